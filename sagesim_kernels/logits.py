"""S of one tile, in units of log2: the same arithmetic in every kernel and either orientation."""

from __future__ import annotations

import triton
import triton.language as tl

from sagesim_kernels.layout import start_of
from sagesim_kernels.smoothing import mean_of


@triton.jit
def logits(left, right, q_factor, k_scale, bias):
    """left [m, d] times the transpose of right [n, d], one of them queries and the other keys.

    q_factor: the queries' scales times the logit scale, [m, 1] or [1, n].
    k_scale: the keys' scales, the other way round; for codes only.
    bias: what smoothing Q took out, times the logit scale, broadcastable to [m, n]; or None.
    """
    if left.dtype == tl.int8:
        s = tl.dot(left, tl.trans(right), out_dtype=tl.int32).to(tl.float32)
        s = s * q_factor * k_scale
    else:
        s = tl.dot(left, tl.trans(right), out_dtype=tl.float32) * q_factor
    if bias is not None:
        s += bias
    return s


@triton.jit
def key_bias(
    smoothing,
    lengths,
    b,
    h,
    k_head,
    block,
    first,
    count: tl.constexpr,
    last,
    scale,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """The mean of query block `block` times smoothed keys first..first + count, [count]; None where
    Q is not smoothed.

    last: keys from there on have none.
    """
    if smoothing.q_mean is None:
        return None
    else:
        local, column = tl.arange(0, count), tl.arange(0, D_PAD)
        k = smoothing.k
        base = k.ptr + b.to(tl.int64) * k.stride_b + k_head.to(tl.int64) * k.stride_h
        base += (start_of(lengths.cu_k, b) + first) * k.stride_n
        mask = (first + local < last)[:, None] & (column < D)[None, :]
        ptrs = base + local[:, None] * k.stride_n + column[None, :] * k.stride_d
        keys = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        if smoothing.k_mean is not None:
            keys -= mean_of(smoothing.k_mean, b, k_head, 0, D, D_PAD)
        return tl.sum(keys * mean_of(smoothing.q_mean, b, h, block, D, D_PAD), 1) * scale
