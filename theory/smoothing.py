"""What subtracting means of K and Q changes, what it must not change, and what it is worth.

Tensors are [..., n, d], maps [..., n_q, n_k]. "Smoothed" K has the mean over a head's tokens
subtracted, smoothed Q the mean over each block's tokens. A step is the scale of a quantized
element, broadcastable to what it belongs to. Masked entries of maps are 0. Everything is float64
and nothing is converted.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from theory.matmul import product_moments
from theory.rounding import rounding_moments

HALF: Final = 0.5 + 127 * 4 * 2.0**-24
"""The largest rounding error in steps: half of one, and four float32 roundings of up to 127."""


def logit_rounding(q: Tensor, k: Tensor, *, scale: float, unit: float) -> Tensor:
    """|S computed - S|, at most, for float arithmetic of this unit roundoff; [..., n_q, n_k].

    A sum of d products is off by at most d * unit times the sum of their magnitudes; two more
    roundings are for the scale, two for what is subtracted from q or k beforehand.

    Source: Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 3.1.
    """
    return abs(scale) * (q.shape[-1] + 4) * unit * (q.abs() @ k.abs().mT)


def lse_shift(q: Tensor, shift: Tensor, *, scale: float) -> Tensor:
    """What L loses when `shift` [..., 1, d] is subtracted from every key; [..., n_q].

    S_ij - S'_ij = scale * q_i . shift for every j. A constant of a row cancels in its softmax, so
    that P, and with it O and all gradients, stay, and the log of the row's sum loses it.

    Source: arXiv 2603.02170.
    """
    return scale * (q * shift).sum(-1)


def amax_growth(tokens: int) -> float:
    """max|K - mean K| / max|K| over a whole head, at most.

    A token less the mean is (1 - 1/n) of itself and -1/n of each of the n - 1 others, each of at
    most max|K|: together 2 - 2/n. One token of 1 among tokens of -1 attains it. So smoothing
    can double the step at worst; over one block the step can grow without limit, but by no more
    than max|mean K| / 127.

    Raises:
        ValueError: if tokens is not positive.

    Source: ours.
    """
    if tokens < 1:
        raise ValueError(f"tokens={tokens} is not a positive number")
    return 2 - 2 / tokens


def logit_mean_square(
    q: Tensor, k: Tensor, q_step: Tensor, k_step: Tensor, *, scale: float
) -> Tensor:
    """Expected square of the error of S from rounding q and k; [..., n_q, n_k].

    The error of S_ij is the sum over channels of (error of q) k + q (error of k) + their product,
    and with independent errors uniform over a step, of mean square step^2 / 12, its square has the
    sum of their mean squares. With Q smoothed, S has its rank-one term in high precision: pass q
    smoothed.

    Source: ours.
    """
    k, k_step = k.mT, k_step.expand_as(k).mT
    errors = rounding_moments(q, q_step), rounding_moments(k, k_step)
    return scale**2 * product_moments(q, k, *errors).mean_square


def row_sum(do: Tensor, pv_error: Tensor) -> Tensor:
    """Sum over keys of dS where delta = rowsum(dO o O) and O carries pv_error; [..., n_q].

    pv_error [..., n_q, d] is O - P V with the backward's P: the error of the PV product alone.
    Rows of P sum to 1, so the row of dS = P o (dP - delta) sums to do . (P V) - delta, which is
    -do . pv_error. The errors of S and P cancel. With delta = rowsum(P o dP) it is 0.

    Source: ours.
    """
    return -(do * pv_error).sum(-1)


def row_sum_bound(p: Tensor, v: Tensor, do: Tensor, p_step: Tensor, v_step: Tensor) -> Tensor:
    """|row sum of dS|, at most, for PV in INT8; [..., n_q].

    P and V are off by at most `HALF` steps: |O - P V| <= P_off |V| + P V_off + P_off V_off, and
    the row sum is its product with |do|. p_step is that of the normalised P.

    Source: ours.
    """
    p_off, v_off = HALF * p_step.expand_as(p), HALF * v_step.expand_as(v)
    o_off = p_off @ (v.abs() + v_off) + p @ v_off
    return (do.abs() * o_off).sum(-1)


def row_sum_mean_square(p: Tensor, v: Tensor, do: Tensor, p_step: Tensor, v_step: Tensor) -> Tensor:
    """Expected square of the row sum of dS, for PV in INT8; [..., n_q].

    The row sum is -(sum_j (error of P_ij) dP_ij + sum_jc P_ij (error of V_jc) do_ic), of terms
    taken as independent, but for those that `rounding_moments` knows: elements of P below half a
    step all become 0, their errors have one sign and add up.

    Source: ours.
    """
    p_error, v_error = rounding_moments(p, p_step), rounding_moments(v, v_step)
    known = (do * product_moments(p, v, p_error, v_error).mean).sum(-1)
    variance = (p_error.variance * (do @ v.mT) ** 2).sum(-1)
    return known**2 + variance + (p**2 @ v_error.variance * do**2).sum(-1)


def dropped_term(row_sums: Tensor, k_mean: Tensor, *, scale: float) -> Tensor:
    """scale * rowsum(dS) mean(K)^T, the part of dS K that dS K_smoothed leaves out; [..., n_q, d].

    0 in exact arithmetic, where rows of dS sum to 0. arXiv 2505.11594 adds it.
    """
    return scale * row_sums[..., None] * k_mean


def delta_error_in_dq(p: Tensor, k: Tensor, delta_error: Tensor, *, scale: float) -> Tensor:
    """What an error of delta [..., n_q] puts into dQ = scale * dS K; [..., n_q, d].

    dS changes by -P_ij delta_error_i, hence dQ by -scale * delta_error_i (P K)_i: the error comes
    multiplied by the attention-weighted mean of the keys that dS is multiplied with. With the
    smoothed keys that is the whole story; adding `dropped_term` puts the raw keys there. The
    term helps where (P K)_i is shorter than (P K)_i - mean(K), and hurts where it is longer.

    Source: ours.
    """
    return -scale * delta_error[..., None] * (p @ k)


def with_dropped_term(
    error: Tensor, p: Tensor, k: Tensor, k_mean: Tensor, delta_error: Tensor, *, scale: float
) -> float:
    """The estimate of |error of dQ|_2 after adding `dropped_term`, from that before, `error`.

    The part of `delta_error_in_dq` is replaced by its form with raw keys; the other parts of the
    error are taken as uncorrelated with it.

    Source: ours.
    """
    before = delta_error_in_dq(p, k - k_mean, delta_error, scale=scale).square().sum()
    after = delta_error_in_dq(p, k, delta_error, scale=scale).square().sum()
    return float((error.square().sum() - before + after).clamp(min=0).sqrt())


def block_means(x: Tensor, block: int) -> Tensor:
    """The mean over each block's tokens, once for every token; shaped as x."""
    blocks = x.split(block, -2)
    return torch.cat([b.mean(-2, keepdim=True).expand_as(b) for b in blocks], -2)


def bias_branch(ds: Tensor, q_mean: Tensor, *, scale: float) -> Tensor:
    """scale * (dS^T 1) mean(Q)^T over blocks, what dS^T Q_smoothed lacks of dK; [..., n_k, d].

    q_mean: `block_means` of q. Q = Q_smoothed + mean, and dS^T Q is linear in Q, so the branch is
    exact. It adds no error of its own: an error of dS goes through it as it would have gone
    through the mean inside Q. Columns of dS, unlike its rows, do not sum to 0.

    Source: arXiv 2603.02170; the remark on errors is ours.
    """
    return scale * (ds.mT @ q_mean)


def bias_branch_bound(ds_off: Tensor, q_mean: Tensor, *, scale: float) -> Tensor:
    """|error of the bias branch|, at most, where |error of dS| <= ds_off; [..., n_k, d]."""
    return abs(scale) * (ds_off.mT @ q_mean.abs())


def bias_branch_mean_square(ds_mean_square: Tensor, q_mean: Tensor, *, scale: float) -> Tensor:
    """Expected square of the error of the bias branch; [..., n_k, d].

    For errors of dS that are independent from row to row. They are not quite: the error of one
    key reaches all rows.
    """
    return scale**2 * (ds_mean_square.mT @ q_mean**2)


def dk_mean_square(
    ds: Tensor, q: Tensor, ds_step: Tensor, q_step: Tensor, *, scale: float
) -> Tensor:
    """Expected square of what rounding dS and q at the site dk puts into dK; [..., n_k, d].

    Elements of dS below half a step are counted as in `row_sum_mean_square`. With Q smoothed, pass
    q smoothed: the bias branch is not rounded, and what rounding does to dS is then multiplied with
    a smaller Q.

    Source: ours.
    """
    ds, ds_step = ds.mT, ds_step.expand_as(ds).mT
    errors = rounding_moments(ds, ds_step), rounding_moments(q, q_step)
    return scale**2 * product_moments(ds, q, *errors).mean_square
