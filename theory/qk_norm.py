"""What QK-norm allows queries, keys and logits to be, and how errors grow with their size.

QK-norm divides each token by its RMS and multiplies it by a vector gamma, so gamma alone bounds
what INT8 has to hold. The second half is for Gaussian tokens: with q and k of deviation sigma_q,
sigma_k the logits of a row are Gaussian of deviation tau = scale * sqrt(d) * sigma_q * sigma_k
(sigma_q * sigma_k for the usual scale), and the rows of P are those of the random energy model,
whose moments are known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import integrate, stats
from torch import Tensor

from theory.smoothing import HALF

_Array = NDArray[np.float64]


def normalised_norm(mean_square: Tensor, d: int, eps: float) -> Tensor:
    """|x / sqrt(mean(x^2) + eps)|_2 of a token of this mean square m: sqrt(d m / (m + eps)).

    Below sqrt(d) always, and equal to it up to m >> eps. Shapes as mean_square.
    """
    return (d * mean_square / (mean_square + eps)).sqrt()


def channel_bound(gamma: Tensor) -> Tensor:
    """|x_c| of any normalised token times gamma, at most: sqrt(d) |gamma_c|; [d].

    One channel's square is at most the sum over all, d. Attained by a token with one channel.
    """
    return math.sqrt(gamma.shape[-1]) * gamma.abs()


def step_bound(gamma: Tensor) -> float:
    """The step of an INT8 region of any shape, at most: sqrt(d) max|gamma| / 127."""
    return float(channel_bound(gamma).max()) / 127


def logit_bound(gamma_q: Tensor, gamma_k: Tensor, *, scale: float | None = None) -> float:
    """|S_ij|, at most: scale * d * max_c |gamma_q_c gamma_k_c|; scale is 1/sqrt(d) by default.

    S_ij / scale = sum_c gamma_q_c gamma_k_c x_c y_c for normalised tokens x and y; taking the
    largest product out leaves |x| |y| <= d by Cauchy-Schwarz. Attained by x = y with the one
    channel where the product is largest, hence never above scale * d * max|gamma_q| max|gamma_k|.

    Source: ours.
    """
    d = gamma_q.shape[-1]
    scale = 1 / math.sqrt(d) if scale is None else scale
    return abs(scale) * d * float((gamma_q * gamma_k).abs().max())


def weight_bounds(logit_bound: float, tokens: int) -> tuple[float, float]:
    """The least and the largest P_ij of a row of this many keys with |S_ij| <= logit_bound.

    P is largest with its own logit at the bound and the others at minus the bound: then
    1 / (1 + (n - 1) exp(-2 bound)). The least is the mirror image.

    Raises:
        ValueError: if tokens is not positive.

    Source: ours.
    """
    if tokens < 1:
        raise ValueError(f"tokens={tokens} is not a positive number")
    others, swing = tokens - 1, math.exp(-2 * logit_bound)
    return swing / (swing + others) if others else 1.0, 1 / (1 + others * swing)


def logit_error_bound(gamma_q: Tensor, gamma_k: Tensor, *, scale: float | None = None) -> float:
    """|error of S_ij| from rounding q and k to INT8, at most, whatever the granularity.

    With half a step h = step_bound / 2 for each, the error is at most
    scale * (|q|_1 h_k + |k|_1 h_q + d h_q h_k), and |q|_1 = sum_c |gamma_c x_c| <=
    |gamma|_2 sqrt(d). For keys that are not smoothed; smoothing at worst doubles |k| and its step.

    Source: ours.
    """
    d = gamma_q.shape[-1]
    scale = 1 / math.sqrt(d) if scale is None else scale
    h_q, h_k = HALF * step_bound(gamma_q), HALF * step_bound(gamma_k)
    sum_q, sum_k = (math.sqrt(d) * float(g.norm()) for g in (gamma_q, gamma_k))
    return abs(scale) * (sum_q * h_k + sum_k * h_q + d * h_q * h_k)


def expected_amax(count: int) -> float:
    """The mean of the largest magnitude of `count` independent standard normal numbers.

    The integral over t of P(largest > t) = 1 - (2 Phi(t) - 1)^count.

    Raises:
        ValueError: if count is not positive.

    Source: David and Nagaraja, "Order Statistics", 3rd ed., section 3.1.

    >>> round(expected_amax(1), 4)  # sqrt(2 / pi)
    0.7979
    """
    if count < 1:
        raise ValueError(f"count={count} is not a positive number")

    def exceeds(t: float) -> float:
        return -math.expm1(count * math.log1p(-math.erfc(t / math.sqrt(2)))) if t > 0 else 1.0

    return float(integrate.quad(exceeds, 0, 12, epsabs=1e-10)[0])


def logit_mean_square(
    sigma_q: float,
    sigma_k: float,
    d: int,
    *,
    region_q: int,
    region_k: int,
    scale: float | None = None,
) -> float:
    """Expected square of the error of S for Gaussian q and k, rounded to INT8.

    A region of `region` elements has a step of about sigma * expected_amax(region) / 127, and
    errors uniform over it. So the mean square is scale^2 d sigma_q^2 sigma_k^2 (a + b + a b) with
    a, b = (expected_amax / 127)^2 / 12: the fraction of tau^2 that it makes up depends on the
    regions only, and the error of S grows as sigma_q * sigma_k.

    Source: ours.
    """
    scale = 1 / math.sqrt(d) if scale is None else scale
    a, b = ((expected_amax(region) / 127) ** 2 / 12 for region in (region_q, region_k))
    return scale**2 * d * sigma_q**2 * sigma_k**2 * (a + b + a * b)


class PowerSums:
    """Expected products of the power sums A_a = sum_j P_j^a of a softmax of Gaussian logits.

    P_j = exp(S_j) / Z with `tokens` independent logits of deviation tau. 1 / Z^n is the integral
    over t of t^(n-1) exp(-t Z) / Gamma(n), under which the logits separate:

        E sum over distinct j_1..j_k of prod P_(j_i)^(a_i)
            = N! / (N - k)! / Gamma(n) * integral of prod phi_(a_i) phi_0^(N - k) dlog t

    with n = sum of a and phi_a(t) = E[(t exp S)^a exp(-t exp S)]. Exact at any N, up to
    quadrature.

    Raises:
        ValueError: if tau or tokens is not positive.

    Source: ours; the model is Derrida's random energy model (Phys. Rev. B 24, 2613, 1981).
    """

    def __init__(self, tau: float, tokens: int) -> None:
        if not (tau > 0 and tokens > 0):
            raise ValueError(f"tau={tau} and tokens={tokens} have to be positive")
        self.tau, self.tokens = tau, tokens
        self._phi: dict[int, _Array] = {}

    def expectation(self, *exponents: int) -> float:
        """E of the product of A_a over `exponents`; E[A_1] = 1.

        A product of sums is a sum over all ways in which their indices coincide.
        """
        return sum(self._distinct([sum(b) for b in groups]) for groups in _partitions(exponents))

    def _distinct(self, exponents: list[int]) -> float:
        total, count = sum(exponents), len(exponents)
        if count > self.tokens:
            return 0.0
        integrand = np.exp((self.tokens - count) * self._log_phi_0)
        for a in exponents:
            integrand = integrand * self._phi_of(a)
        ways = math.prod(self.tokens - i for i in range(count))
        return ways / math.gamma(total) * float(integrand.sum()) * self._step

    @cached_property
    def _log_t(self) -> _Array:
        reach = 9 * self.tau  # of the logits; beyond lies 1e-19 of them
        return np.arange(-reach - 40, reach + 10, self._step)

    @property
    def _step(self) -> float:
        """Of log t; every phi is smooth over 1 and over tau."""
        return 0.125 * max(1.0, self.tau / 16)

    @cached_property
    def _nodes(self) -> tuple[_Array, _Array, _Array]:
        """x = log(t exp S) and weights of its integral, for each log t; and x less log t over tau.

        Between -40 and 4 every phi has its mass, and the logits theirs within 9 tau.
        """
        lower = np.clip(self._log_t - 9 * self.tau, -40, 4)
        upper = np.clip(self._log_t + 9 * self.tau, -40, 4)
        half = (upper - lower)[:, None] / 2
        x = (upper + lower)[:, None] / 2 + half * _GAUSS[0]
        return x, half * _GAUSS[1], (x - self._log_t[:, None]) / self.tau

    def _phi_of(self, a: int) -> _Array:
        if a not in self._phi:
            x, weight, z = self._nodes
            density = np.exp(a * x - np.exp(x) - z**2 / 2) / (self.tau * math.sqrt(2 * math.pi))
            self._phi[a] = (density * weight).sum(1)
        return self._phi[a]

    @cached_property
    def _log_phi_0(self) -> _Array:
        """log E exp(-t exp S), by parts, so that what it lacks to 1 keeps its digits."""
        x, weight, z = self._nodes
        window = (np.exp(x - np.exp(x)) * stats.norm.cdf(-z) * weight).sum(1)
        below = -np.expm1(-np.exp(np.clip(self._log_t - 9 * self.tau, -40, 4)))
        return np.log1p(-np.minimum(window + below, 1 - 1e-16))


_GAUSS: Final = np.polynomial.legendre.leggauss(192)


def softmax_error(mean_square: float, sums: PowerSums) -> float:
    """Relative L2 error of P, O and dV from errors of S of this mean square, to first order.

    dP_j = P_j (e_j - sum_l P_l e_l) for independent e has the expected square
    mean_square * (A_2 - 2 A_3 + A_2^2), of A_2. O = P V and dV = P^T dO have the same relative
    error where V and dO are independent of P and white.

    Source: ours.
    """
    return math.sqrt(mean_square * _spread(sums) / sums.expectation(2))


def score_gradient_error(mean_square: float, sums: PowerSums) -> float:
    """Relative L2 error of dS, dQ and dK from errors of S of this mean square, to first order.

    dS = P o (g - P.g) with g = dP white. Its error is P_j (x_j y_j - sum_l P_l x_l y_l), where x
    and y are the errors of S and g, each less its mean under P, with covariance
    delta_jl - P_j - P_l + A_2. The expected square of the row is mean_square times
    A_2 + 3 A_2^2 + 4 A_2^3 - 12 A_2 A_3 - 6 A_3 + 10 A_4, of A_2 - 2 A_3 + A_2^2. A row of one
    key has no dS, and no error.

    Source: ours.
    """
    if sums.tokens == 1:
        return 0.0
    e = sums.expectation
    square = e(2) + 3 * e(2, 2) + 4 * e(2, 2, 2) - 12 * e(2, 3) - 6 * e(3) + 10 * e(4)
    return math.sqrt(mean_square * square / _spread(sums))


def frozen_softmax_error(mean_square: float, tau: float, tokens: int) -> float:
    """`softmax_error` for logits so large that few keys share a row: tau > sqrt(2 log N).

    There P follows the Poisson-Dirichlet law of index m = sqrt(2 log N) / tau, for which
    (A_2 - 2 A_3 + A_2^2) / A_2 is m / 3. As sqrt(mean_square) grows with tau, the error grows
    with sqrt(tau), that is with sigma.

    Raises:
        ValueError: if tau is not above sqrt(2 log tokens).

    Source: ours, from Pitman and Yor, Ann. Probab. 25(2), 1997, for the moments.
    """
    index = math.sqrt(2 * math.log(tokens)) / tau
    if not index < 1:
        raise ValueError(f"tau={tau} is not above sqrt(2 log {tokens})")
    return math.sqrt(mean_square * index / 3)


def frozen_score_gradient_error(mean_square: float) -> float:
    """`score_gradient_error` in the same limit: sqrt(2/5) of the error of S, whatever m.

    Both sums are proportional to m (1 - m), with factors 2/15 and 1/3. So the error of dS grows
    with tau, that is with sigma^2.

    Source: ours.
    """
    return math.sqrt(mean_square * 2 / 5)


def _spread(sums: PowerSums) -> float:
    e = sums.expectation
    return max(0.0, e(2) - 2 * e(3) + e(2, 2))


def _partitions(items: tuple[int, ...]) -> Iterator[list[list[int]]]:
    """All ways to put items into groups."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for groups in _partitions(rest):
        yield [[first], *groups]
        for i in range(len(groups)):
            yield [*groups[:i], [first, *groups[i]], *groups[i + 1 :]]
