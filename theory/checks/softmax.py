"""Measurements of `theory.softmax`: QK rounds to INT8, everything else computes in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import sagesim
from sagesim import Granularity
from theory import softmax
from theory.checks.check import Check, bounded, estimated
from theory.checks.matmul import Site, converted
from theory.checks.samples import Sample, captured, gaussian, outlier_channels
from theory.matmul import product_moments
from theory.rounding import Moments

TOPIC = "softmax"
UNIT = 2.0**-53


def checks() -> Iterator[Check]:
    """Bounds from the measured error of S, bounds from Q and K, then the estimates."""
    causal = gaussian(3.0, 256, 64, is_causal=True)
    for sample in (gaussian(1.0, 256), gaussian(8.0, 256), causal, captured()[3]):
        yield from _bounds(Logits.of(sample))
    for sample in (gaussian(1.0, 256), outlier_channels(256)):
        yield from _from_operands(sample)
    for sample in (gaussian(1.0), gaussian(3.0)):
        y = Logits.of(sample, Granularity.PerToken)
        yield from _first_order("Q and K rounded", "PO", y, y.variance)
    for sample in (gaussian(1.0), gaussian(3.0), *captured()):
        yield from _first_order("K alone rounded", "POL", *keys_alone(sample))
    for sigma in (3.0, 5.0, 8.0):
        yield from _small_elements(sigma)


@dataclass(frozen=True, slots=True)
class Logits:
    """A sample traced with rounding in QK only."""

    sample: Sample
    exact: sagesim.Exact
    trace: sagesim.Trace
    x: Tensor  #: the error of S, 0 where masked
    variance: Tensor  #: the expected square of x, 0 where masked

    @classmethod
    def of(cls, sample: Sample, how: Granularity = Granularity.PerBlock) -> Logits:
        sample = converted(sample, torch.float64)
        site = Site.of("qk", sample, how, how)
        exact = sample.exact()
        variance = site.moments().mean_square.masked_fill(exact.s.isneginf(), 0.0)
        return cls(sample, exact, sample.trace(site.spec), site.error(), variance)

    @property
    def slack(self) -> Tensor:
        """Float64's relative error of P. It comes from the exponent: S, L and their difference."""
        size = self.exact.s.nan_to_num(neginf=0.0).abs().amax((-2, -1)).max()
        return (self.x.shape[-1] + 8 + 8 * size) * UNIT

    @property
    def spread(self) -> Tensor:
        """The largest less the smallest error of S among the keys of each query."""
        masked = self.exact.s.isneginf()
        largest = self.x.masked_fill(masked, -torch.inf).amax(-1)
        return largest - self.x.masked_fill(masked, torch.inf).amin(-1)


def _bounds(y: Logits) -> Iterator[Check]:
    p, slack, name = y.exact.p, y.slack, y.sample.name
    off, p_error = y.x.abs(), y.trace.p - y.exact.p
    tiny = torch.finfo(p.dtype).tiny
    yield bounded(
        TOPIC,
        "|error of L| <= largest |error of S|",
        name,
        bound=softmax.lse_bound(off) + slack,
        measured=(y.trace.lse - y.exact.lse).abs(),
    )
    yield bounded(
        TOPIC,
        "|error of P| from |error of S|",
        name,
        bound=softmax.p_bound(p, off) + 2 * slack * torch.maximum(p, y.trace.p) + tiny,
        measured=p_error.abs(),
    )
    # The second order can be below float64's error of the first order.
    first = softmax.p_first_order(p, y.x)
    yield bounded(
        TOPIC,
        "|error of P - first order|",
        name,
        bound=softmax.p_remainder_bound(p, y.spread)
        + 2 * slack * (p * (1 + y.spread[..., None]) + y.trace.p)
        + tiny,
        measured=(p_error - first).abs(),
    )
    variation = p_error.abs().sum(-1) / 2
    yield bounded(
        TOPIC,
        "half of sum |error of P| <= tanh(spread / 4)",
        name,
        bound=softmax.variation_bound(y.spread) + 2 * slack,
        measured=variation,
    )
    v = y.sample.v
    yield bounded(
        TOPIC,
        "|error of O| <= range of V * half of sum |error of P|",
        name,
        bound=softmax.o_bound(softmax.value_range(v, is_causal=y.sample.is_causal), variation)
        + 4 * slack * (p @ v.abs()),
        measured=(y.trace.o - y.exact.o).abs(),
    )


def _from_operands(sample: Sample) -> Iterator[Check]:
    """Bounds that use no measured error: the error of S is bounded from Q and K."""
    sample = converted(sample, torch.float64)
    for how in (Granularity.PerBlock, Granularity.PerToken):
        site, y = Site.of("qk", sample, how, how), Logits.of(sample, how)
        off = site.bound() + y.slack
        variation = softmax.variation_bound(2 * off.amax(-1))
        yield bounded(
            TOPIC,
            f"|error of P| from Q and K, per {how.value}",
            sample.name,
            bound=softmax.p_bound(y.exact.p, off) + 4 * y.slack,
            measured=(y.trace.p - y.exact.p).abs(),
        )
        yield bounded(
            TOPIC,
            f"|error of O| from Q and K, per {how.value}",
            sample.name,
            bound=softmax.o_bound(softmax.value_range(sample.v), variation) + 4 * y.slack,
            measured=(y.trace.o - y.exact.o).abs(),
        )


def _first_order(how: str, tensors: str, y: Logits, u: Tensor) -> Iterator[Check]:
    p = y.exact.p
    found = {
        "P": (softmax.p_variance(p, u), y.trace.p - p),
        "O": (softmax.o_variance(p, y.sample.v, u), y.trace.o - y.exact.o),
        "L": (softmax.lse_moments(p, u).mean_square, y.trace.lse - y.exact.lse),
    }
    for tensor in tensors:
        statement = f"RMS error of {tensor}, first order, {how}"
        yield _estimated_rms(statement, y.sample.name, *found[tensor])


def keys_alone(sample: Sample) -> tuple[Logits, Tensor]:
    """The sample with a Q that INT8 represents exactly, and the variance of the error of S.

    Only K is rounded, so errors of S are independent from key to key. Rounding a query would give
    all its keys a common error, which changes L without averaging and leaves P unchanged. Keys of
    a trained model have much in common; P is then more accurate than independent errors predict.
    """
    q = sagesim.quantize(sample.q.float(), Granularity.PerToken).dequantize()
    sample = replace(converted(sample, torch.float64), q=q.double())
    how = Granularity.PerToken
    _, k_error = Site.of("qk", sample, how, how).rounding()
    variance = product_moments(q, sample.k.mT, Moments.none(q), k_error).mean_square
    logits = Logits.of(sample, how)
    return logits, (variance / q.shape[-1]).masked_fill(logits.exact.s.isneginf(), 0.0)


def small_elements(sigma: float, draws: int = 6) -> tuple[float, float, float]:
    """The RMS of the relative error of an element of P: first order, log-normal and measured.

    The mean is over elements above 1e-60; the squares of smaller ones underflow.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for seed in range(draws):
        y = Logits.of(gaussian(sigma, 256, seed=seed), Granularity.PerToken)
        p, u = y.exact.p, y.variance
        squares = (
            softmax.p_variance(p, u),
            softmax.p_lognormal_moments(p, u).mean_square,
            (y.trace.p - p).square(),
        )
        sums += torch.stack([(x / p.square())[p > 1e-60].mean() for x in squares])
    first, lognormal, measured = (sums / draws).sqrt().tolist()
    return first, lognormal, measured


def _small_elements(sigma: float) -> Iterator[Check]:
    _, lognormal, measured = small_elements(sigma)
    yield estimated(
        TOPIC,
        "RMS relative error of an element of P, log-normal",
        f"Gaussian, sigma {sigma:g}, N 256, d 64, 6 draws",
        predicted=lognormal,
        measured=measured,
        within=0.1,
    )


def _estimated_rms(statement: str, inputs: str, square: Tensor, error: Tensor) -> Check:
    return estimated(
        TOPIC,
        statement,
        inputs,
        predicted=float(square.mean().sqrt()),
        measured=float(error.square().mean().sqrt()),
        # Few keys dominate a row, and all rows share the error of a key: one draw of Gaussian
        # inputs scatters by 5 % (one standard deviation, sigma 3).
        within=0.15,
    )
