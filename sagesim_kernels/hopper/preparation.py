"""What the kernels for Hopper need of keys and queries, computed in few passes over each.

Before a forward, a program for a head of K computes the mean and rounds the head, and a program for
some blocks of Q rounds these, in one launch. A head of K is read twice, the second time from the
cache. Long sequences take several launches, so that many programs share a head. Before a backward,
there are two launches:

A program for a block of keys reads K and V once: it smooths and rounds K, and bounds both. After
that, a program for a block of queries reads Q, O and dO once: it rounds Q, computes delta and the
units of dQ, and sets the sums of dQ to 0.
"""

# Pyright takes the annotations of Triton's functions literally:
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.hopper.support import BLOCK, has_to_copy, is_wide
from sagesim_kernels.launch_plans import launch
from sagesim_kernels.operands import (
    DTYPES,
    LAUNCH,
    LOG2_E,
    DqSums,
    Grid,
    Growths,
    KernelProblem,
    KernelSizes,
    KeyBounds,
    OperandCache,
    Rounding,
    Rows,
    RowStatistics,
    Strided,
    TokenBlocks,
    attended_bounds,
    clear_tma_sums,
    coordinates_of,
    inverse_of,
    largest,
    length_of,
    live_count,
    load_live,
    load_rows,
    load_source,
    magnitude,
    norms_of,
    padded,
    program_coordinates,
    programs_of,
    reversed_coordinates,
    row_sums,
    store_block,
    store_bounds,
    store_rows,
    stored_start_of,
    subtract_lse_gradient,
    units_of,
    upper_lse2,
)

_TYPES: Final = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

_MOST_BYTES: Final = 128 * 1024
"""Of a head of K that one program prepares. It takes as long as it waits for memory."""

_ELEMENTS_AT_ONCE: Final = 16384
"""Elements of K or Q that a program loads at once."""

_CHANNELS_OF_A_WARP: Final = 16
"""Channels of a head for each warp of a program that holds one block."""

_REGISTERS_KEYS: Final = 80
_REGISTERS_QUERIES: Final = {64: 80, 128: 64}
"""At most so many for a thread of a program that holds one block; for queries by the channels of a
tile. With more, fewer programs run on a multiprocessor at a time."""

_ELEMENTS_OF_A_WARP: Final = 2048
"""Elements of K or Q for each warp of a program that holds several blocks."""


# Arguments of these kernels are not tuples of tuples: in the first tuple of a tuple, Triton 3.6
# loses integers that it specialised to the constant 1.
@triton.jit
def _load_blocks(x, lengths, i, COUNT: tl.constexpr, h, b, blocks):
    """Load COUNT blocks from block i on; return the tokens of each, and which are live.

    See `load_live`. All loads are in flight at once.
    """
    tokens, live = (), ()
    for j in tl.static_range(COUNT):
        first = (i + j) * blocks.BLOCK
        block, block_live = load_live(x, lengths, first, blocks.BLOCK, h, b, blocks)
        tokens += (block,)
        live += (block_live,)
    return tokens, live


@triton.jit
def _prepare_head(k, means, k8, rounding, lengths, h, b, blocks, COUNT: tl.constexpr):
    """Compute the mean of a head of K, and round the head minus its mean, COUNT blocks at once."""
    length = length_of(lengths.cu_k, lengths.n_k, b)
    total = tl.zeros((blocks.BLOCK, blocks.D_PAD), tl.float64)
    for first in range(0, tl.cdiv(length, blocks.BLOCK), COUNT):
        tokens, _ = _load_blocks(k, lengths, first, COUNT, h, b, blocks)
        for j in tl.static_range(COUNT):
            total += tokens[j].to(tl.float64)
    count = live_count(lengths, b, COUNT * blocks.BLOCK)
    mean = (tl.sum(total, 0) / tl.maximum(count, 1).to(tl.float64)).to(tl.float32)
    column = tl.arange(0, blocks.D_PAD)
    out = means.ptr + (b.to(tl.int64) * means.heads + h) * blocks.D
    tl.store(out + column, mean, mask=column < blocks.D)
    for first in range(0, tl.cdiv(length, blocks.BLOCK), COUNT):
        tokens, live = _load_blocks(k, lengths, first, COUNT, h, b, blocks)
        for j in tl.static_range(COUNT):
            i = first + j
            if i * blocks.BLOCK < length:
                rest = tl.where(live[j], tokens[j].to(tl.float32) - mean[None, :], 0.0)
                store_block(k8, rest, rounding, lengths, i, h, b, blocks)


@triton.jit
def _round_queries(q, q8, rounding, lengths, part, h, b, blocks, COUNT: tl.constexpr):
    """Round the blocks of Q from block part * COUNT on, COUNT of them."""
    length = length_of(lengths.cu_q, lengths.n_q, b)
    if part * (COUNT * blocks.BLOCK) < length:
        tokens, _ = _load_blocks(q, lengths, part * COUNT, COUNT, h, b, blocks)
        for j in tl.static_range(COUNT):
            i = part * COUNT + j
            if i * blocks.BLOCK < length:
                store_block(q8, tokens[j].to(tl.float32), rounding, lengths, i, h, b, blocks)


@triton.jit
def prepare_forward_kernel(
    q_grid, k_grid, q, k, means, q8, k8, q_rounding, k_rounding, lengths, q_blocks, k_blocks,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Smooth and round a head of K, or round COUNT blocks of Q.

    The first programs, one for each head of K, take longer than the others.

    q_grid: one tile for COUNT blocks of Q. k_grid: one tile for each head of K. q, k: `Strided`.
    means: `Means` of K. q8, k8: `Operand` of qk. COUNT: blocks that are loaded at once.
    """
    program = tl.program_id(0)
    heads = programs_of(k_grid)
    if program < heads:
        _, h, b = coordinates_of(program, k_grid)
        _prepare_head(k, means, k8, k_rounding, lengths, h, b, k_blocks, COUNT)
    else:
        part, h, b = coordinates_of(program - heads, q_grid)
        _round_queries(q, q8, q_rounding, lengths, part, h, b, q_blocks, COUNT)


@triton.jit
def prepare_keys_kernel(
    grid, k, v, mean, k8, bounds, rounding, lengths, k_blocks, v_blocks, TYPE: tl.constexpr
):
    """Round a block of K, minus its mean, to codes, and compute the `KeyBounds` of the block.

    k, v: `Strided`. mean: `Means` of K, or None. k8: `Operand` of qk_recompute. k_blocks, v_blocks:
    `TokenBlocks` of the spec. TYPE: the 16-bit type of the other products.
    """
    i, h, b = program_coordinates(grid)
    first = i * k_blocks.BLOCK
    if first >= length_of(lengths.cu_k, lengths.n_k, b):
        return
    k_tokens = load_source(k, mean, lengths, i, first, k_blocks.BLOCK, h, b, k_blocks)
    v_tokens = load_source(v, None, lengths, i, first, v_blocks.BLOCK, h, b, v_blocks)
    at = h.to(tl.int64) * bounds.tokens + stored_start_of(lengths.cu_k, lengths.n_k, b) + first
    k_amax = largest(magnitude(k_tokens.to(TYPE).to(tl.float32)), 1)
    v_norm = magnitude(norms_of(v_tokens.to(TYPE).to(tl.float32)))
    store_block(k8, k_tokens, rounding, lengths, i, h, b, k_blocks)
    store_bounds(bounds.k_amax, bounds.block_k_amax, at, k_amax, k_blocks.BLOCK)
    store_bounds(bounds.v_norm, bounds.block_v_norm, at, v_norm, k_blocks.BLOCK)


@triton.jit
def start_rows(dq_sums, row_stats, at, unit, row_lse2, row_delta, sizes):
    """Clear the sums of dQ of a block of queries, and store its unit and row statistics.

    The caller stores the first statistic, the factor of the logits. dq_sums: `DqSums`, with or
    without memory. at: the first query in padded storage, over all heads.
    """
    local = tl.arange(0, sizes.BLOCK_Q)
    if dq_sums.sums is not None:
        clear_tma_sums(dq_sums, at, sizes)
        tl.store(dq_sums.unit + at + local, unit)
    stats = row_stats + at * 4 + local
    tl.store(stats + sizes.BLOCK_Q, -upper_lse2(row_lse2))
    tl.store(stats + 2 * sizes.BLOCK_Q, row_delta)
    tl.store(stats + 3 * sizes.BLOCK_Q, inverse_of(unit))


@triton.jit
def prepare_queries_kernel(
    grid, q, o, do, q8, bounds, rounding, lse2, d_lse, delta, row_stats, dq_sums, lengths,
    scale_log2, growths, q_blocks, o_blocks, sizes, TYPE: tl.constexpr,
):  # fmt: skip
    """Round a block of Q to codes, compute delta, units and row statistics, and clear its sums.

    Queries behind the last one of a sequence get statistics that make P 0.

    q, o, do: `Strided`. q8: `Operand` of qk_recompute. bounds: `KeyBounds`. lse2, d_lse, delta:
    `Rows`. row_stats: see `ROW_STATS`, in padded storage. dq_sums: `DqSums`. growths: `Growths`.
    q_blocks, o_blocks: `TokenBlocks` of the spec. TYPE: the 16-bit type of dp.
    """
    i, h, b = reversed_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = i * sizes.BLOCK_Q
    if first >= n_q:
        return
    local = tl.arange(0, sizes.BLOCK_Q)
    row = first + local
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, row, n_q, float("inf"))
    attended = attended_bounds(bounds, lengths, b, h // sizes.GROUPS, first, row, sizes)
    do_tokens, _ = load_live(do, lengths, first, sizes.BLOCK_Q, h, b, o_blocks)
    o_tokens, _ = load_live(o, lengths, first, sizes.BLOCK_Q, h, b, o_blocks)
    row_delta = row_sums(o_tokens.to(tl.float32) * do_tokens.to(tl.float32))
    row_delta = subtract_lse_gradient(row_delta, d_lse, lengths, b, h, row, n_q, row_lse2)
    do_norm = norms_of(do_tokens.to(TYPE).to(tl.float32))
    do_norm = tl.where(row_lse2 != float("inf"), do_norm, 0.0)
    unit = units_of(
        None, do_norm, bounds, attended, None, lengths, b, h, first, row_lse2, row_delta,
        scale_log2, growths, sizes,
    )  # fmt: skip
    # All stores follow all loads, which could not be moved up past a store.
    q_tokens, _ = load_live(q, lengths, first, sizes.BLOCK_Q, h, b, q_blocks)
    q_scale = store_block(q8, q_tokens.to(tl.float32), rounding, lengths, i, h, b, q_blocks)
    at = h.to(tl.int64) * dq_sums.tokens + stored_start_of(lengths.cu_q, lengths.n_q, b) + first
    store_rows(delta, lengths.cu_q, b, h, row, n_q, row_delta)
    tl.store(row_stats + at * 4 + local[:, None], q_scale * scale_log2)
    start_rows(dq_sums, row_stats, at, unit, row_lse2, row_delta, sizes)


def prepare_forward(problem: KernelProblem) -> OperandCache:
    """Return the operands of a forward. Q and K are codes; K is smoothed if the spec says so."""
    spec, sequences, stored = problem.spec, problem.sequences, has_to_copy(problem, queries=False)
    heads, d = problem.k.shape[1], problem.k.shape[3]
    blocks = triton.next_power_of_2(-(-problem.longest_k // spec.block_k))
    block = spec.block_k * padded(d)
    is_long = blocks * block * problem.k.element_size() > _MOST_BYTES
    if not spec.smoothing.k or is_long or is_wide(problem):
        operands = OperandCache(problem, stored=stored)
        operands.quantize("qk")
        return operands
    mean = problem.k.new_empty((sequences, heads, 1, d), dtype=torch.float32)
    operands = OperandCache(problem, k_mean=mean, stored=stored)
    (q8, q), (k8, k) = (operands.reserve("qk", x) for x in ("q", "k"))
    count = min(blocks, _ELEMENTS_AT_ONCE // block)
    q_grid = Grid(-(-problem.longest_q // (count * BLOCK)), q.x.shape[1], sequences)
    k_grid = Grid(1, heads, sequences)
    launch(
        prepare_forward_kernel,
        (q_grid.programs[0] + k_grid.programs[0],),
        q_grid,
        k_grid,
        Strided.of(q.x),
        Strided.of(k.x),
        k.mean,
        q8,
        k8,
        Rounding.of(spec, "q", spec.qk.precision),
        Rounding.of(spec, "k", spec.qk.precision),
        problem.lengths,
        TokenBlocks.of(False, d, padded(d), BLOCK),  # each query has its own scale
        TokenBlocks.of(True, d, padded(d), spec.block_k),
        count,
        num_warps=max(count * block // _ELEMENTS_OF_A_WARP, 4),
        **LAUNCH,
    )
    return operands


def prepare_backward(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor,
    do: Tensor,
    statistics: RowStatistics,
    d_lse: Rows | None,
    dq_sums: DqSums,
    row_stats: Tensor,
    *,
    tile: int,
) -> None:
    """Fill the codes of Q and K of qk_recompute, delta, the units and row statistics; clear sums.

    operands: before any was rounded; `get` then returns the codes. tile: keys that a product of dQ
    sums over. The others: see `launch_backward`.
    """
    spec, lengths = problem.spec, problem.lengths
    matmul = spec.qk_recompute
    dtype: tl.constexpr = tl.constexpr(_TYPES[DTYPES[spec.dp.precision]])
    (q8, q), (k8, k) = (operands.reserve("qk_recompute", x) for x in ("q", "k"))
    d, d_v = k.x.shape[3], problem.v.shape[3]
    block_q, block_k = spec.block_q, spec.block_k
    bounds = KeyBounds.empty(problem, tile)
    grid = Grid(-(-problem.longest_k // block_k), k.x.shape[1], problem.sequences)
    launch(
        prepare_keys_kernel,
        grid.programs,
        grid,
        Strided.of(k.x),
        Strided.of(problem.v),
        k.mean,
        k8,
        bounds,
        Rounding.of(spec, "k", matmul.precision),
        lengths,
        TokenBlocks.of(True, d, padded(d), block_k),
        TokenBlocks.of(True, d_v, padded(d_v), block_k),
        dtype,
        num_warps=padded(d) // _CHANNELS_OF_A_WARP,
        maxnreg=_REGISTERS_KEYS,
        **LAUNCH,
    )
    grid = Grid(-(-problem.longest_q // block_q), q.x.shape[1], problem.sequences)
    launch(
        prepare_queries_kernel,
        grid.programs,
        grid,
        Strided.of(q.x),
        Strided.of(o),
        Strided.of(do),
        q8,
        bounds,
        Rounding.of(spec, "q", matmul.precision),
        statistics.lse2,
        d_lse,
        statistics.delta,
        row_stats,
        dq_sums,
        lengths,
        problem.scale * LOG2_E,
        Growths.of(spec),
        TokenBlocks.of(False, d, padded(d), block_q),
        TokenBlocks.of(False, d_v, padded(d_v), block_q),
        KernelSizes.of(problem, block_q),
        dtype,
        num_warps=padded(d) // _CHANNELS_OF_A_WARP,
        maxnreg=_REGISTERS_QUERIES[padded(d)],
        **LAUNCH,
    )
