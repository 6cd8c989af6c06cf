"""Comparison of runs: groups by setting and attention, curves over seeds, and differences."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from sagesim.analysis import geometric_mean, mean
from sagesim.experiments.pretrain.report.difference import Difference
from sagesim.experiments.pretrain.run.log import FILE, Log
from sagesim.experiments.pretrain.run.settings import Run

REFERENCE: Final = "sdpa"
"""The attention that others are compared with."""

_NO_SETTING: Final = (
    "attention",
    "seed",
    "monitor",
    "steps",
    "evaluate_every",
    "monitor_every",
    "monitor_sequences",
    "bias_sequences",
)
"""Fields of `Run` that do not distinguish settings.

The attention and the seed are what is compared. The number of steps follows from the tokens per
step when runs have equal tokens. The other fields do not change the training.
"""

Point = tuple[float, float, float, float]
"""(x, smallest, mean, largest), over seeds."""


@dataclass(frozen=True)
class TrainedRun:
    """A run and its log."""

    name: str
    log: Log

    @property
    def run(self) -> Run:
        """The settings of the run."""
        return self.log.run

    @cached_property
    def series(self) -> Mapping[tuple[str, str, int, str], list[tuple[int, float]]]:
        """Lists of (step, value) by (group, attention, layer, name)."""
        found: defaultdict[tuple[str, str, int, str], list[tuple[int, float]]] = defaultdict(list)
        for row in self.log.rows:
            found[row.group, row.attention, row.layer, row.name].append((row.step, row.value))
        return dict(found)

    def curve(self, group: str, name: str) -> dict[int, float]:
        """One number of the whole model, by the number of tokens trained on."""
        each = self.series.get((group, "", -1, name), [])
        return {step * self.run.tokens_per_step: value for step, value in each}

    @property
    def final(self) -> float | None:
        """The held-out loss after the last step; None if the run is not done or stopped."""
        return None if self.stop else self._last_loss

    @property
    def stop(self) -> str:
        """Why the run stopped. A last held-out loss that is not finite counts as a stop."""
        last = self._last_loss
        found = "" if last is None or math.isfinite(last) else f"held-out loss {last}"
        return self.log.stop or found

    @property
    def _last_loss(self) -> float | None:
        return dict(self.series.get(("evaluation", "", -1, "loss"), [])).get(self.run.steps)

    def last(self, group: str, attention: str, layer: int, name: str) -> float | None:
        """The newest value of a number; None if it was not measured."""
        each = self.series.get((group, attention, layer, name))
        return each[-1][1] if each else None


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    attention: str
    runs: tuple[TrainedRun, ...]

    @property
    def by_seed(self) -> dict[int, TrainedRun]:
        """The runs by seed."""
        return {each.run.seed: each for each in self.runs}

    @property
    def finals(self) -> dict[int, float]:
        """Final held-out losses by seed, of the runs that are done."""
        return {seed: x.final for seed, x in self.by_seed.items() if x.final is not None}

    @property
    def stops(self) -> list[str]:
        """The reasons of the runs that stopped."""
        return [x.stop for x in self.runs if x.stop]


@dataclass(frozen=True)
class Setting:
    """Groups that differ only in their attention."""

    title: str
    groups: tuple[Group, ...]
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The settings that differ between all compared runs, with their values here."""

    @property
    def reference(self) -> Group | None:
        """The group with the attention `REFERENCE`, if there is one."""
        return next((group for group in self.groups if group.attention == REFERENCE), None)


def find_logs(paths: Sequence[Path]) -> list[Path]:
    """The log files of runs.

    Args:
        paths: log files, folders of runs, and folders that contain runs or log files.

    Raises:
        ValueError: if a folder has no log.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
        elif (path / FILE).exists():
            found.append(path / FILE)
        else:
            inside = sorted([*path.glob(f"*/{FILE}"), *path.glob("*.parquet")])
            if not inside:
                raise ValueError(f"{path}: neither a run nor a folder of runs")
            found += inside
    return found


def read_run(log: Path) -> TrainedRun:
    """The run with a log file.

    Raises:
        ValueError: if the file is not the readable log of a run.
    """
    return TrainedRun(_name(log), Log.read(log))


def _name(path: Path) -> str:
    return path.parent.name if path.name == FILE else path.stem


def group_runs(runs: Sequence[TrainedRun]) -> list[Setting]:
    """Group runs by setting, then attention, then seed.

    The order is that of the given runs, except that the reference comes first in its setting.

    Raises:
        ValueError: if two runs have the same setting, attention and seed.
    """
    differing = differing_fields([each.run for each in runs])
    by_setting: dict[tuple[Any, ...], dict[str, list[TrainedRun]]] = {}
    for each in runs:
        key = tuple(getattr(each.run, name) for name in differing)
        members = by_setting.setdefault(key, {}).setdefault(label_of(each.run.attention), [])
        if other := next((x for x in members if x.run.seed == each.run.seed), None):
            raise ValueError(f"{other.name} and {each.name} are the same run")
        members.append(each)
    return [
        Setting(
            ", ".join(describe(name, value) for name, value in zip(differing, key, strict=True)),
            tuple(
                Group(attention, tuple(groups[attention]))
                for attention in sorted(groups, key=lambda name: name != REFERENCE)
            ),
            dict(zip(differing, key, strict=True)),
        )
        for key, groups in by_setting.items()
    ]


def differing_fields(runs: Sequence[Run]) -> list[str]:
    """The settings that are not the same for all runs, in the order of `Run`, then "tokens".

    The warmup is one of them only if it differs between runs of equal steps and tokens per step. A
    plan gives it as a fraction of the steps, so it differs between runs of different steps.
    """
    names = [name for name in Run.__slots__ if name not in _NO_SETTING]
    found = [name for name in names if len({getattr(run, name) for run in runs}) > 1]
    lengths = {(run.steps, run.tokens_per_step) for run in runs}
    if len({(run.steps, run.tokens_per_step, run.warmup) for run in runs}) == len(lengths):
        found = [name for name in found if name != "warmup"]
    # The number of steps follows from the tokens per step only if all runs have equal tokens.
    if len({run.tokens for run in runs}) > 1:
        found.append("tokens")
    return found


def describe(name: str, value: Any) -> str:
    """One setting as text.

    >>> describe("qk_norm", True), describe("tokens_per_step", 65536)
    ('with QK-norm', '65,536 tokens per step')
    """
    if name == "qk_norm":
        return "with QK-norm" if value else "without QK-norm"
    if name in ("tokens_per_step", "tokens"):
        return f"{value:,} {name.replace('_', ' ')}"
    return f"{name.replace('_', ' ')} {value}"


def label_of(attention: str) -> str:
    """An attention's name without its family, as the emulator and the kernels compute the same.

    >>> label_of("kernels:sagebwd"), label_of("sdpa")
    ('sagebwd', 'sdpa')
    """
    return attention.partition(":")[2] or attention


def over_seeds(curves: Sequence[Mapping[int, float]]) -> list[Point]:
    """The smallest, mean and largest value at each x that all curves have."""
    if not curves:
        return []
    common = set(curves[0]).intersection(*curves[1:])
    found: list[Point] = []
    for x in sorted(common):
        values = [curve[x] for curve in curves]
        found.append((float(x), min(values), mean(values), max(values)))
    return found


def smoothed(curve: Mapping[int, float], bins: int = 60) -> dict[int, float]:
    """Means over at most `bins` stretches with equal numbers of points, each at its last x."""
    xs = sorted(curve)
    size = max(1, math.ceil(len(xs) / bins))
    parts = [xs[start : start + size] for start in range(0, len(xs), size)]
    return {part[-1]: mean([curve[x] for x in part]) for part in parts}


def differences(group: Group, reference: Group) -> list[float]:
    """Differences of final losses, one for each seed that is done in both groups."""
    ours, theirs = group.finals, reference.finals
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def difference(setting: Setting, group: Group) -> Difference | None:
    """A group's difference from the setting's reference.

    It is None for the reference itself, if the setting has no reference, and if no seed is done in
    both groups.
    """
    reference = setting.reference
    if reference is None or group is reference or not (each := differences(group, reference)):
        return None
    deviation, degrees = seed_deviation(setting)
    error = None if deviation is None else deviation / math.sqrt(len(each))
    return Difference(mean(each), min(each), max(each), len(each), error, degrees)


def seed_deviation(setting: Setting) -> tuple[float | None, int]:
    """The standard deviation over seeds of the difference from the reference.

    It is pooled over the attentions of the setting: the few seeds of one attention give a poor
    estimate. All its differences share the runs of the reference, so it has fewer independent terms
    than degrees of freedom.

    Returns:
        The deviation, or None if no attention has two seeds; and its degrees of freedom.
    """
    reference = setting.reference
    squares, degrees = 0.0, 0
    for group in setting.groups:
        each = differences(group, reference) if reference and group is not reference else []
        if len(each) > 1:
            squares += sum((x - mean(each)) ** 2 for x in each)
            degrees += len(each) - 1
    return math.sqrt(squares / degrees) if degrees else None, degrees


def difference_curve(group: Group, reference: Group) -> list[Point]:
    """The difference of held-out losses during training, paired by seed."""
    pairs = [
        (x.curve("evaluation", "loss"), reference.by_seed[seed].curve("evaluation", "loss"))
        for seed, x in group.by_seed.items()
        if seed in reference.by_seed
    ]
    return over_seeds(
        [{x: ours[x] - theirs[x] for x in ours.keys() & theirs.keys()} for ours, theirs in pairs]
    )


def layer_errors(group: Group, measured: str, name: str) -> list[Point]:
    """One number of every layer at the newest measurement; x is the index of the layer."""
    found: list[Point] = []
    for layer in range(_layers(group)):
        values = [x.last("layer", measured, layer, name) for x in group.runs]
        known = [value for value in values if value is not None]
        if known:
            found.append((float(layer), min(known), mean(known), max(known)))
    return found


def pooled_error(group: Group, measured: str, tensor: str) -> tuple[float, float] | None:
    """The cosine and relative L2 error of a tensor, pooled over layers; None if not measured.

    The cosine is a mean over layers, the error a geometric mean. A layer's value is a mean over
    seeds.
    """
    cosines = [p[2] for p in layer_errors(group, measured, f"{tensor}_cosine")]
    errors = [p[2] for p in layer_errors(group, measured, f"{tensor}_rel_l2")]
    return (mean(cosines), geometric_mean(errors)) if errors else None


def measured_attentions(group: Group) -> list[str]:
    """The attentions whose errors the runs of a group measured, sorted."""
    return sorted({a for x in group.runs for (kind, a, _, _) in x.series if kind == "layer" and a})


def gradient_numbers(group: Group, measured: str) -> dict[str, float]:
    """The newest numbers about the gradient, by name, as means over seeds.

    Args:
        measured: the measured attention; empty for the gradient of 16-bit attention itself.
    """
    names = {
        n
        for x in group.runs
        for (kind, a, _, n) in x.series
        if kind == "gradient" and a == measured
    }
    found: dict[str, float] = {}
    for name in sorted(names):
        values = [x.last("gradient", measured, -1, name) for x in group.runs]
        found[name] = mean([value for value in values if value is not None])
    return found


def _layers(group: Group) -> int:
    return 1 + max((layer for x in group.runs for (_, _, layer, _) in x.series), default=-1)
