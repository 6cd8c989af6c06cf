"""The tiles of packed sequences of unequal length, those that take longest first.

A launch ends when its last program does. If that one begins late with a tile of a long sequence,
the others wait. The host does not know the lengths, so a kernel puts the tiles in order.

Tiles of queries are in the order of their own work. A backward reads more for each tile of keys, so
tiles of keys stay together with those of their sequence, which meet the same queries, and sequences
are in the order of the work of their first tile. docs/kernel_variants.md has the times.

Tiles of some heads are computed before those of the others, so that tokens stay in the cache.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from sagesim_kernels.launching import launch, wait_for_earlier_kernels
from sagesim_kernels.operands.grid import Grid, packed_place
from sagesim_kernels.operands.kernel_problem import KernelProblem
from sagesim_kernels.operands.layout import length_of
from sagesim_kernels.operands.masking import causal_offset, live_keys, lowest_diagonal
from sagesim_kernels.operands.program_order import (
    choose_packed_heads,
    steps_of_key_tiles,
    steps_of_query_tiles,
)

_OWN = tl.constexpr(32)
"""Tiles whose places in the order a program finds."""

_OTHERS = tl.constexpr(128)
"""Tiles that they are compared with at a time."""

_SHORT: Final = 1 / 64
"""A share of the time of a launch. If no tile takes longer, the order does not matter."""

_PROGRAMS: Final = 132
"""Programs that run at the same time on a large GPU. With fewer, tiles are shorter shares."""


@triton.jit
def _find(tile, lengths, sequences, OWNS_QUERIES: tl.constexpr, ROWS: tl.constexpr):
    """Return three facts about tiles, a vector of their numbers.

    These are the number of each in its sequence, the sequence, and the work that it is ordered by:
    how many tokens of the other side a tile meets, or -1 if the tile has no tokens.
    """
    cu = lengths.cu_q if OWNS_QUERIES else lengths.cu_k
    tile, b = packed_place(tile, cu, sequences, ROWS)
    first = tile * ROWS
    begin = first * 0
    if OWNS_QUERIES:
        own = length_of(lengths.cu_q, lengths.n_q, b)
        last = tl.minimum(first + ROWS, own)
        end = live_keys(lengths, b)
        if lengths.IS_CAUSAL:
            end = tl.minimum(end, last + causal_offset(lengths, b))
        if lengths.left is not None:
            begin = tl.maximum(first + lowest_diagonal(lengths, b), 0)
    else:
        own = length_of(lengths.cu_k, lengths.n_k, b)
        end = length_of(lengths.cu_q, lengths.n_q, b)  # the work of the first tile
        if lengths.IS_CAUSAL:
            begin = tl.maximum(-causal_offset(lengths, b), 0)
        if lengths.left is not None:
            end = tl.minimum(end, tl.minimum(ROWS, own) - lowest_diagonal(lengths, b))
    return tile, b, tl.where(first < own, tl.maximum(end - begin, 0), -1)


@triton.jit
def packed_tiles_kernel(
    found, lengths, tiles, sequences, OWNS_QUERIES: tl.constexpr, ROWS: tl.constexpr,
    IS_SORTED: tl.constexpr,
):  # fmt: skip
    """Store the tiles of a head in order. One program for each `_OWN` of them.

    found: see `order_tiles`. sequences: how many there are. IS_SORTED: whether tiles are in the
    order of their work, and not as they lie.
    """
    wait_for_earlier_kernels()
    own = tl.program_id(0) * _OWN + tl.arange(0, _OWN)
    tile, b, work = _find(own, lengths, sequences, OWNS_QUERIES, ROWS)
    rank = own * 0 if IS_SORTED else own
    for first in range(0, tiles if IS_SORTED else 0, _OTHERS):
        others = first + tl.arange(0, _OTHERS)
        _, _, other_work = _find(others, lengths, sequences, OWNS_QUERIES, ROWS)
        other_work = tl.where(others < tiles, other_work, -2)
        is_equal = other_work[None, :] == work[:, None]
        is_before = (other_work[None, :] > work[:, None]) | (
            is_equal & (others[None, :] < own[:, None])
        )
        rank += tl.sum(is_before.to(tl.int32), 1)
    is_tile = own < tiles
    tl.store(found + 2 * rank, tile, mask=is_tile)
    tl.store(found + 2 * rank + 1, b, mask=is_tile)


def order_tiles(problem: KernelProblem, grid: Grid, rows: int, *, queries: bool) -> Tensor | None:
    """Return the tiles of a head, those with the most work first; None without packed tiles.

    They are not sorted if each of them takes a small share of the launch: then any order is
    balanced, and to sort them takes a time that grows with the square of their number. Kernels read
    the order as `packed_tile` does.

    Args:
        problem: the call.
        grid: a launch with tiles of `rows` tokens.
        queries: whether these are queries; else keys.

    Returns:
        int32 [tiles, 2]: the number of each tile in its sequence, and the sequence. Some tiles may
        be behind the last token of their sequence.
    """
    if grid.cu is None:
        return None
    share = _share_of_longest(problem, grid, rows, _PROGRAMS, queries=queries)
    found = torch.empty((grid.tiles, 2), dtype=torch.int32, device=grid.cu.device)
    launch(
        packed_tiles_kernel,
        (-(-grid.tiles // _OWN.value),),
        found,
        problem.lengths._replace(n_q=None, n_k=None),
        grid.tiles,
        grid.sequences,
        queries,
        rows,
        share > _SHORT,
        num_warps=4,
    )
    return found


def heads_of_packed_tiles(
    problem: KernelProblem,
    grid: Grid,
    rows: int,
    programs: int,
    head_bytes: int,
    *,
    queries: bool,
    query_heads: int = 1,
) -> int:
    """Return of how many heads the tiles of a launch are computed at a time, a divisor of them.

    Args:
        problem: the call, with packed sequences.
        grid: a launch with tiles of `rows` tokens.
        programs: that run at the same time.
        head_bytes: see `choose_packed_heads`.
        queries: whether the tiles are of queries; else of keys.
        query_heads: that each tile of keys meets.
    """
    share = _share_of_longest(
        problem, grid, rows, programs, queries=queries, query_heads=query_heads
    )
    return choose_packed_heads(grid.heads, head_bytes, share)


def _share_of_longest(
    problem: KernelProblem,
    grid: Grid,
    rows: int,
    programs: int,
    *,
    queries: bool,
    query_heads: int = 1,
) -> float:
    """Return the time of the longest tile, as a share of that of a balanced launch.

    The host assumes that all sequences but the longest have the same length. The arguments are
    those of `heads_of_packed_tiles`.
    """
    longest = (problem.longest_q, problem.longest_k)
    totals = (problem.q.shape[2], problem.k.shape[2])
    count = grid.sequences - 1
    mean = [max(all_ - n, 0) // count for all_, n in zip(totals, longest, strict=True)]
    met = None if queries else query_heads
    of_longest, of_others = (_steps(problem, *lengths, rows, met) for lengths in (longest, mean))
    steps = grid.heads * int(of_longest.sum() + count * of_others.sum())
    return float(of_longest.max() * programs / steps)


def _steps(
    problem: KernelProblem, n_q: int, n_k: int, rows: int, query_heads: int | None
) -> NDArray[np.int64]:
    """Return the time of each tile of a sequence in steps.

    query_heads: that each tile of keys meets; None for tiles of queries.
    """
    alignment = n_k - n_q if problem.lower_right else 0
    left, right = problem.extras.window
    right = 0 if problem.is_causal else right
    offset = alignment + right if right >= 0 else None
    lowest = alignment - left if left >= 0 else None
    if query_heads is None:
        return steps_of_query_tiles(n_q, n_k, offset, lowest, rows)
    return steps_of_key_tiles(n_q, n_k, offset, rows, query_heads, lowest)
