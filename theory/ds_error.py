"""The error of dS by its sources, and the errors of dQ, dK and dV from their own scales.

`ds_error` splits a computed dS into parts, exactly. `ds_moments_from_qk` and `ds_moments_from_pv`
propagate the moments of the operands' rounding errors to dS, to first order. `dispersion` and
`scale_gain` predict the gain of finer scales from how unequal rows and channels are.

Maps are [..., n_q, n_k]. Computed in float64. Source: ours, unless stated otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from theory.matmul import product_error_mean
from theory.rounding import Moments


@dataclass(frozen=True, slots=True)
class DsError:
    """Computed dS minus exact dS, as four parts that add up to it exactly; each [..., n_q, n_k]."""

    through_p: Tensor  #: (P^ - P) o (dP - delta)
    through_dp: Tensor  #: P o (dP^ - dP)
    through_delta: Tensor  #: -P o (delta^ - delta)
    together: Tensor  #: (P^ - P) o (dP^ - dP - delta^ + delta), the second-order part

    @property
    def total(self) -> Tensor:
        """The sum of the parts."""
        return self.through_p + self.through_dp + self.through_delta + self.together


def ds_error(
    p: Tensor,
    dp: Tensor,
    delta: Tensor,
    *,
    computed_p: Tensor,
    computed_dp: Tensor,
    computed_delta: Tensor,
) -> DsError:
    """The error of dS = P o (dP - delta 1^T), split by the errors of P, dP and delta.

    It is an identity: (P + a)(dP - delta + b) - P (dP - delta) is expanded in the errors a of P and
    b of dP - delta. `through_delta_bound` has the sources for the part of delta.

    Args:
        p: exact P, [..., n_q, n_k].
        dp: exact dP.
        delta: exact delta, [..., n_q].
        computed_p: P as computed.
        computed_dp: dP as computed.
        computed_delta: delta as computed.
    """
    p, dp, delta = p.double(), dp.double(), delta.double()[..., None]
    p_off, dp_off = computed_p.double() - p, computed_dp.double() - dp
    delta_off = computed_delta.double()[..., None] - delta
    return DsError(
        through_p=p_off * (dp - delta),
        through_dp=p * dp_off,
        through_delta=-p * delta_off,
        together=p_off * (dp_off - delta_off),
    )


def through_delta_bound(p: Tensor, do: Tensor, o_error: Tensor) -> Tensor:
    """An upper bound on the RMS of each row of P o (delta^ - delta), [..., n_q], with delta from O.

    The row is P_i times a constant, so its RMS is |delta^ - delta| RMS(P_i). With delta^ =
    rowsum(dO o O^), |dO_i . (O^_i - O_i)| <= |dO_i| |O^_i - O_i| (Cauchy-Schwarz). Every error of
    the forward's PV enters dS through this term; with delta = rowsum(P o dP) none does.

    Args:
        do: [..., n_q, d_v].
        o_error: O^ - O, [..., n_q, d_v].

    Source: arXiv 2510.04212 traces failures of training in BF16 to this term, and mends them by
    delta = rowsum(P o dP); arXiv 2603.00040 mends it by a second O in high precision. The bound is
    ours.
    """
    rms_p = p.double().square().mean(-1).sqrt()
    return rms_p * do.double().norm(dim=-1) * o_error.double().norm(dim=-1)


class Cap(NamedTuple):
    """How a softcap maps logits, elementwise; see `cap_of`."""

    slope: Tensor  #: the derivative of the cap
    bend: Tensor  #: the derivative of slope by the capped logit


def cap_of(s: Tensor, softcap: float | None) -> Cap:
    """The cap at the capped logits s; without a softcap the slope is 1 and the bend 0.

    With t = s / softcap, the slope of softcap tanh(x / softcap) is 1 - t^2. By s, it changes by
    -2 t / softcap.
    """
    if softcap is None:
        return Cap(torch.ones_like(s), torch.zeros_like(s))
    t = s / softcap
    return Cap(1 - t.square(), -2 * t / softcap)


def ds_moments_from_qk(
    p: Tensor,
    c: Tensor,
    q: Tensor,
    k: Tensor,
    q_error: Moments,
    k_error: Moments,
    scale: float,
    cap: Cap | None = None,
) -> Moments:
    """The first-order error of dS from rounding Q and K in QK, alike in forward and backward.

    An error x of a row of S changes P by P o (x - P.x), and delta with it. Both forms of delta
    change alike, because O is computed from the same P. With c = dP - delta and P.c = 0, dS_j
    changes by

        F_j(x) = P_j [(x_j - P.x) c_j - (P o c).x].

    Rounding K gives x_j = Q_i . b_j scale, independent for each key, of variance u_j. The variance
    of F_j is then P_j^2 [u_j c_j^2 (1 - 4 P_j) + sum_l P_l^2 u_l (c_j + c_l)^2]. Rounding Q gives x
    = K a scale with one a for the whole row, and F_j is P_j a . [(K_j - P.K) c_j - dS_i K] scale.

    With a softcap of slope g and bend h, the error of a capped logit is y = g o x, and dS = g o P o
    c changes by P_j [e_j y_j - g_j (c_j P.y + (P o c).y)] with e = c o (g + h). The variance from K
    is P_j^2 [u_j e_j (e_j - 4 g_j P_j c_j) + g_j^2 sum_l P_l^2 u_l (c_j + c_l)^2], with u that of
    y. From Q, F_j is P_j a . [e_j g_j K_j - g_j c_j (P o g) K - g_j dS_i K] scale.

    It breaks where errors of S are not small against 1: for Gaussian inputs from a deviation of Q
    and K of about 4 on.

    Args:
        p: [..., n_q, n_k]; rows sum to 1. With sinks, the last key is the sink, and 0 in c's dP, k
            and k_error.
        c: dP - delta, [..., n_q, n_k], as `theory.ds_bound.centred` returns it.
        q: Q as it is rounded, [..., n_q, d].
        k: K as it is rounded (smoothed if the spec smooths K), [..., n_k, d].
        q_error: the moments of the rounding error of q.
        k_error: the same of k.
        scale: the softmax scale.
        cap: of a softcap, [..., n_q, n_k]; None: there is none.
    """
    p, c, q, k = p.double(), c.double(), q.double(), k.double()
    slope, bend = cap or cap_of(torch.zeros_like(p), None)
    x = slope * scale * product_error_mean(q, k.mT, q_error.mean, k_error.mT.mean)
    from_own, from_row, capped_p = c * (slope + bend), slope * c, slope * p
    ds = capped_p * c
    mean = p * (from_own * x - from_row * _sum(p * x) - slope * _sum(p * c * x))

    u = slope.square() * (q.square() @ k_error.variance.mT)
    weighted = p.square() * u
    from_k = u * from_own * (from_own - 4 * from_row * p)
    for factor, power in ((c.square(), 0), (2 * c, 1), (1.0, 2)):
        from_k = from_k + slope.square() * factor * _sum(weighted * c**power)

    # The square is expanded into matrix products.
    if cap is None:  # Subtracting the mean of K, which leaves P unchanged, avoids cancellation.
        k = k - k.mean(-2, keepdim=True)
    var, k_mean, pull = q_error.variance, capped_p @ k, ds @ k
    own, row = from_own * slope, from_row
    from_q = own.square() * (var @ k.square().mT) - 2 * own * row * ((var * k_mean) @ k.mT)
    from_q = from_q + row.square() * _sum(var * k_mean.square())
    from_q = from_q - 2 * own * slope * ((var * pull) @ k.mT)
    from_q = from_q + 2 * row * slope * _sum(var * k_mean * pull)
    from_q = from_q + slope.square() * _sum(var * pull.square())
    return Moments(mean, scale**2 * p.square() * (from_q + from_k).clamp(min=0.0))


def ds_moments_from_pv(
    p: Tensor, v: Tensor, do: Tensor, p_error: Moments, v_error: Moments
) -> Moments:
    """The first-order error of dS from rounding P and V in PV, for delta = rowsum(dO o O).

    delta is off by dO_i . (O^_i - O_i) = sum_j a_j dP_ij + P_ij (dO_i . b_j) for the errors a of P
    and b of V, and dS by -P times that. With delta = rowsum(P o dP) this error is 0.

    Args:
        p: [..., n_q, n_k].
        v: [..., n_k, d_v].
        do: [..., n_q, d_v].
        p_error: the moments of the rounding error of p in PV.
        v_error: the same of v.
    """
    p, v, do = p.double(), v.double(), do.double()
    delta = product_error_mean(p, v, p_error.mean, v_error.mean)
    variance = _sum(p_error.variance * (do @ v.mT).square())
    variance = variance + _sum((p.square() @ v_error.variance) * do.square())
    return Moments(-p * _sum(delta * do), p.square() * variance)


def dispersion(fine_amax: Tensor, coarse_amax: Tensor, weight: Tensor) -> float:
    """How equal the parts of a region are: weighted mean of fine_amax^2 over that of coarse_amax^2.

    Squared scales are in the same ratio, so it is also the ratio of the expected squared rounding
    errors. It is at most 1, for equal parts. Under equal weights it is at least 1 / (number of
    parts that share a scale), if all parts but one are 0. It is 1 if all magnitudes are 0.

    Args:
        fine_amax: the largest magnitude of the part that gets its own scale (a row of a tile, a
        channel of a block), per element or broadcastable. coarse_amax: the largest magnitude of the
        whole region, per element or broadcastable. weight: the cost of a unit error of the element:
        the sum of squares of the row of the other operand that it is multiplied with.
    """
    fine, coarse, weight = torch.broadcast_tensors(fine_amax, coarse_amax, weight)
    total = float((weight * coarse.square()).sum())
    return float((weight * fine.square()).sum()) / total if total else 1.0


def scale_gain(left_share: float, left: float, right: float) -> float:
    """The factor by which a product's RMS error falls if each part gets its own scale.

    It is (left_share * left + (1 - left_share) * right)^(-1/2). It holds for operands whose
    elements span many codes. If shared scales round many elements to 0, it charges them a noise
    that they do not have; compare `theory.matmul.product_moments` instead.

    Args:
        left_share: the share of the expected squared error under shared scales that comes from the
        left operand. left: the `dispersion` of the left operand. right: the `dispersion` of the
        right operand.
    """
    return (left_share * left + (1 - left_share) * right) ** -0.5


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)
