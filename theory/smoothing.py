"""Smoothing of K and Q: what it leaves unchanged, what it costs and how much it gains.

Smoothing K subtracts the mean over a head's tokens; smoothing Q subtracts the mean over each
block's tokens. Token tensors are [..., n, d] and maps [..., n_q, n_k], with 0 where masked. A step
is the scale of a quantized element and broadcasts to its tensor. The functions compute in the dtype
of their arguments, which should be float64.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from theory.matmul import product_moments
from theory.rounding import rounding_moments

HALF: Final = 0.5 + 127 * 4 * 2.0**-24
"""The largest rounding error, in steps: half a step and four float32 roundings of up to 127."""


def logit_rounding(q: Tensor, k: Tensor, *, scale: float, unit: float) -> Tensor:
    """An upper bound on |S computed - S| in floating point of this unit roundoff; [..., n_q, n_k].

    A sum of d products is off by at most d * unit times the sum of their magnitudes. Four more
    roundings are for the scale and for a mean subtracted from q or k beforehand.

    Source: Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 3.1.
    """
    return abs(scale) * (q.shape[-1] + 4) * unit * (q.abs() @ k.abs().mT)


def lse_shift(q: Tensor, shift: Tensor, *, scale: float) -> Tensor:
    """The decrease of L if `shift` [..., 1, d] is subtracted from every key; [..., n_q].

    S_ij - S'_ij = scale * q_i . shift is the same for every key j of a row. A constant cancels in
    the row's softmax, so P, O and all gradients are unchanged, and L_i decreases by that constant.

    Source: arXiv 2603.02170.
    """
    return scale * (q * shift).sum(-1)


def amax_growth(tokens: int) -> float:
    """An upper bound on max|K - mean K| / max|K| over a head of this many tokens: 2 - 2 / tokens.

    A token less the mean is (1 - 1/n) of itself and -1/n of each of the n - 1 others. Each token is
    at most max|K|, together at most 2 - 2/n times that. One token of 1 among tokens of -1 attains
    it. So smoothing at most doubles the step of a head. The step of a single block can grow by any
    factor, but by no more than max|mean K| / 127.

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
    """The expected squared error of S from rounding q and k to INT8; [..., n_q, n_k].

    The error of S_ij is a sum over channels of (error of q) k + q (error of k) + the product of
    both errors. The errors are those of `rounding_moments`: mostly independent and uniform over a
    step, of mean square step^2 / 12.

    Args:
        q: Q as it is rounded: smoothed if the spec smooths Q, because the mean's part of S is added
        in high precision. k: K as it is rounded.

    Source: ours.
    """
    k, k_step = k.mT, k_step.expand_as(k).mT
    errors = rounding_moments(q, q_step), rounding_moments(k, k_step)
    return scale**2 * product_moments(q, k, *errors).mean_square


def row_sum(do: Tensor, pv_error: Tensor) -> Tensor:
    """The sum over keys of dS, [..., n_q], if delta = rowsum(dO o O) and O has the error pv_error.

    Rows of P sum to 1, so a row of dS = P o (dP - delta) sums to do . (P V) - delta = -do .
    pv_error. Errors of S and P cancel. With delta = rowsum(P o dP) the sum is 0.

    Args:
        pv_error: O - P V [..., n_q, d] with the backward's P: the error of the PV product alone.

    Source: arXiv 2510.04212 for a BF16 O; arXiv 2603.00040 mends it by a second O in high
    precision. The form for an INT8 PV is ours.
    """
    return -(do * pv_error).sum(-1)


def row_sum_bound(p: Tensor, v: Tensor, do: Tensor, p_step: Tensor, v_step: Tensor) -> Tensor:
    """An upper bound on |row sum of dS| if PV is INT8 and delta comes from O; [..., n_q].

    P and V are off by at most `HALF` steps, so |O - P V| <= P_off |V| + P V_off + P_off V_off. The
    row sum is at most |do| times that, summed over channels.

    Args:
        p_step: the step of the normalised P.
        v_step: the step of V.

    Source: ours.
    """
    p_off, v_off = HALF * p_step.expand_as(p), HALF * v_step.expand_as(v)
    o_off = p_off @ (v.abs() + v_off) + p @ v_off
    return (do.abs() * o_off).sum(-1)


def row_sum_mean_square(p: Tensor, v: Tensor, do: Tensor, p_step: Tensor, v_step: Tensor) -> Tensor:
    """The expected square of the row sum of dS if PV is INT8 and delta comes from O; [..., n_q].

    The row sum is -(sum_j (error of P_ij) dP_ij + sum_jc P_ij (error of V_jc) do_ic). Its terms are
    taken as independent, except for the errors that `rounding_moments` gives a mean: elements of P
    below half a step all become 0, and their errors add up.

    Source: ours.
    """
    p_error, v_error = rounding_moments(p, p_step), rounding_moments(v, v_step)
    known = (do * product_moments(p, v, p_error, v_error).mean).sum(-1)
    variance = (p_error.variance * (do @ v.mT) ** 2).sum(-1)
    return known**2 + variance + (p**2 @ v_error.variance * do**2).sum(-1)


def dropped_term(row_sums: Tensor, k_mean: Tensor, *, scale: float) -> Tensor:
    """scale * rowsum(dS) mean(K)^T, the difference of dS K and dS K_smoothed; [..., n_q, d].

    It is 0 in exact arithmetic, where rows of dS sum to 0. arXiv 2505.11594 adds it to dQ.
    """
    return scale * row_sums[..., None] * k_mean


def delta_error_in_dq(p: Tensor, k: Tensor, delta_error: Tensor, *, scale: float) -> Tensor:
    """The error of dQ = scale * dS K from an error of delta [..., n_q]; [..., n_q, d].

    dS changes by -P_ij delta_error_i and dQ by -scale * delta_error_i (P K)_i: the error is
    multiplied by the attention-weighted mean of the keys k. Without `dropped_term`, k is the
    smoothed K; with it, k is the raw K. The term reduces the error where (P K)_i is shorter than (P
    K)_i - mean(K), and increases it where it is longer.

    Source: ours.
    """
    return -scale * delta_error[..., None] * (p @ k)


def with_dropped_term(
    error: Tensor, p: Tensor, k: Tensor, k_mean: Tensor, delta_error: Tensor, *, scale: float
) -> float:
    """An estimate of |error of dQ|_2 after `dropped_term` is added to dQ.

    The part of the error that comes from delta (`delta_error_in_dq`) is replaced by its form with
    raw keys. The rest of the error is taken as uncorrelated with it.

    Args:
        error: the error of dQ without the term, [..., n_q, d].
        k: the raw keys.

    Source: ours.
    """
    before = delta_error_in_dq(p, k - k_mean, delta_error, scale=scale).square().sum()
    after = delta_error_in_dq(p, k, delta_error, scale=scale).square().sum()
    return float((error.square().sum() - before + after).clamp(min=0).sqrt())


def block_means(x: Tensor, block: int) -> Tensor:
    """The mean over the tokens of each block, repeated for every token; [..., n, d] as x."""
    blocks = x.split(block, -2)
    return torch.cat([b.mean(-2, keepdim=True).expand_as(b) for b in blocks], -2)


def bias_branch(ds: Tensor, q_mean: Tensor, *, scale: float) -> Tensor:
    """scale * dS^T mean(Q), the part of dK that dS^T Q_smoothed lacks; [..., n_k, d].

    dS^T Q is linear in Q = Q_smoothed + mean, so the identity is exact. The branch adds no error:
    an error of dS passes through it exactly as through the mean inside Q. Columns of dS do not sum
    to 0, as rows do, so the branch cannot be omitted.

    Args:
        q_mean: `block_means` of q.

    Source: arXiv 2603.02170; the remark on errors is ours.
    """
    return scale * (ds.mT @ q_mean)


def bias_branch_bound(ds_off: Tensor, q_mean: Tensor, *, scale: float) -> Tensor:
    """An upper bound on |error of the bias branch| where |error of dS| <= ds_off; [..., n_k, d]."""
    return abs(scale) * (ds_off.mT @ q_mean.abs())


def bias_branch_mean_square(ds_mean_square: Tensor, q_mean: Tensor, *, scale: float) -> Tensor:
    """The expected squared error of the bias branch; [..., n_k, d].

    Assumes errors of dS that are independent from row to row. That is not quite true: all rows
    share the rounding error of a key.
    """
    return scale**2 * (ds_mean_square.mT @ q_mean**2)


def dk_mean_square(
    ds: Tensor, q: Tensor, ds_step: Tensor, q_step: Tensor, *, scale: float
) -> Tensor:
    """The expected squared error of dK from rounding dS and Q to INT8 in dS^T Q; [..., n_k, d].

    Elements of dS below half a step have errors that add up, as in `row_sum_mean_square`.

    Args:
        q: Q as it is rounded: smoothed if the spec smooths Q. The bias branch is not rounded, so
        the error of dS is then multiplied by a smaller Q.

    Source: ours.
    """
    ds, ds_step = ds.mT, ds_step.expand_as(ds).mT
    errors = rounding_moments(ds, ds_step), rounding_moments(q, q_step)
    return scale**2 * product_moments(ds, q, *errors).mean_square
