"""The error budget against the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from sagesim import FACTORED, SAGEBWD, compare, exact_backward
from sagesim.analysis import OUTPUTS, attribute
from theory.budget import Budget, error_budget
from theory.checks.check import Check, estimated
from theory.checks.samples import Sample, captured, gaussian, outlier_channels

TOPIC = "budget"
WITHIN = 0.25
"""What the budget claims."""

SPECS = (SAGEBWD, FACTORED)
SIGMAS = (1.0, 3.0, 5.0, 8.0, 10.0)


def checks() -> Iterator[Check]:
    """Both six-product schemes on Table 1's inputs, the capture, outlier channels; and shares."""
    every = samples()
    budgets = {spec: [error_budget(sample, spec=spec) for sample in every] for spec in SPECS}
    for of_spec in budgets.values():
        for sample, budget in zip(every, of_spec, strict=True):
            yield from of_errors(sample, budget)
    for i in (SIGMAS.index(3.0), len(SIGMAS) + 2, -1):  # Table 1, a layer of the capture, outliers
        yield from of_shares(every[i], budgets[SAGEBWD][i])


def samples() -> tuple[Sample, ...]:
    """What the budget is held to: Table 1's inputs, the capture, outlier channels."""
    return (*(table1(sigma) for sigma in SIGMAS), *captured(2048), outliers())


def table1(sigma: float) -> Sample:
    """Table 1's inputs, 8 draws: at large sigma a few rows make up most of a head's error."""
    return pooled([gaussian(sigma, 256, seed=seed) for seed in range(8)])


def outliers() -> Sample:
    """32 draws, each with one large row of dO, which makes up most of a head's error of dS."""
    return pooled([outlier_channels(256, 32, seed=seed) for seed in range(32)])


def pooled(samples: list[Sample]) -> Sample:
    """The heads of all samples as one."""
    first = samples[0]
    tensors = {n: torch.cat([getattr(s, n) for s in samples], 1) for n in ("q", "k", "v", "do")}
    return replace(first, name=f"{first.name}, {len(samples)} draws", **tensors)


def of_errors(sample: Sample, budget: Budget) -> Iterator[Check]:
    """The relative L2 error of each output, against both references. The budget is the sample's."""
    traced = sample.trace(budget.spec)
    for reference, words, predicted in (
        (sample.exact(), "relative L2", budget.error),
        (exact_backward(sample, traced), "against its own forward, relative L2", budget.own_error),
    ):
        measured = compare(traced, reference).overall
        for t in OUTPUTS:
            yield estimated(
                TOPIC,
                f"{budget.spec.label()}: {words} of {t}",
                sample.name,
                predicted=predicted[t],
                measured=measured[t].rel_l2,
                within=WITHIN,
            )


def of_shares(sample: Sample, budget: Budget) -> Iterator[Check]:
    """Each share that is more than a tenth of the error."""
    for t, part, predicted, measured in shares(sample, budget):
        if measured > 0.1:
            yield estimated(
                TOPIC,
                f"{budget.spec.label()}: share of {part} in {t}",
                sample.name,
                predicted=predicted,
                measured=measured,
                within=WITHIN,
            )


def shares(sample: Sample, budget: Budget) -> Iterator[tuple[str, str, float, float]]:
    """Tensor, part, and the share of the one's error that the other has: predicted, measured."""
    found = attribute(sample, base=budget.spec)
    for t in OUTPUTS:
        for part in found.parts:
            yield t, part.site, budget.share[part.site][t], part.share[t]
