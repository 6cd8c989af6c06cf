"""What an error of S does to P, to L and to O.

x [..., n_q, n_k] is the error of S, 0 where masked; P the exact softmax, 0 where masked; hats mark
what is computed from S + x. Only differences within a row count: a constant added to a row of x
changes L and nothing else. So bounds take the spread of a row, its largest x less its smallest,
which is at most twice the largest |x|. Everything is float64. Source: ours, unless said otherwise.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor

from theory.rounding import Moments

NODES: Final = 40
"""Points of the Gauss-Hermite quadrature: errors below 1e-4 up to a deviation of 4."""


def lse_bound(off: Tensor) -> Tensor:
    """|error of L|, at most, where |x| <= off [..., n_q, n_k]: the row's largest; [..., n_q].

    L^ - L = log sum_j P_j exp(x_j), the log of a mean of exponentials, which lies between those of
    the smallest and the largest. Attained by a constant x.
    """
    return off.amax(-1)


def p_bound(p: Tensor, off: Tensor) -> Tensor:
    """|error of P_ij|, at most, where |x| <= off; shaped as p.

    P^_j = P_j exp(x_j) / sum_l P_l exp(x_l) grows with x_j and falls with every other x_l. So it is
    largest where x_j is off_j and the others are -off_l: with R = sum over l != j of
    P_l exp(-off_l) it exceeds P_j by P_j (exp(off_j) (1 - P_j) - R) / (P_j exp(off_j) + R). The
    least P^_j is the same with the signs of off turned. Both are attained. The bound is at most
    P_j (exp(2 max off) - 1) and at most 1; it is 1 in rows with an off above 300.
    """
    bound = torch.maximum(_moved(p, off, 1.0), _moved(p, off, -1.0))
    return torch.where((off > 300).any(-1, keepdim=True), 1.0, bound)


def _moved(p: Tensor, off: Tensor, sign: float) -> Tensor:
    """|P^_j - P_j| where x_j is sign * off_j and every other x_l is -sign * off_l."""
    own, rest = torch.exp(sign * off), _others(p * torch.exp(-sign * off))
    # What it grows by, in terms of one sign that keep their digits where off is small.
    grown = torch.expm1(sign * off) * _others(p) - _others(p * torch.expm1(-sign * off))
    return p * grown.abs() / (p * own + rest).clamp(min=torch.finfo(p.dtype).tiny)


def _others(x: Tensor) -> Tensor:
    """For each element of a row the sum of the others, without taking it from that of all."""
    before = torch.nn.functional.pad(x, (1, 0)).cumsum(-1)[..., :-1]
    after = torch.nn.functional.pad(x.flip(-1), (1, 0)).cumsum(-1)[..., :-1]
    return before + after.flip(-1)


def p_first_order(p: Tensor, x: Tensor) -> Tensor:
    """The error of P to first order: P o (x - P.x), with P.x the row's mean under P."""
    return p * (x - (p * x).sum(-1, keepdim=True))


def p_remainder_bound(p: Tensor, spread: Tensor) -> Tensor:
    """|error of P - `p_first_order`|, at most, for rows of x of this spread [..., n_q].

    Along P(t) of S + t x the second derivative is P_j(t) [(x_j - P(t).x)^2 - Var_P(t)(x)]. The
    bracket is at most spread^2 and P_j(t) at most P_j exp(t spread), so that the remainder is at
    most the integral of (1 - t) spread^2 exp(t spread), exp(spread) - 1 - spread, times P_j. That
    is attained by a vanishing P_j with x_j above all others: softmax is then the exponential.
    """
    factor = (torch.expm1(spread) - spread)[..., None]
    return torch.where(p > 0, p * factor, 0.0)  # 0 * inf where masked


def variation_bound(spread: Tensor) -> Tensor:
    """Half of sum_j |error of P_ij|, at most, for a row of x of this spread: tanh(spread / 4).

    Half of the sum is the largest error of any sum of elements. Keys of probability a together have
    odds a / (1 - a), which x changes by a factor of at most exp(spread). The logarithm of odds goes
    from -spread / 2 to spread / 2 in the worst case, and probability by 2 / (1 + exp(-spread / 2))
    - 1. Attained by two keys of those odds. For |x| <= e the spread is 2e: sum_j |error| is at most
    2 tanh(e / 2), whatever the number of keys, and 2 at most.
    """
    return torch.tanh(spread / 4)


def value_range(v: Tensor, *, is_causal: bool = False) -> Tensor:
    """The largest less the smallest value of each channel that a query sees; [..., n or 1, d]."""
    if is_causal:
        return v.cummax(-2).values - v.cummin(-2).values
    return v.amax(-2, keepdim=True) - v.amin(-2, keepdim=True)


def o_bound(v_range: Tensor, variation: Tensor) -> Tensor:
    """|error of O_ic|, at most, from that of P: `value_range` times half of sum_j |error of P_ij|.

    The errors of a row of P sum to 0, so that a constant may be subtracted from a channel of V. The
    part of P that moves, `variation` [..., n_q], moves from one value to another, and no two are
    further apart than the range. Attained where it moves from the smallest to the largest.
    """
    return v_range * variation[..., None]


def lse_moments(p: Tensor, u: Tensor) -> Moments:
    """The error of L for independent x of mean 0 and variance u [..., n_q, n_k]; [..., n_q].

    To second order L^ - L = P.x + Var_P(x) / 2. The mean of the second is half of
    sum_j P_j (1 - P_j) u_j: noise in S makes L too large. The variance is that of the first.
    Errors that the keys of a row share, as those from rounding its query, go into L undiminished.
    """
    return Moments(mean=(p * (1 - p) * u).sum(-1) / 2, variance=(p.square() * u).sum(-1))


def p_variance(p: Tensor, u: Tensor) -> Tensor:
    """The variance of the error of P for independent x of variance u, to first order.

    P_j (x_j - P.x) is P_j times (1 - P_j) x_j - sum over l != j of P_l x_l:
    P_j^2 [u_j (1 - 2 P_j) + sum_l P_l^2 u_l]. It is short where u is no longer small: see
    `p_lognormal_moments`.
    """
    weighted = (p.square() * u).sum(-1, keepdim=True)
    return p.square() * (u * (1 - 2 * p) + weighted).clamp(min=0.0)


def p_lognormal_moments(p: Tensor, u: Tensor) -> Moments:
    """The error of P for independent Gaussian x of variance u of any size.

    exp(x_j) is log-normal, and the sum of the others nearly so: one of the same mean and variance
    is taken for it. Then the log of the odds of P^_j is Gaussian, with

        mean      log(P_j / M) + t^2 / 2,   M = sum_l P_l exp(u_l / 2),
        variance  u_j + t^2,                t^2 = log(1 + sum_l P_l^2 e^u_l (e^u_l - 1) / M^2)

    over l != j, and the moments of P^ follow by quadrature. Among many keys that is
    P^_j = P_j exp(x_j - u / 2) of relative variance exp(u) - 1: the exponential growth that
    `p_variance` does not see. Near a P of 1 there is no room to grow, and it does not. Beyond a
    u of about 1/2 it says too much of an S rounded in INT8: an error that is a sum of bounded ones
    has no tail that an exponential could make so much of.

    Args: u below 300.

    Source: for the sum, Fenton, IRE Trans. Communications Systems 8(1), 1960.
    """
    first = p * torch.exp(u / 2)
    second = p.square() * torch.exp(u) * torch.expm1(u)
    rest, rest_square = (_others(x) for x in (first, second))
    tiny = torch.finfo(p.dtype).tiny
    t_square = torch.log1p(rest_square / rest.square().clamp(min=tiny))
    mean = p.clamp(min=tiny).log() - rest.clamp(min=tiny).log() + t_square / 2
    deviation = (u + t_square).sqrt()
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    first, second = torch.zeros_like(p), torch.zeros_like(p)
    for node, weight in zip(nodes.tolist(), weights.tolist(), strict=True):
        error = torch.sigmoid(mean + node * deviation) - p
        first += weight / math.sqrt(2 * math.pi) * error
        second += weight / math.sqrt(2 * math.pi) * error.square()
    alone = (rest == 0) | (p == 0)  # nothing to move to or from
    first, second = (x.masked_fill(alone, 0.0) for x in (first, second))
    return Moments(first, second - first.square())


def o_variance(p: Tensor, v: Tensor, u: Tensor) -> Tensor:
    """The variance of the error of O for independent x of variance u; [..., n_q, d].

    To first order O's error is sum_j P_j x_j (v_j - O): of variance sum_j P_j^2 u_j (v_j - O)^2.
    """
    weight, o = p.square() * u, p @ v
    total = weight.sum(-1, keepdim=True)
    return (weight @ v.square() - 2 * o * (weight @ v) + total * o.square()).clamp(min=0.0)
