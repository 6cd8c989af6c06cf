"""Runs side by side: what differs between them, their curves over seeds, their differences."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from sagesim.experiments.pretrain.runlog import Log
from sagesim.experiments.pretrain.settings import Run
from sagesim.metrics import geometric_mean, mean

REFERENCE: Final = "sdpa"

_FOLLOWS: Final = (
    "attention",
    "seed",
    "monitor",
    "steps",
    "warmup",
    "evaluate_every",
    "monitor_every",
)
"""Fields that are no setting of their own: what is compared, and what follows from the others at
equal tokens."""

Point = tuple[float, float, float, float]
"""x, and the smallest, mean and largest over seeds."""


@dataclass(frozen=True)
class Trained:
    """A run, with its numbers by what they are of."""

    name: str
    log: Log

    @property
    def run(self) -> Run:
        return self.log.run

    @cached_property
    def series(self) -> Mapping[tuple[str, str, int, str], list[tuple[int, float]]]:
        """(step, value) by (group, attention, layer, name)."""
        found: defaultdict[tuple[str, str, int, str], list[tuple[int, float]]] = defaultdict(list)
        for row in self.log.rows:
            found[row.group, row.attention, row.layer, row.name].append((row.step, row.value))
        return dict(found)

    def curve(self, group: str, name: str) -> dict[int, float]:
        """A number of the whole run by tokens seen."""
        each = self.series.get((group, "", -1, name), [])
        return {step * self.run.tokens_per_step: value for step, value in each}

    @property
    def final(self) -> float | None:
        """The held-out loss after the last step; None where the run is not done."""
        steps = dict(self.series.get(("evaluation", "", -1, "loss"), []))
        return steps.get(self.run.steps) if not self.log.stop else None

    def last(self, group: str, attention: str, layer: int, name: str) -> float | None:
        """The newest value of a number."""
        each = self.series.get((group, attention, layer, name))
        return each[-1][1] if each else None


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only."""

    attention: str
    runs: tuple[Trained, ...]

    @property
    def by_seed(self) -> dict[int, Trained]:
        return {each.run.seed: each for each in self.runs}

    @property
    def finals(self) -> dict[int, float]:
        """Held-out losses by seed, of the runs that are done."""
        return {seed: x.final for seed, x in self.by_seed.items() if x.final is not None}

    @property
    def stops(self) -> list[str]:
        """Why runs were stopped."""
        return [x.log.stop for x in self.runs if x.log.stop]


@dataclass(frozen=True)
class Setting:
    """Groups that differ in their attention only."""

    title: str
    groups: tuple[Group, ...]
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def reference(self) -> Group | None:
        return next((group for group in self.groups if group.attention == REFERENCE), None)


@dataclass(frozen=True, slots=True)
class Difference:
    """Held-out loss less that of the reference with the same seed, over seeds that both have."""

    mean: float
    low: float
    high: float
    seeds: int
    error: float | None = None  #: of the mean, by `scatter`

    @property
    def is_chance(self) -> bool:
        """Whether seeds scatter so much that the mean may be chance: it is no more than twice its
        error, or the seeds disagree on its sign."""
        if self.error is not None and abs(self.mean) <= 2 * self.error:
            return True
        return self.low <= 0 <= self.high

    def verdict(self, margin: float | None) -> str:
        """In words, by the rule of a plan: mean beyond the margin, and one sign for all seeds."""
        if margin is None:
            return ""
        one_sign = self.low > 0 or self.high < 0
        if abs(self.mean) <= margin:
            return "within the margin"
        if not one_sign:
            return "seeds disagree"
        return "worse" if self.mean > 0 else "better"


def settings(runs: Sequence[Trained]) -> list[Setting]:
    """The runs by setting, attention and seed, in the order in which they are given, but for the
    reference, which comes first.

    Raises:
        ValueError: naming two runs of the same setting, attention and seed.
    """
    differing = varying([each.run for each in runs])
    by_setting: dict[tuple[Any, ...], dict[str, list[Trained]]] = {}
    for each in runs:
        key = tuple(getattr(each.run, name) for name in differing)
        members = by_setting.setdefault(key, {}).setdefault(family_free(each.run.attention), [])
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


def varying(runs: Sequence[Run]) -> list[str]:
    """The settings that are not the same for all."""
    names = [name for name in Run.__slots__ if name not in _FOLLOWS]
    found = [name for name in names if len({getattr(run, name) for run in runs}) > 1]
    # Unequal numbers of steps follow from unequal steps only where the tokens are the same.
    if len({run.tokens for run in runs}) > 1:
        found.append("tokens")
    return found


def describe(name: str, value: Any) -> str:
    """A setting in words.

    >>> describe("qk_norm", True), describe("tokens_per_step", 65536)
    ('with QK-norm', '65,536 tokens per step')
    """
    if name == "qk_norm":
        return "with QK-norm" if value else "without QK-norm"
    if name in ("tokens_per_step", "tokens"):
        return f"{value:,} {name.replace('_', ' ')}"
    return f"{name.replace('_', ' ')} {value}"


def family_free(attention: str) -> str:
    """The name without the word that says who computes the spec: both compute the same.

    >>> family_free("kernels:sagebwd"), family_free("sdpa")
    ('sagebwd', 'sdpa')
    """
    return attention.partition(":")[2] or attention


def over_seeds(curves: Sequence[Mapping[int, float]]) -> list[Point]:
    """Where all curves have a value: x, smallest, mean, largest."""
    if not curves:
        return []
    common = set(curves[0]).intersection(*curves[1:])
    found: list[Point] = []
    for x in sorted(common):
        values = [curve[x] for curve in curves]
        found.append((float(x), min(values), mean(values), max(values)))
    return found


def smoothed(curve: Mapping[int, float], bins: int = 60) -> dict[int, float]:
    """Means over so many stretches of equal length, each at its last x."""
    xs = sorted(curve)
    size = max(1, math.ceil(len(xs) / bins))
    parts = [xs[start : start + size] for start in range(0, len(xs), size)]
    return {part[-1]: mean([curve[x] for x in part]) for part in parts}


def differences(group: Group, reference: Group) -> list[float]:
    """Of the losses in the end, one for each seed of both that is done."""
    ours, theirs = group.finals, reference.finals
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def difference(setting: Setting, group: Group) -> Difference | None:
    """Of a group from the setting's reference; None for the reference itself, without one, and
    where no seed of both is done."""
    reference = setting.reference
    if reference is None or group is reference or not (each := differences(group, reference)):
        return None
    deviation = scatter(setting)
    error = None if deviation is None else deviation / math.sqrt(len(each))
    return Difference(mean(each), min(each), max(each), len(each), error)


def scatter(setting: Setting) -> float | None:
    """The standard deviation of a seed's difference from the reference, pooled over attentions, as
    of few seeds each alone says little; None where no attention has two seeds."""
    reference = setting.reference
    squares, degrees = 0.0, 0
    for group in setting.groups:
        each = differences(group, reference) if reference and group is not reference else []
        if len(each) > 1:
            squares += sum((x - mean(each)) ** 2 for x in each)
            degrees += len(each) - 1
    return math.sqrt(squares / degrees) if degrees else None


def difference_curve(group: Group, reference: Group) -> list[Point]:
    """Of held-out losses on the way, paired by seed."""
    pairs = [
        (x.curve("evaluation", "loss"), reference.by_seed[seed].curve("evaluation", "loss"))
        for seed, x in group.by_seed.items()
        if seed in reference.by_seed
    ]
    return over_seeds(
        [{x: ours[x] - theirs[x] for x in ours.keys() & theirs.keys()} for ours, theirs in pairs]
    )


def layer_errors(group: Group, measured: str, name: str) -> list[Point]:
    """A number of every layer at the newest measurement; x is the layer."""
    found: list[Point] = []
    for layer in range(_layers(group)):
        values = [x.last("layer", measured, layer, name) for x in group.runs]
        known = [value for value in values if value is not None]
        if known:
            found.append((float(layer), min(known), mean(known), max(known)))
    return found


def pooled_error(group: Group, measured: str, tensor: str) -> tuple[float, float] | None:
    """(cosine, relative L2) of a tensor over layers and seeds: the mean, and the geometric mean."""
    cosines = [p[2] for p in layer_errors(group, measured, f"{tensor}_cosine")]
    errors = [p[2] for p in layer_errors(group, measured, f"{tensor}_rel_l2")]
    return (mean(cosines), geometric_mean(errors)) if errors else None


def measured_attentions(group: Group) -> list[str]:
    """The attentions whose errors were measured."""
    return sorted({a for x in group.runs for (kind, a, _, _) in x.series if kind == "layer" and a})


def gradient(group: Group, measured: str) -> dict[str, float]:
    """Means over seeds of the newest numbers of the gradient; see `monitor`."""
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
