"""The error of one product of two rounded operands, at its own site: at most, and on average.

Products are left [..., m, n] @ right [..., n, d] as they are multiplied: K transposed in QK, P and
dS transposed in dV and dK. Everything is float64.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from sagesim._quantize import COLUMN, ROW, SHARED
from sagesim.spec import AttentionSpec, Precision
from theory.rounding import UNIT, Moments

_OPERATIONS: Final = 16
"""Roundings an element goes through beside those of its sums: scales, exponential, differences."""

CONTRACTED: Final = {
    "qk": (COLUMN, COLUMN),
    "pv": (COLUMN, ROW),
    "qk_recompute": (COLUMN, COLUMN),
    "dv": (ROW, ROW),
    "dp": (COLUMN, COLUMN),
    "dq": (COLUMN, ROW),
    "dk": (ROW, ROW),
}
"""The axis within a tile of the left and of the right operand that each site sums over."""


def float32_error(terms: int) -> float:
    """The relative error of a float32 sum of this many products, at most.

    Relative to the sum of their magnitudes. A sum of n numbers, in any order, is off by at most
    (n - 1) roundings; the rest is for scales and what else an element goes through.

    Source: Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 3.1.
    """
    return (terms + _OPERATIONS) * UNIT


def product_bound(
    left: Tensor, right: Tensor, left_off: Tensor, right_off: Tensor, *, terms: int = 0
) -> Tensor:
    """|computed - left @ right|, at most, for operands that are off by at most these.

    (A + a)(B + b) - AB = aB + Ab + ab, and each element of it is at most the same of magnitudes,
    |a| |B| + |A| |b| + |a| |b|: attained where errors are at their largest and of fitting signs.

    Args: terms: of each sum, if it is done in float32: see `float32_error`; 0 if it is exact.

    Source: Higham, as above, section 3.5.
    """
    a, b = left.abs(), right.abs()
    off = left_off @ (b + right_off) + a @ right_off
    return off + float32_error(terms) * ((a + left_off) @ (b + right_off)) if terms else off


def product_moments(
    left: Tensor, right: Tensor, left_error: Moments, right_error: Moments
) -> Moments:
    """The error of left [..., m, n] @ right [..., n, d], both operands rounded on their own.

    Means go through the product as they are. Variances of independent errors a and b add up:
    var(aB + Ab + ab) = var(a) (B^2 + var b) + A^2 var(b), with A, B the operands plus their means.
    """
    a, b = left.double() + left_error.mean, right.double() + right_error.mean
    return Moments(
        mean=a @ b - left.double() @ right.double(),
        variance=left_error.variance @ (b.square() + right_error.variance)
        + a.square() @ right_error.variance,
    )


def sums_integers(spec: AttentionSpec, site: str) -> bool:
    """Whether a site adds up codes, exactly, within a tile: INT8 with scales that factor out.

    A scale factors out of a sum if it does not vary along it: of the left operand one a row or
    coarser, of the right one a column or coarser. If either varies, both are multiplied by their
    scales first and the sum is one of float32.
    """
    matmul = spec.site(site)
    along = zip((matmul.lhs, matmul.rhs), CONTRACTED[site], strict=True)
    return matmul.precision is Precision.INT8 and all(axis in SHARED[how] for how, axis in along)


def integer_sum_bound(tile_sums: Tensor) -> Tensor:
    """|computed - sum over tiles|, at most, where the codes of each tile are summed as integers.

    tile_sums [..., tiles, m, d] are the tiles' products of the rounded operands. Conversion, two
    scales, the softmax's and the product with it are five roundings of each tile's sum; adding t
    tiles is t - 1 more, and one is for what is of second order. All are relative to the tiles'
    sums, however much cancels within a tile: a float32 sum has an error relative to the sum of
    magnitudes instead.

    Source: ours.
    """
    count = tile_sums.shape[-3]
    return (count + 5) * UNIT * tile_sums.abs().sum(-3)
