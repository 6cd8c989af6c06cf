"""Where the error of dS comes from, and what the scales of dQ, dK and dV cost.

Three steps. `ds_error` takes a computed dS apart, exactly. `rounding_moments` says what to expect
of an operand's rounding, and `..._moments` carry that to dS and to a product, to first order.
`dispersion` and `scale_gain` reduce the choice of scales to how unequal rows and channels are.

Maps are [..., n_q, n_k]; computed in float64. Source: ours, unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from theory.matmul import product_moments
from theory.rounding import Moments


@dataclass(frozen=True, slots=True)
class DsError:
    """Computed dS minus exact dS; the four parts add up to it exactly."""

    through_p: Tensor  #: (P^ - P) o (dP - delta)
    through_dp: Tensor  #: P o (dP^ - dP)
    through_delta: Tensor  #: -P o (delta^ - delta)
    together: Tensor  #: (P^ - P) o (dP^ - dP - delta^ + delta), of second order

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
    """The error of dS = P o (dP - delta 1^T) by the three tensors it is made of.

    An identity: expand (P + a)(dP - delta + b) - P (dP - delta) with the errors a of P and b of
    dP - delta. delta is [..., n_q].
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
    """RMS of a row of P o (delta^ - delta), at most, where delta^ = rowsum(dO o O^): [..., n_q].

    A constant of the row times P_i, so its RMS is |delta^ - delta| RMS(P_i), and
    |dO_i . (O^_i - O_i)| <= |dO_i| |O^_i - O_i| (Cauchy and Schwarz). Every error of the forward's
    PV enters dS by this door; delta = rowsum(P o dP) closes it.
    """
    rms_p = p.double().square().mean(-1).sqrt()
    return rms_p * do.double().norm(dim=-1) * o_error.double().norm(dim=-1)


def ds_moments_from_qk(
    p: Tensor, c: Tensor, q: Tensor, k: Tensor, q_error: Moments, k_error: Moments, scale: float
) -> Moments:
    """The first-order error of dS from rounding Q and K in QK, forward and backward alike.

    An error x of a row of S changes P by P o (x - P.x), and delta with it (that of O and that of
    P o dP change alike, as O is made of the same P). With c = dP - delta, P.c = 0:

        dS_j changes by F_j(x) = P_j [(x_j - P.x) c_j - (P o c).x].

    Rounding K gives x_j = Q_i . b_j scale, independent for each key of variance u_j, and F_j has
    P_j^2 [u_j c_j^2 (1 - 4 P_j) + sum_l P_l^2 u_l (c_j + c_l)^2]. Rounding Q gives x = K a scale
    with one a for the whole row, so that F_j is P_j a . [(K_j - P.K) c_j - dS_i K] scale.

    Args: q, k as they are rounded (K smoothed if the spec says so); c [..., n_q, n_k], centred;
        scale the softmax's.
    """
    p, c, q, k = p.double(), c.double(), q.double(), k.double()
    x = scale * product_moments(q, k.mT, q_error, k_error.mT).mean
    ds = p * c
    mean = p * ((x - (p * x).sum(-1, keepdim=True)) * c - (ds * x).sum(-1, keepdim=True))

    u = q.square() @ k_error.variance.mT
    weighted = p.square() * u
    from_k = u * c.square() * (1 - 4 * p)
    for factor, power in ((c.square(), 0), (2 * c, 1), (1.0, 2)):
        from_k = from_k + factor * (weighted * c**power).sum(-1, keepdim=True)

    # Expanded into products of matrices; shifting K changes no row of P.
    k = k - k.mean(-2, keepdim=True)
    var, k_mean, pull = q_error.variance, p @ k, ds @ k
    far = var @ k.square().mT - 2 * (var * k_mean) @ k.mT + _sum(var * k_mean.square())
    along = (var * pull) @ k.mT - _sum(var * k_mean * pull)
    from_q = c.square() * far - 2 * c * along + _sum(var * pull.square())
    return Moments(mean, scale**2 * p.square() * (from_q + from_k).clamp(min=0.0))


def ds_moments_from_pv(
    p: Tensor, v: Tensor, do: Tensor, p_error: Moments, v_error: Moments
) -> Moments:
    """The error of dS from rounding P and V in PV, where delta = rowsum(dO o O).

    delta is off by dO_i . (O^_i - O_i) = sum_j a_j dP_ij + P_ij (dO_i . b_j) for the errors a of P
    and b of V, and dS by -P times that. None where delta = rowsum(P o dP).
    """
    p, v, do = p.double(), v.double(), do.double()
    delta = product_moments(p, v, p_error, v_error).mean
    variance = _sum(p_error.variance * (do @ v.mT).square())
    variance = variance + _sum((p.square() @ v_error.variance) * do.square())
    return Moments(-p * _sum(delta * do), p.square() * variance)


def dispersion(fine_amax: Tensor, coarse_amax: Tensor, weight: Tensor) -> float:
    """How unequal the parts of a region are: the weighted mean of fine_amax^2 over that of
    coarse_amax^2.

    fine_amax is the largest magnitude of the part of the region that has a scale of its own (a
    row of a tile, a channel of a block), coarse_amax of all of it; per element or broadcastable.
    Squared scales are in the same ratio, so this is also the ratio of the expected squared
    rounding errors. At most 1, which takes equal parts. Under equal weights at least one over the
    number of parts that share a scale, which takes that only one of them is not 0.

    Args: weight: what a unit error of the element costs: the square sum of the row of the other
        operand that it meets.
    """
    fine, coarse, weight = torch.broadcast_tensors(fine_amax, coarse_amax, weight)
    total = float((weight * coarse.square()).sum())
    return float((weight * fine.square()).sum()) / total if total else 1.0


def scale_gain(left_share: float, left: float, right: float) -> float:
    """How much smaller a product's RMS error becomes when each part has its own scale.

    left_share: of the expected squared error under shared scales, what comes from the left
        operand. left, right: the operands' `dispersion`.

    Holds for operands whose elements span many codes. Where shared scales lose small elements
    altogether, the noise they are charged here is not theirs: compare `product_moments` instead.
    """
    return (left_share * left + (1 - left_share) * right) ** -0.5


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)
