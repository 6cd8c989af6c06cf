"""What rounding does to an operand: at most, on average, and when the average is another one.

A region is a set of elements that share one scale. Scales are those of the emulator: the region's
largest magnitude over the format's largest code, 1 for the unscaled formats. x is float64, in any
shape that scales and magnitudes broadcast to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sagesim._quantize import SHARED, from_tiles, to_tiles
from sagesim.spec import Granularity, Precision, RoundingMode

UNIT: Final = 2.0**-24
"""Unit roundoff of float32, in which the quantizer computes."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A format's numbers: `smallest` apart near 0, elsewhere at most 2 * unit of themselves."""

    largest: float
    unit: (
        float  #: unit roundoff, 2**-(mantissa bits + 1); 0 where all numbers are equally far apart
    )
    smallest: float  #: the smallest positive number


GRIDS: Final = {
    Precision.INT8: Grid(127.0, 0.0, 1.0),
    Precision.FP8_E4M3: Grid(448.0, 2.0**-4, 2.0**-9),
    Precision.FP8_E5M2: Grid(57344.0, 2.0**-3, 2.0**-16),
    Precision.FP16: Grid(65504.0, 2.0**-11, 2.0**-24),
    Precision.BF16: Grid((2 - 2.0**-7) * 2.0**127, 2.0**-8, 2.0**-133),
}
"""Every format that rounds, in codes."""


@dataclass(frozen=True, slots=True)
class Moments:
    """What to expect of an error, elementwise: a part that is known and a part that is noise."""

    mean: Tensor
    variance: Tensor

    def __add__(self, other: Moments) -> Moments:
        """The sum of two errors whose noise is independent."""
        return Moments(self.mean + other.mean, self.variance + other.variance)

    @classmethod
    def none(cls, like: Tensor) -> Moments:
        """No error."""
        zero = torch.zeros_like(like, dtype=torch.float64)
        return cls(zero, zero)

    @property
    def mT(self) -> Moments:
        """The moments of the transpose."""
        return Moments(self.mean.mT, self.variance.mT)

    @property
    def mean_square(self) -> Tensor:
        """The expected squared error."""
        return self.mean.square() + self.variance

    def relative_to(self, exact: Tensor) -> float:
        """The expected relative L2 error of `exact`; 0 where both are 0, inf where only it is."""
        error, norm = float(self.mean_square.sum()), float(exact.double().square().sum())
        if norm == 0:
            return math.inf if error else 0.0
        return math.sqrt(error / norm)


def region_amax(x: Tensor, how: Granularity, rows: int, columns: int) -> Tensor:
    """The largest magnitude among those that each element of x [..., n, m] shares a scale with.

    rows, columns: the size of a block or tile; cut to that of x.
    """
    tiles = to_tiles(x.abs(), min(rows, x.shape[-2]), min(columns, x.shape[-1]))
    amax = tiles.amax(SHARED[how], keepdim=True).expand_as(tiles)
    return from_tiles(amax, x.shape[-2], x.shape[-1])


def rounding_bound(
    x: Tensor,
    amax: Tensor,
    precision: Precision,
    mode: RoundingMode = RoundingMode.HALF_EVEN,
) -> Tensor:
    """|rounded - x|, at most. Grows with |x| and amax, so that bounds on them will do.

    To nearest, an element is off by half the distance of the numbers around it: half a code in
    INT8; in a float format half the smallest number near 0 and unit / (1 + unit) of |x| elsewhere,
    attained half way between 1 and the number above it; never by more than |x|, as 0 is a number.
    Stochastic rounding goes to either neighbour: a whole code, or 2 unit. It is for scaled formats;
    the others round to nearest.

    Float32 adds: conversion, inverse and product on the way to a code, scale and product on the
    way back, five roundings of what is there, bounded by six. Where largest / amax overflows the
    region becomes 0 and the error is |x|, below largest * 2**-128; below that every scale is far
    enough above the subnormal numbers.

    Args: amax the largest magnitude of x's region; of no effect in the unscaled formats.

    Returns: float64; inf where x overflows an unscaled format.

    Raises:
        ValueError: for INPUT16, which is not a format but a choice of one.

    Source: Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 2.1;
    unit / (1 + unit): Jeannerod and Rump, Math. Comp. 87, 2018. The float32 terms are ours.
    """
    x = x.double().abs()
    if precision is Precision.FP32:
        return torch.zeros_like(x)
    if precision not in GRIDS:
        raise ValueError(f"{precision.value!r} stands for fp16 or bf16; say which")
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
    off = off + 6 * UNIT * (x + off) + x.clamp(max=vanishing)
    if not precision.is_scaled:
        off = off.masked_fill(x * (1 + UNIT) >= grid.largest * (1 + grid.unit / 2), math.inf)
    return off


def spacing(x: Tensor, scale: Tensor, precision: Precision) -> Tensor:
    """The distance of the two numbers of the format around x, or of those above x if it is one."""
    grid, x, scale = GRIDS[precision], x.double().abs(), scale.double()
    codes = (x / scale).expand(torch.broadcast_shapes(x.shape, scale.shape))
    binade = torch.exp2(torch.frexp(codes).exponent.double() - 1).where(codes > 0, 0.0)
    return (2 * grid.unit * binade).clamp(min=grid.smallest) * scale


def expected_square(x: Tensor, scale: Tensor, precision: Precision = Precision.INT8) -> Tensor:
    """The mean square to reckon with for each element, to nearest: for an error budget.

    x^2 of what is rounded to 0, that is up to half the smallest number; else spacing^2 / 12, an
    error uniform over the distance of two numbers; but 0 for a region's largest, which its scale
    makes a code. In a tile row of a softmax that one may be all there is.
    """
    x, scale = x.double().abs(), scale.double()
    grid = GRIDS[precision]
    square = torch.where(
        x <= grid.smallest * scale / 2, x.square(), spacing(x, scale, precision).square() / 12
    )
    if precision.is_scaled:  # float32's scale is right to 2**-22
        square = square.masked_fill(x >= (1 - 2.0**-20) * grid.largest * scale, 0.0)
    return square


def rounding_moments(x: Tensor, scale: Tensor) -> Moments:
    """The error of INT8 rounding to nearest, x^ - x, where x was scaled by `scale` = amax / 127.

    Between codes 2 and 126 it is noise, uniform over a code: mean 0, variance scale^2 / 12. That
    fails at both ends. Elements that become 0 or one code lie denser below than above in any map
    of many small and few large elements, and are lost together: a bias, which sums over keys and
    queries do not average out. The largest element is 127 codes exactly. At both ends the error is
    therefore taken as it is.

    Args: scale broadcastable to x; 0 where a region is all 0.
    """
    x, scale = x.double(), scale.double().expand_as(x)
    codes = (x / scale.where(scale > 0, 1.0)).round()
    known = (codes.abs() <= 1) | (codes.abs() >= 127)
    return Moments(
        mean=(codes * scale - x).where(known, 0.0),
        variance=(scale.square() / 12).masked_fill(known, 0.0),
    )


def gaussian_mean_square(sigma: Tensor, scale: Tensor) -> Tensor:
    """The exact mean square of INT8's error of a Gaussian of deviation sigma > 0; not cut off.

    The squared error is a function of x of period scale, with the Fourier series
    scale^2 / 12 + (scale / pi)^2 sum_n (-1)^n / n^2 cos(2 pi n x / scale). A cosine's mean is the
    density's characteristic function: for a Gaussian exp(-2 (pi n sigma / scale)^2). So the
    uniform model is off by the fraction 12 / pi^2 exp(-2 (pi sigma / scale)^2), and is good from
    sigma = scale / 2 on. The other way, scale >> sigma, all becomes 0 and the sum is sigma^2.

    Source: Sripad and Snyder, IEEE Trans. ASSP 25(5), 1977.
    """
    ratio = (sigma.double() / scale.double()).clamp(min=0.01)
    n = torch.arange(1, math.ceil(1.5 / float(ratio.min())) + 2, dtype=torch.float64)
    sign = 1 - 2 * (n % 2)
    waves = sign / n**2 * torch.exp(-2 * (math.pi * n * ratio[..., None]) ** 2)
    square = scale.double() ** 2 * (1 / 12 + waves.sum(-1) / math.pi**2)
    # Below a hundredth of a code nothing but 0 is left, and the series would need many terms.
    return torch.where(sigma < 0.01 * scale, sigma.double() ** 2, square)


def lognormal_moments(log_mean: Tensor, log_deviation: Tensor, scale: Tensor) -> Moments:
    """The exact moments of INT8's error of exp(Gaussian), cut off at 127 codes, the region's amax.

    A softmax of Gaussian logits has such regions. For x between a and b the moments of x^r are
    exp(r m + r^2 t^2 / 2) [Phi((log(b) - m) / t - r t) - Phi((log(a) - m) / t - r t)], and around
    each code the error is known; 128 codes are summed.

    Args: log_mean m and log_deviation t > 0 of log x; shapes that broadcast.

    Source: ours. The partial moments are in Johnson, Kotz and Balakrishnan, "Continuous
    Univariate Distributions", vol. 1, 2nd ed., chapter 14.
    """
    m = (log_mean.double() - scale.double().log())[..., None]
    t = log_deviation.double()[..., None]
    codes = torch.arange(128, dtype=torch.float64)
    edges = torch.cat([codes - 0.5, codes[-1:]]).clamp(min=0.0)
    z = (edges.log() - m) / t
    share, first, second = (
        torch.exp(r * m + r**2 * t**2 / 2) * torch.special.ndtr(z - r * t).diff(dim=-1)
        for r in range(3)
    )
    mass = share.sum(-1)
    mean = (codes * share - first).sum(-1) / mass
    square = (codes**2 * share - 2 * codes * first + second).sum(-1) / mass
    scale = scale.double()
    return Moments(scale * mean, scale**2 * (square - mean**2))


def grid_mean_square(parts: int, scale: Tensor) -> Tensor:
    """The mean square of INT8's error of numbers that are themselves scale / parts apart.

    Numbers that were on a grid already, a sixteen-bit or an eight-bit one, fall on `parts` places
    between two codes, equally often if they spread over many. Those are j / parts of a code away
    from the next: for odd parts j = 0, +-1 ... +-(parts - 1) / 2, of mean square
    (1 - 1 / parts^2) / 12; for even parts a tie of 1 / 2 is among them, (1 + 2 / parts^2) / 12.
    One part is no error, two are 3 / 2 of the uniform one; ties alone would be three times it.

    Raises:
        ValueError: if parts is not positive.
    """
    if parts < 1:
        raise ValueError(f"parts={parts} is not a positive number")
    change = 2 if parts % 2 == 0 else -1
    return scale.double() ** 2 * (1 + change / parts**2) / 12
