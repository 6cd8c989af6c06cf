"""When dP = dO V^T can be computed in INT8.

dS = P o (dP - delta). Subtracting delta removes what the dP of a row have in common, but the
rounding error of dP is proportional to dP with that common part. How much of the error reaches dS
depends on P, on the source of delta and on the mean of V.

Maps are [..., n_q, n_k]; v and do are [..., n, d_v]. Computed in float64. Source: ours. The paper
computes dP in 16 bits because of one measurement (arXiv 2505.11594, Table 1c).
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

    dP is off by e_j = a . V_j + dO . b_j, with an error a of the row of dO and b_j of key j of V.

    delta from O does not depend on e, so dS is off by P_j e_j.

    delta from P includes P.e, so dS is off by P_j (e_j - P.e). From the error of dO, P_j a . (V_j -
    O_i) remains, without the part that all values share. The error of V has the variance P_j^2 [u_j
    (1 - 2 P_j) + sum_l P_l^2 u_l], with u_j that of dO . b_j.

    Args:
        do_error: the moments of the rounding error of do in dP.
        v_error: the same of v.
        delta: where the spec takes delta from.
    """
    p, v, do = p.double(), v.double(), do.double()
    error = product_moments(do, v.mT, do_error, v_error.mT)
    if delta is Delta.FROM_O:
        return Moments(p * error.mean, p.square() * error.variance)
    mean = p * (error.mean - (p * error.mean).sum(-1, keepdim=True))
    u = do.square() @ v_error.variance.mT
    from_v = u * (1 - 2 * p) + (p.square() * u).sum(-1, keepdim=True)
    # |V_j - O_i|^2 weighted by the variances of a, expanded into matrix products. The last V is
    # subtracted first: a part that all V share would cancel. With sinks it is the sink's 0. Its P
    # is near 1, and its distance from O is tiny, so that this term must not cancel.
    v = v - v[..., -1:, :]
    var, o = do_error.variance, p @ v
    from_do = var @ v.square().mT - 2 * (var * o) @ v.mT + (var * o.square()).sum(-1, keepdim=True)
    return Moments(mean, p.square() * (from_v + from_do).clamp(min=0.0))


def ds_moments_from_pv_and_dp(
    p: Tensor, v: Tensor, do: Tensor, p_error: Moments, v_error: Moments, do_error: Moments
) -> Moments:
    """The error of dS from rounding P, V and dO, if PV and dP round V alike and delta comes from O.

    O is computed from the same rounded V as dP. Its error b_j reaches delta as P.(dO . b), which is
    exactly what delta from P would subtract from dP. So the error of V counts as with delta from P,
    and the errors of dO and P count as with delta from O. The errors of the two sites are
    correlated: adding the squares of `ds_moments_from_pv` and `ds_moments_from_dp` gives too much.

    Args:
        p_error: the moments of the rounding error of p in PV.
        v_error: the moments of the rounding error of v in PV and dP.
        do_error: the moments of the rounding error of do in dP.
    """
    none_v, none_do = Moments.none(v), Moments.none(do)
    return (
        ds_moments_from_pv(p, v, do, p_error, none_v)
        + ds_moments_from_dp(p, v, do, do_error, none_v, Delta.FROM_O)
        + ds_moments_from_dp(p, v, do, none_do, v_error, Delta.FROM_P)
    )


def cancellation(p: Tensor, weight: Tensor) -> float:
    """The relative error of dS over that of dP, for delta from O: |P|_F / |J|_F over all rows.

    J = diag(P_i) - P_i P_i^T, and row i is weighted by weight_i = |dO_i|. Assumes that dP and its
    errors are independent from key to key: the error of a row is then P o e and the row itself is J
    dP. It is near 1 if rows are spread out, and grows without limit as rows become one-hot. With
    delta from P the error is J e and the factor is 1.

    Args:
        weight: |dO_i|, [..., n_q].
    """
    error = (p.double() * weight.double()[..., None]).square().sum()
    signal = expected_ds_rms(p, weight.double()).square().sum() * p.shape[-1]
    return math.sqrt(float(error / signal))


def gaussian_dp_error(elements: int) -> float:
    """The relative error of INT8 dP for Gaussian dO and V, with one scale per `elements` numbers.

    The scale of an operand is its amax / 127, about `gaussian_crest` / 127 deviations, and each
    operand adds an error of mean square scale^2 / 12. Together that is sqrt(2 / 12) crest / 127,
    for any number of tokens and any logits.
    """
    return math.sqrt(2 / 12) * gaussian_crest(elements) / 127
