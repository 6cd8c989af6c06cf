"""The error budget against the emulator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from sagesim import FACTORED, SAGEBWD, AttentionSpec, compare
from sagesim.attribution import OUTPUTS, attribute
from theory.budget import PARTS, Budget, error_budget
from theory.check import Check, estimated
from theory.samples import Sample, captured, gaussian, outlier_channels

TOPIC = "budget"
WITHIN = 0.25
"""What the budget claims."""

SIGMAS = (1.0, 3.0, 5.0, 8.0, 10.0)


def checks() -> Iterator[Check]:
    """Both six-product schemes on Table 1's inputs, the capture, outlier channels; and shares."""
    layers = captured()
    for spec in (SAGEBWD, FACTORED):
        for sample in (*(table1(sigma) for sigma in SIGMAS), *layers, outliers()):
            yield from of_errors(sample, spec)
    yield from of_shares(layers[2], SAGEBWD)


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
    budget = predict(sample, spec)
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
    """Each share that is more than a tenth."""
    budget = predict(sample, spec)
    found = attribute(*sample.tensors, base=spec, is_causal=sample.is_causal)
    shares: Mapping[str, Mapping[str, float]] = {part.site: part.share for part in found.parts}
    for t in OUTPUTS:
        for part in PARTS:
            if max(shares[part][t], budget.share[part][t]) > 0.1:
                yield estimated(
                    TOPIC,
                    f"{spec.label()}: share of {part} in {t}",
                    sample.name,
                    predicted=budget.share[part][t],
                    measured=shares[part][t],
                    within=WITHIN,
                )


def predict(sample: Sample, spec: AttentionSpec) -> Budget:
    """The budget of a sample."""
    return error_budget(*sample.tensors, spec=spec, is_causal=sample.is_causal)
