"""Rules that decide whether an attention has a gap to SDPA, from runs with several seeds.

The unit is the deviation of a twin: another implementation of 16-bit attention. What differs
between the twin and SDPA is chance. docs/pretraining_experiment.md has the rules and how often
chance meets them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sagesim.experiments.pretrain.report.compare import REFERENCE

REAL: Final = 3.0
"""Deviations of the twin above which a gap is real."""
CLOSED: Final = 2.0
"""Deviations of the twin up to which a gap is closed."""

SMALL, LARGE = 65_536, 524_288  #: tokens per step of the cells of experiment B
SHORT, LONG = 200, 1600  #: their steps

Cell = tuple[int, int]
"""The tokens per step and the steps of runs that are compared."""

Losses = Mapping[str, Mapping[int, Sequence[float]]]
"""Held-out losses by arm, seed and sequence, under one evaluation.

The sequences are the same for all arms and seeds.
"""


class Verdict(StrEnum):
    """What the rules say about an arm."""

    REAL = "real gap"
    CLOSES = "closes the gap"
    UNDECIDED = "undecided"
    WITHDRAWN = "answers nothing"  #: the scheme that should have a gap has none


@dataclass(frozen=True, slots=True)
class Gap:
    """The difference of an arm to SDPA under each evaluation, and the verdict."""

    differences: Mapping[str, float]  #: by evaluation, the mean over seeds, in nats
    deviations: Mapping[str, float]  #: by evaluation, that of the twin, in nats
    verdict: Verdict


def decide(
    evaluations: Mapping[str, Losses],
    *,
    twin: str,
    scheme: str,
    stopped: Sequence[str] = (),
) -> dict[str, Gap]:
    """Return the gap of every arm but SDPA and the twin.

    Args:
        evaluations: losses by the name of the evaluation; each has the same arms and seeds.
        twin: the arm that differs from SDPA by chance alone.
        scheme: the arm whose gap the others may close.
        stopped: arms with a run that stopped at a number that is not finite. Their gap is real.
            They may be missing in `evaluations`. An arm with a loss that is not finite counts as
            stopped.

    Raises:
        ValueError: if SDPA or the twin is missing or has a loss that is not finite, or arms differ
            in their seeds or sequences.
    """
    stopped = list(dict.fromkeys([*stopped, *_not_finite(evaluations.values())]))
    for arm in (REFERENCE, twin):
        if arm in stopped:
            raise ValueError(f"a run of {arm} stopped, so the rules decide nothing")
    evaluations = {
        name: {arm: by_seed for arm, by_seed in losses.items() if arm not in stopped}
        for name, losses in evaluations.items()
    }
    differences = {name: _differences(losses) for name, losses in evaluations.items()}
    for name, found in differences.items():
        if twin not in found:
            raise ValueError(f"evaluation {name}: no runs of the twin {twin}")
    deviations = {
        name: (sum(x**2 for x in found[twin]) / len(found[twin])) ** 0.5
        for name, found in differences.items()
    }
    gaps: dict[str, dict[str, float]] = {}
    for name, found in differences.items():
        for arm, by_seed in found.items():
            if arm != twin:
                gaps.setdefault(arm, {})[name] = sum(by_seed) / len(by_seed)
    for arm in stopped:
        gaps.setdefault(arm, {})

    def is_real(arm: str) -> bool:
        if arm in stopped:
            return True
        return all(gaps[arm][name] > REAL * s for name, s in deviations.items())

    def verdict(arm: str) -> Verdict:
        if is_real(arm):
            return Verdict.REAL
        if scheme not in gaps or not is_real(scheme):
            return Verdict.WITHDRAWN
        is_small = all(gaps[arm][name] <= CLOSED * s for name, s in deviations.items())
        return Verdict.CLOSES if is_small else Verdict.UNDECIDED

    return {arm: Gap(each, deviations, verdict(arm)) for arm, each in gaps.items()}


@dataclass(frozen=True, slots=True)
class BatchOrUpdates:
    """The answers of experiment B about an arm; None while a cell of the answer is open."""

    batch_masks: bool | None  #: whether the batch masks the error
    updates_make: bool | None  #: whether updates make the gap


def batch_or_updates(verdicts: Mapping[Cell, Verdict]) -> BatchOrUpdates:
    """Decide what makes the gap of an arm real: a large batch, or many updates.

    The batch masks the error if the gap is real in the large and not in the small batch, both with
    many updates. Updates make the gap if it is real with many and not with few, both in the small
    batch. At most one of the two holds, because they need opposite verdicts about the small batch
    with many updates.

    Args:
        verdicts: those of `decide` about the arm, in the cells that are not open.
    """

    def is_real_only_in(cell: Cell, other: Cell) -> bool | None:
        if cell not in verdicts or other not in verdicts:
            return None
        return verdicts[cell] is Verdict.REAL and verdicts[other] is not Verdict.REAL

    return BatchOrUpdates(
        batch_masks=is_real_only_in((LARGE, LONG), (SMALL, LONG)),
        updates_make=is_real_only_in((SMALL, LONG), (SMALL, SHORT)),
    )


def _not_finite(evaluations: Iterable[Losses]) -> list[str]:
    """The arms with a loss that is not finite."""
    return [
        arm
        for losses in evaluations
        for arm, by_seed in losses.items()
        if not all(math.isfinite(x) for each in by_seed.values() for x in each)
    ]


def _differences(losses: Losses) -> dict[str, list[float]]:
    """By arm and seed, the mean over sequences of its loss less that of SDPA."""
    if REFERENCE not in losses:
        raise ValueError(f"no runs of {REFERENCE}")
    reference = losses[REFERENCE]
    found: dict[str, list[float]] = {}
    for arm, by_seed in losses.items():
        if arm == REFERENCE:
            continue
        if by_seed.keys() != reference.keys():
            raise ValueError(
                f"{arm} has seeds {sorted(by_seed)}, and {REFERENCE} {sorted(reference)}"
            )
        found[arm] = []
        for seed in sorted(by_seed):
            mine, other = by_seed[seed], reference[seed]
            if len(mine) != len(other):
                raise ValueError(
                    f"{arm}, seed {seed}: {len(mine)} sequences, and {len(other)} of {REFERENCE}"
                )
            found[arm].append(sum(x - y for x, y in zip(mine, other, strict=True)) / len(mine))
    return found
