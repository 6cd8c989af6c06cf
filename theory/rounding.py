"""The error of rounding one operand: its largest size, its mean square, and where it is a bias.

A region is the set of elements that share one scale. The scales are the emulator's: a region's
largest magnitude (amax) over the format's largest code, and 1 in the unscaled formats. Functions
compute in float64. Their tensor arguments have any shapes that broadcast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sagesim.emulator import SHARED_AXES, from_tiles, to_tiles
from sagesim.spec import Granularity, Precision, RoundingMode

UNIT: Final = 2.0**-24
"""Unit roundoff of float32. The quantizer computes in float32."""


_ROUNDINGS: Final = 9
"""Units `UNIT` that cover the float32 arithmetic of the quantizer; see `rounding_bound`."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers that a format represents.

    Near 0 neighbours are `smallest` apart. Elsewhere they are at most 2 * unit * |number| apart.
    """

    largest: float
    unit: float  #: unit roundoff, 2**-(mantissa bits + 1); 0 if all numbers are equally spaced
    smallest: float  #: the smallest positive number


GRIDS: Final = {
    Precision.INT8: Grid(127.0, 0.0, 1.0),
    Precision.FP8_E4M3: Grid(448.0, 2.0**-4, 2.0**-9),
    Precision.FP8_E5M2: Grid(57344.0, 2.0**-3, 2.0**-16),
    Precision.FP16: Grid(65504.0, 2.0**-11, 2.0**-24),
    Precision.BF16: Grid((2 - 2.0**-7) * 2.0**127, 2.0**-8, 2.0**-133),
}
"""The grid of every format that rounds. For a scaled format, its numbers are codes."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and variance of an error, elementwise.

    The mean is the part of the error that is known in advance. The rest is noise of this variance.
    """

    mean: Tensor
    variance: Tensor

    def __add__(self, other: Moments) -> Moments:
        """The moments of the sum of two independent errors."""
        return Moments(self.mean + other.mean, self.variance + other.variance)

    @classmethod
    def none(cls, like: Tensor) -> Moments:
        """The moments of an error of 0, in the shape of `like`."""
        zero = torch.zeros_like(like, dtype=torch.float64)
        return cls(zero, zero)

    @property
    def mT(self) -> Moments:
        """The moments of the transposed error."""
        return Moments(self.mean.mT, self.variance.mT)

    @property
    def mean_square(self) -> Tensor:
        """The expected squared error, mean^2 + variance, elementwise."""
        return self.mean.square() + self.variance

    def relative_to(self, exact: Tensor) -> float:
        """The expected L2 norm of the error over that of `exact`.

        0 if both norms are 0; inf if only that of `exact` is 0.
        """
        error, norm = float(self.mean_square.sum()), float(exact.double().square().sum())
        if norm == 0:
            return math.inf if error else 0.0
        return math.sqrt(error / norm)


def region_amax(x: Tensor, how: Granularity, rows: int, columns: int) -> Tensor:
    """The largest magnitude of each element's region, for x [..., n, m] and a granularity `how`.

    Args:
        rows: rows of a block or tile; at most n are used.
        columns: columns of a block or tile; at most m are used.

    Returns: the shape of x, one value per element.
    """
    tiles = to_tiles(x.abs(), min(rows, x.shape[-2]), min(columns, x.shape[-1]))
    amax = tiles.amax(SHARED_AXES[how], keepdim=True).expand_as(tiles)
    return from_tiles(amax, x.shape[-2], x.shape[-1])


def rounding_bound(
    x: Tensor,
    amax: Tensor,
    precision: Precision,
    mode: RoundingMode = RoundingMode.HALF_EVEN,
) -> Tensor:
    """An upper bound on |rounded - x|, elementwise.

    To nearest, an element is off by at most half the gap between the two numbers around it. In INT8
    that is half a code. In a float format it is half the smallest number near 0, and unit / (1 +
    unit) of |x| elsewhere, which the midpoint between 1 and the next number attains. Because 0 is
    representable, the error never exceeds |x|. Stochastic rounding goes to either neighbour, so its
    bound is a whole code, or 2 unit |x|. Only scaled formats round stochastically; the others round
    to nearest.

    The float32 arithmetic of the quantizer adds to this. Conversion, inverse and product lead to a
    code, scale and product lead back. If largest / amax overflows, the region becomes 0 and the
    error is |x|, which is below largest * 2**-128. All other scales are at least 2**-128. A scale
    below 2**-126 is subnormal: it is off by up to 2**-150, which is 2**-22 of it, or four units
    `UNIT`. The scale and the four other roundings are eight units, bounded here by nine. The
    converted number and the product of code and scale may also be subnormal. Each is then off by
    up to 2**-150, unless it is 0.

    The bound grows with |x| and with amax, so upper bounds on both may be passed instead.

    Args:
        amax: the largest magnitude of each element's region; the unscaled formats ignore it.

    Returns: float64, in the units of x; inf if x overflows an unscaled format.

    Raises:
        ValueError: if precision is INPUT16, which stands for FP16 or BF16.

    Source: Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 2.1;
    unit / (1 + unit): Jeannerod and Rump, Math. Comp. 87, 2018. The float32 terms are ours.
    """
    x = x.double().abs()
    if precision is Precision.FP32:
        return torch.zeros_like(x)
    if precision not in GRIDS:
        raise ValueError(f"{precision.value!r} stands for fp16 or bf16; pass one of the two")
    grid = GRIDS[precision]
    stochastic = precision.is_scaled and mode is RoundingMode.STOCHASTIC
    unit, near_zero = grid.unit / (1 + grid.unit), grid.smallest / 2
    if precision.is_scaled:
        if stochastic:
            unit, near_zero = 2 * grid.unit, grid.smallest
        near_zero = near_zero / grid.largest * amax.double()
        vanishing = grid.largest * 2.0**-128
    else:
        near_zero, vanishing = torch.tensor(near_zero, dtype=torch.float64), 2.0**-150
    off = torch.maximum(unit * x, near_zero)
    if not stochastic:
        off = torch.minimum(off, x)
    off = off + _ROUNDINGS * UNIT * (x + off) + x.clamp(max=vanishing)
    if precision.is_scaled:
        off = off + torch.where(x > 0, 2 * 2.0**-150, 0.0)
    else:
        off = off.masked_fill(x * (1 + UNIT) >= grid.largest * (1 + grid.unit / 2), math.inf)
    return off


def spacing(x: Tensor, scale: Tensor, precision: Precision) -> Tensor:
    """The gap between the format's two numbers around x, in the units of x.

    If x is one of the numbers, it is the gap to the next larger magnitude.
    """
    grid, x, scale = GRIDS[precision], x.double().abs(), scale.double()
    codes = (x / scale).expand(torch.broadcast_shapes(x.shape, scale.shape))
    binade = torch.exp2(torch.frexp(codes).exponent.double() - 1).where(codes > 0, 0.0)
    return (2 * grid.unit * binade).clamp(min=grid.smallest) * scale


def expected_square(x: Tensor, scale: Tensor, precision: Precision = Precision.INT8) -> Tensor:
    """An estimate of the squared rounding error of each element, to nearest.

    An element of up to half the smallest number becomes 0: its squared error is x^2. The largest
    element of a region is a code exactly: its error is 0. For any other element the error is taken
    as uniform over the gap between its neighbours: spacing^2 / 12.

    The second case matters in a tile row of a peaked softmax, where the largest element may be
    nearly the whole row.

    Args:
        scale: the scale of each element's region, broadcastable to x.
    """
    x, scale = x.double().abs(), scale.double()
    grid = GRIDS[precision]
    square = torch.where(
        x <= grid.smallest * scale / 2, x.square(), spacing(x, scale, precision).square() / 12
    )
    if precision.is_scaled:  # a float32 scale has a relative error of up to 2**-22
        square = square.masked_fill(x >= (1 - 2.0**-20) * grid.largest * scale, 0.0)
    return square


def rounding_moments(x: Tensor, scale: Tensor) -> Moments:
    """Mean and variance of the error x^ - x of INT8 rounding to nearest, elementwise.

    Between codes 2 and 126 the error is modelled as noise, uniform over a code: mean 0, variance
    scale^2 / 12. At both ends the model fails, and the actual error is the mean, with variance 0:

    - Codes 0 and 1. In a map of many small and few large elements, more elements lie below such a
      code than above it. They are rounded in the same direction, and their errors add up in a sum
      over keys or queries instead of averaging out.
    - Code 127. The largest element of a region is a code exactly.

    Args:
        scale: amax / 127 of each element's region, broadcastable to x; 0 for a region of zeros.
    """
    x, scale = x.double(), scale.double().expand_as(x)
    codes = (x / scale.where(scale > 0, 1.0)).round()
    known = (codes.abs() <= 1) | (codes.abs() >= 127)
    return Moments(
        mean=(codes * scale - x).where(known, 0.0),
        variance=(scale.square() / 12).masked_fill(known, 0.0),
    )


def gaussian_mean_square(sigma: Tensor, scale: Tensor) -> Tensor:
    """The exact mean square of INT8's error of a Gaussian of deviation sigma > 0, without clipping.

    The squared error is a function of x of period scale, with the Fourier series scale^2 / 12 +
    (scale / pi)^2 sum_n (-1)^n / n^2 cos(2 pi n x / scale). The mean of a cosine is the density's
    characteristic function, for a Gaussian exp(-2 (pi n sigma / scale)^2). The uniform model
    scale^2 / 12 is therefore off by the fraction 12 / pi^2 exp(-2 (pi sigma / scale)^2), below 1
    percent from sigma = scale / 2 on. For sigma far below scale every number becomes 0 and the mean
    square is sigma^2.

    Source: Sripad and Snyder, IEEE Trans. ASSP 25(5), 1977.
    """
    ratio = (sigma.double() / scale.double()).clamp(min=0.01)
    n = torch.arange(1, math.ceil(1.5 / float(ratio.min())) + 2, dtype=torch.float64)
    sign = 1 - 2 * (n % 2)
    waves = sign / n**2 * torch.exp(-2 * (math.pi * n * ratio[..., None]) ** 2)
    square = scale.double() ** 2 * (1 / 12 + waves.sum(-1) / math.pi**2)
    # Below a hundredth of a code every number becomes 0, and the series would need many terms.
    return torch.where(sigma < 0.01 * scale, sigma.double() ** 2, square)


def lognormal_moments(log_mean: Tensor, log_deviation: Tensor, scale: Tensor) -> Moments:
    """The exact moments of INT8's error of exp(Gaussian), truncated at the region's amax.

    The amax is 127 codes. Rows of a softmax of Gaussian logits are close to this distribution. The
    partial moment of x^r between a and b is exp(r m + r^2 t^2 / 2) [Phi((log(b) - m) / t - r t) -
    Phi((log(a) - m) / t - r t)]. Around each code the error is the code less x, so the moments of
    the error are sums of partial moments over 128 codes.

    The exponential overflows and the difference of Phi underflows for large t. So partial moments
    are computed as logarithms, and divided by the probability of the region before they are
    exponentiated.

    Args:
        log_mean: m, the mean of log x.
        log_deviation: t > 0, the deviation of log x.
        scale: the size of a code. All three broadcast.

    Source: ours. The partial moments are in Johnson, Kotz and Balakrishnan, "Continuous Univariate
    Distributions", vol. 1, 2nd ed., chapter 14.
    """
    m = (log_mean.double() - scale.double().log())[..., None]
    t = log_deviation.double()[..., None]
    codes = torch.arange(128, dtype=torch.float64)
    edges = torch.cat([codes - 0.5, codes[-1:]]).clamp(min=0.0)
    z = (edges.log() - m) / t
    partial = [r * m + r**2 * t**2 / 2 + _log_normal_shares(z - r * t) for r in range(3)]
    mass = partial[0].logsumexp(-1, keepdim=True)
    share, first, second = (torch.exp(x - mass) for x in partial)
    mean = (codes * share - first).sum(-1)
    square = (codes**2 * share - 2 * codes * first + second).sum(-1)
    scale = scale.double()
    return Moments(scale * mean, scale**2 * (square - mean**2))


def _log_normal_shares(edges: Tensor) -> Tensor:
    """log(Phi(b) - Phi(a)) of neighbours a < b along the last axis, [..., n - 1] for n edges.

    Phi is near 1 in the upper tail, where a difference cancels. An interval whose midpoint is
    positive is therefore reflected: Phi(b) - Phi(a) = Phi(-a) - Phi(-b).
    """
    a, b = edges[..., :-1], edges[..., 1:]
    upper = a + b > 0
    a, b = torch.where(upper, -b, a), torch.where(upper, -a, b)
    large = torch.special.log_ndtr(b)
    return large + torch.log1p(-torch.exp(torch.special.log_ndtr(a) - large))


def grid_mean_square(parts: int, scale: Tensor) -> Tensor:
    """The mean square of INT8's error of numbers that are multiples of scale / parts.

    Numbers that were rounded before, to 16 or 8 bits, lie on such a grid. If they spread over many
    codes, each of the `parts` offsets between two codes is equally likely. The distances to the
    nearest code are j / parts codes. For odd parts, j = 0, +-1 ... +-(parts - 1) / 2 and the mean
    square is (1 - 1 / parts^2) / 12. For even parts there are also ties at 1 / 2, and it is (1 + 2
    / parts^2) / 12. One part gives no error; two parts give 3 / 2 of the uniform mean square.

    Raises:
        ValueError: if parts is not positive.
    """
    if parts < 1:
        raise ValueError(f"parts={parts} is not a positive number")
    change = 2 if parts % 2 == 0 else -1
    return scale.double() ** 2 * (1 + change / parts**2) / 12


OUTPUT_GRIDS: Final = {
    torch.float16: GRIDS[Precision.FP16],
    torch.bfloat16: GRIDS[Precision.BF16],
    torch.float32: Grid((2 - 2.0**-23) * 2.0**127, UNIT, 2.0**-149),
}
"""The grid of each dtype of an output."""


def output_rounding_bound(size: Tensor, dtype: torch.dtype) -> Tensor:
    """An upper bound on |rounded - x| for |x| <= size, in the dtype of an output, to nearest.

    It is inf where x may round to infinity. That begins halfway from the largest number to the next
    power of two: largest / (1 - unit) is this power.

    Args:
        size: float64, any shape; at least 0.
        dtype: float16, bfloat16 or float32.
    """
    grid = OUTPUT_GRIDS[dtype]
    infinite = grid.largest / (1 - grid.unit) * (1 - grid.unit / 2)
    return (grid.unit * size + grid.smallest / 2).masked_fill(size >= infinite, math.inf)
