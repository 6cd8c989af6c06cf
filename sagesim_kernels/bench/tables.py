"""The tables of a record, as text for the terminal and for the docs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import geometric_mean
from typing import Any, Final, NamedTuple

from sagesim.spec import Precision
from sagesim_kernels.bench.accuracy import OUTPUTS
from sagesim_kernels.bench.cases import (
    PAYOFF_BASE,
    PAYOFF_SITES,
    payoff_spec,
)
from sagesim_kernels.bench.jobs import preparation_share
from sagesim_kernels.bench.models import MODEL_SPECS

TITLES: Final = {"o": "O", "dq": "dQ", "dk": "dK", "dv": "dV"}
GRADIENTS: Final = ("dq", "dk", "dv")
_NOT_RUN: Final = "-"
_WORDS: Final = {
    "forward": "forward",
    "backward": "backward",
    "both": "forward and backward",
    "step": "training step",
}
"""The name in a table of each of `PASSES`, and of what the part "training" times."""


class Table(NamedTuple):
    """A title, column heads, and rows of text cells. The first column names the row."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Panel(NamedTuple):
    """Problems that differ only in the number of tokens."""

    head_dim: int
    is_causal: bool

    @property
    def mask(self) -> str:
        return "causal" if self.is_causal else "full"

    def __str__(self) -> str:
        return f"head size {self.head_dim}, {self.mask} mask"


def cases(document: dict[str, Any], part: str, panel: Panel | None = None) -> list[dict[str, Any]]:
    """The results of a part: "speed", "payoff", "accuracy", "models", "masks", "training".

    A panel's are sorted by tokens.
    """
    found = [case for case in document["cases"].values() if case["part"] == part]
    if panel is not None:
        found = [c for c in found if (c["head_dim"], c["is_causal"]) == panel]
        found.sort(key=lambda c: c["tokens"])
    return found


def panels(document: dict[str, Any], part: str) -> list[Panel]:
    """The head sizes and masks of a part, "speed" or "payoff"."""
    return sorted({Panel(c["head_dim"], c["is_causal"]) for c in cases(document, part)})


def contenders(document: dict[str, Any]) -> list[str]:
    """The contenders of "speed", our specs first."""
    settings = document["settings"]
    return [*settings["specs"], *settings["peers"]]


def teraflops(case: dict[str, Any], name: str, which: str) -> float:
    """TFLOP/s, by the count of `cases.Shape.flop`."""
    return case["flop"][which] / case["runs"][name][which]["ms"] / 1e9


def ratio(case: dict[str, Any], name: str, peer: str, which: str = "both") -> float:
    """How many times as fast as a peer, by median times."""
    return case["runs"][peer][which]["ms"] / case["runs"][name][which]["ms"]


def speed(document: dict[str, Any], panel: Panel, which: str = "both") -> Table:
    """A table of TFLOP/s of one of `PASSES`."""

    def cell(case: dict[str, Any], name: str) -> str:
        return f"{teraflops(case, name, which):.0f}"

    return _grid(document, panel, f"TFLOP/s, {_WORDS[which]}", cell)


def times(document: dict[str, Any], panel: Panel) -> Table:
    """A table of milliseconds of forward and backward: of the device, and of the host."""

    def cell(case: dict[str, Any], name: str) -> str:
        both = case["runs"][name]["both"]
        return f"{both['ms']:.3g} ({both['host_ms']:.2g})"

    return _grid(document, panel, "ms, forward and backward (host's time to launch both)", cell)


def memory(document: dict[str, Any], panel: Panel) -> Table:
    """A table of MB that the forward saves, and that forward and backward add at the peak."""

    def cell(case: dict[str, Any], name: str) -> str:
        several = [case["runs"][name][what] for what in ("saved_bytes", "added_bytes")]
        return " / ".join(_NOT_RUN if n is None else f"{n / 1e6:.0f}" for n in several)

    return _grid(document, panel, "MB saved for the backward / added at the peak", cell)


def preparation(document: dict[str, Any], panel: Panel) -> Table:
    """A table of the part of all kernels' time that is not spent in products, of our specs."""

    def cell(case: dict[str, Any], name: str) -> str:
        jobs = case["runs"][name].get("jobs_ms")
        return f"{preparation_share(jobs):.1%}" if jobs else _NOT_RUN

    ours = [(name,) for name in document["settings"]["specs"]]
    return _grid(document, panel, "preparation, of the time of all kernels", cell, ours)


def ratios(document: dict[str, Any], panel: Panel, which: str = "both") -> Table:
    """A table of speeds relative to each peer that ran, in one of `PASSES`."""

    def cell(case: dict[str, Any], spec: str, peer: str) -> str:
        return f"{ratio(case, spec, peer, which):.2f}"

    timed = cases(document, "speed", panel)
    peers = [p for p in document["settings"]["peers"] if any(p in case["runs"] for case in timed)]
    pairs = [(spec, peer) for spec in document["settings"]["specs"] for peer in peers]
    return _grid(document, panel, f"times as fast as each peer, {_WORDS[which]}", cell, pairs)


def ranges(document: dict[str, Any], which: str = "both") -> Table:
    """A table of the smallest and largest of `ratios`, over all shapes."""
    peers, specs = document["settings"]["peers"], document["settings"]["specs"]
    rows: list[list[str]] = []
    for name in specs:
        cells: list[str] = []
        for peer in peers:
            timed = cases(document, "speed")
            both = [c for c in timed if name in c["runs"] and peer in c["runs"]]
            found = [ratio(c, name, peer, which) for c in both]
            cells.append(f"{min(found):.2f} to {max(found):.2f}" if found else _NOT_RUN)
        rows.append([name, *cells])
    title = f"times as fast as each peer, {_WORDS[which]}, over all shapes"
    return Table(title, ["spec", *peers], rows)


def accuracy(document: dict[str, Any], key: str) -> Table:
    """A table of the relative L2 errors of a case, of the contenders of "speed" and "models"."""
    case = document["cases"][key]
    settings = document["settings"]
    names = dict.fromkeys([*settings["specs"], *MODEL_SPECS, *settings["peers"]])
    rows = [
        [name, *(f"{case['errors'][name][t]:.4f}" for t in OUTPUTS)]
        for name in names
        if name in case["errors"]
    ]
    return Table(f"relative L2 error, {key.removeprefix('accuracy ')}", _head("", OUTPUTS), rows)


FRONTIER_PEER: Final = "sdpa cudnn"
FRONTIER_LENGTHS: Final = (4096, 8192, 16384)
"""Lengths over which a time of `frontier_points` is a mean, each with both masks."""


class Point(NamedTuple):
    """The time and the error of a contender at one head size.

    Times of forward and backward are relative to `FRONTIER_PEER`. An error is the root mean square
    of those of dQ, dK and dV. `time` and `error` are geometric means, over lengths and masks and
    over the inputs whose errors were measured at this head size.
    """

    name: str
    time: float
    error: float
    least_time: float
    most_time: float
    least_error: float
    most_error: float


def frontier_points(document: dict[str, Any], head_dim: int) -> list[Point]:
    """A point for each contender of which a time and an error were measured, specs first."""
    timed = [
        case
        for case in cases(document, "speed")
        if case["head_dim"] == head_dim
        and case["tokens"] in FRONTIER_LENGTHS
        and FRONTIER_PEER in case["runs"]
    ]
    measured = [
        case["errors"]
        for key, case in document["cases"].items()
        if case["part"] == "accuracy" and key.startswith(f"accuracy d{head_dim} ")
    ]
    found: list[Point] = []
    for name in contenders(document):
        times = [1 / ratio(case, name, FRONTIER_PEER) for case in timed if name in case["runs"]]
        rms = [
            math.sqrt(sum(errors[name][t] ** 2 for t in GRADIENTS) / len(GRADIENTS))
            for errors in measured
            if name in errors
        ]
        if times and rms:
            ends = (min(times), max(times), min(rms), max(rms))
            found.append(Point(name, geometric_mean(times), geometric_mean(rms), *ends))
    return found


def frontier_of(points: Sequence[Point]) -> list[Point]:
    """The points that no other is both as fast and as accurate as, the fastest first.

    Errors that differ by less than 1 % count as equal: another order of sums changes as much.
    """
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.time, p.error)):
        if not best or point.error < 0.99 * best[-1].error:
            best.append(point)
    return best


def payoff(document: dict[str, Any], panel: Panel, sigma: float) -> Table:
    """A table of times and errors with each site in INT8 and in 16 bit.

    The other sites are those of `PAYOFF_BASE`. A site has a row if both precisions were timed.
    """
    rows: list[list[str]] = []
    errors = errors_of(document, panel, sigma)
    for case in cases(document, "payoff", panel):
        for site in PAYOFF_SITES:
            pair = int8_and_16_bit(site)
            if any(name not in case["runs"] for name in pair):
                continue
            int8, bits16 = (case["runs"][name]["both"]["ms"] for name in pair)
            cells = [
                " / ".join(f"{errors[name][t]:.4f}" for name in pair)
                if all(name in errors for name in pair)
                else _NOT_RUN
                for t in OUTPUTS
            ]
            rows.append([site, f"{int8:.2f}", f"{bits16:.2f}", f"{1 - int8 / bits16:.1%}", *cells])
    tokens = ", ".join(str(case["tokens"]) for case in cases(document, "payoff", panel))
    title = f"what INT8 buys and costs: {PAYOFF_BASE.label()}, {panel}, {tokens} tokens"
    head = ["site", "INT8 ms", "16 bit ms", "time saved", *(TITLES[t] for t in OUTPUTS)]
    return Table(f"{title}; errors at sigma {sigma:g}, INT8 / 16 bit", head, rows)


def int8_and_16_bit(site: str) -> tuple[str, str]:
    """Labels of `PAYOFF_BASE` with one of `PAYOFF_SITES` in INT8 and in 16 bit."""
    base, other = PAYOFF_BASE.label(), payoff_spec(site).label()
    is_int8 = PAYOFF_BASE.site(site.split("+")[0]).precision is Precision.INT8
    return (base, other) if is_int8 else (other, base)


def sigmas(document: dict[str, Any], panel: Panel) -> list[float]:
    """The sigmas at which errors were measured."""
    head = _accuracy_key(panel, "")
    keys = [key for key in document["cases"] if key.startswith(head)]
    return sorted(float(key.removeprefix(head)) for key in keys)


def errors_of(document: dict[str, Any], panel: Panel, sigma: float) -> dict[str, Any]:
    """Errors at a sigma, by contender and tensor; empty if they were not measured."""
    case = document["cases"].get(_accuracy_key(panel, f"{sigma:g}"))
    return {} if case is None else case["errors"]


def not_run(document: dict[str, Any]) -> Table:
    """A table of contenders that did not run or lack a measurement, with cases and reasons."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for key, case in document["cases"].items():
        for name, why in case["not_run"].items():
            grouped.setdefault((name, why), []).append(key)
        for name, run in case.get("runs", {}).items():
            for what, why in run.get("not_measured", {}).items():
                grouped.setdefault((name, f"{what}: {why}"), []).append(key)
    everywhere = len(document["cases"])
    rows = [
        [name, "every case" if len(keys) == everywhere else ", ".join(keys), why]
        for (name, why), keys in grouped.items()
    ]
    return Table("not run", ["contender", "cases", "reason"], rows)


def waits(document: dict[str, Any]) -> Table:
    """A table of times that may include waits of the device for the host."""
    rounds = document["settings"].get("rounds")
    rows = [
        [name, _WORDS[which], key, f"{waited} of {rounds}"]
        for key, case in document["cases"].items()
        for name, run in case.get("runs", {}).items()
        for which in _WORDS
        if (waited := run.get(which, {}).get("waited"))
    ]
    head = ["contender", "pass", "case", "rounds"]
    return Table("times that may include waits of the GPU for the host", head, rows)


def _grid(
    document: dict[str, Any],
    panel: Panel,
    title: str,
    cell: Callable[..., str],
    rows: Sequence[tuple[str, ...]] | None = None,
) -> Table:
    """A table with a column for each number of tokens.

    cell: makes a cell from a case and the contenders of the row.
    rows: the contenders of each row; by default each contender has a row of its own. A cell is "-"
        if one of its contenders did not run.
    """
    timed = cases(document, "speed", panel)
    found: list[list[str]] = []
    for who in [(name,) for name in contenders(document)] if rows is None else rows:
        cells = [cell(c, *who) if c["runs"].keys() >= {*who} else _NOT_RUN for c in timed]
        found.append([" to ".join(who), *cells])
    return Table(f"{title}, {panel}", ["tokens", *(str(case["tokens"]) for case in timed)], found)


def _head(first: str, names: Sequence[str]) -> list[str]:
    return [first, *(TITLES[t] for t in names)]


def _accuracy_key(panel: Panel, sigma: str) -> str:
    return f"accuracy d{panel.head_dim} {panel.mask} sigma{sigma}"
