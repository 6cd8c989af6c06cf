"""The error of one product of two rounded operands: upper bound and mean square.

Only the product itself rounds; everything before it is exact. A product is left [..., m, n] @
right [..., n, d], in the form in which the site multiplies it: K is transposed in QK, P and dS
are transposed in dV and dK. Computed in float64.
"""

from __future__ import annotations

import math
from typing import Final

from torch import Tensor

from sagesim.emulator import COLUMN, ROW, SHARED_AXES
from sagesim.spec import AttentionSpec, Precision
from theory.rounding import UNIT, Moments

_OPERATIONS: Final = 16
"""Float32 roundings of an element outside its sums: scales, exponential, differences."""

UNDERFLOW: Final = 2.0**-126
"""The smallest normal number of float32. A smaller result is off by at most this much."""

CONTRACTED: Final = {
    "qk": (COLUMN, COLUMN),
    "pv": (COLUMN, ROW),
    "qk_recompute": (COLUMN, COLUMN),
    "dv": (ROW, ROW),
    "dp": (COLUMN, COLUMN),
    "dq": (COLUMN, ROW),
    "dk": (ROW, ROW),
}
"""The axis that each site sums over, within a tile of its left and of its right operand."""


def float32_error(terms: int) -> float:
    """An upper bound on the error of a float32 sum of `terms` products.

    It is relative to the sum of their magnitudes. A sum of n numbers, in any order, is off by at
    most n - 1 roundings of 2^-24; 16 more are for the scales and other steps of an element.

    Source: Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 3.1.
    """
    return (terms + _OPERATIONS) * UNIT


def underflow_error(terms: int, largest: float = 1.0) -> float:
    """An upper bound on the absolute error of a float32 sum of `terms` products by underflow.

    A relative bound such as `float32_error` does not hold for results below 2^-126. There the error
    is absolute: at most 2^-150 in IEEE arithmetic, and at most 2^-126 where such results become 0,
    as those of exponentials on GPUs. The sum has one such error for each product, each addition and
    each of 16 steps of an element. A product of two scales that underflows is multiplied by
    products of two codes afterwards.

    Args:
        largest: the largest product of two codes; 1 if no operand has a scale.

    Source: Higham, as above, section 2.1. The terms for scales are ours.
    """
    return (2 * terms + _OPERATIONS) * largest * UNDERFLOW


def unbounded(bound: Tensor) -> Tensor:
    """A bound with inf in place of NaN.

    A bound becomes NaN where the infinite error of a number that may overflow is multiplied by 0.
    The computed product is then NaN as well, so that no finite bound holds.
    """
    return bound.nan_to_num(nan=math.inf, posinf=math.inf)


def product_bound(
    left: Tensor, right: Tensor, left_off: Tensor, right_off: Tensor, *, terms: int = 0
) -> Tensor:
    """An upper bound on |computed - left @ right|, elementwise, [..., m, d].

    With errors a and b, (A + a)(B + b) - AB = aB + Ab + ab. Each element is at most the same
    expression of magnitudes, |a| |B| + |A| |b| + |a| |b|. It is attained if all errors are at their
    largest with matching signs.

    Args:
        left_off: an upper bound on |error of left|, in its shape.
        right_off: the same of right.
        terms: the number of terms of each sum, if it is computed in float32 (`float32_error`); 0 if
            sums are exact.

    Returns: inf, and not NaN, where an element of left_off or right_off is inf.

    Source: Higham, as above, section 3.5.
    """
    a, b = left.abs(), right.abs()
    off = left_off @ (b + right_off) + a @ right_off
    if terms:
        off = off + float32_error(terms) * ((a + left_off) @ (b + right_off))
    return unbounded(off)


def product_moments(
    left: Tensor, right: Tensor, left_error: Moments, right_error: Moments
) -> Moments:
    """The moments of the error of left @ right for independent errors of the operands.

    The means propagate exactly: mean(AB) = (A + mean a)(B + mean b) - AB. With A and B shifted by
    the means, the variances of independent errors a and b add up to var(a) (B^2 + var b) + A^2
    var(b), where squares are elementwise.

    Args:
        left: [..., m, n].
        right: [..., n, d].
        left_error: the moments of the error of left, in its shape.
        right_error: the same of right.

    Returns: [..., m, d].
    """
    a, b = left.double() + left_error.mean, right.double() + right_error.mean
    return Moments(
        mean=product_error_mean(left, right, left_error.mean, right_error.mean),
        variance=left_error.variance @ (b.square() + right_error.variance)
        + a.square() @ right_error.variance,
    )


def product_error_mean(
    left: Tensor, right: Tensor, left_mean: Tensor, right_mean: Tensor
) -> Tensor:
    """The mean error of left @ right, from the mean errors of the operands; see `product_moments`.

    It is a B + (A + a) b.
    """
    a, b = left_mean.double(), right_mean.double()
    return a @ right.double() + (left.double() + a) @ b


def sums_integers(spec: AttentionSpec, site: str) -> bool:
    """Whether a site sums INT8 codes as integers, and therefore exactly, within a tile.

    It does if its scales factor out of the sum: no scale varies along the contracted axis. That
    takes one scale per row or coarser on the left and one per column or coarser on the right.
    Otherwise both operands are multiplied by their scales first and the sum is a float32 sum.
    """
    matmul = spec.site(site)
    along = zip((matmul.lhs, matmul.rhs), CONTRACTED[site], strict=True)
    return matmul.precision is Precision.INT8 and all(
        axis in SHARED_AXES[how] for how, axis in along
    )


def integer_sum_bound(tile_sums: Tensor) -> Tensor:
    """An upper bound on |computed - sum over tiles|, [..., m, d], for tiles summed as integers.

    Within a tile the sum of codes is exact. Converting the sum to float32,
    multiplying it by the scales of both operands and by the softmax scale are at most five
    roundings of each tile's sum. Adding t tiles takes t - 1 more, and one more covers terms of
    second order. All are relative to the tiles' sums, even if much cancels within a tile. The
    error of a float32 sum is relative to the sum of magnitudes instead.

    Args:
        tile_sums: [..., tiles, m, d], each tile's product of the rounded operands.

    Source: ours.
    """
    count = tile_sums.shape[-3]
    return (count + 5) * UNIT * tile_sums.abs().sum(-3)
