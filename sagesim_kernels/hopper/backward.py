"""The backward for Hopper: bounds on keys, a preprocess kernel, one pass, and dQ from its sums."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sagesim_kernels.hopper.backward_kernel import Config, hopper_backward
from sagesim_kernels.hopper.backward_warps import ROW_STATS, STATS_LAYOUT, WARPS
from sagesim_kernels.hopper.descriptors import multiprocessor_count, tma_descriptor
from sagesim_kernels.hopper.dq_parts import BLOCK_Q, TILE_K
from sagesim_kernels.hopper.splits import add_splits, empty_splits
from sagesim_kernels.hopper.tile_scheduler import (
    choose_backward_heads,
    query_heads_per_program,
)
from sagesim_kernels.launch_plans import launch
from sagesim_kernels.operands import (
    LAUNCH,
    LOG2_E,
    DqSums,
    Gradients,
    Grid,
    Growths,
    KernelProblem,
    KernelSizes,
    OperandCache,
    Rows,
    RowStatistics,
    Strided,
    compute_key_bounds,
    ds_row_sums,
    finish_dq,
    head_pointers,
    inverse_of,
    length_of,
    load_rows,
    load_token_scales,
    padded,
    program_coordinates,
    row_units,
    rowsum_do_o,
    store_rows,
    stored_start_of,
    subtract_lse_gradient,
)

_BLOCK_Q: Final = BLOCK_Q.value
_TILE_K: Final = TILE_K.value


# Arguments of this kernel are not tuples of tuples: in the first tuple of a tuple, Triton 3.6
# loses integers that it specialised to the constant 1.
@triton.jit
def hopper_preprocess(
    grid, q8, do16, o, do, bounds, lse2, d_lse, delta, row_stats, dq_sums, lengths, scale_log2,
    growths, sizes,
):  # fmt: skip
    """Compute delta, units and row statistics of a block of queries, and set its sum of dQ to 0.

    Queries behind the last one of a sequence get statistics that make P 0.

    q8, do16: `Operand` of qk_recompute and dp. o, do: `Strided`. bounds: `KeyBounds`. lse2, d_lse,
    delta: `Rows`. row_stats: see `ROW_STATS`, in padded storage. dq_sums: `DqSums`. growths:
    `Growths`.
    """
    i, h, b = program_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = i * sizes.BLOCK_Q
    if first >= n_q:
        return
    local = tl.arange(0, sizes.BLOCK_Q)
    row = first + local
    at = h.to(tl.int64) * dq_sums.tokens + stored_start_of(lengths.cu_q, lengths.n_q, b) + first
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, row, n_q, float("inf"))
    row_delta = rowsum_do_o(o, do, lengths, b, h, first, sizes.DV, sizes.DV_PAD, sizes.BLOCK_Q)
    row_delta = subtract_lse_gradient(row_delta, d_lse, lengths, b, h, row, n_q, row_lse2)
    unit = row_units(
        q8, do16, bounds, None, lengths, b, h, first, row_lse2, row_delta, scale_log2, growths,
        sizes,
    )  # fmt: skip
    _q_base, q_scales = head_pointers(q8, lengths.cu_q, lengths.n_q, b, h)
    factor = load_token_scales(q8, q_scales, first, sizes.BLOCK_Q, n_q) * scale_log2
    # All stores follow all loads, which could not be moved up past a store.
    whole = tl.arange(0, sizes.BLOCK_Q * sizes.D_PAD)
    tl.store(dq_sums.sums + at * sizes.D_PAD + whole, tl.zeros_like(whole))
    tl.store(dq_sums.unit + at + local, unit)
    store_rows(delta, lengths.cu_q, b, h, row, n_q, row_delta)
    ptrs = row_stats + at * 4 + local
    tl.store(ptrs, factor)
    tl.store(ptrs + sizes.BLOCK_Q, row_lse2)
    tl.store(ptrs + 2 * sizes.BLOCK_Q, row_delta)
    tl.store(ptrs + 3 * sizes.BLOCK_Q, inverse_of(unit))


def launch_backward(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor,
    do: Tensor,
    statistics: RowStatistics,
    d_lse: Rows | None,
    grads: Gradients,
    *,
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
        p_sink: the share of the sink in each row's sum, [sequences, heads, n_q]; None without
            sinks.
    """
    dq, dk, dv = grads
    q8, k8 = operands.get("qk_recompute", "q"), operands.get("qk_recompute", "k")
    q16, v16 = operands.get("dk", "q"), operands.get("dp", "v")
    do16 = operands.get("dp", "do")
    k16, mean = operands.get_unsmoothed("dq", "k")
    kv_heads, heads, d, d_v = dk.shape[1], dq.shape[1], dk.shape[3], dv.shape[3]
    channels = padded(d)
    groups = query_heads_per_program(kv_heads, problem.groups)
    splits = problem.groups // groups
    lengths, scale = problem.lengths, problem.scale
    has_dq_warps = channels == 64
    config = Config(
        groups=groups,
        splits=splits,
        d=d,
        d_v=d_v,
        has_dq_warps=has_dq_warps,
        is_copied=operands.stored,
    )
    dq_sums = DqSums.by_tma(problem, channels)
    tokens_q, tokens_k = dq_sums.tokens, k8.scale.shape[1] * _BLOCK_Q
    row_stats = dq.new_empty(heads * tokens_q * 4, dtype=torch.float32)
    bounds = compute_key_bounds(
        problem, {"k": k8, "v": v16, "k_right": k16}, tile=_TILE_K, to_subtract=mean
    )
    blocks = Grid(-(-problem.longest_q // _BLOCK_Q), heads, problem.sequences)
    launch(
        hopper_preprocess,
        blocks.programs,
        blocks,
        q8,
        do16,
        Strided.of(o),
        Strided.of(do),
        bounds,
        statistics.lse2,
        d_lse,
        statistics.delta,
        row_stats,
        dq_sums,
        lengths,
        scale * LOG2_E,
        Growths.of(problem.spec),
        KernelSizes.of(problem, _BLOCK_Q),
        **LAUNCH,
    )
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
    sums = dq_sums.sums.view(-1, 32)
    sums_layout = gl.NVMMASharedLayout(128, 32, 2)
    launch(
        hopper_backward,
        tiles.programs,
        tma_descriptor(q8.ptr.view(-1, q8.stride_n), _BLOCK_Q, channels),
        tma_descriptor(k8.ptr.view(-1, k8.stride_n), _TILE_K, channels),
        tma_descriptor(q16.ptr, _BLOCK_Q, channels),
        tma_descriptor(k16.ptr, _TILE_K, channels),
        tma_descriptor(v16.ptr, _TILE_K, channels),
        tma_descriptor(do16.ptr, _BLOCK_Q, channels),
        TensorDescriptor.from_tensor(row_stats, [ROW_STATS.value], STATS_LAYOUT.value),
        k8.scale,
        None if mean is None else mean.ptr,
        Strided.of(dk_parts),
        Strided.of(dv_parts),
        TensorDescriptor.from_tensor(sums, [_BLOCK_Q * channels // 32, 32], sums_layout),
        dq_sums.unit,
        # passed on their own: a tuple would specialise them
        lengths._replace(n_q=0, n_k=0, left=None, right=None, key_counts=None),
        lengths.n_q,
        lengths.n_k,
        lengths.left,
        lengths.right,
        tiles.tiles,
        kv_heads,
        heads_per_group,
        tokens_q,
        tokens_k,
        scale if splits == 1 else 1.0,
        config,
        num_warps=WARPS.value,
        **LAUNCH,
    )
    if splits > 1:
        add_splits(problem, dk_parts, dk, scale)
        add_splits(problem, dv_parts, dv, 1.0)
    ds_sums = ds_row_sums(
        problem, p_sink, statistics.delta.ptr, None if d_lse is None else d_lse.ptr
    )
    rows = None if ds_sums is None else Rows.of(ds_sums)
    finish_dq(problem, dq_sums, statistics.lse2, rows, operands.subtracted, dq)
