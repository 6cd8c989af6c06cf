"""Records of the benchmark in docs/data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sagesim_kernels.bench.record import read

DATA = Path(__file__).parents[1] / "data"


def of_models() -> dict[str, Any] | None:
    """The record with the part "models"; None if there is none.

    It is bench.json, or bench_models.json if the part was measured in a run of its own.
    """
    for name in ("bench.json", "bench_models.json"):
        if (DATA / name).exists():
            document = read(DATA / name)
            if any(case["part"] == "models" for case in document["cases"].values()):
                return document
    return None
