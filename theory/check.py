"""A statement of the theory, held against a measurement."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One number predicted by a function of `theory`, and the same number measured."""

    topic: str  #: module of `theory` that predicts
    statement: str  #: what is claimed, in a few words
    inputs: str  #: what it was measured on
    predicted: float
    measured: float
    within: float | None  #: largest |ratio - 1| of an estimate; None for an upper bound

    @property
    def ratio(self) -> float:
        """measured / predicted; 0 where both are 0."""
        if self.predicted == 0:
            return math.inf if self.measured > 0 else 0.0
        return self.measured / self.predicted

    @property
    def holds(self) -> bool:
        """Whether the measurement is what the theory says; never where either is NaN."""
        if self.within is None:
            return self.measured <= self.predicted
        return self.measured == self.predicted or abs(self.ratio - 1) <= self.within


def bounded(topic: str, statement: str, inputs: str, *, bound: Tensor, measured: Tensor) -> Check:
    """The check of an elementwise upper bound, at the element that comes closest to it.

    bound and measured broadcast to the same shape; a NaN in either is an element that violates.
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
    ratio = ratio.masked_fill(measured <= 0, 0.0)  # 0 / 0 as well: a bound of 0 that holds
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
    """The check of an estimate that claims to be right to a fraction `within`."""
    return Check(
        topic=topic,
        statement=statement,
        inputs=inputs,
        predicted=predicted,
        measured=measured,
        within=within,
    )
