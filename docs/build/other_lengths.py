"""The host's time of calls whose lengths change; docs/speed.md shows it."""

from __future__ import annotations

from typing import Any, Final

from grid import markdown
from IPython.display import Markdown
from tables import data, sourced

from sagesim_kernels.bench.machine import one_line

_HEAD: Final = (
    "calls",
    "code",
    "kernels compiled in the first call",
    "in the next ones",
    "next calls that compile",
    "host's time of a first call of its lengths, ms",
    "of a repeated one, ms",
)


def tables() -> Markdown:
    """What calls of other lengths compile, and how long the host takes, now and before."""
    record = data("other_lengths")
    rows = [
        _row(code, run)
        for several in zip(record["before"]["runs"], record["runs"], strict=True)
        for code, run in zip(("before", "now"), several, strict=True)
    ]
    before = one_line(record["before"]["machine"])
    about = f"{record['about']} Before: {before}, another virtual machine. Now:"
    return sourced(markdown(_HEAD, rows), about, machine=one_line(record["machine"]))


def _row(code: str, run: dict[str, Any]) -> list[str]:
    """The row of one kind of calls. code: of the kernels."""
    first, *others = run["compiled"]
    times = (f"{sum(run['ms'][which].values()):.1f}" for which in ("first", "again"))
    stalls = f"{sum(x > 0 for x in others)} of {len(others)}"
    return [run["kind"], code, str(first), str(sum(others)), stalls, *times]
