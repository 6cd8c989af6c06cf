"""How an error of the logits S propagates to P, to the logsumexp L and to O.

x [..., n_q, n_k] is the error of S and P is the exact softmax, both 0 where masked. P^, L^ and O^
are computed from S + x. A constant added to a row of x changes L only, so bounds on P and O use
the spread of a row: its largest x less its smallest, at most twice the largest |x|. Computed in
float64. Source: ours, unless stated otherwise.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor

from theory.rounding import Moments

NODES: Final = 64
"""Points of the Gauss-Hermite quadrature.

Its absolute error, of the mean and of the mean square of an error of P, is below 1e-4 for log odds
of a deviation of up to 4. A test compares it with an adaptive quadrature.
"""


def lse_bound(off: Tensor) -> Tensor:
    """An upper bound on |error of L|, [..., n_q], where |x| <= off: the row's largest off.

    L^ - L = log sum_j P_j exp(x_j) is the log of a mean of exponentials, which lies between the
    smallest and the largest x_j. A constant x attains it.

    Args:
        off: [..., n_q, n_k].
    """
    return off.amax(-1)


def p_bound(p: Tensor, off: Tensor) -> Tensor:
    """An upper bound on |error of P_ij|, in the shape of p, where |x| <= off.

    P^_j = P_j exp(x_j) / sum_l P_l exp(x_l) grows with x_j and falls with every other x_l. It is
    largest where x_j = off_j and every other x_l = -off_l. With R = sum over l != j of
    P_l exp(-off_l), it then exceeds P_j by P_j (exp(off_j) (1 - P_j) - R) / (P_j exp(off_j) + R).
    With all signs of off reversed, the same expression gives the smallest P^_j. Both are attained.

    The bound is at most P_j (exp(2 max off) - 1) and at most 1. It is 1 in a row with an off above
    300, where exp would overflow.
    """
    bound = torch.maximum(_moved(p, off, 1.0), _moved(p, off, -1.0))
    return torch.where((off > 300).any(-1, keepdim=True), 1.0, bound)


def _moved(p: Tensor, off: Tensor, sign: float) -> Tensor:
    """|P^_j - P_j| where x_j is sign * off_j and every other x_l is -sign * off_l."""
    own, rest = torch.exp(sign * off), _others(p * torch.exp(-sign * off))
    # The change as two terms of the same sign: nothing cancels where off is small.
    grown = torch.expm1(sign * off) * _others(p) - _others(p * torch.expm1(-sign * off))
    return p * grown.abs() / (p * own + rest).clamp(min=torch.finfo(p.dtype).tiny)


def _others(x: Tensor) -> Tensor:
    """For each element, the sum of the others in its row, computed without subtraction."""
    before = torch.nn.functional.pad(x, (1, 0)).cumsum(-1)[..., :-1]
    after = torch.nn.functional.pad(x.flip(-1), (1, 0)).cumsum(-1)[..., :-1]
    return before + after.flip(-1)


def exponential_error(log_p: Tensor, off: Tensor) -> Tensor:
    """An upper bound on |P exp(x) - P| where |x| <= off: P (exp(off) - 1), elementwise.

    It is computed as exp(log P + off) (1 - exp(-off)). So it is neither NaN where P underflows and
    exp(off) overflows, nor infinite unless it exceeds the numbers of float64.

    Args:
        log_p: log P; -inf where P is 0.
        off: at least 0; inf gives inf, also where P is 0.
    """
    grown = torch.exp(log_p + off) * -torch.expm1(-off)
    return grown.masked_fill(off.isinf(), math.inf)


def p_first_order(p: Tensor, x: Tensor) -> Tensor:
    """The error of P to first order: P o (x - P.x), where P.x is the row's mean of x under P."""
    return p * (x - (p * x).sum(-1, keepdim=True))


def p_remainder_bound(p: Tensor, spread: Tensor) -> Tensor:
    """An upper bound on |error of P - `p_first_order`|, for rows of x of this spread [..., n_q].

    With P(t) the softmax of S + t x, the second derivative of P_j(t) is P_j(t) [(x_j - P(t).x)^2 -
    Var_P(t)(x)]. The bracket is at most spread^2, and P_j(t) is at most P_j exp(t spread). So the
    remainder is at most P_j times the integral of (1 - t) spread^2 exp(t spread), which is P_j
    (exp(spread) - 1 - spread). A vanishing P_j whose x_j is above all others attains it: there the
    softmax is the exponential.
    """
    factor = (torch.expm1(spread) - spread)[..., None]
    return torch.where(p > 0, p * factor, 0.0)  # 0 * inf where masked


def variation_bound(spread: Tensor) -> Tensor:
    """An upper bound on half of sum_j |error of P_ij| for x of this spread: tanh(spread / 4).

    Half of that sum is the largest error of the total probability of any set of keys. A set of
    probability a has the odds a / (1 - a), which x changes by a factor of at most exp(spread). The
    worst case moves the log of the odds from -spread / 2 to spread / 2, and the probability by 2 /
    (1 + exp(-spread / 2)) - 1 = tanh(spread / 4). Two keys of these odds attain it.

    For |x| <= e the spread is at most 2e, so sum_j |error of P_ij| <= 2 tanh(e / 2) < 2 for any
    number of keys.
    """
    return torch.tanh(spread / 4)


def value_range(v: Tensor, *, is_causal: bool = False) -> Tensor:
    """The largest less the smallest value of each channel, over the keys that a query attends to.

    Args:
        v: [..., n_k, d_v].
        is_causal: whether query i attends to keys 0 to i only.

    Returns: [..., n_k, d_v] if is_causal, else [..., 1, d_v].
    """
    if is_causal:
        return v.cummax(-2).values - v.cummin(-2).values
    return v.amax(-2, keepdim=True) - v.amin(-2, keepdim=True)


def o_bound(v_range: Tensor, variation: Tensor) -> Tensor:
    """An upper bound on |error of O_ic|, [..., n_q, d_v]: v_range_ic * variation_i.

    The errors of a row of P sum to 0: they move a probability of `variation` from some keys to
    others. Each part moves between two values of channel c, which differ by at most v_range. A move
    from the smallest to the largest value attains the bound.

    Args:
        v_range: `value_range` of V.
        variation: half of sum_j |error of P_ij|, [..., n_q], or a bound on it (`variation_bound`).
    """
    return v_range * variation[..., None]


def lse_moments(p: Tensor, u: Tensor) -> Moments:
    """The moments of the error of L, [..., n_q], for independent x of mean 0 and variance u.

    To second order L^ - L = P.x + Var_P(x) / 2. The mean comes from the second term, sum_j P_j (1 -
    P_j) u_j / 2: noise in S makes L too large. The variance comes from the first term, sum_j P_j^2
    u_j.

    The variance is too small if the keys of a row share an error, as after rounding the row's
    query: a shared error changes L without averaging.

    Args:
        u: [..., n_q, n_k], 0 where masked.
    """
    return Moments(mean=(p * (1 - p) * u).sum(-1) / 2, variance=(p.square() * u).sum(-1))


def p_variance(p: Tensor, u: Tensor) -> Tensor:
    """The variance of the error of P for independent x of variance u, to first order.

    The error P_j (x_j - P.x) is P_j times (1 - P_j) x_j - sum over l != j of P_l x_l. Its variance
    is P_j^2 [u_j (1 - 2 P_j) + sum_l P_l^2 u_l]. It is too small if u is not small against 1; use
    `p_lognormal_moments` there.
    """
    weighted = (p.square() * u).sum(-1, keepdim=True)
    return p.square() * (u * (1 - 2 * p) + weighted).clamp(min=0.0)


def p_lognormal_moments(p: Tensor, u: Tensor) -> Moments:
    """The moments of the error of P for independent Gaussian x of any variance u.

    exp(x_j) is log-normal. The sum of the other keys' exponentials is approximated by a log-normal
    number of the same mean and variance. The log of the odds of P^_j is then Gaussian, with

        mean      log(P_j / M) + t^2 / 2,   M = sum_l P_l exp(u_l / 2),
        variance  u_j + t^2,                t^2 = log(1 + sum_l P_l^2 e^u_l (e^u_l - 1) / M^2)

    where sums are over l != j. The moments of P^ follow by quadrature. Among many keys P^_j is
    P_j exp(x_j - u / 2), of relative variance exp(u) - 1: this exponential growth is missing from
    `p_variance`. Near P_j = 1 the error saturates, because P^_j cannot exceed 1.

    For S rounded in INT8 and u above about 1/2 the estimate is too large: the error of S is a sum
    of bounded errors, and lacks the Gaussian tail that the exponential amplifies.

    Args:
        u: below 300; 0 where masked.

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
    alone = (rest == 0) | (p == 0)  # the only key of its row, or masked: P cannot change
    first, second = (x.masked_fill(alone, 0.0) for x in (first, second))
    return Moments(first, second - first.square())


def o_variance(p: Tensor, v: Tensor, u: Tensor) -> Tensor:
    """The variance of the error of O, [..., n_q, d_v], for independent x of variance u.

    To first order the error of O is sum_j P_j x_j (v_j - O), of variance sum_j P_j^2 u_j (v_j -
    O)^2.
    """
    weight, o = p.square() * u, p @ v
    total = weight.sum(-1, keepdim=True)
    return (weight @ v.square() - 2 * o * (weight @ v) + total * o.square()).clamp(min=0.0)
