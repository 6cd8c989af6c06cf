"""Ball arithmetic in float64: bounds on every possible result of a float32 computation.

If the operands of an operation lie in their balls, the result lies in its ball for every
implementation that computes in float32, adds in any order, and rounds each result once. No error is
neglected: a radius may be larger than needed, but is never too small. An infinite radius means that
nothing is known about the value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.float32_bound import U, gamma

U64 = 2.0**-53
"""Unit roundoff of float64, in which the balls are computed."""

TENSOR_CORE_U = 2.0**-23
"""Unit roundoff of a tensor core, which truncates when it adds products of 16-bit values."""

EXP = 2.0**-22
"""Relative error of an exponential: ex2.approx on a GPU is within 2 units in the last place (PTX
ISA, 9.7.3), numpy's, glibc's and Sleef's within 1."""

TINY = 2.0**-126
"""The smallest normal float32; below it, results may be flushed to zero."""


class Ball(NamedTuple):
    """|x - mid| <= radius, elementwise; float64. -inf is allowed for mid, with radius 0."""

    mid: Tensor
    radius: Tensor

    @classmethod
    def exactly(cls, x: Tensor) -> Ball:
        return cls(x.double(), torch.zeros_like(x, dtype=torch.float64))

    @property
    def size(self) -> Tensor:
        """The largest magnitude in the ball."""
        return self.mid.abs() + self.radius

    @property
    def lowest(self) -> Tensor:
        return self.mid - self.radius

    @property
    def highest(self) -> Tensor:
        return self.mid + self.radius

    def widened(self, by: Tensor | float) -> Ball:
        return Ball(self.mid, _known(self.radius + by))

    def rounded(self, times: int = 1) -> Ball:
        """After `times` consecutive roundings to float32."""
        if not times:
            return self
        return self.widened(gamma(times) * self.size + times * TINY)

    def rounded16(self, dtype: torch.dtype) -> Ball:
        """After one rounding to a 16-bit format, where the value may be subnormal or overflow."""
        info = torch.finfo(dtype)
        band = info.eps / 2 * self.size + info.smallest_normal * info.eps / 2
        return self.widened(band.masked_fill(self.size > info.max, torch.inf))

    def times(self, other: Ball) -> Ball:
        radius = self.size * other.radius + self.radius * other.mid.abs()
        return Ball(self.mid * other.mid, _known(radius))

    def plus(self, other: Ball) -> Ball:
        return Ball(self.mid + other.mid, self.radius + other.radius)

    def minus(self, other: Ball) -> Ball:
        return Ball(self.mid - other.mid, self.radius + other.radius)

    def over(self, other: Ball) -> Ball:
        """The quotient by a positive ball."""
        least = other.lowest
        mid = self.mid / other.mid
        radius = (self.radius + mid.abs() * other.radius) / least
        return Ball(mid, _known(radius.masked_fill(least <= 0, torch.inf)))

    def sum(self, axis: int, terms: int, u: float = U) -> Ball:
        """The float32 sum in any order; no sum has more than `terms` terms."""
        lost = gamma(terms, u) + gamma(self.mid.shape[axis], U64)
        radius = self.radius.sum(axis) + lost * self.size.sum(axis) + TINY * terms
        return Ball(self.mid.sum(axis), _known(radius))

    def matmul(self, other: Ball, terms: int, u: float = U) -> Ball:
        """The matrix product: exact products, added in float32 in any order.

        terms: the number of roundings that each product goes through; 0 for integers.
        """
        mid = self.mid @ other.mid
        sizes = self.size @ other.size
        # Two more roundings: a code times its scale is rounded to float64.
        lost = gamma(terms, u) + gamma(self.mid.shape[-1] + 2, U64)
        radius = self.size @ other.radius + self.radius @ other.mid.abs() + lost * sizes
        return Ball(mid, _known(radius + TINY * bool(terms)))

    def exp(self) -> Ball:
        """The exponential; exactly 0 for -inf."""
        mid = self.mid.exp()
        radius = mid * torch.expm1(self.radius)
        radius = radius + EXP * (mid + radius) + TINY
        return Ball(mid, _known(radius).masked_fill(self.mid == -torch.inf, 0.0))

    def where(self, condition: Tensor, other: float) -> Ball:
        """The ball where the condition holds, and exactly `other` elsewhere."""
        return Ball(
            self.mid.masked_fill(~condition, other), self.radius.masked_fill(~condition, 0.0)
        )

    def max(self, axis: int) -> Ball:
        """The maximum along an axis, kept."""
        top = self.mid.amax(axis, keepdim=True)
        high = self.highest.amax(axis, keepdim=True)
        low = self.lowest.amax(axis, keepdim=True)
        radius = torch.maximum(high - top, top - low)
        return Ball(top, _known(radius).masked_fill(top == -torch.inf, 0.0))

    def log(self) -> Ball:
        """The exact logarithm of a positive ball."""
        mid = self.mid.log()
        radius = torch.maximum(self.highest.log() - mid, mid - self.lowest.log())
        return Ball(mid, _known(radius))


def _known(radius: Tensor) -> Tensor:
    """Replace NaN, which operations on infinities give, by an infinite radius."""
    return radius.nan_to_num(torch.inf, torch.inf)
