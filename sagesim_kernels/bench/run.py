"""Measure the cases that a record does not have yet."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from sagesim.problem import AttentionProblem
from sagesim.spec import AttentionSpec
from sagesim_kernels.bench.accuracy import distance, errors, mean_errors, problems
from sagesim_kernels.bench.cases import PASSES, Case, TimedCase
from sagesim_kernels.bench.contenders import Contender, contender, is_grouped, reason
from sagesim_kernels.bench.jobs import by_job
from sagesim_kernels.bench.mask_steps import mask_contender, mask_step
from sagesim_kernels.bench.masks import MaskCase
from sagesim_kernels.bench.meter import Elapsed, Meter
from sagesim_kernels.bench.models import ModelCase, TrainingCase
from sagesim_kernels.bench.record import Record
from sagesim_kernels.bench.shape import Shape
from sagesim_kernels.bench.step import Step
from sagesim_kernels.bench.timing import Within, in_rounds, interleaved, looped, summary
from sagesim_kernels.bench.training import TrainingStep

_WARM_UP: Final = 2
"""Runs of each pass before any is timed. The first one compiles, tunes and allocates."""

_LOOPS: Final = 5
"""Loops of calls of each contender. A loop is a mean already, so fewer are enough."""

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
        sizes = (shape.q_size, shape.kv_size, shape.kv_size, shape.q_size)
        tensors = (torch.randn(x, generator=generator, device=self.device) for x in sizes)
        q, k, v, do = (x.to(self.dtype) for x in tensors)
        grouped = is_grouped(q, k)
        return AttentionProblem(q=q, k=k, v=v, do=do, is_causal=shape.is_causal, enable_gqa=grouped)


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
            if isinstance(case, MaskCase):
                contenders = [mask_contender(name, case) for name in names]
            else:
                contenders = [find(name) for name in names]
            if isinstance(case, TimedCase | ModelCase | MaskCase):
                result = _timed(case, contenders, setup, check, lost)
            elif isinstance(case, TrainingCase):
                result = _trained(case, contenders, setup, check, lost)
            else:
                several = list(problems(case, setup.device, setup.dtype))
                result = _errors(several, contenders, check, lost)
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
    case: TimedCase | ModelCase | MaskCase,
    contenders: Sequence[Contender],
    setup: Setup,
    check: _DeviceCheck,
    not_run: dict[str, str],
) -> dict[str, Any]:
    problem = setup.inputs(case.shape)
    steps: dict[str, Step] = {}

    def results(each: Contender) -> dict[str, Tensor]:
        if isinstance(case, MaskCase):
            steps[each.name] = mask_step(each, case, problem)
        else:
            steps[each.name] = Step.of(each, problem)
        return steps[each.name].results()

    def warm_up(name: str) -> None:
        for which in PASSES * _WARM_UP:
            steps[name].prepared(which)()

    apart = _ready(contenders, results, warm_up, check, not_run)
    steps = {name: steps[name] for name in apart}
    within = _within(contenders)
    timed = interleaved(steps, setup.meter, setup.rounds, on_error=check, within=within)
    not_run |= timed.not_run
    clock = setup.meter.clock_mhz()
    specs = {c.name: c.spec for c in contenders}
    runs: dict[str, dict[str, Any]] = {}
    for name, times in timed.times.items():
        run = {which: summary(times[which]) for which in PASSES}
        run["apart"] = apart[name]
        with within(name):
            runs[name] = run | _details(name, specs[name], steps[name], setup.meter, check)
    if isinstance(case, ModelCase):
        both = {name: steps[name].both for name in runs}
        _add_loops(runs, both, "both", setup.meter, within, check, not_run)
    shape = case.shape
    _, kv_heads, keys, _ = shape.kv_size
    flop = case.flop if isinstance(case, MaskCase) else shape.flop
    return {
        "part": case.part,
        "batch": shape.batch,
        "heads": shape.heads,
        "kv_heads": kv_heads,
        "tokens": shape.tokens,
        "keys": keys,
        "head_dim": shape.head_dim,
        "is_causal": shape.is_causal,
        "flop": {which: flop(which) for which in PASSES},
        "sm_clock_mhz": clock,
        "runs": {name: runs[name] for name in case.contenders if name in runs},
        "not_run": not_run,
    }


def _trained(
    case: TrainingCase,
    contenders: Sequence[Contender],
    setup: Setup,
    check: _DeviceCheck,
    not_run: dict[str, str],
) -> dict[str, Any]:
    if case.is_compiled:
        # Graphs of other models count towards the limit of recompilations.
        torch.compiler.reset()
    steps: dict[str, TrainingStep] = {}

    def results(each: Contender) -> dict[str, Tensor]:
        steps[each.name] = TrainingStep.of(each, case, setup.device, setup.dtype)
        return steps[each.name].gradients()

    def warm_up(name: str) -> None:
        for _ in range(_WARM_UP):
            steps[name]()

    apart = _ready(contenders, results, warm_up, check, not_run)
    found: dict[str, list[Elapsed]] = {name: [] for name in apart}

    def measure(name: str) -> None:
        found[name].append(setup.meter.elapsed(lambda: steps[name]))

    within = _within(contenders)
    not_run |= in_rounds(list(apart), setup.rounds, measure, on_error=check, within=within)
    clock = setup.meter.clock_mhz()
    runs: dict[str, dict[str, Any]] = {
        name: {"step": summary(times), "apart": apart[name]}
        for name, times in found.items()
        if name not in not_run
    }
    calls = {name: steps[name] for name in runs}
    _add_loops(runs, calls, "step", setup.meter, within, check, not_run)
    return {
        "part": "training",
        "layers": case.layers,
        "width": case.width,
        "head_dim": case.head_dim,
        "tokens": case.tokens,
        "batch": case.batch,
        "is_compiled": case.is_compiled,
        "sm_clock_mhz": clock,
        "runs": {name: runs[name] for name in case.contenders if name in runs},
        "not_run": not_run,
    }


def _within(contenders: Sequence[Contender]) -> Within:
    selected = {each.name: each.selected for each in contenders}
    return lambda name: selected[name]()


def _ready(
    contenders: Sequence[Contender],
    results: Callable[[Contender], dict[str, Tensor]],
    warm_up: Callable[[str], None],
    check: _DeviceCheck,
    not_run: dict[str, str],
) -> dict[str, float | None]:
    """Run each contender until it can be timed, and return its distance from the first peer.

    The first peer's results are the reference. Contenders that raise, or whose results are wrong,
    are added to not_run instead.
    """
    apart: dict[str, float | None] = {}
    reference: dict[str, Tensor] | None = None
    for each in sorted(contenders, key=lambda c: c.spec is not None):  # peers first
        try:
            with each.selected():
                found = results(each)
                check.wait()
                if reference is None and each.spec is None:
                    reference = found
                off = None if reference is None else distance(found, reference)
                if off is not None and not off < _WRONG:
                    raise ArithmeticError(f"its results are {off:.3g} off, relative L2")
                warm_up(each.name)
                check.wait()
        except Exception as error:
            check(each.name, error)
            not_run[each.name] = reason(error)
        else:
            apart[each.name] = off
    return apart


def _add_loops(
    runs: dict[str, dict[str, Any]],
    calls: Mapping[str, Callable[[], object]],
    what: str,
    meter: Meter,
    within: Within,
    check: _DeviceCheck,
    not_run: dict[str, str],
) -> None:
    """Add "wall" to each run, the time of a call in a loop; runs[name][what] are its usual times.

    A contender that raises is moved from runs to not_run.
    """
    usual = {name: 1e-3 * max(run[what]["ms"], run[what]["host_ms"]) for name, run in runs.items()}
    loops = looped(calls, usual, meter, _LOOPS, on_error=check, within=within)
    for name, wall in loops.runs.items():
        runs[name]["wall"] = wall
    for name, why in loops.not_run.items():
        del runs[name]
        not_run[name] = why


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
                with each.selected():
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
