"""Upper bounds on the size of a row of dS, from a few statistics of its P and dP.

A row of dS is P_i o c_i with c_i = dP_i - delta_i and delta_i = P_i . dP_i, so P_i . c_i = 0. Its
sum of squares is a mean under the weights P_i,

    |dS_i|^2 = sum_j P_ij (P_ij c_ij^2) = E_P[P c^2],

and each bound factors this mean differently. RMS(dS_i) is |dS_i| / sqrt(n_k).

In every function p is [..., n_q, n_k] with rows that sum to 1, and c is the centred dP of `centred`
in the same shape. Results are [..., n_q], in the units of dP. Computed in float64. A key with P = 0
does not contribute: its dS is 0 for any dP.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

_BISECTIONS: Final = 60
"""Steps of the bisection; the mantissa of a float64 has 53 bits."""


def centred(p: Tensor, dp: Tensor) -> Tensor:
    """c = dP - delta with delta = rowsum(P o dP); 0 where P is 0."""
    p, dp = p.double(), dp.double()
    return (dp - (p * dp).sum(-1, keepdim=True)).masked_fill(p == 0, 0.0)


def ds_rms(p: Tensor, c: Tensor) -> Tensor:
    """RMS(dS_i) = RMS(P_i o c_i), the quantity that the bounds bound; c need not be centred."""
    return _rms(p.double() * c.double())


def paper_bound(p: Tensor, c: Tensor) -> Tensor:
    """RMS(dS_i) <= RMS(P_i) max_j |c_ij|, for any c, centred or not.

    The largest |c| is factored out of the sum. The bound is too large by exactly the row's crest
    factor: max|c| over the root mean square of c under the weights P^2.

    Source: arXiv 2603.02170, appendix.
    """
    return _rms(p.double()) * _largest(c)


def paper_flat_bound(p: Tensor, c: Tensor) -> Tensor:
    """RMS(dS_i) <= n_k^-1/2 max_j |c_ij|: `paper_bound` with sum P^2 <= 1.

    It exceeds `paper_bound` by the factor 1 / |P_i|, the root of the number of keys that the row
    attends to.

    Source: arXiv 2603.02170, appendix.
    """
    return _largest(c) / math.sqrt(p.shape[-1])


def holder_bound(p: Tensor, c: Tensor, theta: float) -> Tensor:
    """RMS(dS_i) bounded by Hoelder's inequality for E_P[P c^2], for theta in [0, 1] and any c.

        |dS_i|^2 <= E_P[P^(1/theta)]^theta E_P[|c|^(2/(1-theta))]^(1-theta)

    theta 1 is `paper_bound`: the mean of P times the largest c^2. theta 0 is the largest P times
    the mean of c^2. The logarithm of the bound is convex in theta (Lyapunov), so for theta in
    between it is at most the weighted geometric mean of the two ends.

    Raises:
        ValueError: if theta is outside [0, 1].
    """
    if not 0 <= theta <= 1:
        raise ValueError(f"theta={theta} is outside [0, 1]")
    p, c = p.double(), c.double()
    # Divided by the row's maximum, powers of P and c cannot overflow.
    p_top, c_top = _largest(p), _largest(c)
    p_unit, c_unit = p / _divisor(p_top)[..., None], c.abs() / _divisor(c_top)[..., None]
    left = (p * p_unit ** (1 / theta)).sum(-1) ** theta if theta else 1.0
    right = (p * c_unit ** (2 / (1 - theta))).sum(-1) ** (1 - theta) if theta < 1 else 1.0
    return (p_top * left * right / p.shape[-1]).sqrt() * c_top


def capped_bound(p: Tensor, c: Tensor) -> Tensor:
    """RMS(dS_i) bounded sharply for given P, E_P[c^2] and M = max|c|, for any c.

    With w_j = P_j c_j^2 the sum of squares is sum P_j w_j. The w_j sum to V = E_P[c^2] and none
    exceeds P_j M^2. The largest such sum raises the w_j to their limits in the order of falling P
    until V is used up (a fractional knapsack). Without the constraint on the sum it is
    `paper_bound`; without the limits it is `holder_bound` at theta 0. So it never exceeds either.
    """
    p, c = p.double(), c.double()
    falling = p.sort(-1, descending=True).values
    top = _largest(c)
    # In units of M^2: squares neither overflow nor underflow.
    budget = (p * (c / _divisor(top)[..., None]).square()).sum(-1, keepdim=True)
    spent = torch.nn.functional.pad(falling.cumsum(-1)[..., :-1], (1, 0))
    filled = torch.minimum(falling, (budget - spent).clamp(min=0.0))
    return ((falling * filled).sum(-1) / p.shape[-1]).sqrt() * top


def jacobian_norm(p: Tensor) -> Tensor:
    """The largest eigenvalue of the softmax's Jacobian J = diag(P_i) - P_i P_i^T, [..., n_q].

    An eigenvector is x_j ~ P_j / (P_j - lambda), and the eigenvalue solves sum_j P_j / (P_j -
    lambda) = 0. Between the second largest P and the largest, the left side rises from -inf to inf,
    and its only root there is the largest eigenvalue. It is found by bisection; the upper end of
    the last interval is returned.
    """
    p = p.double()
    high, low = jacobian_norm_bound(p), _peak(p)[1]
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        gap = p - middle[..., None]
        above = (p / gap.where(gap != 0, math.inf)).sum(-1) > 0
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return high


def jacobian_norm_bound(p: Tensor) -> Tensor:
    """lambda_max(J_i) <= p1 (1 - p1 + p2), with p1 >= p2 the two largest P of the row; at most 1/2.

    A constant added to x does not change J x, so let P.x = 0 and u = sqrt(P) o x. Then J x = P o x,
    and |J x|^2 / (x^T J x) is the mean of P under the weights u^2. As u is orthogonal to sqrt(P),
    the largest P has at most the share 1 - p1 of |u|^2 (Cauchy-Schwarz). The others average at most
    p2. Together that is at most p1 (1 - p1) + p2 p1.

    It is an equality for uniform rows, one-hot rows and rows of two keys.
    """
    first, second, rest = _peak(p.double())
    return first * (rest + second)


def jacobian_bound(p: Tensor, c: Tensor) -> Tensor:
    """RMS(dS_i) <= sqrt(lambda_max(J_i) Var_P(dP_i) / n_k), for centred c.

    dS_i = J_i dP_i and Var_P(dP_i) = dP_i^T J_i dP_i, so |dS_i|^2 <= lambda_max(J_i) Var. It is
    sharp for given P and variance: a dP_i along the eigenvector attains it. It is exact for uniform
    P, and goes to 0 as a row becomes one-hot, as dS does. `paper_bound` does neither.

    It is not always below `paper_bound`: for two keys with P = 1/4 among very many keys and
    constant |c| it is larger by sqrt(2).
    """
    p, c = p.double(), c.double()
    top = _largest(c)
    variance = (p * (c / _divisor(top)[..., None]).square()).sum(-1)
    return (jacobian_norm(p) * variance / p.shape[-1]).sqrt() * top


def ds_bound(p: Tensor, dp: Tensor) -> Tensor:
    """The smallest of three bounds on RMS(dS_i), [..., n_q].

    They are `capped_bound`, `holder_bound` at theta 1/2 and `jacobian_bound`. The smallest never
    exceeds `paper_bound`, because `capped_bound` never does.

    Args:
        dp: dP itself; the function centres it.
    """
    c = centred(p, dp)
    smallest = torch.minimum(capped_bound(p, c), holder_bound(p, c, 0.5))
    return torch.minimum(smallest, jacobian_bound(p, c))


def value_bound(p: Tensor, v: Tensor, do: Tensor) -> Tensor:
    """A bound on RMS(dS_i) from P, V and dO, without dP.

    RMS(dS_i) <= |dO_i| sqrt(lambda_max(J_i) lambda_max(Cov_{P_i}(V)) / n_k). dP_ij = dO_i . V_j, so
    its variance over the row is dO_i^T Cov_{P_i}(V) dO_i. A constant added to all values of a row
    does not change it.

    Args:
        v: [..., n_k, d_v].
        do: [..., n_q, d_v]; v and do have as many heads as p.
    """
    p, v, do = p.double(), v.double(), do.double()
    rows: list[Tensor] = []
    for p_row, o_row in zip(p.unbind(-2), (p @ v).unbind(-2), strict=True):
        x = p_row.sqrt()[..., None] * (v - o_row[..., None, :])  # centred first: no cancellation
        rows.append(torch.linalg.eigvalsh(x.mT @ x)[..., -1])
    spread = torch.stack(rows, -1).clamp(min=0.0)
    return do.norm(dim=-1) * (jacobian_norm(p) * spread / p.shape[-1]).sqrt()


def expected_ds_rms(p: Tensor, dp_std: Tensor) -> Tensor:
    """The root of E[RMS(dS_i)^2] for independent dP: dp_std |J_i|_F / sqrt(n_k).

    Assumes that the dP of a row are independent and have equal means and the deviation dp_std.
    |J|_F^2 = sum_j P_j^2 (1 - P_j)^2 + sum_{j != l} P_j^2 P_l^2. A key with P near 1 contributes
    little, because delta follows its dP.

    Args:
        dp_std: [..., n_q].
    """
    falling = p.double().sort(-1, descending=True).values
    squares = falling.square()
    # 1 - P_j is summed from the other P: at a peak the difference would lose its digits.
    missing = torch.cat([falling[..., 1:].sum(-1, keepdim=True), 1 - falling[..., 1:]], -1)
    smaller = squares[..., 1:].flip(-1).cumsum(-1).flip(-1)
    own = (squares * missing.square()).sum(-1)
    pairs = 2 * (squares[..., :-1] * smaller).sum(-1)
    return dp_std * ((own + pairs) / p.shape[-1]).sqrt()


def gaussian_crest(keys: int) -> float:
    """The median of max_j |c_j| over `keys` independent standard normal c_j.

    It is about sqrt(2 log keys). `paper_bound` is too large by this factor if P is uniform and dP
    Gaussian.
    """
    return math.sqrt(2) * float(torch.erfinv(torch.tensor(0.5 ** (1 / keys), dtype=torch.float64)))


def _rms(x: Tensor) -> Tensor:
    top = _largest(x)
    return (x / _divisor(top)[..., None]).square().mean(-1).sqrt() * top


def _largest(x: Tensor) -> Tensor:
    return x.double().abs().amax(-1)


def _divisor(top: Tensor) -> Tensor:
    return top.where(top > 0, 1.0)


def _peak(p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest P of each row, the second largest, and the sum of all but the largest.

    The sum is not computed as 1 - P, which loses its digits if a row is nearly one-hot.
    """
    falling = p.sort(-1, descending=True).values
    rest = falling[..., 1:]
    second = rest[..., 0] if rest.shape[-1] else torch.zeros_like(falling[..., 0])
    return falling[..., 0], second, rest.sum(-1)
