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
_PASSES: Final = ("forward", "backward", "both")
_HEAD: Final = ("lengths", "sequences", "tokens", "longest", "heads", "head size")


def beside(peer: str) -> Markdown:
    """How many times as fast as a peer each pass of each call is."""
    record = data("packed_times")
    rows = [
        [
            *_call(row),
            *(f"{row['us'][_OURS][which]:.0f}" for which in _PASSES),
            *(f"{row['us'][peer][which] / row['us'][_OURS][which]:.2f}" for which in _PASSES),
        ]
        for row in record["runs"]
    ]
    times = (f"{which}, us" for which in _PASSES)
    head = [*_HEAD, *times, *(f"{which}, times as fast" for which in _PASSES)]
    machine = record["machine"]
    text = sourced(markdown(head, rows), record["about"], machine=one_line(machine)).data
    return Markdown(records.with_age(f"Beside {peer}:\n\n{text}", machine))


def variants(which: str) -> Markdown:
    """The times of a pass in the same calls with earlier kernels, and with those of the record."""
    record = data("packed_times")
    every = [*record["variants"], {"what": "more heads at a time", "runs": record["runs"]}]
    rows = [
        [*_call(row), *(f"{x['runs'][i]['us'][_OURS][which]:.0f}" for x in every)]
        for i, row in enumerate(record["runs"])
    ]
    head = [*_HEAD, *(f"{x['what']}, us" for x in every)]
    text = markdown(head, rows)
    about = f"Times of the {which}. {record['variants_about']}"
    return sourced(text, about, machine=one_line(record["machine"]))


def _call(row: Mapping[str, Any]) -> Sequence[str]:
    lengths = row["lengths"]
    sizes = (f"{n:,}" for n in (len(lengths), sum(lengths), max(lengths)))
    return row["call"], *sizes, f"{row['q']}/{row['kv']}", str(row["size"])
