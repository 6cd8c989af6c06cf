"""How far attention computed in float32 may lie from attention: a first-order forward analysis.

With u = 2**-24, a sum of n products in any order errs by at most gamma(n) times the sum of their
absolute values (N. Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section
3.1). An exponential errs by its argument's absolute error, plus EXP of its own. Everything else
is one rounding u an operation. Terms of second order are covered by a factor SLACK on the whole,
which is justified as long as every relative error stays below SLACK - 1; `of` checks that.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sagesim import Exact, Smoothing
from tests.support.inputs import Case

U = 2.0**-24
EXP = 4 * U
"""Two units in the last place, twice what Sleef and glibc state for expf."""
SLACK = 1.01
NO_SMOOTHING = Smoothing()


@dataclass(frozen=True)
class Float32Bound:
    """|computed - exact|, elementwise; float64."""

    o: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def gamma(n: int, u: float = U) -> float:
    """Relative error of n roundings in a row, each of at most u: see the module's source."""
    return n * u / (1 - n * u)


def of(
    case: Case, exact: Exact, *, smoothing: Smoothing = NO_SMOOTHING, block_q: int = 64
) -> Float32Bound:
    """The bound for a spec of FP32 sites and for float32 inputs, without GQA.

    Smoothing: the products see K - mean and Q - mean, whose magnitudes are at most |K| + |mean|
    and |Q| + |mean|, rounded once; the rank-one terms add |mean| once more. What K-smoothing
    takes out of the logits enlarges what is rounded relative to their size.
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

    # S: two dot products and their sum, the constant and its multiplication, smoothed operands.
    s = gamma(d + 5) * scale * (q_abs @ k_abs.mT) * attended
    s_row = s.amax(-1, keepdim=True) if n_k else s.sum(-1, keepdim=True)
    # exp(S - max), in two factors: the arguments' roundings add up to u |S - max|, which is at
    # most u (|S| + |max|); the error of S in the maximum itself cancels against that in l.
    s_abs = (exact.s.masked_fill(exact.s.isneginf(), 0.0).abs() + shift[..., None]) * attended
    top = s_abs.amax(-1, keepdim=True) if n_k else s_abs.sum(-1, keepdim=True)
    e = s + U * (s_abs + top) + 2 * EXP + U
    e_row = (s_row + 2 * U * top + 2 * EXP + U) + gamma(n_k + 2)  # of the sum l, relatively
    # O = sum(e v) / l
    abs_pv = exact.p @ v.abs()
    o = (exact.p * e) @ v.abs() + (e_row + gamma(n_k + 2)) * abs_pv
    # L = max + log(l); log(l) is at most log(n_k).
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
    assert not relative.numel() or relative.max() < SLACK - 1, "no first-order analysis applies"
    # Results below the smallest normal number lose all of their relative accuracy.
    tiny = 2.0**-126
    return Float32Bound(*(SLACK * x + tiny for x in (o, lse_bound, dq, dk, dv)))
