"""Timing in rounds: every contender once a round, so that a change of clocks affects all alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

from sagesim_kernels.bench.cases import PASSES
from sagesim_kernels.bench.contenders import reason
from sagesim_kernels.bench.meter import Elapsed, Meter
from sagesim_kernels.bench.step import Step

_LOOP: Final = 0.03
"""Seconds of a loop of calls."""

_FEWEST_CALLS: Final = 3

SETTLING: Final = 0.15
"""Seconds of calls before a loop is timed. In a loop a GPU reaches the limit of its power, and then
its clock depends on what runs. An H200 takes about 0.1 s to change it."""

Within = Callable[[str], AbstractContextManager[Any]]
"""Returns the context in which a contender runs, by name."""


def anywhere(name: str) -> AbstractContextManager[Any]:
    """A context that changes nothing."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Timed:
    """The times of several contenders."""

    times: Mapping[str, Mapping[str, Sequence[Elapsed]]]  #: by contender and pass, one per round
    not_run: Mapping[str, str]  #: contenders that raised, with the reason


def interleaved(
    steps: Mapping[str, Step],
    meter: Meter,
    rounds: int,
    *,
    on_error: Callable[[str, Exception], None],
    within: Within = anywhere,
) -> Timed:
    """Time every contender once a round: its forward, its backward, and both together.

    Each round starts with another contender. A contender that raises is not timed again.

    Args:
        steps: by contender. They have run before, so nothing is compiled here.
        on_error: called with the name and the exception of a contender that raises. It raises
            itself if the device is lost.
        within: entered before each measurement.
    """
    times: dict[str, dict[str, list[Elapsed]]] = {n: {p: [] for p in PASSES} for n in steps}

    def measure(name: str) -> None:
        for which in PASSES:
            times[name][which].append(meter.elapsed(_preparing(steps[name], which)))

    not_run = in_rounds(list(steps), rounds, measure, on_error=on_error, within=within)
    return Timed({n: t for n, t in times.items() if n not in not_run}, not_run)


def in_rounds(
    names: Sequence[str],
    rounds: int,
    measure: Callable[[str], None],
    *,
    on_error: Callable[[str, Exception], None],
    within: Within = anywhere,
) -> dict[str, str]:
    """Call measure with every name once a round; each round starts with another name.

    A name for which it raises is left out from then on.

    Args:
        on_error: called with the name and the exception.
        within: entered before each call of measure.

    Returns:
        The names for which it raised, with the reason.
    """
    not_run: dict[str, str] = {}
    for turn in range(rounds):
        first = turn % len(names) if names else 0
        for name in (*names[first:], *names[:first]):
            if name in not_run:
                continue
            try:
                with within(name):
                    measure(name)
            except Exception as error:
                on_error(name, error)
                not_run[name] = reason(error)
    return not_run


@dataclass(frozen=True, slots=True)
class Looped:
    """The times of several contenders in loops of calls, by contender."""

    runs: Mapping[str, Mapping[str, Any]]  #: for a record, in milliseconds a call
    not_run: Mapping[str, str]  #: contenders that raised, with the reason


def looped(
    calls: Mapping[str, Callable[[], object]],
    usual: Mapping[str, float],
    meter: Meter,
    rounds: int,
    *,
    on_error: Callable[[str, Exception], None],
    within: Within = anywhere,
) -> Looped:
    """Time a loop of calls of every contender once a round: what a user waits for.

    The host's time counts wherever the device waits for it. Nothing clears the caches. Before each
    timed loop, the contender runs for `SETTLING` seconds, so that the contender before it does not
    decide at which clock it runs.

    Args:
        calls: by contender.
        usual: about how many seconds a call takes, by contender. It decides the length of a loop.
        on_error, within: as for `interleaved`.
    """
    counts = {name: max(_FEWEST_CALLS, math.ceil(_LOOP / usual[name])) for name in calls}
    found: dict[str, list[float]] = {name: [] for name in calls}

    def measure(name: str) -> None:
        settled = 0.0
        while settled < SETTLING:
            settled += counts[name] * meter.loop(calls[name], counts[name])
        found[name].append(1e3 * meter.loop(calls[name], counts[name]))

    not_run = in_rounds(list(calls), rounds, measure, on_error=on_error, within=within)
    runs = {
        name: {**_quartiles(ms), "calls": counts[name]}
        for name, ms in found.items()
        if name not in not_run
    }
    return Looped(runs, not_run)


def _preparing(step: Step, which: str) -> Callable[[], Callable[[], object]]:
    return lambda: step.prepared(which)


def summary(several: Sequence[Elapsed]) -> dict[str, Any]:
    """Medians of device and host times, and quartiles of the device's, in milliseconds.

    "waited" is the number of rounds in which the device may have waited for the host.

    >>> summary([Elapsed(0.002, 0.001), Elapsed(0.001, 0.001), Elapsed(0.009, 0.004)])
    {'ms': 2.0, 'quartiles_ms': [1.5, 5.5], 'host_ms': 1.0, 'waited': 0}
    """
    host = statistics.median(1e3 * e.host for e in several)
    return {
        **_quartiles([1e3 * e.device for e in several]),
        "host_ms": round(host, 5),
        "waited": sum(e.waited for e in several),
    }


def _quartiles(ms: Sequence[float]) -> dict[str, Any]:
    low, median, high = (
        statistics.quantiles(ms, n=4, method="inclusive") if len(ms) > 1 else [*ms] * 3
    )
    return {"ms": round(median, 5), "quartiles_ms": [round(low, 5), round(high, 5)]}
