"""The table of torchtitan's model with the override, from docs/data/torchtitan_steps.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grid import markdown
from smollm2 import SHOWN

DATA = Path(__file__).parents[1] / "data" / "torchtitan_steps.json"


def losses() -> str:
    """The losses under each override, and how far the first gradients are from those of SDPA."""
    return shown(json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else None)


def shown(record: dict[str, Any] | None) -> str:
    if record is None:
        return (
            "Nothing has been trained yet. `python scripts/torchtitan_steps.py` compares the "
            "override with SDPA."
        )
    runs, setting = record["runs"], record["setting"]
    steps = [step for step in SHOWN if step <= len(runs["sdpa"]["losses"])]
    rows = [
        [
            f"`{name}`",
            *(f"{run['losses'][step - 1]:.4f}" for step in steps),
            "" if name == "sdpa" else f"{run['gradients_apart']:.1e}",
        ]
        for name, run in runs.items()
    ]
    head = [
        "attention, spec",
        *(f"step {step}" for step in steps),
        "gradients' difference",
    ]
    return (
        f"{markdown(head, rows)}\n\nEach step trains all weights of torchtitan's "
        f"{setting['model']} on {setting['rows']} rows of {setting['tokens']} tokens "
        f"({setting['optimizer']}); all rows together hold {setting['documents']} documents. "
        "Gradients' difference: relative L2, of the gradients of all weights in the first step, "
        f"from those of `sdpa`.\n\n`{record['command']}` on {record['machine']}."
    )
