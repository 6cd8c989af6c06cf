"""The table of several GPUs beside one, from docs/data/several_gpus.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import records
from grid import markdown

from sagesim.analysis import TITLES
from sagesim_kernels.bench.machine import one_line

DATA = Path(__file__).parents[1] / "data" / "several_gpus.json"

NAMES = {
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "ring": "ring attention of PyTorch, causal",
    "context_parallel": "`context_parallel` of PyTorch, causal, balanced",
    "ulysses": "Ulysses of diffusers, full mask",
}
"""The cases of scripts/several_gpus.py."""


def document() -> dict[str, Any] | None:
    """The record; None if there is none."""
    return json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else None


def compared() -> str:
    """How far the results of several GPUs are from those of one, and their times."""
    return shown(document())


def shown(record: dict[str, Any] | None) -> str:
    command = "`torchrun --nproc-per-node 2 scripts/several_gpus.py --out several_gpus.json`"
    if record is None:
        return (
            f"Nothing has run on several GPUs yet. {command} compares DDP, FSDP2, ring attention "
            "and Ulysses with one GPU."
        )
    cases, setting = record["cases"], record["setting"]
    rows = [
        [
            NAMES[name],
            f"{case['difference']:.1e}",
            _errors(case, "error"),
            _errors(case, "one_error"),
            f"{case['ms']:.1f} ms",
            f"{case['one_ms']:.1f} ms",
        ]
        for name, case in cases.items()
    ]
    head = ["", "difference", "error", "error on one GPU", "time", "time on one GPU"]
    gpus = record["machine"].get("gpus", 1)
    missing = [NAMES[name] for name in NAMES if name not in cases]
    return (
        f"{markdown(head, rows)}\n\nDifference: relative L2, from the results of one GPU. Error: "
        f"relative L2 of {', '.join(TITLES[t] for t in ('o', 'dq', 'dk', 'dv'))} against float64. "
        "Times are medians of the host, which waits for the GPUs. DDP and FSDP2: forward and "
        f"backward of SmolLM2-135M with random weights, {setting['rows']} rows of "
        f"{setting['tokens']} tokens on each GPU; one GPU computes all rows, one part after the "
        f"other. The others: one attention, {setting['tokens']} tokens on each GPU. Spec "
        f"`{setting['spec']}`."
        + "".join(f" Not run: {name}." for name in missing)
        + records.with_age(
            f"\n\n`{record['command']}` on {gpus} x {one_line(record['machine'])}.",
            record["machine"],
        )
    )


def _errors(case: dict[str, Any], which: str) -> str:
    return ", ".join(f"{error:.1e}" for error in case[which].values()) if which in case else ""
