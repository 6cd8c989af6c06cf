"""The numbers of each query that the backward kernel reads, together in padded storage."""

from __future__ import annotations

import triton
import triton.language as tl

from sagesim_kernels.dependent_launch import wait_for_earlier_kernels
from sagesim_kernels.operands import (
    head_pointers,
    inverse_units,
    length_of,
    load_rows,
    load_token_scales,
    program_coordinates,
    stored_start_of,
    upper_lse2,
)


@triton.jit
def row_stats_kernel(grid, q, lse2, delta, dq_sums, out, lengths, scale_log2, sizes):
    """Store the factor of the logits, lse2, delta and the inverse unit of a block of queries.

    q: `Operand` of qk_recompute. out: float32 [heads, 4, tokens] in padded storage.
    Queries from the last one on have an infinite lse2, so that their P is 0.
    """
    wait_for_earlier_kernels()
    block, h, b = program_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = block * sizes.BLOCK_Q
    if first >= n_q:
        return
    local = tl.arange(0, sizes.BLOCK_Q)
    queries = first + local
    start = stored_start_of(lengths.cu_q, lengths.n_q, b) + first
    row = h.to(tl.int64) * dq_sums.tokens + start
    each = tl.cast(dq_sums.tokens, tl.int64)  # three times as many may exceed 32 bits
    ptrs = out + h.to(tl.int64) * 4 * each + start + local
    _q_base, q_scales = head_pointers(q, lengths.cu_q, lengths.n_q, b, h)
    factor = load_token_scales(q, q_scales, first, sizes.BLOCK_Q, n_q) * scale_log2
    tl.store(ptrs, factor)
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, queries, n_q, float("inf"))
    tl.store(ptrs + each, upper_lse2(row_lse2))
    row_delta = load_rows(delta, lengths.cu_q, b, h, queries, n_q, 0.0)
    tl.store(ptrs + 2 * each, row_delta)
    tl.store(ptrs + 3 * each, inverse_units(dq_sums, row, sizes.BLOCK_Q))
