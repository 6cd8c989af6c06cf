"""The backward on Hopper in one pass: what comes before its kernel and after it, and the launches.

`one_pass` computes S and dP once, where the portable kernels compute them in one kernel for dQ and
once more in another for dK and dV. The parts of dQ are added up in global memory, in one order.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sagesim_kernels.delta import less_gradient, load_rows, products_with_o, store_rows
from sagesim_kernels.hopper.device import loads
from sagesim_kernels.hopper.one_pass import one_pass
from sagesim_kernels.hopper.partitions import NUMBERS, ROW, WARPS
from sagesim_kernels.hopper.turns import BK, BQ, out_of_order
from sagesim_kernels.layout import (
    Grid,
    Rows,
    Strided,
    length_of,
    place_in,
    store_tokens,
    stored_start_of,
)
from sagesim_kernels.primitives import LAUNCH, LOG2_E
from sagesim_kernels.problem import Problem
from sagesim_kernels.quantize import Operands
from sagesim_kernels.smoothing import mean_of

_QUERIES: Final = BQ.value
_KEYS: Final = BK.value


@triton.jit
def _prepare_rows(
    grid,
    q_scale,
    o,
    do,
    lse2,
    d_lse,
    delta,
    numbers,
    counters,
    lengths,
    tokens_q,
    scale_log2,
    D: tl.constexpr,
    BQ: tl.constexpr,
):
    """A program for each block of queries: delta, what `one_pass` reads of the block's rows, and a
    count of 0 parts of dQ.

    q_scale: float32 [heads, tokens_q], in storage; behind the last query of a sequence P becomes 0.
    """
    i, h, b = place_in(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = i * BQ
    if first >= n_q:
        return
    local = tl.arange(0, BQ)
    row = first + local
    at = h.to(tl.int64) * tokens_q + stored_start_of(lengths.cu_q, lengths.n_q, b) + first
    factor = tl.load(q_scale + at + local, mask=row < n_q, other=1.0) * scale_log2
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, row, n_q, float("inf"))
    row_delta = products_with_o(o, do, lengths, b, h, first, D, D, BQ)
    row_delta = less_gradient(row_delta, d_lse, lengths, b, h, row, n_q, row_lse2)
    store_rows(delta, lengths.cu_q, b, h, row, n_q, row_delta)
    out = numbers + at * 4 + local
    tl.store(out, factor)
    tl.store(out + BQ, row_lse2)
    tl.store(out + 2 * BQ, row_delta)
    tl.store(out + 3 * BQ, tl.zeros((BQ,), tl.float32))
    tl.store(counters + at // BQ, 0)


@triton.jit
def _finish(
    grid,
    sums,
    lse2,
    d_lse,
    k_mean,
    dq,
    lengths,
    tokens_q,
    scale,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    SHARED_BY: tl.constexpr,
    BQ: tl.constexpr,
):
    """dQ of a block of queries out of its sum: scaled and rounded. Zero for queries that attend to
    nothing: where all of a block do, nobody has written its sum."""
    i, h, b = place_in(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = i * BQ
    if first >= n_q:
        return
    row = first + tl.arange(0, BQ)
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, row, n_q, float("inf"))[:, None]
    at = h.to(tl.int64) * tokens_q + stored_start_of(lengths.cu_q, lengths.n_q, b) + first
    total = out_of_order(tl.load(sums + at * D + tl.arange(0, BQ * D)), BQ, D, SHARED_BY)
    total = tl.where(row_lse2 != float("inf"), total, 0.0)
    if d_lse is not None and k_mean is not None:
        # Rows of dS then sum to the logsumexp's gradient, and the mean of K counts.
        gain = load_rows(d_lse, lengths.cu_q, b, h, row, n_q, 0.0)[:, None]
        mean = mean_of(k_mean, b, h // GROUPS, 0, D, D)
        total += tl.where(row_lse2 < float("inf"), gain * mean, 0.0)
    store_tokens(dq, lengths.cu_q, b, h, first, n_q, total * scale, D)


def backward(
    problem: Problem,
    operands: Operands,
    o: Tensor,
    do: Tensor,
    lse2: Tensor,
    d_lse: Rows | None,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Fill dq, dk and dv [sequences, heads, tokens, channels], any strides, and delta.

    o, do: as dq. lse2, d_lse, delta: float32 [sequences, heads, n_q].
    """
    q8, k8 = operands.at("qk_recompute", "q"), operands.at("qk_recompute", "k")
    k, mean = operands.unsmoothed("dq", "k")
    tokens = (operands.at("dk", "q"), k, operands.at("dp", "v"), operands.at("dp", "do"))
    q16, k16, v16, do16 = (x.ptr for x in tokens)
    kv_heads, heads, d = dk.shape[1], dq.shape[1], dq.shape[3]
    stored_q, stored_k = q8.scale.shape[1], k8.scale.shape[1] * _QUERIES
    lengths, scale = problem.lengths, problem.scale
    is_split = d == 64
    alternating = 4 if is_split or not problem.is_causal else 1  # measured: docs/speed.md
    together = math.gcd(alternating, problem.sequences * kv_heads)

    sums = dq.new_empty((heads * stored_q * d // 32, 32), dtype=torch.float32)
    numbers = dq.new_empty(heads * stored_q * 4, dtype=torch.float32)
    counters = dq.new_empty(heads * stored_q // _QUERIES, dtype=torch.int32)
    blocks = Grid(-(-problem.longest_q // _QUERIES), heads, problem.sequences)
    _prepare_rows[blocks.programs](
        blocks,
        q8.scale,
        Strided.of(o),
        Strided.of(do),
        Rows.of(lse2),
        d_lse,
        Rows.of(delta),
        numbers,
        counters,
        lengths,
        stored_q,
        scale * LOG2_E,
        d,
        _QUERIES,
        **LAUNCH,
    )
    tiles = Grid(-(-problem.longest_k // _KEYS), kv_heads, problem.sequences)
    part = gl.NVMMASharedLayout(128, 32, 2)
    one_pass[tiles.programs](
        loads(q8.ptr.view(-1, d), _QUERIES),
        loads(k8.ptr.view(-1, d), _KEYS),
        loads(q16, _QUERIES),
        loads(k16, _KEYS),
        loads(v16, _KEYS),
        loads(do16, _QUERIES),
        TensorDescriptor.from_tensor(numbers, [NUMBERS.value], ROW.value),
        k8.scale,
        None if mean is None else mean.ptr,
        Strided.of(dk),
        Strided.of(dv),
        TensorDescriptor.from_tensor(sums, [_QUERIES * d // 32, 32], part),
        counters,
        lengths._replace(n_q=0, n_k=0),  # in a tuple they would be built in
        lengths.n_q,
        lengths.n_k,
        tiles.tiles,
        kv_heads,
        stored_q,
        stored_k,
        scale,
        operands.stored,
        problem.groups,
        together,
        d,
        is_split,
        num_warps=WARPS.value,
        **LAUNCH,
    )
    _finish[blocks.programs](
        blocks,
        sums,
        Rows.of(lse2),
        d_lse,
        operands.k_mean,
        Strided.of(dq),
        lengths,
        stored_q,
        scale,
        problem.groups,
        d,
        1 if is_split else 2,
        _QUERIES,
        **LAUNCH,
    )
