"""Measurements of `theory.rounding`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from sagesim import Granularity, Precision, Rounding
from sagesim.emulator import encode, from_tiles, to_tiles
from sagesim.spec import HALF_AWAY, HALF_EVEN
from theory import rounding
from theory.checks.check import Check, bounded, estimated
from theory.checks.samples import Sample, captured, gaussian, outlier_channels

TOPIC = "rounding"
BLOCK = 64


def checks() -> Iterator[Check]:
    """Bounds on every format, mean squares by distribution, then elementwise estimates."""
    yield from _bounds()
    yield from _distributions()
    yield from _elements()


def rounded(
    x: Tensor, precision: Precision, how: Granularity, mode: Rounding = HALF_EVEN
) -> tuple[Tensor, Tensor]:
    """Float32 x [..., n, m] rounded by the emulator, and its scales.

    Both are float64 in the shape of x.
    """
    rows, columns = (min(BLOCK, x.shape[-2]), x.shape[-1])
    if how.is_map:
        columns = min(BLOCK, columns)
    operand = encode(to_tiles(x, rows, columns), precision, how, mode, "q")
    scale = torch.ones(()) if operand.scale is None else operand.scale
    values, scale = operand.values.double(), scale.double().expand_as(operand.values)
    return from_tiles(values * scale, *x.shape[-2:]), from_tiles(scale, *x.shape[-2:])


def wide(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Float32 numbers of both signs with magnitudes spread over many binades."""
    generator = torch.Generator().manual_seed(seed)
    sign = torch.randn(shape, generator=generator).sign()
    return sign * torch.exp2(3 * torch.randn(shape, generator=generator))


def with_scale(x: Tensor, scale: float = 1.0) -> Tensor:
    """x [rows, n] with one more column of 127 * scale, which makes `scale` its scale per token."""
    return torch.cat([torch.full_like(x[:, :1], 127 * scale), x], -1)


def mean_square(x: Tensor, scale: float = 1.0) -> tuple[float, float]:
    """The mean square and the mean of INT8's error of x [rows, n], per token at this scale."""
    x = with_scale(x, scale)
    error = (rounded(x, Precision.INT8, Granularity.PerToken)[0] - x.double())[:, 1:]
    return float(error.square().mean()), float(error.mean())


def operands(sample: Sample) -> dict[str, tuple[Tensor, Granularity]]:
    """The float32 operands of a sample by name: Q, K, V, dO per token, P and dS per tile row."""
    exact = sample.exact()
    token, row = Granularity.PerToken, Granularity.PerTileRow
    names = dict(zip(("Q", "K", "V", "dO"), sample.qkvdo, strict=True))
    tokens = {name: (x.float(), token) for name, x in names.items()}
    return tokens | {"P": (exact.p.float(), row), "dS": (exact.ds.float(), row)}


def _bounds() -> Iterator[Check]:
    modes = (HALF_EVEN, HALF_AWAY, Rounding.stochastic(0))
    x = torch.cat([wide((1, 2, 256, 64)), outlier_channels(256).q.expand(1, 2, -1, -1)], 1)
    for precision in rounding.GRIDS:
        for mode in modes if precision.is_scaled else modes[:1]:
            found = rounded(x, precision, Granularity.PerBlock, mode)[0]
            amax = rounding.region_amax(x.double(), Granularity.PerBlock, BLOCK, x.shape[-1])
            yield bounded(
                TOPIC,
                f"|error| of {precision.value}, {mode.mode.value}",
                "wide and outlier channels",
                bound=rounding.rounding_bound(x, amax, precision, mode.mode),
                measured=(found - x.double()).abs(),
            )


def _distributions() -> Iterator[Check]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(4096, 64, generator=generator)
    for sigma in (0.1, 0.25, 0.5, 30.0):
        one = torch.tensor(sigma, dtype=torch.float64)
        exact = float(rounding.gaussian_mean_square(one, torch.ones_like(one)))
        measured, _ = mean_square(sigma * normal)
        inputs = f"Gaussian, deviation {sigma:g} codes"
        if sigma > 1:
            yield estimated(
                TOPIC,
                "RMS error, scale / sqrt(12)",
                inputs,
                predicted=math.sqrt(1 / 12),
                measured=math.sqrt(measured),
                within=0.01,
            )
        yield estimated(
            TOPIC,
            "RMS error, Fourier series",
            inputs,
            predicted=math.sqrt(exact),
            measured=math.sqrt(measured),
            within=0.01,
        )
    for median, deviation in ((0.02, 2.0), (0.3, 1.0), (5.0, 1.0)):
        x = (math.log(median) + deviation * normal).exp()
        x = x.where(x <= 127, median)  # truncated: the rare larger elements become the median
        m, t = (torch.tensor(y, dtype=torch.float64) for y in (math.log(median), deviation))
        moments = rounding.lognormal_moments(m, t, torch.ones_like(m))
        square, mean = mean_square(x)
        inputs = f"log-normal, median {median:g} codes, deviation {deviation:g}"
        yield estimated(
            TOPIC,
            "RMS error, sum over codes",
            inputs,
            predicted=math.sqrt(float(moments.mean_square)),
            measured=math.sqrt(square),
            within=0.02,
        )
        if median < 1:
            yield estimated(
                TOPIC,
                "mean error (bias), sum over codes",
                inputs,
                predicted=float(moments.mean),
                measured=mean,
                within=0.05,
            )
    for parts in (2, 3, 8):
        x = torch.randint(-127 * parts, 127 * parts, (4096, 64), generator=generator) / parts
        one = torch.ones((), dtype=torch.float64)
        yield estimated(
            TOPIC,
            "RMS error of numbers scale / parts apart",
            f"parts {parts}",
            predicted=float(rounding.grid_mean_square(parts, one).sqrt()),
            measured=math.sqrt(mean_square(x)[0]),
            within=0.01,
        )


def _elements() -> Iterator[Check]:
    for sample in (gaussian(1.0), gaussian(5.0), captured()[3]):
        for name, (x, how) in operands(sample).items():
            for precision in (Precision.INT8, Precision.FP8_E4M3):
                found, scale = rounded(x, precision, how)
                expected = rounding.expected_square(x, scale, precision)
                # The square of a uniform error has a variance of 4 / 5 of its squared mean. The
                # sum fluctuates like one of `count` equal elements; few for a map with peaks.
                count = float(expected.sum() ** 2 / expected.square().sum())
                yield estimated(
                    TOPIC,
                    f"RMS error of {name}, {precision.value}, elementwise",
                    sample.name,
                    predicted=float(expected.mean().sqrt()),
                    measured=float((found - x.double()).square().mean().sqrt()),
                    within=0.04 + 3 * math.sqrt(0.2 / count),
                )
