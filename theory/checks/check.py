"""A statement of `theory` compared with a measurement."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A number predicted by a function of `theory`, and the same number measured."""

    topic: str  #: the module of `theory` with the prediction
    statement: str  #: the claim, in a few words
    inputs: str  #: the inputs of the measurement
    predicted: float
    measured: float
    within: float | None  #: tolerance of an estimate: the largest |ratio - 1|; None for a bound

    @property
    def ratio(self) -> float:
        """measured / predicted: 0 if both are 0, inf if only predicted is."""
        if self.predicted == 0:
            return math.inf if self.measured > 0 else 0.0
        return self.measured / self.predicted

    @property
    def holds(self) -> bool:
        """Whether the measurement agrees with the prediction; False if either is NaN."""
        if self.within is None:
            return self.measured <= self.predicted
        return self.measured == self.predicted or abs(self.ratio - 1) <= self.within


def bounded(topic: str, statement: str, inputs: str, *, bound: Tensor, measured: Tensor) -> Check:
    """Check an elementwise upper bound; records the element with the largest measured / bound.

    bound and measured broadcast to a common shape. A NaN in either violates the bound.
    """
    if bound.isnan().any() or measured.isnan().any():
        return Check(
            topic=topic,
            statement=statement,
            inputs=inputs,
            predicted=math.nan,
            measured=math.nan,
            within=None,
        )
    bound, measured = (x.double().flatten() for x in torch.broadcast_tensors(bound, measured))
    ratio = measured / bound
    ratio = ratio.masked_fill(measured <= 0, 0.0)  # includes 0 / 0, where a bound of 0 holds
    worst = int(ratio.argmax())
    return Check(
        topic=topic,
        statement=statement,
        inputs=inputs,
        predicted=float(bound[worst]),
        measured=float(measured[worst]),
        within=None,
    )


def estimated(
    topic: str, statement: str, inputs: str, *, predicted: float, measured: float, within: float
) -> Check:
    """Check an estimate that claims to be right to within the fraction `within`."""
    return Check(
        topic=topic,
        statement=statement,
        inputs=inputs,
        predicted=predicted,
        measured=measured,
        within=within,
    )
