"""A bound of the errors of attention computed in float32, to first order.

With u = 2**-24, a sum of n products in any order has an error of at most gamma(n) times the sum of
their absolute values (N. Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section
3.1). The relative error of an exponential is the absolute error of its argument plus EXP. Any other
operation has one rounding u. The factor SLACK covers terms of second order if every relative error
is below SLACK - 1, which `of` checks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sagesim import Exact, Smoothing
from tests.support.inputs import Case

U = 2.0**-24
EXP = 4 * U
"""The relative error of expf: two units in the last place, twice what Sleef and glibc state."""
SLACK = 1.01
NO_SMOOTHING = Smoothing()


@dataclass(frozen=True)
class Float32Bound:
    """Elementwise bounds of |computed - exact|, float64."""

    o: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def gamma(n: int, u: float = U) -> float:
    """The relative error of n successive roundings, each of at most u."""
    return n * u / (1 - n * u)


def of(
    case: Case, exact: Exact, *, smoothing: Smoothing = NO_SMOOTHING, block_q: int = 64
) -> Float32Bound:
    """The bound for a spec with FP32 at every site and for float32 inputs, without GQA.

    With smoothing, the operands are K - mean and Q - mean, rounded once, with magnitudes of at most
    |K| + |mean| and |Q| + |mean|. The term of the mean of Q adds |mean| again. The constant that
    smoothing K subtracts from the logits adds to the magnitude that is rounded.
    """
    q, k, v, do = (x.double() for x in case.qkvdo)
    n_q, n_k, d, d_v = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    scale = d**-0.5 if case.scale is None else abs(case.scale)
    q_abs, k_abs, shift = q.abs(), k.abs(), torch.zeros_like(exact.lse)
    if smoothing.k:
        mean = k.mean(-2, keepdim=True).abs()
        shift = scale * (q_abs @ mean.mT).squeeze(-1)
        k_abs = k_abs + mean
    if smoothing.q:
        means = [block.mean(-2, keepdim=True).expand_as(block) for block in q.split(block_q, -2)]
        q_abs = q_abs + 2 * torch.cat(means, -2).abs()
    attended = exact.p.new_ones(exact.p.shape).masked_fill(exact.s.isneginf(), 0.0)
    lse = exact.lse.masked_fill(exact.lse.isneginf(), 0.0).abs() + shift

    # S: two dot products and their sum, the scale and its multiplication, smoothed operands.
    s = gamma(d + 5) * scale * (q_abs @ k_abs.mT) * attended
    s_row = s.amax(-1, keepdim=True) if n_k else s.sum(-1, keepdim=True)
    # exp(S - max), in two factors: the roundings of the arguments add up to u |S - max|, which is
    # at most u (|S| + |max|). The error of the maximum cancels against that in the row sum.
    s_abs = (exact.s.masked_fill(exact.s.isneginf(), 0.0).abs() + shift[..., None]) * attended
    top = s_abs.amax(-1, keepdim=True) if n_k else s_abs.sum(-1, keepdim=True)
    e = s + U * (s_abs + top) + 2 * EXP + U
    e_row = (s_row + 2 * U * top + 2 * EXP + U) + gamma(n_k + 2)  # relative error of the row sum
    # O = sum(e v) / row sum
    abs_pv = exact.p @ v.abs()
    o = (exact.p * e) @ v.abs() + (e_row + gamma(n_k + 2)) * abs_pv
    # L = max + log(row sum), which is at most max + log(n_k).
    log_n = torch.tensor(float(max(n_k, 1))).log().double()
    lse_row = e_row + s_row + U * (2 * top + 4 * log_n)
    # P = exp(S - L)
    p = s + lse_row + U * (s_abs + lse[..., None]) + EXP
    dv = (exact.p * p).mT @ do.abs() + gamma(n_q + 1) * (exact.p.mT @ do.abs())
    dp = gamma(d_v + 1) * (do.abs() @ v.abs().mT)
    delta = (do.abs() * o).sum(-1) + gamma(d_v + 1) * (do.abs() * exact.o.abs()).sum(-1)
    # dS = P (dP - delta)
    difference = (exact.dp - exact.delta[..., None]).abs() * attended
    ds = exact.p * (dp + delta[..., None]) + exact.p * difference * (p + 3 * U)
    ds_abs = exact.ds.abs()
    dq = scale * (ds @ k_abs + gamma(n_k + 4) * (ds_abs @ k_abs))
    dk = scale * (ds.mT @ q_abs + gamma(n_q + 6) * (ds_abs.mT @ q_abs))
    lse_bound = lse_row.squeeze(-1) + gamma(d + 4) * shift + U * lse

    relative = torch.cat([x.flatten() for x in (e * attended, e_row, p * attended)])
    assert not relative.numel() or relative.max() < SLACK - 1, "errors too large for first order"
    # Subnormal results have no relative accuracy.
    smallest_normal = 2.0**-126
    return Float32Bound(*(SLACK * x + smallest_normal for x in (o, lse_bound, dq, dk, dv)))
