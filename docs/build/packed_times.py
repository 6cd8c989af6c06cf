"""Times of packed sequences beside FlashAttention-2's; docs/speed.md and kernel_variants.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import records
from grid import markdown
from IPython.display import Markdown
from tables import data, sourced

from sagesim_kernels.bench.machine import one_line

_OURS: Final = "factored_qk"
_PEER: Final = "FlashAttention-2"
_PASSES: Final = ("forward", "backward", "both")


def beside_flash_2() -> Markdown:
    """How many times as fast as FlashAttention-2 each pass of each call is."""
    record = data("packed_times")
    rows = [
        [
            *_call(row),
            *(f"{row['us'][_OURS][which]:.0f}" for which in _PASSES),
            *(f"{_ratio(row, which):.2f}" for which in _PASSES),
        ]
        for row in record["runs"]
    ]
    head = [
        *_HEAD,
        *(f"{which}, us" for which in _PASSES),
        *(f"{which}, times as fast" for which in _PASSES),
    ]
    machine = record["machine"]
    text = sourced(markdown(head, rows), record["about"], machine=one_line(machine)).data
    return Markdown(records.with_age(text, machine))


def before() -> Markdown:
    """The same calls when each sequence had as many programs as the longest, and now."""
    record = data("packed_times")
    rows = [
        [
            *_call(row),
            *(f"{each['us'][_OURS][which]:.0f}" for which in _PASSES for each in (old, row)),
        ]
        for old, row in zip(record["before"]["runs"], record["runs"], strict=True)
    ]
    whens = ("before", "by length")
    head = [*_HEAD, *(f"{which}, {when}, us" for which in _PASSES for when in whens)]
    about = record["before"]["about"]
    return sourced(markdown(head, rows), about, machine=one_line(record["machine"]))


_HEAD: Final = ("lengths", "tokens", "heads", "head size")


def _call(row: Mapping[str, Any]) -> Sequence[str]:
    lengths = row["lengths"]
    tokens = f"{sum(lengths):,} in {len(lengths)}, longest {max(lengths):,}"
    return row["call"], tokens, f"{row['q']}/{row['kv']}", str(row["size"])


def _ratio(row: Mapping[str, Any], which: str) -> float:
    return row["us"][_PEER][which] / row["us"][_OURS][which]
