"""The backward of heads with more than 128 channels: row statistics, then dV, dK and dQ."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sagesim_kernels.hopper.channel_parts import BLOCK, code_parts, token_parts
from sagesim_kernels.hopper.support import have_key_ends, tile_channels
from sagesim_kernels.hopper.tile_scheduler import MOST_QUERY_HEADS
from sagesim_kernels.hopper.wide_launch import Side, launch_wide
from sagesim_kernels.hopper.wide_structures import Config
from sagesim_kernels.hopper.wide_warps import ROW_STATS, STATS_LAYOUT
from sagesim_kernels.launching import launch, wait_for_earlier_kernels
from sagesim_kernels.operands import (
    LAUNCH,
    LOG2_E,
    Gradients,
    KernelProblem,
    KernelSizes,
    OperandCache,
    Rows,
    RowStatistics,
    Softcap,
    Splits,
    Strided,
    ds_row_sums,
    head_pointers,
    length_of,
    load_rows,
    load_shift,
    load_token_scales,
    program_coordinates,
    rowsum_do_o,
    store_rows,
    stored_start_of,
    stored_tokens,
    subtract_lse_gradient,
    upper_lse2,
)

_BLOCK: Final = BLOCK.value


@triton.jit
def row_statistics_kernel(
    grid, q8, o, do, lse2, d_lse, delta, row_stats, tokens, softcap, lengths, scale, sizes
):  # fmt: skip
    """Compute delta and the row statistics of a block of queries.

    Queries behind the last one of a sequence get statistics that make P 0.

    q8: `Operand` of qk_recompute. o, do: `Strided`. lse2, d_lse, delta: `Rows`. row_stats: see
    `ROW_STATS`, in padded storage. tokens: of a head in padded storage. softcap: `Softcap`. scale:
    the scale of the logits, times log2(e) or divided by the softcap.
    """
    wait_for_earlier_kernels()
    i, h, b = program_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = i * sizes.BLOCK_Q
    if first >= n_q:
        return
    local = tl.arange(0, sizes.BLOCK_Q)
    row = first + local
    at = h.to(tl.int64) * tokens + stored_start_of(lengths.cu_q, lengths.n_q, b) + first
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, row, n_q, float("inf"))
    row_delta = rowsum_do_o(o, do, lengths, b, h, first, sizes.DV, sizes.DV_PAD, sizes.BLOCK_Q)
    row_delta = subtract_lse_gradient(row_delta, d_lse, lengths, b, h, row, n_q, row_lse2)
    _q_base, q_scales = head_pointers(q8, lengths.cu_q, lengths.n_q, b, h)
    factor = load_token_scales(q8, q_scales, first, sizes.BLOCK_Q, n_q) * scale
    store_rows(delta, lengths.cu_q, b, h, row, n_q, row_delta)
    ptrs = row_stats + at * 4 + local
    tl.store(ptrs, factor)
    tl.store(ptrs + sizes.BLOCK_Q, upper_lse2(row_lse2))
    tl.store(ptrs + 2 * sizes.BLOCK_Q, row_delta)
    if softcap.base2 is not None:
        shift = load_shift(softcap, lengths.cu_q, b, h, row, n_q)
        # Of a query without keys, Q may be NaN.
        tl.store(ptrs + 3 * sizes.BLOCK_Q, tl.where(row_lse2 == float("inf"), 0.0, shift))


def launch_backward(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor,
    do: Tensor,
    statistics: RowStatistics,
    d_lse: Rows | None,
    grads: Gradients,
    *,
    shift: Tensor | None = None,
    p_sink: Tensor | None = None,
) -> None:
    """Fill grads and statistics.delta. The arguments are those of `backward.launch_backward`."""
    dq, dk, dv = grads
    softcap = Softcap.of(problem, shift)
    operands.quantize("qk_recompute")
    q8, k8 = operands.get("qk_recompute", "q"), operands.get("qk_recompute", "k")
    q16, k16 = operands.get("dk", "q"), operands.get("dq", "k")
    v16, do16 = operands.get("dp", "v"), operands.get("dp", "do")
    heads, d, d_v = dq.shape[1], dk.shape[3], dv.shape[3]
    tile_d, tile_dv = tile_channels(d), tile_channels(d_v)
    tokens_q = stored_tokens(problem.cu_q, problem.q)
    row_stats = dq.new_empty(heads * tokens_q * 4, dtype=torch.float32)
    blocks = problem.query_grid(_BLOCK)
    launch(
        row_statistics_kernel,
        blocks.programs,
        blocks,
        q8,
        Strided.of(o),
        Strided.of(do),
        statistics.lse2,
        d_lse,
        statistics.delta,
        row_stats,
        tokens_q,
        softcap,
        problem.lengths,
        problem.scale * (LOG2_E if softcap.inverse is None else softcap.inverse),
        KernelSizes.of(problem, _BLOCK),
        **LAUNCH,
    )
    of_queries = operands.are_packed(keys=False)
    of_keys = have_key_ends(problem, operands)
    q_codes, k_codes = code_parts(q8, tile_d), code_parts(k8, tile_d)
    do_numbers = token_parts(do16, tile_dv, has_ends=of_queries)
    v_numbers = token_parts(v16, tile_dv, has_ends=of_keys)
    q_right = token_parts(q16, tile_d, has_ends=of_queries)
    k_right = token_parts(k16, tile_d, has_ends=of_keys)
    stats = TensorDescriptor.from_tensor(row_stats, [ROW_STATS.value], STATS_LAYOUT.value)
    splits = Splits.of(problem, MOST_QUERY_HEADS)
    is_large = tile_d + tile_dv > 2 * 192

    def compute_of_keys(grad: Tensor, own: Side, streamed: Side, config: Config, scale: float):
        """Fill grad, dK or dV, as the sum of parts if several programs share a tile of keys."""
        parts = splits.parts(grad)
        lse2 = statistics.lse2
        launch_wide(
            problem,
            parts,
            lse2,
            own,
            streamed,
            k8.scale,
            splits.factor(scale),
            config,
            stats=stats,
            softcap=softcap,
        )
        splits.add(problem, parts, grad, scale)

    for_dv = Config(
        is_forward=False,
        owns_queries=False,
        has_dp=False,
        stages=3 if is_large else 4,
        right_stages=4,
        groups=splits.query_heads,
        splits=splits.programs,
        tile_d=tile_d,
        tile_dv=tile_dv,
        channels=d_v,
        copied=operands.copied,
        is_fixed=False,
    )
    compute_of_keys(dv, Side(k_codes), Side(q_codes, right=do_numbers), for_dv, 1.0)
    for_dk = for_dv._replace(has_dp=True, stages=2, right_stages=1 if is_large else 2, channels=d)
    compute_of_keys(
        dk,
        Side(k_codes, v_numbers),
        Side(q_codes, do_numbers, q_right),
        for_dk,
        problem.scale,
    )
    k_mean = operands.k_mean
    ds_sums = None if k_mean is None else ds_row_sums(problem, p_sink, statistics, d_lse)
    has_mean = ds_sums is not None or softcap.base2 is not None
    launch_wide(
        problem,
        dq,
        statistics.lse2,
        Side(q_codes, do_numbers),
        Side(k_codes, v_numbers, k_right),
        k8.scale,
        problem.scale,
        for_dk._replace(owns_queries=True, groups=problem.groups, splits=1),
        row_stats=row_stats,
        softcap=softcap,
        ds_sums=ds_sums,
        k_mean=None if k_mean is None or not has_mean else k_mean.ptr,
    )
