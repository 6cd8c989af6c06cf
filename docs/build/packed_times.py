"""Times of packed sequences beside other attention's; docs/speed.md and kernel_variants.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import records
from grid import markdown
from IPython.display import Markdown
from tables import data, sourced

from sagesim_kernels.bench.machine import one_line

_OURS: Final = "factored_qk"
_PEERS: Final = ("FlashAttention-2", "flash-attn-4")
_PASSES: Final = ("forward", "backward", "both")
_HEAD: Final = ("lengths", "tokens", "heads", "head size")


def beside_peers() -> Markdown:
    """How many times as fast as its peers each pass of each call is."""
    record = data("packed_times")
    rows = [
        [
            *_call(row),
            *(f"{row['us'][_OURS][which]:.0f}" for which in _PASSES),
            *(f"{_ratio(row, peer, which):.2f}" for peer in _PEERS for which in _PASSES),
        ]
        for row in record["runs"]
    ]
    head = [
        *_HEAD,
        *(f"{which}, us" for which in _PASSES),
        *(f"{which}, times as fast as {peer}" for peer in _PEERS for which in _PASSES),
    ]
    machine = record["machine"]
    text = sourced(markdown(head, rows), record["about"], machine=one_line(machine)).data
    return Markdown(records.with_age(text, machine))


def variants() -> Markdown:
    """The same calls with earlier kernels, and now."""
    record = data("packed_times")
    every = [*record["variants"], {"what": "by work of sequences", "runs": record["runs"]}]
    rows = [
        [
            *_call(row),
            *(f"{x['runs'][i]['us'][_OURS][which]:.0f}" for which in _PASSES[:2] for x in every),
        ]
        for i, row in enumerate(record["runs"])
    ]
    head = [*_HEAD, *(f"{which}, {x['what']}, us" for which in _PASSES[:2] for x in every)]
    about = record["variants_about"]
    return sourced(markdown(head, rows), about, machine=one_line(record["machine"]))


def _call(row: Mapping[str, Any]) -> Sequence[str]:
    lengths = row["lengths"]
    tokens = f"{sum(lengths):,} in {len(lengths)}, longest {max(lengths):,}"
    return row["call"], tokens, f"{row['q']}/{row['kv']}", str(row["size"])


def _ratio(row: Mapping[str, Any], peer: str, which: str) -> float:
    return row["us"][peer][which] / row["us"][_OURS][which]
