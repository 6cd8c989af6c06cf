"""The backward for Hopper with dV, dK and dQ in FP8: what comes before and after the one pass."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sagesim_kernels.hopper.backward_warps import STATS_LAYOUT
from sagesim_kernels.hopper.descriptors import multiprocessor_count, tma_descriptor
from sagesim_kernels.hopper.dq_parts import BLOCK_Q, TILE_K
from sagesim_kernels.hopper.fp8_backward_kernel import Fp8Config, hopper_fp8_backward
from sagesim_kernels.hopper.fp8_backward_warps import KEYS
from sagesim_kernels.hopper.fp8_preparation import prepare_rows
from sagesim_kernels.hopper.splits import add_splits, empty_splits
from sagesim_kernels.hopper.tile_scheduler import (
    choose_backward_heads,
    query_heads_per_program,
)
from sagesim_kernels.launch_plans import launch
from sagesim_kernels.operands import (
    CHANNELS_AT_ONCE,
    LAUNCH,
    DqSums,
    Gradients,
    Grid,
    KernelProblem,
    OperandCache,
    Rows,
    RowStatistics,
    Strided,
    ds_row_sums,
    finish_dq,
    padded,
    summed_channels,
)

_BLOCK_Q: Final = BLOCK_Q.value
_TILE_K: Final = TILE_K.value
_KEYS: Final = KEYS.value

BLOCKS: Final = {64: 2, 128: 1}
"""Blocks of queries of a step, by the channels of a tile: as many as the registers suffice for."""


def launch_backward(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor,
    do: Tensor,
    statistics: RowStatistics,
    d_lse: Rows | None,
    grads: Gradients,
    *,
    row_max: Tensor,
    p_sink: Tensor | None = None,
) -> None:
    """Fill grads and statistics.delta.

    Args:
        problem: the call.
        operands: its operands.
        o, do: [sequences, heads, n_q, d], any strides.
        statistics: lse2 of the forward; delta is written.
        d_lse: the gradient of the logsumexp, or None.
        grads: [sequences, heads, tokens, d] each, any strides.
        row_max: see `ForwardResult.row_max`.
        p_sink: the share of the sink in each row's sum, [sequences, heads, n_q]; None without
            sinks.
    """
    dq, dk, dv = grads
    operands.quantize("qk_recompute", "dq")
    q8, k8 = operands.get("qk_recompute", "q"), operands.get("qk_recompute", "k")
    v16, do16 = operands.get("dp", "v"), operands.get("dp", "do")
    k_t = operands.get("dq", "k")
    kv_heads, d, d_v = dk.shape[1], dk.shape[3], dv.shape[3]
    channels = padded(d)
    groups = query_heads_per_program(kv_heads, problem.groups)
    splits = problem.groups // groups
    lengths, scale = problem.lengths, problem.scale
    blocks = BLOCKS[channels]
    part = problem.spec.block_q // (blocks * _BLOCK_Q)
    config = Fp8Config(groups, splits, d, d_v, blocks, part, operands.stored)
    dq_sums = DqSums.by_tma(problem, channels)
    tokens_q, tokens_k = dq_sums.tokens, k8.scale.shape[1]
    rows = prepare_rows(
        problem, operands, o, do, statistics, Rows.of(row_max), d_lse, dq_sums, _TILE_K
    )
    q_t, do_t = rows.q, rows.do
    dk_parts, dv_parts = dk, dv
    if splits > 1:
        dk_parts, dv_parts = empty_splits(dk, splits), empty_splits(dv, splits)
    tiles = Grid(-(-problem.longest_k // _TILE_K), kv_heads * splits, problem.sequences)
    heads_per_group = choose_backward_heads(
        problem.longest_q,
        problem.longest_k,
        problem.longest_offset,
        _TILE_K,
        tiles.heads * tiles.sequences,
        groups,
        multiprocessor_count(),
        lowest=problem.longest_lowest,
    )
    has_parts = groups > 1 or problem.longest_q > problem.spec.block_q
    programs = tiles.programs[0] if has_parts else 0
    sums = dq.new_empty(programs * 2 * _TILE_K * channels, dtype=torch.float32)
    sums_of_dq = dq_sums.sums.view(-1, 32)
    sums_layout = gl.NVMMASharedLayout(128, 32, 2)
    is_whole = summed_channels(d, channels) == channels
    at_once = channels // 2 if is_whole else CHANNELS_AT_ONCE.value
    launch(
        hopper_fp8_backward,
        tiles.programs,
        tma_descriptor(q8.ptr.view(-1, q8.stride_n), _BLOCK_Q, channels),
        tma_descriptor(k8.ptr.view(-1, k8.stride_n), _KEYS, channels),
        tma_descriptor(v16.ptr, _KEYS, channels),
        tma_descriptor(do16.ptr, _BLOCK_Q, channels),
        _columns(q_t, channels, _BLOCK_Q),
        _columns(k_t, channels // 2, _KEYS),
        _columns(do_t, channels, _BLOCK_Q),
        TensorDescriptor.from_tensor(rows.statistics, [_BLOCK_Q], STATS_LAYOUT.value),
        k8.scale,
        q_t.scale,
        k_t.scale,
        do_t.scale,
        Strided.of(dk_parts),
        Strided.of(dv_parts),
        sums,
        TensorDescriptor.from_tensor(sums_of_dq, [_BLOCK_Q * at_once // 32, 32], sums_layout),
        # passed on their own: a tuple would specialise them
        lengths._replace(n_q=0, n_k=0, left=None, right=None, key_counts=None, key_runs=None),
        lengths.n_q,
        lengths.n_k,
        lengths.left,
        lengths.right,
        tiles.tiles,
        kv_heads,
        heads_per_group,
        tokens_q,
        tokens_k,
        q_t.scale.shape[1],
        scale if splits == 1 else 1.0,
        config,
        num_warps=4,
        **LAUNCH,
    )
    if splits > 1:
        add_splits(problem, dk_parts, dk, scale)
        add_splits(problem, dv_parts, dv, 1.0)
    row_sums = ds_row_sums(problem, p_sink, statistics, d_lse)
    finish_dq(problem, dq_sums, statistics.lse2, row_sums, operands.subtracted, dq)


def _columns(x, channels: int, tokens: int) -> TensorDescriptor:
    """Return a descriptor of codes [heads, channels, tokens] that are contiguous along tokens."""
    rows = x.ptr.view(-1, x.CHANNELS.value, x.stride_d).view(torch.float8_e4m3fn)
    return tma_descriptor(rows, channels, tokens)
