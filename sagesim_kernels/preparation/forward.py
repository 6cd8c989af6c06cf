"""The operands of a forward: Q and K in codes, smoothed and rounded in one launch.

A program prepares a head of K, or rounds a tile of Q. Long sequences take several launches, so that
many programs share a head.
"""

from __future__ import annotations

from typing import Final

import torch
import triton

from sagesim_kernels.launching import launch
from sagesim_kernels.operands import (
    LAUNCH,
    Copied,
    Grid,
    KernelProblem,
    OperandCache,
    Rounding,
    Strided,
    TokenTensor,
    channels_of_part,
    padded,
)
from sagesim_kernels.preparation.forward_kernel import prepare_forward_kernel
from sagesim_kernels.preparation.tiles import Tile
from sagesim_kernels.target import multiprocessor_count

_MOST_BYTES: Final = 128 * 1024
"""Of a head of K that one program prepares. It takes as long as it waits for memory."""

_MOST_CHANNELS: Final = 128
"""Of a head of K that one program prepares."""

_QUERIES: Final = 64
"""Queries of a block: each has a scale of its own, or all of a block of the spec share one."""

_ELEMENTS_OF_A_WARP: Final = 2048
"""Elements of Q or K that a warp holds at once, 64 in each thread."""

_VECTOR: Final = 16
"""Bytes that a thread loads at once."""

_WARPS: Final = {False: 8, True: 4}
"""Of a program, at most; by whether there are two or more heads of K for each multiprocessor.

With few heads, a program does not share its multiprocessor, and needs the warps to have enough
loads in flight.
"""


def prepare_forward(problem: KernelProblem, *others: str, copied: Copied) -> OperandCache:
    """Return the operands of a forward. Q and K are codes; K is smoothed if the spec says so.

    The scales of Q are of single queries, or of blocks of 64. others: sites whose operands are
    rounded as well. copied: see `OperandCache`.
    """
    spec, sequences = problem.spec, problem.sequences
    heads, d = problem.k.shape[1], problem.k.shape[3]
    is_long = problem.longest_k * d * problem.k.element_size() > _MOST_BYTES
    if not spec.smoothing.k or is_long or padded(d) > _MOST_CHANNELS:
        operands = OperandCache(problem, copied=copied)
        operands.quantize("qk", *others)
        return operands
    mean = problem.k.new_empty((sequences, heads, 1, d), dtype=torch.float32)
    operands = OperandCache(problem, k_mean=mean, copied=copied)
    (q8, q), (k8, k) = (operands.reserve("qk", x) for x in ("q", "k"))
    many = heads * sequences >= 2 * multiprocessor_count()
    blocks = triton.next_power_of_2(-(-problem.longest_k // spec.block_k))
    elements = blocks * spec.block_k * channels_of_part(d, padded(d), 0)[1]
    warps = min(max(elements // _ELEMENTS_OF_A_WARP, 4), _WARPS[many])
    q_tile = _tile(q, _QUERIES, warps)
    k_tile = _tile(k, spec.block_k, warps)
    q_grid = problem.query_grid(q_tile.BLOCKS * _QUERIES)
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
        d,
        q_tile,
        k_tile,
        num_warps=warps,
        **LAUNCH,
    )
    operands.quantize(*others)
    return operands


def _tile(source: TokenTensor, block: int, warps: int) -> Tile:
    """Return a tile of blocks of tokens that these warps can hold at once, of the first part."""
    d = source.x.shape[3]
    part = channels_of_part(d, padded(d), 0)
    channels = part[1]
    blocks = min(
        warps * _ELEMENTS_OF_A_WARP // (block * channels),
        triton.next_power_of_2(-(-source.longest // block)),
    )
    across = channels * source.x.element_size() // _VECTOR
    return Tile.of(max(blocks, 1), block, part, across, warps)
