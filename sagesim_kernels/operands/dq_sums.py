"""Sums of dQ as integers, to which programs add in any order with the same result.

A program that owns a block of keys computes one part of each row of dQ. A sum of floats would
depend on the order of the parts. So each query has a unit, a power of two, and the parts are added
as multiples of it, in int32. The kernel that computes the units clears the sums. If a part may be
NaN or infinite, the unit is NaN, and so is dQ. theory.dq_sums proves that no sum overflows, and
bounds the error.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.interpreter import IS_INTERPRETED
from sagesim_kernels.launching import Specialized, launch, wait_for_earlier_kernels
from sagesim_kernels.operands.delta import load_rows
from sagesim_kernels.operands.grid import reversed_coordinates
from sagesim_kernels.operands.kernel_problem import KernelProblem, KernelSizes
from sagesim_kernels.operands.layout import (
    ALIGNMENT,
    Rows,
    Strided,
    length_of,
    store_tokens,
    stored_start_of,
    stored_tokens,
)
from sagesim_kernels.operands.means import SubtractedMeans, load_k_mean
from sagesim_kernels.operands.rounding import (
    LAUNCH,
    largest,
    magnitude,
    to_int32,
)
from sagesim_kernels.target import compute_capability

BY_ROWS = tl.constexpr(0)
"""The order of a block of queries in memory: row by row."""
BY_THREADS = tl.constexpr(1)
"""Each thread adds the numbers that it holds: see `_order`."""
BY_TMA = tl.constexpr(2)
"""TMA adds a part from shared memory: see `from_tma_order`. The sums of channels that are padding
may be anything: they are not set to 0, added to or read."""

_TMA_BLOCK: Final = 64
"""Queries of a part that TMA adds."""

_GROUP: Final = 8
"""Channels whose sums are together in the order of `BY_TMA`."""


class DqSums(NamedTuple):
    """The sums of dQ in padded storage, in units of their rows, and the units."""

    sums: Any
    """int32 [heads, tokens, channels]; each block of queries in the order of ORDER. None if a
    program computes all of dQ at once; then it needs no more than the tokens of these fields."""
    unit: Any  #: float32 [heads, tokens], or None
    tokens: Any  #: of a head, in padded storage
    ORDER: Any  #: constexpr: BY_ROWS, BY_THREADS or BY_TMA

    @classmethod
    def by_threads(cls, problem: KernelProblem, rows: int, channels: int, warps: int) -> DqSums:
        """Memory for sums to which threads add, and for the units.

        rows, channels: the size of the smallest part that is added, with padded channels.
        warps: of a program that adds parts.
        """
        order = BY_THREADS if _has_one_owner(rows, channels, warps) else BY_ROWS
        return cls._memory(problem, channels, order)

    @classmethod
    def by_tma(cls, problem: KernelProblem, channels: int) -> DqSums:
        """Memory for sums to which TMA adds, and for the units. channels: padded."""
        return cls._memory(problem, channels, BY_TMA)

    @classmethod
    def _memory(cls, problem: KernelProblem, channels: int, order: Any) -> DqSums:
        tokens, heads = stored_tokens(problem.cu_q, problem.q), problem.q.shape[1]
        device = problem.q.device
        return cls(
            torch.empty((heads, tokens, channels), dtype=torch.int32, device=device),
            torch.empty((heads, tokens), dtype=torch.float32, device=device),
            Specialized(tokens),
            order,
        )

    @classmethod
    def of_one_part(cls, problem: KernelProblem) -> DqSums:
        """No memory, because a single part is all of dQ."""
        return cls(None, None, Specialized(stored_tokens(problem.cu_q, problem.q)), BY_TMA)


def _has_one_owner(rows: int, columns: int, warps: int) -> bool:
    """Whether no two threads hold the same element of a part of dQ [rows, columns].

    In the layouts of mma.sync and wgmma, a warp holds at least 16 rows and 8 columns, and warps
    follow each other along either axis. The layouts of data center Blackwell are others.
    """
    if IS_INTERPRETED:
        return False
    has_tensor_memory = compute_capability() // 10 in (10, 11)
    return not has_tensor_memory and rows >= 16 * warps and columns >= 8 * warps


@triton.jit
def inverse_units(dq_sums, at, count: tl.constexpr):
    """Return 1 / unit of `count` queries, exactly; any number where the unit is NaN.

    at: the index of the first query in padded storage, over all heads.
    """
    return inverse_of(tl.load(dq_sums.unit + at + tl.arange(0, count)))


@triton.jit
def inverse_of(unit):
    """Return 1 / unit, exactly; any number where the unit is NaN."""
    return ((254 << 23) - unit.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def mark_nonfinite(dq_sums, at, part):
    """Set the units of the rows of a part [queries, channels] to NaN where it is not finite.

    at: as for `inverse_units`. Every program that stores to a unit stores NaN.
    """
    is_bad = largest(magnitude(part), 1) >= 0x7F800000
    unit = dq_sums.unit + at + tl.arange(0, part.shape[0])
    tl.store(unit, tl.full((part.shape[0],), float("nan"), tl.float32), mask=is_bad)


@triton.jit
def _order(ORDER: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    """Return where a block [rows, columns] keeps each element.

    BY_THREADS, the 64 elements of 8 rows and 8 columns are together, first those of even columns:
    a warp holds the result of mma.sync and wgmma so that an instruction adds to 32 neighbours.
    """
    row, column = tl.arange(0, rows)[:, None], tl.arange(0, columns)[None, :]
    if ORDER == BY_THREADS:
        group = (row // 8 * (columns // 8) + column // 8) * 2 + column % 2
        return group * 32 + row % 8 * 4 + column % 8 // 2
    else:
        return row * columns + column


@triton.constexpr_function
def summed_channels(d, d_pad):
    """Return for how many of d_pad channels TMA adds sums, if the head size is d."""
    return min(-(-d // _GROUP) * _GROUP, d_pad)


def channels_at_once(d: int, d_pad: int) -> int:
    """Return how many of `summed_channels` TMA adds at once: a power of two that divides them."""
    summed = summed_channels(d, d_pad)
    return summed & -summed


@triton.jit
def start_sums(dq_sums, at, unit, sizes):
    """Set the sums of a block of queries to 0, and store its units. at: as for `inverse_units`."""
    tl.store(dq_sums.unit + at + tl.arange(0, sizes.BLOCK_Q), unit)
    clear_sums(dq_sums, at, tl.arange(0, sizes.BLOCK_Q * sizes.D_PAD), sizes)


@triton.jit
def clear_sums(dq_sums, at, places, sizes):
    """Set some sums of a block of queries to 0.

    at: as for `inverse_units`. places: of these sums in the memory of the block. In Gluon they have
    a layout.
    """
    SUMMED: tl.constexpr = sizes.BLOCK_Q * summed_channels(sizes.D, sizes.D_PAD)
    ptrs = dq_sums.sums + at * sizes.D_PAD + places
    if dq_sums.ORDER == BY_TMA and SUMMED < sizes.BLOCK_Q * sizes.D_PAD:
        tl.store(ptrs, places * 0, mask=places < SUMMED)
    else:
        tl.store(ptrs, places * 0)


@triton.jit
def _load_tma_sums(dq_sums, at, sizes):
    """Return the sums of a block of queries, [BLOCK_Q, D_PAD]; 0 for channels without sums."""
    SUMMED: tl.constexpr = sizes.BLOCK_Q * summed_channels(sizes.D, sizes.D_PAD)
    place = tl.arange(0, sizes.BLOCK_Q * sizes.D_PAD)
    ptrs = dq_sums.sums + at * sizes.D_PAD + place
    if SUMMED < sizes.BLOCK_Q * sizes.D_PAD:
        block = tl.load(ptrs, mask=place < SUMMED, other=0)
    else:
        block = tl.load(ptrs)
    return from_tma_order(block, sizes)


@triton.jit
def from_tma_order(block, sizes):
    """Return [BLOCK_Q, D_PAD] from the elements of a block in the order of `BY_TMA`.

    The 128 elements of 16 rows and 8 columns are together. They are the elements that a warp holds
    in the layout of wgmma: four of each thread, two in each of two rows.
    """
    block = block.reshape([sizes.D_PAD // 8, sizes.BLOCK_Q // 16, 8, 4, 2, 2])
    return block.trans(1, 4, 2, 0, 3, 5).reshape([sizes.BLOCK_Q, sizes.D_PAD])


_ADD = tl.constexpr("red.relaxed.gpu.global.add.s32 [$1], $2; mov.b32 $0, 0;")


@triton.jit
def add_part(dq_sums, at, part):
    """Add a part of dQ, float32 [queries, channels] in units, to the sums of a block of queries.

    at: as for `inverse_units`.
    """
    units = to_int32(part)
    order = _order(dq_sums.ORDER, part.shape[0], part.shape[1])
    ptrs = dq_sums.sums + at * part.shape[1] + order
    if dq_sums.ORDER == BY_THREADS:
        tl.inline_asm_elementwise(
            _ADD, "=r,l,r", [ptrs, units], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        # Without knowledge of alignment, the lanes of a warp add to neighbours.
        tl.atomic_add(tl.multiple_of(ptrs, (1, 1)), units, sem="relaxed")


@triton.jit
def finish_dq_kernel(grid, dq_sums, lse2, ds_sums, subtracted, dq, lengths, scale, sizes):
    """Convert the sums of a block of queries to dQ.

    ds_sums: `Rows` of the sums of the rows of dS, or None if they are 0.
    """
    wait_for_earlier_kernels()
    block, h, b = reversed_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = block * sizes.BLOCK_Q
    if first >= n_q:
        return
    queries = first + tl.arange(0, sizes.BLOCK_Q)
    at = h.to(tl.int64) * dq_sums.tokens + stored_start_of(lengths.cu_q, lengths.n_q, b) + first
    if dq_sums.ORDER == BY_TMA:
        total = _load_tma_sums(dq_sums, at, sizes)
    else:
        sums = dq_sums.sums + at * sizes.D_PAD
        total = tl.load(sums + _order(dq_sums.ORDER, sizes.BLOCK_Q, sizes.D_PAD))
    total = total.to(tl.float32)
    total *= tl.load(dq_sums.unit + at + tl.arange(0, sizes.BLOCK_Q))[:, None]
    if ds_sums is not None and subtracted.k_mean is not None:
        # The mean that was subtracted from K contributes to dQ, unless a row of dS sums to 0.
        ds_sum = load_rows(ds_sums, lengths.cu_q, b, h, queries, n_q, 0.0)[:, None]
        total += ds_sum * load_k_mean(subtracted, b, h // sizes.GROUPS, sizes)
    # A query that attends to no key may share a tile with a NaN. NaN != inf.
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, queries, n_q, float("inf"))
    total = tl.where((row_lse2 != float("inf"))[:, None], total, 0.0)
    store_tokens(dq, lengths.cu_q, b, h, first, n_q, total * scale, sizes.D)


def finish_dq(
    problem: KernelProblem,
    dq_sums: DqSums,
    lse2: Rows,
    ds_sums: Rows | None,
    subtracted: SubtractedMeans,
    dq: Tensor,
) -> None:
    """Fill dq, any strides, from its sums. ds_sums: the sums of the rows of dS; None if 0."""
    block = min(problem.spec.block_q, ALIGNMENT.value)
    if dq_sums.ORDER.value == BY_TMA.value:
        block = _TMA_BLOCK
    grid = problem.query_grid(block)
    launch(
        finish_dq_kernel,
        grid.programs,
        grid,
        dq_sums,
        lse2,
        ds_sums,
        subtracted,
        Strided.of(dq),
        problem.lengths,
        problem.scale,
        KernelSizes.of(problem, block, block_q=block),
        **LAUNCH,
    )
