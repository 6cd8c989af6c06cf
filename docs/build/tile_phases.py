"""What a tile of Hopper's kernels takes besides its steps; two pages show it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from statistics import mean
from typing import Any

from grid import markdown
from hopper_variants import variants_of
from IPython.display import Markdown
from tables import call_of, data, sourced


def cycles() -> Markdown:
    """The cycles of a tile by phase, a row for each call and role of warpgroups."""
    record = data("tile_phases")
    parts = []
    for which, phases in record["phases"].items():
        rows = [
            [
                call_of(several[0]),
                *([_role(several)] if which == "backward" else []),
                f"{several[0]['tiles_of_a_program']:.1f}",
                *(
                    f"{mean(each):,.0f}"
                    for each in zip(*(row["cycles"] for row in several), strict=True)
                ),
            ]
            for several in _by_role(record["rows"], which)
        ]
        roles = ["warpgroups"] if which == "backward" else []
        head = ["call", *roles, "tiles of a program", *phases]
        parts.append(f"{which}, cycles of a tile:\n\n{markdown(head, rows)}")
    return sourced("\n\n".join(parts), record["about"], machine=record["machine"])


def _by_role(rows: list[dict[str, Any]], which: str) -> list[list[dict[str, Any]]]:
    """The rows of a pass, those of warpgroups with the same role together."""

    def key(row: Mapping[str, Any]) -> tuple[str, bool]:
        return call_of(row), _is_third(row)

    return [[*several] for _, several in groupby((r for r in rows if r["pass"] == which), key)]


def _is_third(row: Mapping[str, Any]) -> bool:
    """Whether a row is of the warpgroup that computes dQ and dK of both blocks of keys."""
    return row["pass"] == "backward" and row["warpgroup"] == 2


def _role(several: list[dict[str, Any]]) -> str:
    """What warpgroups of a backward compute."""
    if _is_third(several[0]):
        return "dQ and dK"
    return "64 keys each" if len(several) > 1 else "both in step"


def variants() -> Markdown:
    """Times of variants of the kernels that were to shorten these phases."""
    record = data("tile_phases")
    made = record["variants"]
    parts = []
    for which in record["phases"]:
        rows = [row for row in made["rows"] if row["pass"] == which]
        parts.append(f"{which}:\n\n{variants_of({'rows': rows})}")
    return sourced("\n\n".join(parts), made["about"], machine=record["machine"])
