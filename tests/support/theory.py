"""Helpers of the tests of `theory`: its samples, drawn errors, and a comparison of moments."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.support.assertions import assert_within_bound
from tests.support.inputs import Case
from theory.checks.samples import Sample
from theory.rounding import Moments

SHORT: dict[str, Any] = {
    "lengths": st.sampled_from((1, 2, 3, 17, 65, 130)),
    "head_sizes": st.sampled_from((1, 8, 40)),
    "masks": ("none", "causal"),
}
"""Arguments of `tests.support.strategies.cases` for small problems."""


def as_sample(case: Case) -> Sample:
    """A case in float64, so that no product but the one under test rounds."""
    q, k, v, do = (x.double() for x in case.qkvdo)
    return Sample(name=repr(case), q=q, k=k, v=v, do=do, is_causal=case.is_causal)


def draw_errors(*errors: Moments, draws: int = 4000) -> Iterator[Tensor]:
    """Independent normal errors of these moments, [draws, ...] each."""
    generator = torch.Generator().manual_seed(0)
    for error in errors:
        noise = torch.randn(draws, *error.mean.shape, generator=generator, dtype=torch.float64)
        yield error.mean + error.variance.sqrt() * noise


def assert_moments(moments: Moments, sample: Tensor, what: str) -> None:
    """Assert that the mean and mean square of sample [draws, ...] match to six standard errors.

    The standard error is that of a mean of products of normal numbers; about 60 are compared.
    """
    spread = 6 / math.sqrt(len(sample))
    assert_within_bound(
        actual=sample.mean(0),
        exact=moments.mean,
        bound=spread * moments.mean_square.sqrt() + 1e-300,
        what=f"mean, {what}",
    )
    assert_within_bound(
        actual=sample.square().mean(0),
        exact=moments.mean_square,
        bound=4 * spread * moments.mean_square + 1e-300,
        what=f"mean square, {what}",
    )
