"""Smoothing: means of K over a head and of Q over blocks, summed in float64 and rounded once."""

# Pyright takes the annotations of Triton's functions literally:
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.launching import launch, wait_for_earlier_kernels
from sagesim_kernels.operands.grid import Grid, program_coordinates
from sagesim_kernels.operands.kernel_problem import KernelProblem
from sagesim_kernels.operands.layout import (
    ALIGNMENT,
    Lengths,
    Strided,
    TokenBlocks,
    part_columns,
    part_count,
    stored_start_of,
    stored_tokens,
    token_ptrs,
)
from sagesim_kernels.operands.masking import (
    first_live_key,
    is_live_key,
    is_live_query,
    live_keys,
    live_queries,
    unmasked_keys,
)
from sagesim_kernels.operands.rounding import LAUNCH, row_sums

_STEP: Final = 64
"""Tokens that a program adds in one step. The tokens of the next step are loaded meanwhile."""

_CHUNK: Final = 128
"""Keys of K that one program sums."""

_WARPS: Final = 2
"""Of a program that sums a chunk; with few, the reduction across warps is short."""

_VECTORS: Final = _WARPS * 32 * 8
"""Elements in 16 bit that the threads of such a program load at once, 16 bytes each."""

_CHUNKS_AT_ONCE: Final = 256
"""Chunks whose sums a program adds in one step, at most: a step takes as long as one load."""

_SUMS_AT_ONCE: Final = 4096
"""Sums that a program loads in one step; with many chunks, it has few channels."""

_FEWEST_CHANNELS: Final = 16
"""Of such a program: a whole cache line."""


class Means(NamedTuple):
    """Means of tokens, float32 [sequences, heads, means, channels], contiguous."""

    ptr: Any
    heads: Any
    means: Any  #: means of a head: one for each block, or a single one

    @classmethod
    def of_heads(cls, mean: Tensor) -> Means:
        """One mean for each sequence and head, [sequences, heads, 1, channels]."""
        return cls(mean, mean.shape[1], 1)


class SubtractedMeans(NamedTuple):
    """What smoothing subtracted from Q and K; kernels need it to restore the logits and dK.

    Its fields are those of two `Means` and of a `Strided`, not nested: Triton 3.6 loses constexprs
    of nested tuples in loops.
    """

    q_mean: Any  #: None if Q is not smoothed
    q_heads: Any
    q_means: Any
    k_mean: Any  #: None if K is not smoothed
    k_heads: Any
    k_means: Any
    raw_k: Any  #: K before smoothing
    raw_k_stride_b: Any
    raw_k_stride_h: Any
    raw_k_stride_n: Any
    raw_k_stride_d: Any
    raw_k_DIVISOR: Any

    @classmethod
    def of(cls, q_mean: Means | None, k_mean: Means | None, raw_k: Tensor) -> SubtractedMeans:
        nothing = (None, None, None)
        return cls(*(q_mean or nothing), *(k_mean or nothing), *Strided.of(raw_k))


@triton.jit
def mean_ptr(means, b, h, index, D: tl.constexpr):
    """Return a pointer to the first channel of one mean of a `Means`."""
    row = (b.to(tl.int64) * means.heads + h) * means.means + index
    return means.ptr + row * D


@triton.jit
def load_mean(means, b, h, index, D: tl.constexpr, column):
    """Load channels of one mean of a `Means`, [1, channels]; channels from D on are 0."""
    ptrs = mean_ptr(means, b, h, index, D) + column
    return tl.load(ptrs, mask=column < D, other=0.0)[None, :]


@triton.jit
def load_q_mean(subtracted, b, h, block, sizes):
    """Load the mean of a block of Q, [1, D_PAD]."""
    means = Means(subtracted.q_mean, subtracted.q_heads, subtracted.q_means)
    return load_mean(means, b, h, block, sizes.D, tl.arange(0, sizes.D_PAD))


@triton.jit
def load_k_mean(subtracted, b, k_head, sizes):
    """Load the mean of a head of K, [1, D_PAD]."""
    means = Means(subtracted.k_mean, subtracted.k_heads, subtracted.k_means)
    return load_mean(means, b, k_head, 0, sizes.D, tl.arange(0, sizes.D_PAD))


@triton.jit
def _raw_key_ptrs(subtracted, cu_k, head, first, count: tl.constexpr, columns):
    """Return pointers to keys first..first + count before smoothing, [count, columns]."""
    raw_k = Strided(
        subtracted.raw_k,
        subtracted.raw_k_stride_b,
        subtracted.raw_k_stride_h,
        subtracted.raw_k_stride_n,
        subtracted.raw_k_stride_d,
        subtracted.raw_k_DIVISOR,
    )
    return token_ptrs(raw_k, cu_k, head.b, head.k_head, first, count, columns)


@triton.jit
def key_bias(subtracted, lengths, head, block, first, count: tl.constexpr, last, sizes):
    """Return the term that smoothing Q removed from the logits, before the logit scale, [count].

    This is the mean of query block `block` times the smoothed keys first..first + count, the same
    for every query of the block. Keys from `last` on have 0.
    """
    local, column = tl.arange(0, count), tl.arange(0, sizes.D_PAD)
    ptrs = _raw_key_ptrs(subtracted, lengths.cu_k, head, first, count, column)
    mask = (first + local < last)[:, None] & (column < sizes.D)[None, :]
    keys = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if subtracted.k_mean is not None:
        keys -= load_k_mean(subtracted, head.b, head.k_head, sizes)
    return row_sums(keys * load_q_mean(subtracted, head.b, head.h, block, sizes))


@triton.jit
def _live(lengths, b, IS_KEY: tl.constexpr):
    """Return the range of tokens of sequence b that attend to a key or that a query attends to."""
    if IS_KEY:
        return first_live_key(lengths, b), live_keys(lengths, b)
    else:
        return live_queries(lengths, b)


@triton.jit
def _is_live(lengths, b, tokens, first, last, IS_KEY: tl.constexpr):
    """Return which tokens attend to a key or are attended to. first, last: those of `_live`."""
    live = (tokens >= first) & (tokens < last)
    if lengths.key_mask is not None:
        live = is_live_key(lengths, b, tokens) if IS_KEY else is_live_query(lengths, b, tokens)
    return live


@triton.jit
def _load_step(x, cu, lengths, b, h, begin, first, end, blocks, STEP: tl.constexpr, column):
    """Load tokens begin..begin + STEP; those that are not live are 0.

    first, end: bounds on the live tokens. column: the channels.
    """
    row = begin + tl.arange(0, STEP)
    live = _is_live(lengths, b, row, first, end, blocks.IS_KEY) & (row < end)
    mask = live[:, None] & (column < blocks.D)[None, :]
    return tl.load(token_ptrs(x, cu, b, h, begin, STEP, column), mask=mask, other=0.0)


@triton.constexpr_function
def _rows_at_once(step, channels) -> Any:
    """Return how many tokens of a step the threads of a program load at once, a vector each."""
    return min(step, max(_VECTORS // channels, 1))


@triton.jit
def _sum_of_part(x, cu, lengths, b, h, begin, first, end, blocks, STEP: tl.constexpr, column):
    """Return the sum of the live tokens from begin to end, float64 [channels]; see `_load_step`."""
    COUNT: tl.constexpr = column.shape[0]
    ROWS: tl.constexpr = _rows_at_once(STEP, COUNT)
    total = tl.zeros((ROWS, COUNT), tl.float64)
    tokens = _load_step(x, cu, lengths, b, h, begin, first, end, blocks, STEP, column)
    for at in range(begin + STEP, end + STEP, STEP):
        following = _load_step(x, cu, lengths, b, h, at, first, end, blocks, STEP, column)
        rows = tl.reshape(tokens.to(tl.float64), (STEP // ROWS, ROWS, COUNT))
        total += tl.sum(rows, 0)
        tokens = following
    return tl.sum(total, 0)


@triton.jit
def sum_chunks_kernel(grid, x, sums, stored_chunks, lengths, blocks, STEP: tl.constexpr):
    """Sum the live tokens of each chunk, float64 [heads, stored_chunks, D].

    A chunk is blocks.BLOCK consecutive tokens of a sequence. Its sum has the index that its tokens
    have in padded storage, divided by blocks.BLOCK. The memory for the sums is therefore bounded by
    the size of padded storage, and does not grow with sequences * longest sequence.

    STEP: tokens of a step. Those that a thread holds are added without the other threads.
    """
    wait_for_earlier_kernels()
    chunk, h, b = program_coordinates(grid)
    if blocks.IS_KEY:
        cu, n = lengths.cu_k, lengths.n_k
    else:
        cu, n = lengths.cu_q, lengths.n_q
    first, last = _live(lengths, b, blocks.IS_KEY)
    if chunk * blocks.BLOCK >= last:
        return
    begin = chunk * blocks.BLOCK
    end = tl.minimum(begin + blocks.BLOCK, last)
    out = h.to(tl.int64) * stored_chunks + stored_start_of(cu, n, b) // blocks.BLOCK + chunk
    for part in tl.static_range(part_count(blocks.D)):
        column = part_columns(blocks, part)
        total = _sum_of_part(x, cu, lengths, b, h, begin, first, end, blocks, STEP, column)
        tl.store(sums + out * blocks.D + column, total, mask=column < blocks.D)


@triton.jit
def divide_sums_kernel(
    grid, sums, stored_chunks, means, lengths, chunks, blocks, AT_ONCE: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Divide the sums of `chunks` chunks by their tokens, float32 [sequences, heads, means, D].

    grid: its tiles are parts of means. AT_ONCE: chunks that are loaded in one step. CHANNELS: of a
    part.
    """
    wait_for_earlier_kernels()
    PARTS: tl.constexpr = blocks.D_PAD // CHANNELS
    tile, h, b = program_coordinates(grid)
    mean = tile // PARTS
    if blocks.IS_KEY:
        cu, n = lengths.cu_k, lengths.n_k
    else:
        cu, n = lengths.cu_q, lengths.n_q
    first, last = _live(lengths, b, blocks.IS_KEY)
    column = tile % PARTS * CHANNELS + tl.arange(0, CHANNELS)
    stored = h.to(tl.int64) * stored_chunks + stored_start_of(cu, n, b) // blocks.BLOCK
    total = tl.zeros((CHANNELS,), tl.float64)
    start = mean * chunks * blocks.BLOCK
    tokens = tl.minimum(start + chunks * blocks.BLOCK, last) - tl.maximum(start, first)
    if lengths.key_mask is not None:
        if blocks.IS_KEY:
            first_key = tl.maximum(start, first)
            tokens = unmasked_keys(lengths, b, first_key, first_key + tokens)
        else:
            tokens = tl.cast(0, tl.int32)
    end = tl.minimum((mean + 1) * chunks, tl.cdiv(last, blocks.BLOCK))
    for chunk in range(mean * chunks, end, AT_ONCE):
        some = chunk + tl.arange(0, AT_ONCE)
        ptrs = sums + (stored + some)[:, None] * blocks.D + column[None, :]
        mask = (some < end)[:, None] & (column < blocks.D)[None, :]
        total += tl.sum(tl.load(ptrs, mask=mask, other=0.0), 0)
        if lengths.key_mask is not None and not blocks.IS_KEY:
            row = chunk * blocks.BLOCK + tl.arange(0, AT_ONCE * blocks.BLOCK)
            live = is_live_query(lengths, b, row)
            tokens += tl.sum((live & (row < end * blocks.BLOCK)).to(tl.int32), 0)
    result = (total / tl.maximum(tokens, 1).to(tl.float64)).to(tl.float32)
    out = (b.to(tl.int64) * grid.heads + h) * (grid.tiles // PARTS) + mean
    tl.store(means + out * blocks.D + column, result, mask=column < blocks.D)


def compute_k_means(problem: KernelProblem) -> Means:
    """Compute the mean of the live keys of each head and sequence."""
    chunks = -(-problem.longest_k // _CHUNK)
    return _compute_means(problem, problem.k, chunks, 1, _CHUNK, is_key=True)


def compute_q_means(problem: KernelProblem) -> Means:
    """Compute the mean of the live queries of each block of the spec."""
    block = problem.spec.block_q
    blocks, chunk = -(-problem.longest_q // block), min(block, ALIGNMENT.value)
    chunks = blocks * (block // chunk)
    return _compute_means(problem, problem.q, chunks, blocks, chunk, is_key=False)


def _compute_means(
    problem: KernelProblem, x: Tensor, chunks: int, means: int, chunk: int, *, is_key: bool
) -> Means:
    """Compute the means of x from the sums of `chunks` chunks, each of `chunk` tokens."""
    heads, d = x.shape[1], x.shape[3]
    d_pad = triton.next_power_of_2(d)
    lengths: Lengths = problem.lengths
    cu = lengths.cu_k if is_key else lengths.cu_q
    stored_chunks = stored_tokens(cu, x) // chunk
    sums = torch.empty((heads, stored_chunks, d), dtype=torch.float64, device=x.device)
    out = torch.empty((problem.sequences, heads, means, d), dtype=torch.float32, device=x.device)
    blocks = TokenBlocks.of(is_key, d, d_pad, chunk)
    grid = problem.token_grid(is_key, chunk, heads)
    launch(
        sum_chunks_kernel,
        grid.programs,
        grid,
        Strided.of(x),
        sums,
        stored_chunks,
        lengths,
        blocks,
        min(chunk, _STEP),
        num_warps=_WARPS,
        **LAUNCH,
    )
    at_once = min(_CHUNKS_AT_ONCE, triton.next_power_of_2(chunks // means))
    channels = min(max(_SUMS_AT_ONCE // at_once, _FEWEST_CHANNELS), d_pad)
    grid = Grid(means * (d_pad // channels), heads, problem.sequences)
    launch(
        divide_sums_kernel,
        grid.programs,
        grid,
        sums,
        stored_chunks,
        out,
        lengths,
        chunks // means,
        blocks,
        at_once,
        channels,
        num_warps=8,
        **LAUNCH,
    )
    return Means(out, heads, means)
