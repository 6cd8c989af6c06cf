"""The numbers of each query that a step of a backward loads, together in padded storage."""

# Pyright takes the annotations of Triton's functions literally:
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.launching import launch, wait_for_earlier_kernels
from sagesim_kernels.operands import (
    LAUNCH,
    LOG2_E,
    DqSums,
    Growths,
    KernelProblem,
    KernelSizes,
    Means,
    Operand,
    Rows,
    RowStatistics,
    compute_key_bounds,
    head_pointers,
    inverse_of,
    length_of,
    load_channel_scales,
    load_rows,
    load_token_scales,
    padded,
    program_coordinates,
    row_units,
    start_sums,
    stored_start_of,
    upper_lse2,
)

_CHANNELS_OF_A_WARP: Final = 16
"""Channels of dO for each warp of a program."""

_REGISTERS: Final = 64
"""At most so many for a thread. With more, fewer programs run on a multiprocessor at a time."""


@triton.jit
def start_rows(dq_sums, row_stats, at, unit, row_lse2, row_delta, sizes, deltas=None):
    """Clear the sums of dQ of a block of queries, and store its unit and row statistics.

    row_stats: float32 [blocks of all heads, 4, BLOCK_Q], in padded storage: the factor of the
    logits, which the caller stores, -lse2, delta, and 1 / unit of dQ. dq_sums: `DqSums`, with or
    without memory. at: the first query in padded storage, over all heads. deltas: int32 [queries of
    all heads, 4], in padded storage, for `delta_words`; or None.
    """
    if dq_sums.sums is not None:
        start_sums(dq_sums, at, unit, sizes)
    local = tl.arange(0, sizes.BLOCK_Q)
    store_row_statistics(row_stats + at * 4 + local, unit, row_lse2, row_delta, sizes.BLOCK_Q)
    if deltas is not None:
        store_delta_words(deltas + (at + local) * 4, row_delta)


@triton.jit
def store_row_statistics(stats, unit, row_lse2, row_delta, BLOCK_Q: tl.constexpr):
    """Store the row statistics of a block of queries but the first; see `start_rows`.

    stats: pointers to the first one of each query.
    """
    tl.store(stats + BLOCK_Q, -upper_lse2(row_lse2))
    tl.store(stats + 2 * BLOCK_Q, row_delta)
    tl.store(stats + 3 * BLOCK_Q, inverse_of(unit))


@triton.jit
def store_delta_words(words, delta):
    """Store the `delta_words` of queries. words: pointers to the first one of each query.

    A query has four words, because TMA needs rows of 16 bytes. The last two are 0.
    """
    first, second = delta_words(delta)
    tl.store(words, first)
    tl.store(words + 1, second)
    tl.store(words + 2, second * 0)
    tl.store(words + 3, second * 0)


@triton.jit
def delta_words(delta):
    """Return two integers whose halves, taken as bfloat16, sum to -delta, up to 2^-133.

    A finite number has three finite parts, of 8 bits each. Infinity and NaN are one part.
    """
    bits = (-delta).to(tl.int32, bitcast=True)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    number = tl.where(is_finite, bits, 0)
    high = number & -65536
    rest = _difference(number, high)
    middle = rest & -65536
    low = _difference(rest, middle)
    # The upper half of a NaN may be that of infinity.
    high = tl.where(is_finite, high, tl.where(delta == delta, bits, 0x7FC00000))
    return ((high >> 16) & 65535) | middle, (low >> 16) & 65535


@triton.jit
def _difference(x, y):
    """Return the bits of x - y for the bits of two float32 numbers."""
    difference = x.to(tl.float32, bitcast=True) - y.to(tl.float32, bitcast=True)
    return difference.to(tl.int32, bitcast=True)


@triton.jit
def logit_factors(q, lengths, b, h, first, n_q, scale_log2, KEYS_PER_SCALE: tl.constexpr, sizes):
    """Return the factor of the logits of each query, without the scales of K.

    q: `Operand` of qk_recompute. KEYS_PER_SCALE: keys that share a scale of K; None in 16 bit.
    """
    _, scales = head_pointers(q, lengths.cu_q, lengths.n_q, b, h)
    factor = load_token_scales(q, scales, first, sizes.BLOCK_Q, n_q) * scale_log2
    if KEYS_PER_SCALE == 1:
        factor *= 1024.0  # see `operands.apply_k_scale`
    return factor


@triton.jit
def store_channel_scales(out, do_right, q_right, lengths, b, h, first, at, sizes):
    """Store the scales of do_right and q_right of a block of queries, one for each channel.

    out: float32 [heads * blocks, 2, D_PAD]. do_right, q_right: right operands of dV and dK. at: the
    first query in padded storage, over all heads.
    """
    _, do_scales = head_pointers(do_right, lengths.cu_q, lengths.n_q, b, h)
    _, q_scales = head_pointers(q_right, lengths.cu_q, lengths.n_q, b, h)
    # A scale may belong to a longer block than this one.
    of_do = load_channel_scales(do_right, do_scales, first, sizes.DV, sizes.DV_PAD)
    of_q = load_channel_scales(q_right, q_scales, first, sizes.D, sizes.D_PAD)
    column = tl.arange(0, sizes.D_PAD)
    out += at // sizes.BLOCK_Q * (2 * sizes.D_PAD)
    tl.store(out + column, tl.broadcast_to(of_do, (sizes.DV_PAD,)))
    tl.store(out + sizes.D_PAD + column, tl.broadcast_to(of_q, (sizes.D_PAD,)))


@triton.jit
def start_rows_kernel(
    grid, q, do, q_right, do_right, bounds, lse2, delta, p_sums, dq_sums, row_stats, channel_scales,
    lengths, scale_log2, growths, sizes, KEYS_PER_SCALE: tl.constexpr,
):  # fmt: skip
    """Store units, row statistics and channel scales of a block of queries; clear its sums of dQ.

    Queries from the last one on have an infinite lse2, so that their P is 0.

    q, do: `Operand` of qk_recompute and dp. q_right, do_right: right operands of dK and dV. bounds,
    p_sums, growths: see `row_units`. row_stats: see `start_rows`. channel_scales: see
    `store_channel_scales`, or None. KEYS_PER_SCALE: see `logit_factors`.
    """
    wait_for_earlier_kernels()
    block, h, b = program_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = block * sizes.BLOCK_Q
    if first >= n_q:
        return
    queries = first + tl.arange(0, sizes.BLOCK_Q)
    start = stored_start_of(lengths.cu_q, lengths.n_q, b) + first
    at = h.to(tl.int64) * dq_sums.tokens + start
    factor = logit_factors(q, lengths, b, h, first, n_q, scale_log2, KEYS_PER_SCALE, sizes)
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, queries, n_q, float("inf"))
    row_delta = load_rows(delta, lengths.cu_q, b, h, queries, n_q, 0.0)
    unit = row_units(
        q, do, bounds, p_sums, lengths, b, h, first, row_lse2, row_delta, tl.abs(scale_log2),
        growths, sizes,
    )  # fmt: skip
    if channel_scales is not None:
        store_channel_scales(channel_scales, do_right, q_right, lengths, b, h, first, at, sizes)
    tl.store(row_stats + at * 4 + tl.arange(0, sizes.BLOCK_Q), factor)
    start_rows(dq_sums, row_stats, at, unit, row_lse2, row_delta, sizes)


def compute_query_rows(
    problem: KernelProblem,
    operands: dict[str, Operand],
    k_mean: Means | None,
    statistics: RowStatistics,
    p_sums: Rows | None,
    dq_sums: DqSums,
    ds_bound: Rows | None,
    *,
    tile: int,
    row_stats: Tensor,
    q_right: Operand | None = None,
    do_right: Operand | None = None,
    channel_scales: Tensor | None = None,
) -> None:
    """Do what `compute_units` does, and fill row_stats and channel_scales.

    See `start_rows_kernel`. There is no softcap, and no scale from a bound. tile: keys that a
    product of dQ sums over.
    """
    assert k_mean is None
    assert ds_bound is None
    q, k = operands["q"], operands["k"]
    block = problem.spec.block_q
    bounds = compute_key_bounds(problem, operands, tile=tile)
    grid = problem.query_grid(block)
    launch(
        start_rows_kernel,
        grid.programs,
        grid,
        q,
        operands["do"],
        q_right,
        do_right,
        bounds,
        *statistics,
        p_sums,
        dq_sums,
        row_stats,
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
