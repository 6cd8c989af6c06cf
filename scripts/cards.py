"""Fit the model of the cards, predict the time of every spec, and recommend one for each card.

    python scripts/cards.py

Reads docs/data/: instructions.json and instructions_flash.json (scripts/instructions.py),
cards_measured.json (scripts/time_cards.py), bench.json and bench_errors.json. Writes
docs/data/cards.json and sagesim_kernels/cards/recommended.json. Needs no GPU.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

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
    Shape,
    fitted,
    left_out_errors,
    limit,
    measurements,
    predict,
    rms,
)

COMMAND = "python scripts/cards.py"
SPECS = ("fpa_bf16", "factored_qk", "sagebwd", "factored_pv16", "factored")
SEQUENCES, CHANNELS, TOKENS = 2, 2048, 4096
FITTED_CODE = 80
"""The model is fitted on code for this capability: what most cards of the list run."""

PAPER = {
    "source": "SageBwd, arXiv 2603.02170: RTX 4090, head size 64, causal, 8192 tokens",
    "tokens": 8192,
    "ratio": 1.67,
    "sagebwd_tops": 248,
    "flash_tops": 149,
}
FLASH_PAPER = {
    "source": "FlashAttention-2, arXiv 2307.08691: A100, the fastest shapes",
    "forward_of_peak": 0.73,
    "backward_of_peak": 0.63,
}
FLASH_IN_BENCH = "sdpa flash"
SIXTEEN_BIT = {"fpa_bf16": FLASH_IN_BENCH}
"""Specs without an entry in bench_errors.json, and the entry with the same precisions."""


def load(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def tflop(shape: Shape, passes: float) -> float:
    """By the usual count: 4 N^2 d for a head's forward, half of it under a causal mask."""
    whole = 4 * shape.heads * shape.tokens**2 * shape.head_size
    return passes * whole * (0.5 if shape.is_causal else 1) / 1e12


def shape_of(head_size: int, is_causal: bool, tokens: int = TOKENS) -> Shape:
    return Shape(SEQUENCES * CHANNELS // head_size, tokens, head_size, is_causal)


def prediction(card: Card, rows: Any, spec: str, shape: Shape, fit: Fit) -> dict[str, Any]:
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
    return result


def accurate_specs() -> list[str]:
    """The specs whose errors are at most those of the paper's scheme, in every entry."""
    cases = [
        case["errors"]
        for record in (load("bench_errors"), load("bench"))
        for case in record["cases"].values()
        if case["part"] == "accuracy" and "sagebwd" in case["errors"]
    ]
    return [
        spec
        for spec in SPECS
        if all(
            errors[SIXTEEN_BIT.get(spec, spec)][result] <= 1.001 * errors["sagebwd"][result]
            for errors in cases
            for result in errors["sagebwd"]
        )
    ]


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def measured_on_hopper(specs: list[str]) -> dict[str, float]:
    """The mean time of specs in docs/data/bench.json, with the kernels that users get there."""
    cases = [case["runs"] for case in load("bench")["cases"].values() if case["part"] == "speed"]
    return {
        spec: geometric_mean(runs[spec]["both"]["ms"] for runs in cases)
        for spec in specs
        if all(spec in runs for runs in cases)
    }


def recommendations(predictions: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """The fastest of the accurate specs by card class."""
    accurate = accurate_specs()
    result: dict[str, dict[str, str]] = {}
    for card in CARDS.values():
        kind = "consumer" if card.is_consumer else "data centre"
        key = f"{card.capability[0]}.{card.capability[1]} {kind}"
        if key in result:
            continue
        if card.capability == (9, 0):
            means, basis = measured_on_hopper(accurate), "measured"
        else:
            own = [p for p in predictions if p["card"] == card.name and p["spec"] in accurate]
            means = {
                spec: geometric_mean(p["both_ms"] for p in own if p["spec"] == spec)
                for spec in accurate
            }
            basis = "predicted"
        best = min(means, key=lambda spec: means[spec])
        result[key] = {"card": card.name, "spec": best, "basis": basis}
    return result


def validation(documents: Any, rows: Any, fit: Fit) -> list[dict[str, Any]]:
    """Every measured pass whose instructions are counted."""
    counted = {(row["capability"], row["spec"]) for row in rows} | {(90, FLASH)}
    result = []
    for each in measurements(documents):
        if (each.code, each.spec) not in counted:
            continue
        loops = each.loops(rows, fit)
        result.append(
            {
                "card": each.card,
                "code": each.code,
                "spec": each.spec,
                "head_size": each.shape.head_size,
                "is_causal": each.shape.is_causal,
                "pass": "forward" if each.forward else "backward",
                "measured_ms": round(loops, 4),
                "predicted_ms": round(each.predicted(rows, fit).loops, 4),
                "error": round(math.exp(each.error(rows, fit)) - 1, 4),
                "is_fitted": each.code == FITTED_CODE,
            }
        )
    return result


def flash_in_bench(rows: Any, fit: Fit) -> list[dict[str, Any]]:
    """FlashAttention-2 in docs/data/bench.json, on an H200: other lengths, and causal masks."""
    result = []
    for case in load("bench")["cases"].values():
        if case["part"] != "speed" or FLASH_IN_BENCH not in case.get("runs", {}):
            continue
        heads = case["batch"] * case["heads"]
        shape = Shape(heads, case["tokens"], case["head_dim"], case["is_causal"])
        row: dict[str, Any] = {
            "tokens": shape.tokens,
            "head_size": shape.head_size,
            "is_causal": shape.is_causal,
        }
        for name in ("forward", "backward"):
            measured = case["runs"][FLASH_IN_BENCH][name]["ms"]
            times = predict(CARDS["H200"], rows, FLASH, shape, fit, forward=name == "forward")
            row[f"{name}_ms"] = measured
            row[f"{name}_error"] = round(times.total / measured - 1, 4)
        result.append(row)
    return result


def published(rows: Any, fit: Fit) -> dict[str, Any]:
    """Published figures of cards that were not measured here, beside the model's."""
    shape = shape_of(64, True, PAPER["tokens"])
    ours, flash = (
        prediction(CARDS["RTX 4090"], rows, spec, shape, fit) for spec in ("sagebwd", FLASH)
    )
    a100 = CARDS["A100"]
    shares = {
        name: max(
            tflop(shape, 1 if name == "forward" else 2.5)
            / predict(a100, rows, FLASH, shape, fit, forward=name == "forward").total
            * 1e3
            / a100.tflops_16
            for shape in (shape_of(*each) for each in product((64, 128), (False, True)))
        )
        for name in ("forward", "backward")
    }
    return {
        "sagebwd": PAPER
        | {
            "predicted_ratio": round(flash["both_ms"] / ours["both_ms"], 3),
            "predicted_sagebwd_tops": ours["tflops"],
            "predicted_flash_tops": flash["tflops"],
        },
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
    rows = counted["rows"] + load("instructions_flash")["rows"]
    documents = load("cards_measured")
    fitted_on = [each for each in measurements(documents) if each.code == FITTED_CODE]
    fit = fitted(fitted_on, rows)
    shapes = [shape_of(*each) for each in product((64, 128), (False, True))]
    predictions = [
        prediction(card, rows, spec, shape, fit)
        for card in CARDS.values()
        for spec in (FLASH, *SPECS)
        for shape in shapes
    ]
    record = {
        "command": COMMAND,
        "machine": f"no GPU; counted: {counted['machine']}",
        "shape": {"sequences": SEQUENCES, "channels": CHANNELS, "tokens": TOKENS},
        "fit": {
            "power": fit.power,
            "stall": fit.stall,
            "l2_bytes": fit.l2_bytes,
            "passes": len(fitted_on),
            "rms": round(rms(each.error(rows, fit) for each in fitted_on), 4),
            "rms_left_out": round(rms(left_out_errors(fitted_on, rows)), 4),
        },
        "accurate": accurate_specs(),
        "published": published(rows, fit),
        "validation": validation(documents, rows, fit),
        "flash_in_bench": flash_in_bench(rows, fit),
        "predictions": predictions,
    }
    write_text(DATA / "cards.json", lines(record))
    classes = recommendations(predictions)
    choice = {"command": COMMAND, "classes": classes}
    write_text(RECOMMENDED, json.dumps(choice, indent=1) + "\n")
    print(json.dumps(record["fit"]))
    for name, chosen in classes.items():
        print(name, chosen)


if __name__ == "__main__":
    main()
