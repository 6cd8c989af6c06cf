"""The operands of a forward: Q and K in codes, computed in few passes over each.

A program for a part of a head of K computes the mean of the head and rounds its part, and a program
for some blocks of Q rounds these, in one launch. K is read twice, the second time from the cache.
Long sequences take several launches, so that many programs share a head.
"""

# Pyright takes the annotations of Triton's functions literally:
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from sagesim_kernels.dependent_launch import wait_for_earlier_kernels
from sagesim_kernels.launch_plans import launch
from sagesim_kernels.operands import (
    LAUNCH,
    Grid,
    KernelProblem,
    OperandCache,
    Rounding,
    Strided,
    TokenBlocks,
    coordinates_of,
    length_of,
    live_count,
    load_live,
    padded,
    programs_of,
    store_block,
)
from sagesim_kernels.target import multiprocessor_count

_MOST_BYTES: Final = 128 * 1024
"""Of a head of K that one program prepares. It takes as long as it waits for memory."""

_MOST_CHANNELS: Final = 128
"""Of a head of K that one program prepares."""

_QUERIES: Final = 64
"""Queries of a block: each has a scale of its own, or all of a block of the spec share one."""

_ELEMENTS_AT_ONCE: Final = 16384
"""Elements of K or Q that a program loads at once."""

_ELEMENTS_OF_A_WARP: Final = 2048
"""Elements of K or Q for each warp of a program that holds several blocks."""

_PARTS: Final = 2
_ELEMENTS_OF_A_WARP_OF_PARTS: Final = 1024
"""Programs for each head of K, and elements for each of their warps, if the programs of all heads
run at once. They take longer than the others, so that the GPU would wait for one program of each
head. Such large programs run one by one on a multiprocessor."""


# Arguments of these kernels are not tuples of tuples: in the first tuple of a tuple, Triton 3.6
# loses integers that it specialised to the constant 1.
@triton.jit
def _load_blocks(x, lengths, i, COUNT: tl.constexpr, h, b, blocks):
    """Load COUNT blocks from block i on; return the tokens of each, and which are live.

    See `load_live`. All loads are in flight at once.
    """
    column = tl.arange(0, blocks.D_PAD)
    tokens, live = (), ()
    for j in tl.static_range(COUNT):
        first = (i + j) * blocks.BLOCK
        block, block_live = load_live(x, lengths, first, blocks.BLOCK, h, b, blocks, column)
        tokens += (block,)
        live += (block_live,)
    return tokens, live


@triton.jit
def _prepare_head(k, means, k8, rounding, lengths, part, parts, h, b, blocks, COUNT: tl.constexpr):
    """Compute the mean of a head of K, and round a part of the head minus its mean.

    part, parts: of the blocks, in groups of COUNT, which are loaded at once.
    """
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
    for first in range(part * COUNT, tl.cdiv(length, blocks.BLOCK), parts * COUNT):
        tokens, live = _load_blocks(k, lengths, first, COUNT, h, b, blocks)
        for j in tl.static_range(COUNT):
            i = first + j
            if i * blocks.BLOCK < length:
                rest = tl.where(live[j], tokens[j].to(tl.float32) - mean[None, :], 0.0)
                store_block(k8, (rest,), rounding, lengths, i, h, b, blocks)


@triton.jit
def _round_queries(q, q8, rounding, lengths, part, h, b, blocks, COUNT: tl.constexpr):
    """Round the blocks of Q from block part * COUNT on, COUNT of them."""
    length = length_of(lengths.cu_q, lengths.n_q, b)
    if part * (COUNT * blocks.BLOCK) < length:
        tokens, _ = _load_blocks(q, lengths, part * COUNT, COUNT, h, b, blocks)
        for j in tl.static_range(COUNT):
            i = part * COUNT + j
            if i * blocks.BLOCK < length:
                store_block(q8, (tokens[j].to(tl.float32),), rounding, lengths, i, h, b, blocks)


@triton.jit
def prepare_forward_kernel(
    q_grid, k_grid, q, k, means, q8, k8, q_rounding, k_rounding, lengths, q_blocks, k_blocks,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Smooth and round a part of a head of K, or round COUNT blocks of Q.

    The first programs, those of K, take longer than the others.

    q_grid: one tile for COUNT blocks of Q. k_grid: one tile for each part of a head of K. q, k:
    `Strided`. means: `Means` of K. q8, k8: `Operand` of qk. COUNT: blocks that are loaded at once.
    """
    wait_for_earlier_kernels()
    program = tl.program_id(0)
    heads = programs_of(k_grid)
    if program < heads:
        part, h, b = coordinates_of(program, k_grid)
        _prepare_head(k, means, k8, k_rounding, lengths, part, k_grid.tiles, h, b, k_blocks, COUNT)
    else:
        part, h, b = coordinates_of(program - heads, q_grid)
        _round_queries(q, q8, q_rounding, lengths, part, h, b, q_blocks, COUNT)


def prepare_forward(problem: KernelProblem, *others: str, stored: bool) -> OperandCache:
    """Return the operands of a forward. Q and K are codes; K is smoothed if the spec says so.

    The scales of Q are of single queries, or of blocks of 64. others: sites whose operands are
    rounded as well. stored: see `OperandCache`.
    """
    spec, sequences = problem.spec, problem.sequences
    heads, d = problem.k.shape[1], problem.k.shape[3]
    blocks = triton.next_power_of_2(-(-problem.longest_k // spec.block_k))
    block = spec.block_k * padded(d)
    is_long = blocks * block * problem.k.element_size() > _MOST_BYTES
    if not spec.smoothing.k or is_long or padded(d) > _MOST_CHANNELS:
        operands = OperandCache(problem, stored=stored)
        operands.quantize("qk", *others)
        return operands
    mean = problem.k.new_empty((sequences, heads, 1, d), dtype=torch.float32)
    operands = OperandCache(problem, k_mean=mean, stored=stored)
    (q8, q), (k8, k) = (operands.reserve("qk", x) for x in ("q", "k"))
    count = min(blocks, _ELEMENTS_AT_ONCE // block)
    q_grid = Grid(-(-problem.longest_q // (count * _QUERIES)), q.x.shape[1], sequences)
    parts, elements_of_a_warp = 1, _ELEMENTS_OF_A_WARP
    if _PARTS * heads * sequences <= multiprocessor_count():
        parts, elements_of_a_warp = _PARTS, _ELEMENTS_OF_A_WARP_OF_PARTS
    k_grid = Grid(parts, heads, sequences)
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
        TokenBlocks.of(False, d, padded(d), _QUERIES),
        TokenBlocks.of(True, d, padded(d), spec.block_k),
        count,
        num_warps=max(count * block // elements_of_a_warp, 4),
        **LAUNCH,
    )
    operands.quantize(*others)
    return operands
