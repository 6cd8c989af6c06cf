"""Records of the benchmark in docs/data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sagesim_kernels.bench.record import read

DATA = Path(__file__).parents[1] / "data"


def of_models() -> dict[str, Any] | None:
    """The record with the part "models"; None if there is none."""
    return _of_part("models")


def of_masks() -> dict[str, Any] | None:
    """The record with the part "masks"; None if there is none."""
    return _of_part("masks")


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
