"""S of one tile, in units of log2: the same arithmetic in every kernel and either orientation."""

from __future__ import annotations

import triton
import triton.language as tl

from sagesim_kernels.layout import token_ptrs
from sagesim_kernels.primitives import row_sums
from sagesim_kernels.smoothing import mean_of


@triton.jit
def logits(left, right, q_factor, k_scale):
    """left [m, d] times the transpose of right [n, d], one of them queries and the other keys.

    q_factor: the queries' scales times the logit scale, [m, 1] or [1, n].
    k_scale: the keys' scales, the other way round; for codes only.
    """
    if left.dtype == tl.int8:
        sums = tl.dot(left, tl.trans(right), out_dtype=tl.int32).to(tl.float32)
        return sums * q_factor * k_scale
    else:
        return tl.dot(left, tl.trans(right), out_dtype=tl.float32) * q_factor


@triton.jit
def key_bias(
    q_mean,
    k_mean,
    raw_k,
    lengths,
    b,
    h,
    k_head,
    block,
    first,
    count: tl.constexpr,
    last,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """What smoothing Q took out of S: the mean of query block `block` times the smoothed keys
    first..first + count, [count].

    last: keys from there on have none.
    """
    local, column = tl.arange(0, count), tl.arange(0, D_PAD)
    ptrs = token_ptrs(raw_k, lengths.cu_k, b, k_head, first, count, column)
    mask = (first + local < last)[:, None] & (column < D)[None, :]
    keys = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if k_mean is not None:
        keys -= mean_of(k_mean, b, k_head, 0, D, D_PAD)
    return row_sums(keys * mean_of(q_mean, b, h, block, D, D_PAD))
