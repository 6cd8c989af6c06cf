"""Timing in rounds: every contender once a round, so that a change of clocks affects all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sagesim_kernels.bench.cases import PASSES
from sagesim_kernels.bench.contenders import reason
from sagesim_kernels.bench.meter import Elapsed, Meter
from sagesim_kernels.bench.step import Step


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
) -> Timed:
    """Time every contender once a round: its forward, its backward, and both together.

    Each round starts with another contender. A contender that raises is not timed again.

    Args:
        steps: by contender. They have run before, so nothing is compiled here.
        on_error: called with the name and the exception of a contender that raises. It raises
            itself if the device is lost.
    """
    times: dict[str, dict[str, list[Elapsed]]] = {n: {p: [] for p in PASSES} for n in steps}
    not_run: dict[str, str] = {}
    names = list(steps)
    for turn in range(rounds):
        first = turn % len(names) if names else 0
        for name in names[first:] + names[:first]:
            if name in not_run:
                continue
            try:
                for which in PASSES:
                    prepare = _preparing(steps[name], which)
                    times[name][which].append(meter.elapsed(prepare))
            except Exception as error:
                on_error(name, error)
                not_run[name] = reason(error)
    return Timed({n: t for n, t in times.items() if n not in not_run}, not_run)


def _preparing(step: Step, which: str) -> Callable[[], Callable[[], object]]:
    return lambda: step.prepared(which)


def summary(several: Sequence[Elapsed]) -> dict[str, Any]:
    """Medians of device and host times, and quartiles of the device's, in milliseconds.

    "waited" is the number of rounds in which the device may have waited for the host.

    >>> summary([Elapsed(0.002, 0.001), Elapsed(0.001, 0.001), Elapsed(0.009, 0.004)])
    {'ms': 2.0, 'quartiles_ms': [1.5, 5.5], 'host_ms': 1.0, 'waited': 0}
    """
    device = sorted(1e3 * e.device for e in several)
    low, median, high = (
        statistics.quantiles(device, n=4, method="inclusive") if len(device) > 1 else device * 3
    )
    host = statistics.median(1e3 * e.host for e in several)
    return {
        "ms": round(median, 5),
        "quartiles_ms": [round(low, 5), round(high, 5)],
        "host_ms": round(host, 5),
        "waited": sum(e.waited for e in several),
    }
