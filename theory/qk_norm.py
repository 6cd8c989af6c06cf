"""Bounds from QK-norm on queries, keys and logits, and how errors grow with the logits.

QK-norm divides each token by its RMS and multiplies it by a vector gamma. gamma alone therefore
bounds every number that INT8 has to represent.

The bounds are for normalised tokens before they are rounded to a dtype. `QKNorm` returns the dtype
of its input. With the unit roundoff u of that dtype, a channel, a step and an L1 norm are at most 1
+ u times their bounds, and logits and their errors (1 + u)^2 times. u is 2^-8 for bfloat16. This
takes channels that are normal numbers of the dtype.

The second half of the module is for Gaussian tokens. With q and k of deviations sigma_q and
sigma_k, the logits of a row are Gaussian of deviation tau = scale * sqrt(d) * sigma_q * sigma_k,
which is sigma_q * sigma_k for the usual scale. The rows of P are then those of the random energy
model, whose moments are known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import integrate, special
from torch import Tensor

from theory.smoothing import HALF

_Array = NDArray[np.float64]


def normalised_norm(mean_square: Tensor, d: int, eps: float) -> Tensor:
    """The L2 norm of x / sqrt(mean(x^2) + eps), for tokens of d channels: sqrt(d m / (m + eps)).

    It is always below sqrt(d), and approaches it for m >> eps.

    Args:
        mean_square: m, the mean of x^2 over the channels of each token; any shape.

    Returns: the shape of mean_square.
    """
    return (d * mean_square / (mean_square + eps)).sqrt()


def channel_bound(gamma: Tensor) -> Tensor:
    """An upper bound on |x_c| of any normalised token times gamma: sqrt(d) |gamma_c|; [d].

    It is for the token before it is rounded to a dtype, as are all bounds of this module.

    The square of one channel is at most the sum over all channels, d. A token with a single nonzero
    channel attains it.
    """
    return math.sqrt(gamma.shape[-1]) * gamma.abs()


def step_bound(gamma: Tensor) -> float:
    """An upper bound on the step of an INT8 region of any shape: sqrt(d) max|gamma| / 127."""
    return float(channel_bound(gamma).max()) / 127


def logit_bound(gamma_q: Tensor, gamma_k: Tensor, *, scale: float | None = None) -> float:
    """An upper bound on |S_ij|: scale * d * max_c |gamma_q_c gamma_k_c|.

    S_ij / scale = sum_c gamma_q_c gamma_k_c x_c y_c for normalised tokens x and y. With the largest
    product of gammas taken out, |x| |y| <= d remains by Cauchy-Schwarz. It is attained if x and y
    both consist of the channel with the largest product. It never exceeds scale * d * max|gamma_q|
    max|gamma_k|.

    Args:
        scale: the softmax scale; 1/sqrt(d) by default.

    Source: ours.
    """
    d = gamma_q.shape[-1]
    scale = 1 / math.sqrt(d) if scale is None else scale
    return abs(scale) * d * float((gamma_q * gamma_k).abs().max())


def weight_bounds(logit_bound: float, tokens: int) -> tuple[float, float]:
    """Lower and upper bounds on P_ij in a row of `tokens` keys with |S_ij| <= logit_bound.

    P is largest if its own logit is at the bound and all others are at minus the bound: 1 / (1 + (n
    - 1) exp(-2 bound)). The signs are reversed for the smallest.

    Raises:
        ValueError: if tokens is not positive.

    Source: ours.
    """
    if tokens < 1:
        raise ValueError(f"tokens={tokens} is not a positive number")
    others, swing = tokens - 1, math.exp(-2 * logit_bound)
    return swing / (swing + others) if others else 1.0, 1 / (1 + others * swing)


def logit_error_bound(gamma_q: Tensor, gamma_k: Tensor, *, scale: float | None = None) -> float:
    """An upper bound on |error of S_ij| from rounding q and k to INT8, for any granularity.

    With half a step h = step_bound / 2 for each operand, the error is at most scale * (|q|_1 h_k +
    |k|_1 h_q + d h_q h_k), where |q|_1 = sum_c |gamma_c x_c| <= |gamma|_2 sqrt(d). It is for keys
    that are not smoothed; smoothing at most doubles |k| and its step.

    Args:
        scale: the softmax scale; 1/sqrt(d) by default.

    Source: ours.
    """
    d = gamma_q.shape[-1]
    scale = 1 / math.sqrt(d) if scale is None else scale
    h_q, h_k = HALF * step_bound(gamma_q), HALF * step_bound(gamma_k)
    sum_q, sum_k = (math.sqrt(d) * float(g.norm()) for g in (gamma_q, gamma_k))
    return abs(scale) * (sum_q * h_k + sum_k * h_q + d * h_q * h_k)


def expected_amax(count: int) -> float:
    """The mean of the largest magnitude of `count` independent standard normal numbers.

    It is the integral over t of P(largest > t) = 1 - (2 Phi(t) - 1)^count.

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
    """The expected squared error of S for Gaussian q and k rounded to INT8.

    A region of n elements has a step of about sigma * expected_amax(n) / 127, and errors uniform
    over the step. The mean square is scale^2 d sigma_q^2 sigma_k^2 (a + b + a b), where a and b are
    (expected_amax / 127)^2 / 12 of the regions of q and k. So it is a fixed fraction of tau^2,
    which depends on the sizes of the regions only, and the error of S grows as sigma_q * sigma_k.

    Args:
        region_q: the number of elements of Q that share a scale.
        region_k: the same of K.
        scale: the softmax scale; 1/sqrt(d) by default.

    Source: ours.
    """
    scale = 1 / math.sqrt(d) if scale is None else scale
    a, b = ((expected_amax(region) / 127) ** 2 / 12 for region in (region_q, region_k))
    return scale**2 * d * sigma_q**2 * sigma_k**2 * (a + b + a * b)


class PowerSums:
    """Expected products of the power sums A_a = sum_j P_j^a of a softmax of Gaussian logits.

    P_j = exp(S_j) / Z for `tokens` independent Gaussian logits of deviation tau. 1 / Z^n is the
    integral over t of t^(n-1) exp(-t Z) / Gamma(n), under which the logits separate:

        E sum over distinct j_1..j_k of prod P_(j_i)^(a_i)
            = N! / (N - k)! / Gamma(n) * integral of prod phi_(a_i) phi_0^(N - k) dlog t

    with n = sum of a and phi_a(t) = E[(t exp S)^a exp(-t exp S)]. It is exact for any N, up to the
    error of the quadrature.

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

        A product of sums is expanded by which of their indices are equal: a sum over all
        partitions of the exponents.
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
        reach = 9 * self.tau  # a logit is beyond it with a probability of 1e-19
        return np.arange(-reach - 40, reach + 10, self._step)

    @property
    def _step(self) -> float:
        """The step of the integral over log t; every phi is smooth on the scales 1 and tau."""
        return 0.125 * max(1.0, self.tau / 16)

    @cached_property
    def _nodes(self) -> tuple[_Array, _Array, _Array]:
        """Gauss-Legendre nodes and weights of the integral over x = log(t exp S), per log t.

        The third tensor is (x - log t) / tau, the standardised logit. Every phi vanishes outside
        of x in [-40, 4], and the density of the logits beyond 9 tau.
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
        """log E exp(-t exp S), integrated by parts: 1 - E exp(-t exp S) keeps its digits."""
        x, weight, z = self._nodes
        window = (np.exp(x - np.exp(x)) * special.ndtr(-z) * weight).sum(1)
        below = -np.expm1(-np.exp(np.clip(self._log_t - 9 * self.tau, -40, 4)))
        return np.log1p(-np.minimum(window + below, 1 - 1e-16))


_GAUSS: Final = np.polynomial.legendre.leggauss(192)


def softmax_error(mean_square: float, sums: PowerSums) -> float:
    """The relative L2 error of P, O and dV from independent errors of S of this mean square.

    To first order dP_j = P_j (e_j - sum_l P_l e_l) for independent e. Its expected square, summed
    over the row, is mean_square * (A_2 - 2 A_3 + A_2^2); that of P is A_2. O = P V and dV = P^T dO
    have the same relative error if V and dO are independent of P and white.

    Source: ours.
    """
    return math.sqrt(mean_square * _spread(sums) / sums.expectation(2))


def score_gradient_error(mean_square: float, sums: PowerSums) -> float:
    """The relative L2 error of dS, dQ and dK from independent errors of S of this mean square.

    dS = P o (g - P.g) with a white g = dP. To first order its error is P_j (x_j y_j - sum_l P_l x_l
    y_l), where x and y are the errors of S and g, each less its mean under P. Their covariances are
    delta_jl - P_j - P_l + A_2. The expected squared error of a row is mean_square * (A_2 + 3 A_2^2
    + 4 A_2^3 - 12 A_2 A_3 - 6 A_3 + 10 A_4); the expected square of dS is A_2 - 2 A_3 + A_2^2. The
    error is 0 for a row of one key, whose dS is 0.

    Source: ours.
    """
    if sums.tokens == 1:
        return 0.0
    e = sums.expectation
    square = e(2) + 3 * e(2, 2) + 4 * e(2, 2, 2) - 12 * e(2, 3) - 6 * e(3) + 10 * e(4)
    return math.sqrt(mean_square * square / _spread(sums))


def frozen_softmax_error(mean_square: float, tau: float, tokens: int) -> float:
    """The limit of `softmax_error` for large logits: tau > sqrt(2 log N).

    There few keys share a row, and P follows the Poisson-Dirichlet law of index m = sqrt(2 log N) /
    tau, for which (A_2 - 2 A_3 + A_2^2) / A_2 is m / 3. sqrt(mean_square) grows with tau, so the
    error grows with sqrt(tau), which is proportional to sigma.

    Raises:
        ValueError: if tau is not above sqrt(2 log tokens).

    Source: ours, from Pitman and Yor, Ann. Probab. 25(2), 1997, for the moments.
    """
    index = math.sqrt(2 * math.log(tokens)) / tau
    if not index < 1:
        raise ValueError(f"tau={tau} is not above sqrt(2 log {tokens})")
    return math.sqrt(mean_square * index / 3)


def frozen_score_gradient_error(mean_square: float) -> float:
    """The limit of `score_gradient_error` for tau > sqrt(2 log N): sqrt(2/5 * mean_square).

    Its numerator and denominator are both proportional to m (1 - m), with the factors 2/15 and 1/3,
    so m cancels. The error of dS grows with tau, which is proportional to sigma^2.

    Source: ours.
    """
    return math.sqrt(mean_square * 2 / 5)


def _spread(sums: PowerSums) -> float:
    """E[A_2 - 2 A_3 + A_2^2]; rounding in the quadrature cannot make it negative."""
    e = sums.expectation
    return max(0.0, e(2) - 2 * e(3) + e(2, 2))


def _partitions(items: tuple[int, ...]) -> Iterator[list[list[int]]]:
    """All partitions of `items` into groups."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for groups in _partitions(rest):
        yield [[first], *groups]
        for i in range(len(groups)):
            yield [*groups[:i], [first, *groups[i]], *groups[i + 1 :]]
