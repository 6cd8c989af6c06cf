"""The backward for Hopper in which P and dS are codes: preparation, one pass, and dQ from sums."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sagesim.spec import Granularity
from sagesim_kernels.hopper.backward_loads import ROW_STATS, STATS_LAYOUT
from sagesim_kernels.hopper.backward_stores import WARPS
from sagesim_kernels.hopper.codes_kernel import CodesConfig, hopper_codes_backward
from sagesim_kernels.hopper.codes_maps import BLOCK_K
from sagesim_kernels.hopper.codes_operands import quantize
from sagesim_kernels.hopper.descriptors import (
    right_descriptor,
    sums_descriptor,
    tma_descriptor,
    token_descriptor,
)
from sagesim_kernels.hopper.dq_parts import BLOCK_Q, TILE_K
from sagesim_kernels.hopper.fp8_rows import prepare_fp8_backward
from sagesim_kernels.hopper.p_rows import launch_p_rows
from sagesim_kernels.hopper.support import have_key_ends
from sagesim_kernels.hopper.tile_scheduler import MOST_QUERY_HEADS, order_of_keys
from sagesim_kernels.launching import launch
from sagesim_kernels.operands import (
    FP8,
    LAUNCH,
    DqSums,
    Gradients,
    KernelProblem,
    OperandCache,
    Rows,
    RowStatistics,
    Splits,
    Strided,
    ds_row_sums,
    finish_dq,
    format_of,
    order_tiles,
    padded,
    stored_tokens,
)
from sagesim_kernels.preparation import compute_query_rows, prepare_backward

_BLOCK_Q: Final = BLOCK_Q.value
_BLOCK_K: Final = BLOCK_K.value
_TILE_K: Final = TILE_K.value


def launch_backward(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor | None,
    do: Tensor,
    statistics: RowStatistics,
    d_lse: Rows | None,
    grads: Gradients,
    *,
    p_sink: Tensor | None = None,
) -> None:
    """Fill grads, any strides, and statistics.delta; see `portable.launch_backward`.

    operands: those of the backward's products, with `k_in_pairs` if these are in FP8.
    """
    is_fp8 = problem.spec.dv.precision in FP8
    if is_fp8:
        operands.quantize("qk_recompute", "dv", "dq", "dk")
    else:
        operands.quantize("qk_recompute", "dv", "dq", "dk", by=quantize)
    dq, dk, dv = grads
    kv_heads, d, d_v = dk.shape[1], dk.shape[3], dv.shape[3]
    channels = padded(d)
    dq_sums = DqSums.by_tma(problem, channels)
    blocks = dq.shape[1] * dq_sums.tokens // _BLOCK_Q
    row_stats = dq.new_empty(blocks * ROW_STATS.value, dtype=torch.float32)
    channel_scales = dq.new_empty(blocks * 2 * channels, dtype=torch.float32)
    prepared = (problem, operands, o, do, statistics, d_lse, dq_sums)
    ratios = None
    if is_fp8:
        ratios = dq.new_empty(blocks * _BLOCK_Q, dtype=torch.float32)
        prepare_fp8_backward(*prepared, row_stats, ratios, channel_scales)
    else:
        fill_units = partial(
            compute_query_rows,
            tile=_TILE_K,
            row_stats=row_stats,
            q_right=operands.get("dk", "q"),
            do_right=operands.get("dv", "do"),
            channel_scales=channel_scales,
        )
        sum_rows = partial(launch_p_rows, problem, operands, statistics, d_lse)
        prepare_backward(*prepared, sum_rows, fill_units=fill_units)
    q_right, do_right = operands.get("dk", "q"), operands.get("dv", "do")
    q8, k8 = operands.get("qk_recompute", "q"), operands.get("qk_recompute", "k")
    do16, v16 = operands.get("dp", "do"), operands.get("dp", "v")
    k_right = operands.get("dq", "k")
    lengths, scale = problem.lengths, problem.scale
    splits = Splits.of(problem, MOST_QUERY_HEADS)
    tokens_k = stored_tokens(problem.cu_k, problem.k)
    dk_parts, dv_parts = splits.parts(dk), splits.parts(dv)
    tiles = problem.key_grid(_TILE_K, dk_parts.shape[1])
    packed_tiles = order_tiles(problem, tiles, _TILE_K, queries=False)
    heads_per_group = order_of_keys(problem, tiles, _TILE_K, splits.query_heads, channels)
    config = CodesConfig(
        groups=splits.query_heads,
        splits=splits.programs,
        d=d,
        d_v=d_v,
        q_channels=q_right.CHANNELS.value,
        do_channels=do_right.CHANNELS.value,
        has_dq_warps=channels == 64,
        copied=operands.copied,
        keys_per_scale=k8.TOKENS.value,
        by_channel=q_right.BY_CHANNEL.value or do_right.BY_CHANNEL.value,
        per_tile=problem.spec.dk.lhs is Granularity.PerTile,
        format=format_of(problem.spec.dv.precision).value,
    )
    launch(
        hopper_codes_backward,
        tiles.programs,
        tma_descriptor(q8.ptr.view(-1, q8.stride_n), _BLOCK_Q, channels),
        tma_descriptor(k8.ptr.view(-1, k8.stride_n), _TILE_K, channels),
        token_descriptor(v16.ptr, _TILE_K, channels, has_ends=have_key_ends(problem, operands)),
        token_descriptor(do16.ptr, _BLOCK_Q, channels, has_ends=operands.are_packed(keys=False)),
        right_descriptor(q_right, _BLOCK_Q, channels),
        right_descriptor(do_right, _BLOCK_Q, channels),
        right_descriptor(k_right, _BLOCK_K, channels),
        TensorDescriptor.from_tensor(row_stats, [ROW_STATS.value], STATS_LAYOUT.value),
        TensorDescriptor.from_tensor(channel_scales, [2 * channels], STATS_LAYOUT.value),
        None
        if ratios is None
        else TensorDescriptor.from_tensor(ratios, [_BLOCK_Q], STATS_LAYOUT.value),
        k8,
        k_right,
        Strided.of(dk_parts),
        Strided.of(dv_parts),
        sums_descriptor(dq_sums, d, channels),
        lengths._replace(n_q=0, n_k=0, left=None, right=None, key_counts=None, key_runs=None),
        # Not n_q and n_k of `lengths`: the kernel would be compiled for whether 16 divides them.
        problem.q.shape[2],
        problem.k.shape[2],
        lengths.left,
        lengths.right,
        tiles.tiles,
        kv_heads,
        packed_tiles,
        heads_per_group,
        dq_sums.tokens,
        tokens_k,
        splits.factor(scale),
        config,
        num_warps=WARPS.value,
        **LAUNCH,
    )
    splits.add(problem, dk_parts, dk, scale)
    splits.add(problem, dv_parts, dv, 1.0)
    ds_sums = ds_row_sums(problem, p_sink, statistics, d_lse)
    finish_dq(problem, dq_sums, statistics.lse2, ds_sums, operands.subtracted, dq)
