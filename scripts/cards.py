"""Fit the model of the cards, predict the time of every spec, and recommend one for each card.

    python scripts/cards.py

Reads docs/data/: instructions.json, instructions_timed.json and instructions_flash.json
(scripts/instructions.py), bench_sm80.json, bench.json, bench_models_4.json and bench_errors.json
(python -m sagesim_kernels.bench). Writes docs/data/cards.json and
sagesim_kernels/cards/recommended.json. Needs no GPU.

The model is fitted to the times of bench_sm80.json with the counts of the kernels that it timed,
instructions_timed.json. Predictions use the counts of the present kernels, instructions.json.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data"
sys.path.insert(0, str(ROOT))

from sagesim.files import write_text  # noqa: E402
from sagesim_kernels.cards import (  # noqa: E402
    CARDS,
    FLASH,
    RECOMMENDED,
    Card,
    Fit,
    Measured,
    Shape,
    fits_without_each,
    fitted,
    limit,
    measurements,
    predict,
    rms,
)

COMMAND = "python scripts/cards.py"
SPECS = ("fpa_bf16", "factored_qk", "sagebwd", "factored_pv16", "factored")
SIXTEEN_BIT = "fpa_bf16"
SEQUENCES, CHANNELS, TOKENS = 2, 2048, 4096
LEAST_TOKENS = 4096
"""What programs do before and after their loops is not modelled, and takes a larger share of
shorter sequences."""

PAPER_TOKENS = 8192
PAPER = {
    "source": "SageBwd, arXiv 2603.02170: RTX 4090, head size 64, causal, 8192 tokens",
    "ratio": 1.67,
    "sagebwd_tops": 248,
    "flash_tops": 149,
}
FLASH_PAPER = {
    "source": "FlashAttention-2, arXiv 2307.08691: A100, the fastest shapes",
    "forward_of_peak": 0.73,
    "backward_of_peak": 0.63,
}
WGMMA = (4096, 8192)
MMA_SYNC = 0.629
"""16-bit and INT8 operations of an H100's multiprocessor in a clock by wgmma (989 TFLOP/s, 1979
TOP/s), and the share that single instructions of mma.sync reach on average: arXiv 2402.13499, as
other documents quote it."""

FLASH_ERRORS = "sdpa flash"
"""The entry of bench_errors.json with the same precisions as SIXTEEN_BIT, which has none."""
ON_HOPPER = ("bench_models_4", "bench_long", "bench_int8", "bench")
"""The records that measured times on Hopper are taken from, with Hopper's own code; the newest
first. Each has several head sizes and many lengths, which later ones of models have not."""
BASE_ON_HOPPER = "factored_qk"
"""The spec that is in all of them; the times of others are relative to it."""


class Assumption(NamedTuple):
    """What the model takes for a rate that is not known well."""

    name: str
    cards: dict[str, Card]
    fit: Fit


def load(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def assumptions(bench: Any, rows: Any) -> Iterator[Assumption]:
    """Yield the assumption that predictions are made with, and then the others."""
    fit = fitted(list(measurements(bench, (*SPECS, FLASH))), rows)
    yield Assumption("as stated", CARDS, fit)
    for name, factor in (("L2 cache of half the rate", 0.5), ("L2 cache of twice the rate", 2.0)):
        scaled = {
            card.name: replace(card, l2_bytes=card.l2_bytes * factor) for card in CARDS.values()
        }
        refit = fitted(list(measurements(bench, (*SPECS, FLASH), cards=scaled)), rows)
        yield Assumption(name, scaled, refit)
    sixteen, int8 = (round(MMA_SYNC * rate) for rate in WGMMA)
    hopper = {
        card.name: replace(card, flop_16=sixteen, flop_int8=int8)
        for card in CARDS.values()
        if card.capability == (9, 0)
    }
    cards = CARDS | hopper
    refit = fitted(list(measurements(bench, (*SPECS, FLASH), cards=cards)), rows)
    yield Assumption("faster mma.sync of the H100", cards, refit)


def tflop(shape: Shape, passes: float) -> float:
    """By the usual count: 4 N^2 d for a head's forward, half of it under a causal mask."""
    whole = 4 * shape.heads * shape.tokens**2 * shape.head_size
    return passes * whole * (0.5 if shape.is_causal else 1) / 1e12


def shape_of(head_size: int, is_causal: bool, tokens: int = TOKENS) -> Shape:
    return Shape(SEQUENCES * CHANNELS // head_size, tokens, head_size, is_causal)


def both_ms(card: Card, rows: Any, spec: str, shape: Shape, fit: Fit) -> float:
    passes = (predict(card, rows, spec, shape, fit, forward=forward) for forward in (True, False))
    return sum(times.total for times in passes)


def ratios(
    name: str, rows: Any, spec: str, shape: Shape, assumed: Sequence[Assumption]
) -> list[float]:
    """The speed relative to FlashAttention-2 under each assumption."""
    return [
        both_ms(each.cards[name], rows, FLASH, shape, each.fit)
        / both_ms(each.cards[name], rows, spec, shape, each.fit)
        for each in assumed
    ]


def prediction(
    card: Card, rows: Any, spec: str, shape: Shape, assumed: Sequence[Assumption]
) -> dict[str, Any]:
    fit = assumed[0].fit
    result: dict[str, Any] = {
        "card": card.name,
        "spec": spec,
        "head_size": shape.head_size,
        "is_causal": shape.is_causal,
        "tokens": shape.tokens,
    }
    for name in ("forward", "backward"):
        forward = name == "forward"
        times = predict(card, rows, spec, shape, fit, forward=forward)
        result[f"{name}_ms"] = round(times.total, 4)
        result[f"{name}_limit"] = limit(card, rows, spec, shape, fit, forward=forward)
    result["both_ms"] = round(result["forward_ms"] + result["backward_ms"], 4)
    result["tflops"] = round(tflop(shape, 3.5) / result["both_ms"] * 1e3, 1)
    result["ratios"] = [round(x, 3) for x in ratios(card.name, rows, spec, shape, assumed)]
    return result


def accurate_specs() -> list[str]:
    """The specs whose errors are below those of the paper's scheme, in every entry."""
    cases = [
        case["errors"]
        for record in (load("bench_errors"), load("bench"))
        for case in record["cases"].values()
        if case["part"] == "accuracy" and "sagebwd" in case["errors"]
    ]
    entry = {SIXTEEN_BIT: FLASH_ERRORS}
    return [
        spec
        for spec in SPECS
        if all(
            errors[entry.get(spec, spec)][result] < errors["sagebwd"][result]
            for errors in cases
            for result in errors["sagebwd"]
        )
    ]


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def card_class(card: Card) -> str:
    kind = "consumer" if card.is_consumer else "data centre"
    return f"{card.capability[0]}.{card.capability[1]} {kind}"


def times_on_hopper() -> dict[str, float]:
    """The measured time of each spec of `SPECS`, relative to `BASE_ON_HOPPER`.

    Geometric means over the cases of `LEAST_TOKENS` tokens or more in which both were timed, in the
    first record of `ON_HOPPER` that has such cases.
    """
    times: dict[str, float] = {}
    for record in ON_HOPPER:
        found: dict[str, list[float]] = {spec: [] for spec in SPECS if spec not in times}
        for case in load(record)["cases"].values():
            runs = case.get("runs", {})
            if case["part"] in ("speed", "models") and case["tokens"] >= LEAST_TOKENS:
                for spec in found.keys() & runs.keys() if BASE_ON_HOPPER in runs else ():
                    base = runs[BASE_ON_HOPPER]["both"]["ms"]
                    found[spec].append(runs[spec]["both"]["ms"] / base)
        times |= {spec: round(geometric_mean(x), 3) for spec, x in found.items() if x}
    return times


def recommendations(predictions: list[dict[str, Any]], margin: float) -> dict[str, dict[str, Any]]:
    """The fastest of the accurate specs by card class.

    A spec with INT8 is recommended only if its mean gain over 16 bit is larger than the margin
    under every assumption. On Hopper the fastest is that of measured times.
    """
    accurate = accurate_specs()
    measured = times_on_hopper()
    result: dict[str, dict[str, Any]] = {}
    for card in CARDS.values():
        if card_class(card) in result:
            continue
        own = [p for p in predictions if p["card"] == card.name]
        speeds = {
            spec: [
                geometric_mean(column)
                for column in zip(*(p["ratios"] for p in own if p["spec"] == spec), strict=True)
            ]
            for spec in accurate
        }
        gains = {
            spec: [x / y for x, y in zip(each, speeds[SIXTEEN_BIT], strict=True)]
            for spec, each in speeds.items()
        }
        surely = [spec for spec in accurate if min(gains[spec]) > 1 + margin]
        best = max(surely, key=lambda spec: speeds[spec][0], default=SIXTEEN_BIT)
        basis = "predicted"
        if card.capability == (9, 0):
            timed = (spec for spec in accurate if spec in measured)
            best, basis = min(timed, key=measured.__getitem__), "measured"
        result[card_class(card)] = {"card": card.name, "spec": best, "basis": basis}
        if basis == "predicted":
            result[card_class(card)]["gains"] = {
                spec: [round(x, 3) for x in each] for spec, each in gains.items()
            }
    return result


def error(each: Measured, rows: Any, fit: Fit) -> float:
    return round(math.exp(each.error(rows, fit)) - 1, 4)


def validation(bench: Any, rows: Any, fits: dict[str, Fit], fit: Fit) -> list[dict[str, Any]]:
    """Every pass of the record, predicted by a fit to the passes of all other specs."""
    return [
        {
            "spec": each.spec,
            "head_size": each.shape.head_size,
            "is_causal": each.shape.is_causal,
            "tokens": each.shape.tokens,
            "pass": "forward" if each.forward else "backward",
            "measured_ms": round(each.ms, 4),
            "predicted_ms": round(each.predicted(rows, fits[each.spec]).total, 4),
            "error": error(each, rows, fits[each.spec]),
            "fitted_error": error(each, rows, fit),
        }
        for each in measurements(bench, (*SPECS, FLASH))
    ]


def flash_elsewhere(rows: Any, fit: Fit) -> list[dict[str, Any]]:
    """FlashAttention-2 in docs/data/bench.json: on an H200, other lengths, and head size 128."""
    return [
        {
            "tokens": each.shape.tokens,
            "head_size": each.shape.head_size,
            "is_causal": each.shape.is_causal,
            "pass": "forward" if each.forward else "backward",
            "measured_ms": each.ms,
            "error": error(each, rows, fit),
        }
        for each in measurements(load("bench"), (FLASH,))
    ]


def published(rows: Any, assumed: Sequence[Assumption]) -> dict[str, Any]:
    """Published figures of cards that were not measured here, beside the model's."""
    shape = shape_of(64, True, PAPER_TOKENS)
    ours = {
        spec: prediction(CARDS["RTX 4090"], rows, spec, shape, assumed) for spec in (FLASH, *SPECS)
    }
    a100 = CARDS["A100"]
    shares = {
        name: max(
            tflop(shape, 1 if name == "forward" else 2.5)
            / predict(a100, rows, FLASH, shape, assumed[0].fit, forward=name == "forward").total
            * 1e3
            / a100.tflops_16
            for shape in (shape_of(*each) for each in product((64, 128), (False, True)))
        )
        for name in ("forward", "backward")
    }
    return {
        "sagebwd": PAPER | {"predicted": list(ours.values())},
        "flash": FLASH_PAPER
        | {f"predicted_{name}_of_peak": round(share, 3) for name, share in shares.items()},
    }


def lines(record: dict[str, Any]) -> str:
    """JSON with one line for each row of a list."""
    parts = []
    for key, value in record.items():
        if isinstance(value, list):
            inside = ",\n".join("  " + json.dumps(row) for row in value)
            parts.append(f' "{key}": [\n{inside}\n ]')
        else:
            parts.append(f' "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    counted = load("instructions")
    flash = load("instructions_flash")["rows"]
    rows = counted["rows"] + flash
    timed = load("instructions_timed")["rows"] + flash
    bench = load("bench_sm80")
    assumed = list(assumptions(bench, timed))
    fit = assumed[0].fit
    passes = list(measurements(bench, (*SPECS, FLASH)))
    fits = fits_without_each(passes, timed)
    left_out = rms(each.error(timed, fits[each.spec]) for each in passes)
    shapes = [shape_of(*each) for each in product((64, 128), (False, True))]
    predictions = [
        prediction(card, rows, spec, shape, assumed)
        for card in CARDS.values()
        for spec in (FLASH, *SPECS)
        for shape in shapes
    ]
    record = {
        "command": COMMAND,
        "machine": f"no GPU; counted: {counted['machine']}",
        "shape": {"sequences": SEQUENCES, "channels": CHANNELS, "tokens": TOKENS},
        "least_tokens": LEAST_TOKENS,
        "fit": {
            **asdict(fit),
            "passes": len(passes),
            "rms": round(rms(each.error(timed, fit) for each in passes), 4),
            "rms_left_out": round(left_out, 4),
        },
        "mma_sync_of_wgmma": MMA_SYNC,
        "assumptions": [{"name": each.name, **asdict(each.fit)} for each in assumed],
        "accurate": accurate_specs(),
        "times_on_hopper": times_on_hopper(),
        "published": published(rows, assumed),
        "validation": validation(bench, timed, fits, fit),
        "flash_elsewhere": flash_elsewhere(flash, fits[FLASH]),
        "predictions": predictions,
    }
    write_text(DATA / "cards.json", lines(record))
    classes = recommendations(predictions, round(left_out, 4))
    choice = {
        "command": COMMAND,
        "classes": {
            name: {key: each[key] for key in ("card", "spec", "basis")}
            for name, each in classes.items()
        },
    }
    write_text(RECOMMENDED, json.dumps(choice, indent=1) + "\n")
    print(json.dumps(record["fit"]))
    for name, chosen in classes.items():
        print(name, chosen)


if __name__ == "__main__":
    main()
