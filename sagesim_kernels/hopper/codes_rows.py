"""The numbers of each block of queries that the backward in codes loads by TMA."""

# Pyright takes the annotations of Triton's functions literally:
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from sagesim_kernels.hopper.preparation import start_rows
from sagesim_kernels.operands import (
    head_pointers,
    length_of,
    load_channel_scales,
    load_rows,
    load_token_scales,
    program_coordinates,
    stored_start_of,
)


@triton.jit
def start_rows_kernel(
    grid, q, q_right, do_right, lse2, delta, dq_sums, row_stats, channel_scales, lengths,
    scale_log2, sizes, KEYS_PER_SCALE: tl.constexpr,
):  # fmt: skip
    """Store row statistics and channel scales of a block of queries, and clear its sums of dQ.

    Queries from the last one on have an infinite lse2, so that their P is 0.

    q: `Operand` of qk_recompute. q_right, do_right: right operands of dK and dV. row_stats: see
    `ROW_STATS`. channel_scales: float32 [heads * blocks, 2, D_PAD], the scales of do_right and
    q_right. KEYS_PER_SCALE: keys that share a scale of K in qk_recompute.
    """
    block, h, b = program_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = block * sizes.BLOCK_Q
    if first >= n_q:
        return
    queries = first + tl.arange(0, sizes.BLOCK_Q)
    start = stored_start_of(lengths.cu_q, lengths.n_q, b) + first
    at = h.to(tl.int64) * dq_sums.tokens + start
    _, q_scales = head_pointers(q, lengths.cu_q, lengths.n_q, b, h)
    factor = load_token_scales(q, q_scales, first, sizes.BLOCK_Q, n_q) * scale_log2
    if KEYS_PER_SCALE == 1:
        factor *= 1024.0  # see `operands.apply_k_scale`
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, queries, n_q, float("inf"))
    row_delta = load_rows(delta, lengths.cu_q, b, h, queries, n_q, 0.0)
    unit = tl.load(dq_sums.unit + at + tl.arange(0, sizes.BLOCK_Q))
    _, do_scales = head_pointers(do_right, lengths.cu_q, lengths.n_q, b, h)
    _, qr_scales = head_pointers(q_right, lengths.cu_q, lengths.n_q, b, h)
    of_do = load_channel_scales(do_right, do_scales, first, sizes.DV, sizes.DV_PAD)
    of_q = load_channel_scales(q_right, qr_scales, first, sizes.D, sizes.D_PAD)
    column = tl.arange(0, sizes.D_PAD)
    scales = channel_scales + at // sizes.BLOCK_Q * (2 * sizes.D_PAD)
    tl.store(scales + column, tl.broadcast_to(of_do, (sizes.DV_PAD,)))
    tl.store(scales + sizes.D_PAD + column, tl.broadcast_to(of_q, (sizes.D_PAD,)))
    tl.store(row_stats + at * 4 + tl.arange(0, sizes.BLOCK_Q), factor)
    start_rows(dq_sums, row_stats, at, unit, row_lse2, row_delta, sizes)
