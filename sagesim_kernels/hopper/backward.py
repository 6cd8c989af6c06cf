"""The backward for Hopper: a preprocess kernel, one pass over Q and K, and a postprocess kernel.

`hopper_backward` computes S and dP once, while the portable kernels compute them once for dQ and
once more for dK and dV. It adds the parts of dQ of all tiles of keys in global memory, in a fixed
order.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sagesim_kernels.hopper.backward_kernel import Config, hopper_backward
from sagesim_kernels.hopper.backward_warps import ROW_STATS, STATS_LAYOUT, WARPS
from sagesim_kernels.hopper.descriptors import tma_descriptor
from sagesim_kernels.hopper.dq_order import BLOCK_Q, TILE_K, from_register_order
from sagesim_kernels.launch_plans import launch
from sagesim_kernels.operands import (
    LAUNCH,
    LOG2_E,
    Gradients,
    Grid,
    KernelProblem,
    OperandCache,
    Rows,
    RowStatistics,
    Strided,
    length_of,
    load_mean,
    load_rows,
    program_coordinates,
    rowsum_do_o,
    store_rows,
    store_tokens,
    stored_start_of,
    subtract_lse_gradient,
)

_BLOCK_Q: Final = BLOCK_Q.value
_TILE_K: Final = TILE_K.value


class Scratch(NamedTuple):
    """What the preprocess kernel prepares for each block of queries, in padded storage."""

    row_stats: Any  #: float32, see `ROW_STATS`
    dq_semaphore: Any  #: int32, see `dq_order`


# Arguments of these kernels are not tuples of tuples: in the first tuple of a tuple, Triton 3.6
# loses integers that it specialised to the constant 1.
@triton.jit
def hopper_preprocess(
    grid, q_scale, o, do, lse2, d_lse, delta, scratch, lengths, tokens_q, scale_log2,
    D: tl.constexpr,
):  # fmt: skip
    """Compute delta and the row statistics of a block of queries, and set its semaphore to 0.

    Queries behind the last one of a sequence get statistics that make P 0.

    q_scale: float32 [heads, tokens_q], in padded storage. delta: `Rows`. scratch: `Scratch`.
    """
    i, h, b = program_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = i * BLOCK_Q
    if first >= n_q:
        return
    local = tl.arange(0, BLOCK_Q)
    row = first + local
    at = h.to(tl.int64) * tokens_q + stored_start_of(lengths.cu_q, lengths.n_q, b) + first
    factor = tl.load(q_scale + at + local, mask=row < n_q, other=1.0) * scale_log2
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, row, n_q, float("inf"))
    row_delta = rowsum_do_o(o, do, lengths, b, h, first, D, D, BLOCK_Q)
    row_delta = subtract_lse_gradient(row_delta, d_lse, lengths, b, h, row, n_q, row_lse2)
    store_rows(delta, lengths.cu_q, b, h, row, n_q, row_delta)
    row_stats = scratch.row_stats + at * 4 + local
    tl.store(row_stats, factor)
    tl.store(row_stats + BLOCK_Q, row_lse2)
    tl.store(row_stats + 2 * BLOCK_Q, row_delta)
    tl.store(row_stats + 3 * BLOCK_Q, tl.zeros((BLOCK_Q,), tl.float32))
    tl.store(scratch.dq_semaphore + at // BLOCK_Q, 0)


@triton.jit
def hopper_postprocess(
    grid, dq_accum, lse2, d_lse, k_mean, dq, lengths, tokens_q, scale, GROUPS: tl.constexpr,
    D: tl.constexpr, COLUMN_GROUPS: tl.constexpr,
):  # fmt: skip
    """Scale and round the sum of dQ of a block of queries.

    dQ is 0 for queries that attend to no key. If this holds for all queries of a block, its sum is
    uninitialised memory.
    """
    i, h, b = program_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = i * BLOCK_Q
    if first >= n_q:
        return
    row = first + tl.arange(0, BLOCK_Q)
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, row, n_q, float("inf"))[:, None]
    at = h.to(tl.int64) * tokens_q + stored_start_of(lengths.cu_q, lengths.n_q, b) + first
    total = tl.load(dq_accum + at * D + tl.arange(0, BLOCK_Q * D))
    total = from_register_order(total, BLOCK_Q, D, COLUMN_GROUPS)
    total = tl.where(row_lse2 != float("inf"), total, 0.0)
    if d_lse is not None and k_mean is not None:
        # A row of dS then sums to the gradient of the logsumexp and not to 0, so the mean that was
        # subtracted from K contributes to dQ.
        row_d_lse = load_rows(d_lse, lengths.cu_q, b, h, row, n_q, 0.0)[:, None]
        mean = load_mean(k_mean, b, h // GROUPS, 0, D, D)
        total += tl.where(row_lse2 < float("inf"), row_d_lse * mean, 0.0)
    store_tokens(dq, lengths.cu_q, b, h, first, n_q, total * scale, D)


def launch_backward(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor,
    do: Tensor,
    statistics: RowStatistics,
    d_lse: Rows | None,
    grads: Gradients,
) -> None:
    """Fill grads and statistics.delta.

    Args:
        problem: the call.
        operands: its operands.
        o, do: [sequences, heads, n_q, d], any strides.
        statistics: lse2 of the forward; delta is written.
        d_lse: the gradient of the logsumexp, or None.
        grads: [sequences, heads, tokens, d] each, any strides.
    """
    dq, dk, dv = grads
    q8, k8 = operands.get("qk_recompute", "q"), operands.get("qk_recompute", "k")
    k, mean = operands.get_unsmoothed("dq", "k")
    tokens = (operands.get("dk", "q"), k, operands.get("dp", "v"), operands.get("dp", "do"))
    q16, k16, v16, do16 = (x.ptr for x in tokens)
    kv_heads, heads, d = dk.shape[1], dq.shape[1], dq.shape[3]
    tokens_q, tokens_k = q8.scale.shape[1], k8.scale.shape[1] * _BLOCK_Q
    lengths, scale = problem.lengths, problem.scale
    has_dq_warps = d == 64
    interleaved = 4 if has_dq_warps or not problem.is_causal else 1  # measured: docs/speed.md
    config = Config(
        groups=problem.groups,
        interleaved_heads=math.gcd(interleaved, problem.sequences * kv_heads),
        has_dq_warps=has_dq_warps,
        is_copied=operands.stored,
    )

    dq_accum = dq.new_empty((heads * tokens_q * d // 32, 32), dtype=torch.float32)
    row_stats = dq.new_empty(heads * tokens_q * 4, dtype=torch.float32)
    dq_semaphore = dq.new_empty(heads * tokens_q // _BLOCK_Q, dtype=torch.int32)
    blocks = Grid(-(-problem.longest_q // _BLOCK_Q), heads, problem.sequences)
    launch(
        hopper_preprocess,
        blocks.programs,
        blocks,
        q8.scale,
        Strided.of(o),
        Strided.of(do),
        statistics.lse2,
        d_lse,
        statistics.delta,
        Scratch(row_stats, dq_semaphore),
        lengths,
        tokens_q,
        scale * LOG2_E,
        d,
        **LAUNCH,
    )
    tiles = Grid(-(-problem.longest_k // _TILE_K), kv_heads, problem.sequences)
    accum_layout = gl.NVMMASharedLayout(128, 32, 2)
    launch(
        hopper_backward,
        tiles.programs,
        tma_descriptor(q8.ptr.view(-1, d), _BLOCK_Q),
        tma_descriptor(k8.ptr.view(-1, d), _TILE_K),
        tma_descriptor(q16, _BLOCK_Q),
        tma_descriptor(k16, _TILE_K),
        tma_descriptor(v16, _TILE_K),
        tma_descriptor(do16, _BLOCK_Q),
        TensorDescriptor.from_tensor(row_stats, [ROW_STATS.value], STATS_LAYOUT.value),
        k8.scale,
        None if mean is None else mean.ptr,
        Strided.of(dk),
        Strided.of(dv),
        TensorDescriptor.from_tensor(dq_accum, [_BLOCK_Q * d // 32, 32], accum_layout),
        dq_semaphore,
        lengths._replace(n_q=0, n_k=0),  # passed on their own: a tuple would specialise them
        lengths.n_q,
        lengths.n_k,
        tiles.tiles,
        kv_heads,
        tokens_q,
        tokens_k,
        scale,
        config,
        num_warps=WARPS.value,
        **LAUNCH,
    )
    launch(
        hopper_postprocess,
        blocks.programs,
        blocks,
        dq_accum,
        statistics.lse2,
        d_lse,
        operands.k_mean,
        Strided.of(dq),
        lengths,
        tokens_q,
        scale,
        problem.groups,
        d,
        1 if has_dq_warps else 2,
        **LAUNCH,
    )
