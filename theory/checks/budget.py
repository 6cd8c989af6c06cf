"""The error budget against the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from sagesim import FACTORED, SAGEBWD, AttentionSpec, compare
from sagesim.analysis import OUTPUTS, attribute
from theory.budget import error_budget
from theory.checks.check import Check, estimated
from theory.checks.samples import Sample, captured, gaussian, outlier_channels

TOPIC = "budget"
WITHIN = 0.25
"""What the budget claims."""

SPECS = (SAGEBWD, FACTORED)
SIGMAS = (1.0, 3.0, 5.0, 8.0, 10.0)


def checks() -> Iterator[Check]:
    """Both six-product schemes on Table 1's inputs, the capture, outlier channels; and shares."""
    for spec in SPECS:
        for sample in samples():
            yield from of_errors(sample, spec)
    for sample in (table1(3.0), captured(2048)[2], outliers()):
        yield from of_shares(sample, SAGEBWD)


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


def of_errors(sample: Sample, spec: AttentionSpec) -> Iterator[Check]:
    """The relative L2 error of each output."""
    budget = error_budget(sample, spec=spec)
    measured = compare(sample.trace(spec), sample.exact()).overall
    for t in OUTPUTS:
        yield estimated(
            TOPIC,
            f"{spec.label()}: relative L2 of {t}",
            sample.name,
            predicted=budget.error[t],
            measured=measured[t].rel_l2,
            within=WITHIN,
        )


def of_shares(sample: Sample, spec: AttentionSpec) -> Iterator[Check]:
    """Each share that is more than a tenth of the error."""
    for t, part, predicted, measured in shares(sample, spec):
        if measured > 0.1:
            yield estimated(
                TOPIC,
                f"{spec.label()}: share of {part} in {t}",
                sample.name,
                predicted=predicted,
                measured=measured,
                within=WITHIN,
            )


def shares(sample: Sample, spec: AttentionSpec) -> Iterator[tuple[str, str, float, float]]:
    """Tensor, part, and the share of the one's error that the other has: predicted, measured."""
    budget = error_budget(sample, spec=spec)
    found = attribute(sample, base=spec)
    for t in OUTPUTS:
        for part in found.parts:
            yield t, part.site, budget.share[part.site][t], part.share[t]
