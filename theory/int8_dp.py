"""When dP = dO V^T can be computed in INT8.

dS = P o (dP - delta). delta takes a common part out of dP, but not out of dP's rounding error: the
error keeps the size that the common part gave it. How much of it reaches dS depends on P, on where
delta comes from, and on the mean of V.

Maps are [..., n_q, n_k], v and do [..., n, d_v]; computed in float64. Source: ours. The paper keeps
dP in 16 bit on the evidence of one measurement (arXiv 2505.11594, Table 1c).
"""

from __future__ import annotations

import math

from torch import Tensor

from sagesim import Delta
from theory.ds_bound import expected_ds_rms, gaussian_crest
from theory.ds_error import ds_moments_from_pv
from theory.matmul import product_moments
from theory.rounding import Moments


def ds_moments_from_dp(
    p: Tensor, v: Tensor, do: Tensor, do_error: Moments, v_error: Moments, delta: Delta
) -> Moments:
    """The error of dS from rounding dO and V in dP, to first order.

    dP is off by e_j = a . V_j + dO . b_j with an error a of the row of dO and b_j of key j.

    From O, delta knows nothing of e: dS is off by P_j e_j.
    From P, delta follows: P_j (e_j - P.e). Of dO's part is left P_j a . (V_j - O_i): what the
    values have in common is gone. V's part has variance P_j^2 [u_j (1 - 2 P_j) + sum_l P_l^2 u_l],
    with u_j that of dO . b_j.
    """
    p, v, do = p.double(), v.double(), do.double()
    error = product_moments(do, v.mT, do_error, v_error.mT)
    if delta is Delta.FROM_O:
        return Moments(p * error.mean, p.square() * error.variance)
    mean = p * (error.mean - (p * error.mean).sum(-1, keepdim=True))
    u = do.square() @ v_error.variance.mT
    from_v = u * (1 - 2 * p) + (p.square() * u).sum(-1, keepdim=True)
    # |V_j - O_i|^2 under the variances of a, expanded; shifting V by its mean spares cancellation.
    v = v - v.mean(-2, keepdim=True)
    var, o = do_error.variance, p @ v
    from_do = var @ v.square().mT - 2 * (var * o) @ v.mT + (var * o.square()).sum(-1, keepdim=True)
    return Moments(mean, p.square() * (from_v + from_do).clamp(min=0.0))


def ds_moments_from_pv_and_dp(
    p: Tensor, v: Tensor, do: Tensor, p_error: Moments, v_error: Moments, do_error: Moments
) -> Moments:
    """The error of dS from rounding P, V and dO where PV and dP round V alike, delta from O.

    O is then made of the same rounded V as dP, and its error b_j reaches delta as P.(dO . b), just
    what delta from P would take out of dP. So V counts as if delta came from P, and dO and P as
    they do with delta from O. The errors of the two sites are not independent: taken one by one,
    their squares add up to more.
    """
    none_v, none_do = Moments.none(v), Moments.none(do)
    return (
        ds_moments_from_pv(p, v, do, p_error, none_v)
        + ds_moments_from_dp(p, v, do, do_error, none_v, Delta.FROM_O)
        + ds_moments_from_dp(p, v, do, none_do, v_error, Delta.FROM_P)
    )


def cancellation(p: Tensor, weight: Tensor) -> float:
    """By how much the relative error of dS exceeds that of dP, where delta comes from O.

    |P_i| / |J_i|_F over all rows, J = diag(P) - P P^T, each weighted by `weight` [..., n_q], its
    |dO_i|. For dP and errors that are independent from key to key: the error of a row is P o e, the
    row itself J dP. 1 for spread-out rows; it grows without limit as rows become one-hot. Where
    delta comes from P, the error is J e and the factor is 1.
    """
    error = (p.double() * weight.double()[..., None]).square().sum()
    signal = expected_ds_rms(p, weight.double()).square().sum() * p.shape[-1]
    return math.sqrt(float(error / signal))


def gaussian_dp_error(elements: int) -> float:
    """The relative error of INT8 dP for Gaussian dO and V with one scale per `elements` numbers.

    Each operand's scale is its amax / 127, about `gaussian_crest` / 127 deviations, and each adds
    scale^2 / 12: sqrt(2 / 12) crest / 127, whatever the length and the logits are.
    """
    return math.sqrt(2 / 12) * gaussian_crest(elements) / 127
