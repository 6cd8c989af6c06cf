"""Tables and the figure of SmolLM2, from the files docs/data/smollm2*.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import plots
import records
from grid import markdown

from sagesim.analysis import TITLES
from sagesim_kernels.bench.machine import one_line

DATA = Path(__file__).parents[1] / "data" / "smollm2.json"
SPEED = DATA.with_name("smollm2_speed.json")
CAPTURED = DATA.with_name("smollm2_capture.json")
SHARES = DATA.with_name("smollm2_shares.json")
FLASH_4 = "flash_attention_4"
"""FlashAttention-4 in transformers."""
SHOWN = (1, 5, 10, 15, 20)
"""Steps in the tables."""


@cache
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def _words(run: str) -> str:
    label, *rest = run.split(", ")
    if label == "sdpa":
        return "`sdpa`"
    default = document()["budget"]["label"]
    spec = f"spec `{label}`" + ", the default" * (label == default)
    return ", ".join([f"`sagebwd` ({spec})", *rest])


def _source() -> str:
    note = document().get("note")
    return f"\n\n`{document()['command']}` on {document()['machine']}." + (
        f" {note}" if note else ""
    )


def losses() -> str:
    """The losses of all runs with the emulator, and the errors of their first gradients."""
    found = document()["emulator"]
    rows = [
        [
            _words(name),
            *(f"{run['losses'][step - 1]:.4f}" for step in SHOWN),
            f"{run['held_out']:.4f}",
            f"{run['gradient_error']:.1e}",
        ]
        for name, run in found["runs"].items()
    ]
    head = ["attention", *(f"step {step}" for step in SHOWN), "held out", "gradients' error"]
    setting = document()["setting"]
    return (
        markdown(head, rows) + f"\n\nEach step trains all weights on {found['tokens']} new tokens "
        f"({setting['optimizer']}). Held out: the loss of {setting['held_out_tokens']} other "
        f"tokens after the last step, which was {found['held_out_before']:.4f} before the first, "
        "computed with `sdpa` for every run. Gradients' error: relative L2, of the gradients of "
        "all weights in the first step, against float64." + _source()
    )


def budget() -> str:
    """Predicted and measured errors of the attention, over the layers."""
    found = document()["budget"]
    rows: list[list[str]] = []
    for t in ("o", "dq", "dk", "dv"):
        pairs = [(layer["predicted"][t], layer["measured"][t]) for layer in found["layers"]]
        predicted, measured = (
            (sum(x**2 for x in each) / len(each)) ** 0.5 for each in zip(*pairs, strict=True)
        )
        ratios = sorted(m / p for p, m in pairs)
        rows.append(
            [
                TITLES[t],
                f"{predicted:.4f}",
                f"{measured:.4f}",
                f"{measured / predicted:.2f}",
                f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            ]
        )
    head = ["", "predicted", "measured", "measured / predicted", "in single layers"]
    return (
        markdown(head, rows)
        + f"\n\n`{found['label']}`; relative L2 errors, as root mean squares over the "
        f"{len(found['layers'])} layers." + _source()
    )


def budget_ends() -> tuple[float, float]:
    """The smallest and the largest of measured over predicted error, in a single layer."""
    ratios = [
        layer["measured"][t] / layer["predicted"][t]
        for layer in document()["budget"]["layers"]
        for t in ("o", "dq", "dk", "dv")
    ]
    return min(ratios), max(ratios)


def interpreted() -> str:
    """Losses with the kernels in Triton's interpreter beside the emulator's."""
    found = document()["interpreter"]
    steps = [step for step in SHOWN if step <= len(found["runs"]["sdpa"]["losses"])]
    rows = [
        [
            _words(name),
            *(f"{run['losses'][step - 1]:.4f}" for step in steps),
            f"{run['gradient_error']:.2e}",
        ]
        for name, run in found["runs"].items()
    ]
    head = ["attention", *(f"step {step}" for step in steps), "error of the first gradients"]
    return (
        markdown(head, rows)
        + f"\n\nSteps of {found['tokens']} tokens, because the interpreter is slow."
        + _source()
    )


def speed() -> str:
    """Tokens per second on a GPU."""
    return shown_speed(json.loads(SPEED.read_text(encoding="utf-8")))


def shown_speed(found: dict[str, Any]) -> str:
    rows: list[list[str]] = []
    not_run: dict[str, str] = {}
    for layout, measured in found["layouts"].items():
        sdpa = measured["runs"]["sdpa"]["tokens_per_second"]
        for name, run in measured["runs"].items():
            low, high = run["quartiles"]
            rows.append(
                [
                    layout,
                    f"`{name}`",
                    f"{run['tokens_per_second']:,.0f}",
                    f"{low:,.0f} to {high:,.0f}",
                    f"{run['tokens_per_second'] / sdpa:.2f}",
                ]
            )
        for name, why in measured["not_run"].items():
            not_run[f"`{name}`, {layout}"] = why
    if found["machine"]["flash-attn-4"] is None:
        not_run[f"`{FLASH_4}`"] = "not installed on that machine"
    head = ["layout", "attention", "tokens/s", "quartiles", "of sdpa's"]
    setting = found["setting"]
    shortest, longest = setting["tokens"]
    return (
        markdown(head, rows)
        + f"\n\n{setting['documents']} documents of {shortest} to {longest} tokens a step. "
        f"Weights: {setting['weights']}."
        + "".join(f" {name} did not run: {why}." for name, why in not_run.items())
        + records.with_age(
            f"\n\n`{found['command']}` on {one_line(found['machine'])}.", found["machine"]
        )
    )


def speed_line() -> str:
    """How fast the model trains beside sdpa and FlashAttention-4, in a few sentences."""
    found: dict[str, Any] = json.loads(SPEED.read_text(encoding="utf-8"))
    longest, layouts = found["setting"]["tokens"][1], found["layouts"]
    label = document()["budget"]["label"]
    return (
        f"On one {found['machine']['gpu']}, the architecture of SmolLM2-135M with random weights "
        f"trains on documents of up to {longest} tokens in bfloat16. If they are packed, `{label}` "
        f"(registered as `sagebwd`) is {_beside(layouts['packed'])}. If they are padded, it is "
        f"{_beside(layouts['padded'])}. Two speeds count as equal if their interquartile ranges "
        "overlap ([more](docs/integrations.md#its-speed-on-a-gpu)). "
        f"{records.age(found['machine'])}"
    )


def _beside(measured: dict[str, Any]) -> str:
    """How fast the default spec is beside the others."""
    ours = measured["runs"][document()["budget"]["label"]]
    low, high = ours["quartiles"]
    others = {"sdpa": "`sdpa`", FLASH_4: "FlashAttention-4"}
    equal: list[str] = []
    words: list[str] = []
    for name, title in others.items():
        theirs = measured["runs"][name]
        if low <= theirs["quartiles"][1] and theirs["quartiles"][0] <= high:
            equal.append(title)
        else:
            times = ours["tokens_per_second"] / theirs["tokens_per_second"]
            words.append(f"{times:.2f} times as fast as {title}")
    if equal:
        words.append(f"as fast as {' and '.join(equal)}")
    return " and ".join(words)


def curves() -> None:
    """The losses, and how far those of each attention are from those of sdpa."""
    runs = document()["emulator"]["runs"]
    sdpa = runs["sdpa"]["losses"]
    steps = range(1, 1 + len(sdpa))
    figure, (left, right) = plt.subplots(1, 2, figsize=plots.WIDE, layout="constrained")
    for (name, run), color in zip(runs.items(), plots.COLORS, strict=False):
        words = _words(name).replace("`", "")
        left.plot(steps, run["losses"], color=color, label=words)
        if name != "sdpa":
            apart = [ours - theirs for ours, theirs in zip(run["losses"], sdpa, strict=True)]
            right.plot(steps, apart, color=color, label=words)
    left.set(title="Loss", xlabel="step")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    right.set(title="Loss, minus that of sdpa", xlabel="step")
    right.axhline(0.0, color=plots.GREY, linewidth=0.8)
    for axes in (left, right):
        axes.set_xticks([step for step in SHOWN if step <= len(sdpa)])
    plt.show()


def captured() -> str:
    """The schemes from the paper's to ours on layers of the pretrained model.

    Errors against full precision, and of the gradients against the scheme's own forward.
    """
    data = _capture()
    outputs, gradients = ("o", "ds", "dq", "dk", "dv"), ("ds", "dq", "dk", "dv")
    rows = [
        [
            row["scheme"],
            *(f"{row['exact'][t]:.4f}" for t in outputs),
            *(f"{row['own'][t]:.4f}" for t in gradients),
        ]
        for row in data["rows"]
    ]
    head = ["scheme", *(TITLES[t] for t in outputs), *(f"{TITLES[t]}, own" for t in gradients)]
    return (
        f"{markdown(head, rows)}\n\n{captured_gains()}\n\n{_part(data)} Geometric means over the "
        'layers; "own" is against the exact gradient of the scheme\'s own forward. '
        f"`{data['command']}` on {data['machine']}."
    )


def captured_shares() -> str:
    """The attribution of each layer of the pretrained model, in both metrics."""
    data: dict[str, Any] = json.loads(SHARES.read_text(encoding="utf-8"))
    metrics = {"exact": "against full precision", "own": "against its own forward"}
    sites = list(data["rows"][0]["exact"]["gradient_share"])
    rows: list[list[str]] = []
    for layer, row in zip(data["layers"], data["rows"], strict=True):
        cells = [" / ".join(f"{row[m]['gradient_error']:.4f}" for m in metrics)]
        for site in sites:
            shares = {m: _percent(row[m]["gradient_share"][site]) for m in metrics}
            cells.append(
                " / ".join(
                    f"**{share}**" if row[m]["largest"] == site else share
                    for m, share in shares.items()
                )
            )
        rows.append([str(layer), *cells])
    means = (
        [_percent(fmean(row[m]["gradient_share"][site] for row in data["rows"])) for m in metrics]
        for site in sites
    )
    rows.append(["mean", "", *map(" / ".join, means)])
    head = ["layer", "error of dQ, dK, dV", *(f"`{site}`" for site in sites)]
    largest = (
        f"{words} "
        + ", ".join(
            f"`{site}` in {count}"
            for site, count in Counter(row[m]["largest"] for row in data["rows"]).most_common()
        )
        for m, words in metrics.items()
    )
    return (
        f"{markdown(head, rows)}\n\nShares of the squared error of `{data['label']}`, "
        f"{' / '.join(metrics.values())}; the largest of a layer is bold. How many layers have "
        f"which product as the largest: {'; '.join(largest)}. The error of dQ, dK "
        "and dV together is the root mean square of their relative errors. A share is negative "
        "where a product's error cancels those of others. "
        f"{_part(data)} `{data['command']}` on {data['machine']}."
    )


def _percent(x: float) -> str:
    return f"{round(x, 2) + 0.0:.0%}"  # + 0.0: no -0%


def _part(data: Mapping[str, Any]) -> str:
    """Which part of the model's attention was measured, and on which text."""
    layers = ", ".join(map(str, data["layers"]))
    which = f"{len(data['layers'])} of the {data['layers_of_model']} layers ({layers})"
    if len(data["layers"]) == data["layers_of_model"]:
        which = f"all {data['layers_of_model']} layers"
    return (
        f"Measured: {which} of {data['model']}; of each layer one of the "
        f"{data['kv_heads_of_model']} heads of K and V with its {data['query_heads']} query "
        f"heads; {data['tokens']} tokens of {data['text']}, causal."
    )


def captured_gains() -> str:
    """What `FACTORED` gains on the pretrained model, in both metrics."""
    rows = {row["label"]: row for row in _capture()["rows"]}
    gains = (
        ", ".join(
            f"{TITLES[t]} {rows['sagebwd'][metric][t] / rows['factored'][metric][t]:.1f}x"
            for t in ("ds", "dq", "dk", "dv")
        )
        for metric in ("exact", "own")
    )
    return (
        "On SmolLM2-135M, the errors of `FACTORED` are smaller than those of the paper's scheme "
        "by: {} against full precision, and {} against the scheme's own forward."
    ).format(*gains)


@cache
def _capture() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(CAPTURED.read_text(encoding="utf-8"))
    return found
