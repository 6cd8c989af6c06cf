"""Measure the cases that a record does not have yet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from sagesim.problem import AttentionProblem
from sagesim.spec import AttentionSpec
from sagesim_kernels.bench.accuracy import distance, errors, mean_errors, problems
from sagesim_kernels.bench.cases import PASSES, Case, Shape, TimedCase
from sagesim_kernels.bench.contenders import Contender, contender, reason
from sagesim_kernels.bench.jobs import by_job
from sagesim_kernels.bench.meter import Meter
from sagesim_kernels.bench.record import Record
from sagesim_kernels.bench.step import Step
from sagesim_kernels.bench.timing import interleaved, summary

_WARM_UP: Final = 2
"""Runs of each pass before any is timed. The first one compiles, tunes and allocates."""

_WRONG: Final = 0.5
"""Relative L2 distance from the reference at which a result is wrong and is not timed. On these
inputs every scheme stays below a fifth of it. A kernel that reads or writes out of bounds does
not."""


class DeviceLost(Exception):
    """The device cannot be used any more. The record names the contender that ran last."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The device of a run, and how it is measured."""

    device: torch.device
    dtype: torch.dtype  #: of q, k, v and do
    meter: Meter
    rounds: int

    def inputs(self, shape: Shape) -> AttentionProblem:
        """Gaussian q, k, v and do of standard deviation 1, the same each time."""
        generator = torch.Generator(self.device).manual_seed(0)
        size = (shape.batch, shape.heads, shape.tokens, shape.head_dim)
        tensors = (torch.randn(size, generator=generator, device=self.device) for _ in range(4))
        q, k, v, do = (x.to(self.dtype) for x in tensors)
        return AttentionProblem(q=q, k=k, v=v, do=do, is_causal=shape.is_causal)


def run(
    cases: Sequence[Case],
    record: Record,
    setup: Setup,
    on_done: Callable[[Case, int], None],
    find: Callable[[str], Contender] = contender,
) -> None:
    """Measure every case that the record does not have, and write each as soon as it is done.

    Args:
        on_done: called with each case that is in the record, and the number of such cases.
        find: makes a contender from its name.

    Raises:
        DeviceLost: if the device fails; it names the case and the contender.
    """
    for count, case in enumerate(cases, 1):
        if case.key not in record:
            lost = dict(record.lost(case.key))
            check = _DeviceCheck(record, case.key, setup.meter)
            names = [name for name in case.contenders if name not in lost]
            if isinstance(case, TimedCase):
                result = _timed(case, [find(n) for n in names], setup, check, lost)
            else:
                several = list(problems(case, setup.device, setup.dtype))
                result = _errors(several, [find(n) for n in names], check, lost)
            record.add(case.key, result)
        on_done(case, count)


class _DeviceCheck:
    """Called with a contender's exception; raises DeviceLost if the device failed with it."""

    def __init__(self, record: Record, key: str, meter: Meter) -> None:
        self._record, self._key, self._meter = record, key, meter

    def __call__(self, name: str, error: Exception) -> None:
        try:
            self._meter.synchronize()
        except RuntimeError as gone:
            self._record.lose(self._key, name, f"the device was lost: {reason(error)}")
            raise DeviceLost(
                f"the device was lost in case {self._key!r} by {name}: {reason(gone)}; "
                "run the same command again to continue without it"
            ) from gone

    def wait(self) -> None:
        self._meter.synchronize()


def _timed(
    case: TimedCase,
    contenders: Sequence[Contender],
    setup: Setup,
    check: _DeviceCheck,
    not_run: dict[str, str],
) -> dict[str, Any]:
    problem = setup.inputs(case.shape)
    steps: dict[str, Step] = {}
    apart: dict[str, float | None] = {}
    reference: dict[str, Tensor] | None = None
    # Peers first: the first peer's results are the reference for our specs.
    for each in sorted(contenders, key=lambda c: c.spec is not None):
        try:
            step = Step.of(each, problem)
            results = step.results()
            check.wait()
            if reference is None and each.spec is None:
                reference = results
            off = None if reference is None else distance(results, reference)
            if off is not None and not off < _WRONG:
                raise ArithmeticError(f"its results are {off:.3g} off, relative L2")
            for which in PASSES * _WARM_UP:
                step.prepared(which)()
            check.wait()
        except Exception as error:
            check(each.name, error)
            not_run[each.name] = reason(error)
        else:
            steps[each.name], apart[each.name] = step, off
    del reference

    timed = interleaved(steps, setup.meter, setup.rounds, on_error=check)
    not_run |= timed.not_run
    clock = setup.meter.clock_mhz()
    specs = {c.name: c.spec for c in contenders}
    runs: dict[str, dict[str, Any]] = {}
    for name, times in timed.times.items():
        run = {which: summary(times[which]) for which in PASSES}
        run["apart"] = apart[name]
        runs[name] = run | _details(name, specs[name], steps[name], setup.meter, check)
    shape = case.shape
    return {
        "part": case.part,
        "batch": shape.batch,
        "heads": shape.heads,
        "tokens": shape.tokens,
        "head_dim": shape.head_dim,
        "is_causal": shape.is_causal,
        "flop": {which: shape.flop(which) for which in PASSES},
        "sm_clock_mhz": clock,
        "runs": {name: runs[name] for name in case.contenders if name in runs},
        "not_run": not_run,
    }


def _details(
    name: str, spec: AttentionSpec | None, step: Step, meter: Meter, check: _DeviceCheck
) -> dict[str, Any]:
    """Measurements that are taken once. One that fails is None, with a reason in "not_measured"."""

    def jobs_ms() -> dict[str, float]:
        kernels = meter.kernels(step.both)
        if not kernels:
            raise RuntimeError("the profiler saw no kernel")
        return {job: round(1e3 * s, 5) for job, s in by_job(kernels).items()}

    measures: dict[str, Callable[[], Any]] = {
        "saved_bytes": step.saved_bytes,
        "added_bytes": lambda: meter.added_bytes(step.both),
    }
    if spec is not None:
        measures["jobs_ms"] = jobs_ms
    found: dict[str, Any] = {}
    for what, measure in measures.items():
        try:
            found[what] = measure()
        except Exception as error:
            check(name, error)
            found[what] = None
            found.setdefault("not_measured", {})[what] = reason(error)
    return found


def _errors(
    several: Sequence[AttentionProblem],
    contenders: Sequence[Contender],
    check: _DeviceCheck,
    not_run: dict[str, str],
) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {c.name: [] for c in contenders}
    for problem in several:
        results: dict[str, dict[str, Tensor]] = {}
        for each in contenders:
            if each.name in not_run:
                continue
            try:
                results[each.name] = Step.of(each, problem).results()
                check.wait()
            except Exception as error:
                check(each.name, error)
                not_run[each.name] = reason(error)
        for name, error in zip(results, errors(problem, list(results.values())), strict=True):
            if not all(map(math.isfinite, error.values())):
                not_run[name] = "its results are not finite"
            found[name].append(error)
    first = several[0].q
    return {
        "part": "accuracy",
        "shape": list(first.shape),
        "problems": len(several),
        "is_causal": several[0].is_causal,
        "errors": {name: mean_errors(e) for name, e in found.items() if name not in not_run},
        "not_run": not_run,
    }
