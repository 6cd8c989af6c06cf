"""Records of the benchmark in docs/data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sagesim_kernels.bench.machine import sources_hash
from sagesim_kernels.bench.record import read

DATA = Path(__file__).parents[1] / "data"

CHANGED: Final = (
    "**Measured with earlier kernels**: their sources have changed since this record was made."
)
SAME_LOOPS: Final = "The loops of the present kernels issue the same instructions."
_COUNTS: Final = ("instructions", "instructions_timed")
UNKNOWN: Final = "**Perhaps measured with earlier code**: this record does not name its sources."


def of_models() -> dict[str, Any] | None:
    """The record with the part "models"; None if there is none."""
    return _of_part("models")


def of_models_earlier() -> dict[str, Any] | None:
    """The record with shapes of models that `of_models` lacks; None if it lacks none."""
    newer, path = of_models(), DATA / "bench_models_earlier.json"
    if newer is None or not path.exists():
        return None
    document = read(path)
    lacking = {key: c for key, c in document["cases"].items() if key not in newer["cases"]}
    return document | {"cases": lacking} if lacking else None


def of_masks() -> dict[str, Any] | None:
    """The record with the part "masks"; None if there is none."""
    return _of_part("masks")


def age(machine: Mapping[str, Any] | str) -> str:
    """A sentence on a record that was not made with the present kernels; empty otherwise.

    machine: of the record: its fields, or a line for readers.
    """
    if isinstance(machine, str):
        named = re.search(r"\bkernels ([0-9a-f]{12})\b", machine)
        machine = {"kernels": None if named is None else named[1]}
    measured = machine.get("kernels")
    if measured is None:
        return UNKNOWN
    return "" if measured == sources_hash() else CHANGED


def has_present_loops(code: str) -> bool:
    """Whether the loops of the present kernels issue the instructions of those that were timed.

    code: of a record of other code on a Hopper GPU, "sm80".
    """
    rows = (json.loads((DATA / f"{name}.json").read_text())["rows"] for name in _COUNTS)
    present, timed = ([r for r in each if r["capability"] == int(code[2:])] for each in rows)
    return present == timed


def age_of_code(document: Mapping[str, Any]) -> str:
    """`age` of a record of other code, or that its kernels issue the same instructions."""
    if age(document["machine"]) and has_present_loops(document["settings"]["code"]):
        return SAME_LOOPS
    return age(document["machine"])


def with_age(text: str, machine: Mapping[str, Any] | str) -> str:
    """The text, and `age` as a paragraph below it."""
    return "\n\n".join(filter(None, (text, age(machine))))


def _of_part(part: str) -> dict[str, Any] | None:
    """The record with a part.

    It is bench.json, or bench_PART.json if the part was measured in a run of its own.
    """
    for name in ("bench.json", f"bench_{part}.json"):
        if (DATA / name).exists():
            document = read(DATA / name)
            if any(case["part"] == part for case in document["cases"].values()):
                return document
    return None
