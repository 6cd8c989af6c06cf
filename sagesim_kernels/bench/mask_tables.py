"""The tables of a record's windows and padded keys."""

from __future__ import annotations

from typing import Any, Final

from sagesim_kernels.bench.masks import PADDED_CONTENDERS, WINDOW_CONTENDERS
from sagesim_kernels.bench.tables import Table

_NOT_RUN: Final = "-"
_SHAPE: Final = "B, heads, tokens, d"


def windows(document: dict[str, Any]) -> Table:
    """A table of times under windows, with the speed relative to each peer."""
    ours, *peers = WINDOW_CONTENDERS
    head = [f"{_SHAPE}, window", ours, *(x for peer in peers for x in (peer, "times as fast"))]
    rows = []
    for words, case in _cases(document, is_padded=False).items():
        own = _ms(case, ours)
        row = [words, _cell(own)]
        for peer in peers:
            other = _ms(case, peer)
            ratio = None if own is None or other is None else other / own
            row += [_cell(other), _cell(ratio)]
        rows.append(row)
    return Table("windows under a causal mask, ms, forward and backward, GPU", head, rows)


def padded_keys(document: dict[str, Any]) -> Table:
    """A table of times with padded keys, and with the same keys packed."""
    rows = [
        [words, *(_cell(_ms(case, name)) for name in PADDED_CONTENDERS)]
        for words, case in _cases(document, is_padded=True).items()
    ]
    return Table("padded keys, ms, forward and backward, GPU", [_SHAPE, *PADDED_CONTENDERS], rows)


def mask_tables(document: dict[str, Any]) -> list[Table]:
    """Both tables, if they have rows."""
    return [table for table in (windows(document), padded_keys(document)) if table.rows]


def _cases(document: dict[str, Any], *, is_padded: bool) -> dict[str, dict[str, Any]]:
    found = {
        key.removeprefix("masks "): case
        for key, case in document["cases"].items()
        if case["part"] == "masks"
    }
    return {key: case for key, case in found.items() if key.endswith("padded") == is_padded}


def _ms(case: dict[str, Any], name: str) -> float | None:
    return case["runs"][name]["both"]["ms"] if name in case["runs"] else None


def _cell(ms: float | None) -> str:
    return _NOT_RUN if ms is None else f"{ms:.3g}"
