"""The numbers of each block of queries for the backward in FP8, with scales from bounds on rows.

docs/numerics.md, "Scales from bounds", defines the scales. The kernel multiplies neither P nor dS
by an inverse scale: that of P is part of the exponential's argument, and dS has it from P.
"""

# Pyright takes the annotations of Triton's functions literally:
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim.spec import Delta
from sagesim_kernels.hopper.dq_parts import BLOCK_Q, TILE_K
from sagesim_kernels.hopper.p_rows import launch_p_rows
from sagesim_kernels.launching import launch, wait_for_earlier_kernels
from sagesim_kernels.operands import (
    LAUNCH,
    LOG2_E,
    DqSums,
    Growths,
    KernelProblem,
    KernelSizes,
    OperandCache,
    Rows,
    RowScales,
    RowStatistics,
    compute_delta_from_o,
    compute_key_bounds,
    inverse_of,
    length_of,
    load_rows,
    memory_of_p_sums,
    padded,
    program_coordinates,
    row_units,
    start_sums,
    stored_start_of,
    upper_lse2,
)
from sagesim_kernels.preparation import compute_row_scales, logit_factors, store_channel_scales

_LARGEST = tl.constexpr(2.0**127)
"""The largest power of two in float32."""

_CHANNELS_OF_A_WARP: Final = 16
"""Channels of dO for each warp of a program."""

_REGISTERS: Final = 64
"""At most so many for a thread. With more, fewer programs run on a multiprocessor at a time."""


@triton.jit
def _row_scales(x, scales, cu, b, h, queries, n_q):
    """Return one of the numbers of a `RowScales` of these queries; 0 from n_q on."""
    return load_rows(Rows(x, scales.stride_b, scales.stride_h), cu, b, h, queries, n_q, 0.0)


@triton.jit
def start_fp8_rows_kernel(
    grid, q, do, q_right, do_right, bounds, lse2, delta, p_sums, ds_bound, scales, dq_sums,
    row_stats, ratios, channel_scales, lengths, scale_log2, growths, sizes,
    KEYS_PER_SCALE: tl.constexpr,
):  # fmt: skip
    """Store units, row statistics and channel scales of a block of queries; clear its sums of dQ.

    Queries from the last one on have an infinite lse2, so that their P is 0.

    q, do: `Operand` of qk_recompute and dp. q_right, do_right: right operands of dK and dV. bounds,
    p_sums, growths, ds_bound: see `row_units`. scales: `RowScales`. row_stats, ratios: as the
    kernel loads them, see `fp8_warps`. channel_scales: see `store_channel_scales`. KEYS_PER_SCALE:
    see `logit_factors`.
    """
    wait_for_earlier_kernels()
    block, h, b = program_coordinates(grid)
    cu = lengths.cu_q
    n_q = length_of(cu, lengths.n_q, b)
    first = block * sizes.BLOCK_Q
    if first >= n_q:
        return
    local = tl.arange(0, sizes.BLOCK_Q)
    queries = first + local
    at = h.to(tl.int64) * dq_sums.tokens + stored_start_of(cu, lengths.n_q, b) + first
    factor = logit_factors(q, lengths, b, h, first, n_q, scale_log2, KEYS_PER_SCALE, sizes)
    row_lse2 = load_rows(lse2, cu, b, h, queries, n_q, float("inf"))
    row_delta = load_rows(delta, cu, b, h, queries, n_q, 0.0)
    unit = row_units(
        q, do, bounds, p_sums, lengths, b, h, first, row_lse2, row_delta, tl.abs(scale_log2),
        growths, sizes, ds_bound,
    )  # fmt: skip
    of_p = _row_scales(scales.p_inverse, scales, cu, b, h, queries, n_q)
    of_ds = _row_scales(scales.dk_inverse, scales, cu, b, h, queries, n_q)
    of_dq = _row_scales(scales.dq_scale, scales, cu, b, h, queries, n_q)
    # Where P is so small that its codes are 0, so are those of dS. An infinite ratio times a P that
    # is masked would be NaN.
    ratio = tl.where(of_p > 0.0, of_ds / tl.where(of_p > 0.0, of_p, 1.0), 0.0)
    ratio = tl.minimum(ratio, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    store_channel_scales(channel_scales, do_right, q_right, lengths, b, h, first, at, sizes)
    stats = row_stats + at * 4 + local
    tl.store(stats, factor)
    tl.store(stats + sizes.BLOCK_Q, tl.log2(of_p) - upper_lse2(row_lse2))
    tl.store(stats + 2 * sizes.BLOCK_Q, -row_delta * ratio)
    tl.store(stats + 3 * sizes.BLOCK_Q, of_dq * inverse_of(unit))
    tl.store(ratios + at + local, ratio)
    start_sums(dq_sums, at, unit, sizes)


def prepare_fp8_backward(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor | None,
    do: Tensor,
    statistics: RowStatistics,
    d_lse: Rows | None,
    dq_sums: DqSums,
    row_stats: Tensor,
    ratios: Tensor,
    channel_scales: Tensor,
) -> None:
    """Fill statistics.delta, dq_sums and the last three tensors; round dO of dV and Q of dK.

    See `start_fp8_rows_kernel`. There is no softcap.

    Args:
        o: the output of the forward; None if delta comes from P.
        do: the gradient of o, any strides.
        statistics: lse2 of the forward, and memory for delta.
        d_lse: the gradient of the logsumexp, or None.
    """
    spec = problem.spec
    if spec.delta is Delta.FROM_O:
        assert o is not None
        compute_delta_from_o(problem, o, do, statistics, d_lse)
    p_bound = Rows.of(torch.empty_like(statistics.lse2.ptr))
    p_sums = memory_of_p_sums(problem)
    launch_p_rows(problem, operands, statistics, d_lse, p_sums, p_bound)
    scales, ds_bound = compute_row_scales(problem, operands, p_bound, statistics)
    _start_rows(
        problem, operands, statistics, p_sums, ds_bound, scales, dq_sums, row_stats, ratios,
        channel_scales,
    )  # fmt: skip


def _start_rows(
    problem: KernelProblem,
    operands: OperandCache,
    statistics: RowStatistics,
    p_sums: Rows | None,
    ds_bound: Rows | None,
    scales: RowScales,
    dq_sums: DqSums,
    row_stats: Tensor,
    ratios: Tensor,
    channel_scales: Tensor,
) -> None:
    q, k = operands.get("qk_recompute", "q"), operands.get("qk_recompute", "k")
    do, v = operands.get("dp", "do"), operands.get("dp", "v")
    named = {"q": q, "k": k, "do": do, "v": v, "k_right": operands.get("dq", "k")}
    block = BLOCK_Q.value
    bounds = compute_key_bounds(problem, named, tile=TILE_K.value)
    grid = problem.query_grid(block)
    launch(
        start_fp8_rows_kernel,
        grid.programs,
        grid,
        q,
        do,
        operands.get("dk", "q"),
        operands.get("dv", "do"),
        bounds,
        *statistics,
        p_sums,
        ds_bound,
        scales,
        dq_sums,
        row_stats,
        ratios,
        channel_scales,
        problem.lengths,
        problem.scale * LOG2_E,
        Growths.of(problem.spec),
        KernelSizes.of(problem, block, block_q=block),
        k.TOKENS,
        num_warps=padded(problem.v.shape[3]) // _CHANNELS_OF_A_WARP,
        maxnreg=_REGISTERS,
        **LAUNCH,
    )
