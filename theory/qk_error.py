"""The errors of O, dS, dQ, dK and dV that rounding Q and K causes through the logits S.

An error x of a row of logits changes P by P o (x - P.x), and dS with it. An error a of row i of Q
gives x_ij = a . K_j scale, where the whole row shares a. An error b_j of row j of K gives x_ij =
Q_i . b_j scale, where the whole column shares b_j. Both are propagated to first order in x. Where x
is not small, two factors reduce the variances, because P and dS saturate.

Maps are [..., n_q, n_k]. Computed in float64, but for the sums of `_outer_squares`. Source: ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from theory.ds_error import Cap, cap_of, ds_moments_from_qk
from theory.matmul import product_error_mean
from theory.rounding import Moments

_Array = NDArray[np.float64]


def qk_moments(
    p: Tensor,
    c: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    q_error: Moments,
    k_error: Moments,
    *,
    q_rounded: Tensor,
    scale: float,
    k_right: Tensor | None = None,
    cap: Cap | None = None,
) -> dict[str, Moments]:
    """The moments of the errors of o, ds, dq, dk and dv from rounding Q and K in QK.

    The forward's and the backward's QK must round Q and K alike.
    A row of O or dQ belongs to one query, whose error a and whose keys' errors b_j are all
    independent. Their variances are exact to first order; they use the covariances of K with V and
    of K with itself under P_i and dS_i.

    dK and dV are sums over queries. For the error b_j of a row's own key, which all queries share,
    the sum over queries is exact. The errors a_i of the queries and b_l of the other keys are taken
    as independent from query to query.

    Args:
        p, c, q, k: as in `theory.ds_error.ds_moments_from_qk`.
        v: [..., n_k, d_v].
        do: [..., n_q, d_v].
        q_error: the moments of the rounding error of q.
        k_error: the same of k.
        q_rounded: the tensor that is rounded, q less its block means if Q is smoothed, else q.
        scale: the softmax scale.
        k_right: the K that dQ multiplies dS by, if not k: with sinks and a smoothed K it is minus
            the mean of K at the sink, and with a softcap it is K before smoothing.
        cap: as in `theory.ds_error.ds_moments_from_qk`; the errors of logits are then those of the
            capped ones.

    Returns: moments by output: "o", "ds", "dq", "dk" and "dv".
    """
    p, c, q, k, v, do = (x.double() for x in (p, c, q, k, v, do))
    q_rounded = q_rounded.double()
    k_right = k if k_right is None else k_right.double()
    slope, bend = cap or cap_of(torch.zeros_like(p), None)
    # The weights of y, the errors of capped logits: of key j in dS_j, and of the others.
    own, ds = p * c * (slope + bend), p * c * slope
    capped_p, o, pull = p * slope, p @ v, ds @ k
    k_mean, right_mean, right_pull = capped_p @ k, capped_p @ k_right, ds @ k_right
    a, b = scale**2 * q_error.variance, scale**2 * k_error.variance
    u = slope.square() * (q_rounded.square() @ b.mT)  # the variance of y_ij from b_j
    pu = p.square() * u

    x = slope * scale * product_error_mean(q_rounded, k.mT, q_error.mean, k_error.mT.mean)
    p_mean = p * (x - _sum(p * x))
    spread = slope.square() * (a @ k.square().mT) - 2 * slope * ((a * k_mean) @ k.mT)
    spread = spread + _sum(a * k_mean.square())
    others = _sum(pu) - pu
    p_own = pu * (1 - p).square()
    p_rest = p.square() * (spread.clamp(min=0.0) + others)

    ds_moments = ds_moments_from_qk(p, c, q_rounded, k, q_error, k_error, scale, cap)
    of_own = own - 2 * p * ds  # the weight of y_ij in dS_ij
    ds_own = u * of_own.square()
    ds_rest = (ds_moments.variance - ds_own).clamp(min=0.0)

    # The error of O is a . Cov_P(K, V) from the query, and b_j times P_j (V_j - O) from key j.
    o_variance = _outer_squares(a, capped_p, k, v, (k_mean, o))
    o_variance = o_variance + pu @ v.square() - 2 * o * (pu @ v) + o.square() * _sum(pu)
    # The error of dQ is a . M from the query, with M the centred second moments of K under dS,
    # and b_l times dS_l (K_l - P.K) - P_l dS K from key l.
    centre = (k_mean, right_pull), (pull, right_mean)
    dq_variance = _outer_squares(a, own * slope, k, k_right, *centre)
    # Of (own_l K_l - (P o c)_l P.K - P_l dS K)^2, summed over the keys l.
    rest = p * c
    dq_variance = dq_variance + (u * own.square()) @ k_right.square()
    dq_variance = dq_variance - 2 * right_mean * ((u * own * rest) @ k_right)
    dq_variance = dq_variance + right_mean.square() * _sum(u * rest.square())
    across = (u * own * p) @ k_right - right_mean * _sum(u * rest * p)
    dq_variance = dq_variance - 2 * right_pull * across + right_pull.square() * _sum(pu)
    # The errors of dV and dK from b_j, summed over all queries; the rest is added below.
    of_p = p * (1 - p) * slope
    dv_variance = _outer_squares(b, of_p.mT, q_rounded, do)
    dk_variance = _outer_squares(b, (of_own * slope).mT, q_rounded, q)

    keys = k.shape[-2]
    apart = _sum(a * (slope.square() @ k.square() / keys - (slope @ k / keys).square()))
    apart = 2 * (apart.clamp(min=0.0) + u.mean(-1, keepdim=True))
    of_p, of_ds = saturation_of_p(apart), saturation_of_ds(apart)
    overall_p, overall_ds = _mean_gain(p_own, of_p), _mean_gain(ds_own, of_ds)
    right = scale * ds_moments.mean @ k_right
    return {
        "o": Moments(p_mean @ v, of_p * o_variance.clamp(min=0.0)),
        "ds": Moments(ds_moments.mean, of_ds * ds_moments.variance),
        "dq": Moments(right, scale**2 * of_ds * dq_variance.clamp(min=0.0)),
        "dk": Moments(
            scale * ds_moments.mean.mT @ q,
            scale**2 * (overall_ds * dk_variance + (of_ds * ds_rest).mT @ q.square()),
        ),
        "dv": Moments(p_mean.mT @ do, overall_p * dv_variance + (of_p * p_rest).mT @ do.square()),
    }


def saturation_of_p(apart: Tensor) -> Tensor:
    """The mean square change of P over its first-order value.

    The difference of two logits is off by a normal number x of variance `apart`. For a row of two
    keys, P = sigmoid(z) with z the difference of their logits. If all z are equally likely, x
    changes P by the integral of (sigmoid(z + x) - sigmoid(z))^2 = x coth(x / 2) - 2, to first order
    x^2 / 6. Two keys are enough: logits large enough for x to matter leave rows that few keys
    share.

    >>> saturation_of_p(torch.tensor([0.0, 4.0])).tolist()[0]
    1.0
    """
    return _saturation(apart, lambda x: x / np.tanh(x / 2) - 2, 1 / 6)


def saturation_of_ds(apart: Tensor) -> Tensor:
    """The mean square change of dS over its first-order value; see `saturation_of_p`.

    For two keys dS = P (1 - P) (dP_1 - dP_2). With f = P (1 - P), the integral of (f(z + x) -
    f(z))^2 is 1/3 less twice the overlap (x coth(x / 2) - 2) / (4 sinh(x / 2)^2), to first order
    x^2 / 30.
    """

    def change(x: _Array) -> _Array:
        return 1 / 3 - 2 * (x / np.tanh(x / 2) - 2) / (4 * np.sinh(x / 2) ** 2)

    return _saturation(apart, change, 1 / 30)


_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(40)
_ROWS: Final = 128  # of a part in `_outer_squares`
_VARIANCES: Final = np.logspace(-3, 3, 121)


def _saturation(apart: Tensor, change: Callable[[_Array], _Array], first_order: float) -> Tensor:
    """E[change(x)] / (first_order E[x^2]) over a normal x of variance `apart`; 1 if it is 0."""
    x = np.sqrt(_VARIANCES[:, None]) * np.abs(_NODES)
    safe = np.clip(x, 1e-2, 600.0)  # the change is quadratic in x below and linear above
    means = (change(safe) * (x / safe) ** np.where(x < safe, 2, 1)) @ _WEIGHTS
    means = means / math.sqrt(2 * math.pi)
    grid = np.concatenate([[0.0], _VARIANCES])
    values = np.concatenate([[1.0], means / (first_order * _VARIANCES)])
    found = np.interp(apart.double().cpu().numpy(), grid, values)
    return torch.from_numpy(found).to(apart.device)


def _mean_gain(variance: Tensor, gain: Tensor) -> Tensor:
    """The gains of rows, [..., n_q, 1], averaged over each column of `variance`: [..., n_k, 1]."""
    weight = variance.sum(-2)
    return ((gain * variance).sum(-2) / weight.where(weight > 0, 1.0))[..., None]


def _outer_squares(
    a: Tensor, weights: Tensor, x: Tensor, y: Tensor, *centre: tuple[Tensor, Tensor]
) -> Tensor:
    """sum_c a_ic (M_i)_ce^2 with M_i = sum_j weights_ij x_j y_j^T - sum of centre: [..., n, d_y].

    a is [..., n, d_x]. centre: pairs of [..., n, d_x] and [..., n, d_y], whose outer products are
    subtracted from M_i.

    M_i is computed in float32, with an error of about 2^-24 of the magnitudes of its terms. So that
    it is within the range of float32, channels and rows are divided by their largest magnitudes.

    Rows are computed in parts, because all M_i together are large. A part has the columns from its
    first to its last weight that is not 0: under a causal mask that is half the work.
    """
    of_x, of_y = (_amax(z.mT).mT for z in (x, y))  # of each channel
    x, y = (x / of_x).float(), (y / of_y).float()
    pairs = (x[..., :, None] * y[..., None, :]).flatten(-2)
    # The column of a sink, of which K and V are 0, must not determine the size of a row.
    weights = weights * pairs.any(-1)[..., None, :]
    of_row = _amax(weights)
    weights = (weights / of_row).float()
    centre = tuple(_scaled(left / of_x / of_row, right / of_y) for left, right in centre)
    a = a * of_x.square()
    of_a = _amax(a)
    a = (a / of_a).float()
    found = list[Tensor]()
    for first in range(0, weights.shape[-2], _ROWS):
        rows = slice(first, first + _ROWS)
        part = weights[..., rows, :]
        used = part.flatten(0, -2).any(0).nonzero()
        columns = slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0)
        m = (part[..., columns] @ pairs[..., columns, :]).unflatten(-1, (x.shape[-1], y.shape[-1]))
        for left, right in centre:
            m.addcmul_(left[..., rows, :, None], right[..., rows, None, :], value=-1)
        found.append((a[..., rows, None, :] @ m.square_()).squeeze(-2))
    return torch.cat(found, -2).double() * of_a * (of_row * of_y).square()


def _scaled(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the same outer products in float32, the right one with elements up to 1."""
    of_right = _amax(right)
    return (left * of_right).float(), (right / of_right).float()


def _amax(x: Tensor) -> Tensor:
    """The largest magnitude over the last axis, which is kept; 1 if it is 0."""
    largest = x.abs().amax(-1, keepdim=True)
    return largest.where(largest > 0, 1.0)


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)
