"""What a backward needs of keys and queries, in one pass over each, if QK alone is in codes.

A program for a block of keys reads K and V once: it smooths and rounds K, and bounds both. After
that, a program for a block of queries reads Q, O and dO once: it rounds Q, computes delta and the
units of dQ, and sets the sums of dQ to 0.
"""

# Pyright takes the annotations of Triton's functions literally:
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim.spec import AttentionSpec, Delta, Granularity, Precision
from sagesim_kernels.launching import launch, wait_for_earlier_kernels
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
    length_of,
    load_parts,
    load_rows,
    magnitude,
    norms_of,
    padded,
    part_count,
    program_coordinates,
    reversed_coordinates,
    row_maxima,
    row_sums64,
    store_block,
    store_bounds,
    store_rows,
    stored_start_of,
    subtract_lse_gradient,
    units_of,
)
from sagesim_kernels.preparation.query_rows import start_rows

_TYPES: Final = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

_CHANNELS_OF_A_WARP: Final = 16
"""Channels for each warp of a program that holds one block, of a tile of 64 or 128 channels. A tile
in two tensors counts as one of 64."""

_REGISTERS_KEYS: Final = 80
_REGISTERS_QUERIES: Final = {4: 80, 8: 64}
"""At most so many for a thread of a program that holds one block; for queries by the warps of the
program. With more, fewer programs run on a multiprocessor at a time."""

_REGISTERS_IN_PARTS: Final = 96
"""The same if a tile is in two tensors: with 80, more of them are spilled."""


@lru_cache(maxsize=256)
def has_one_pass(spec: AttentionSpec) -> bool:
    """Return whether `prepare_backward_in_one_pass` prepares the backward of a spec.

    QK is in INT8, its scales of K are of blocks, and all else is in one 16-bit format. The backward
    recomputes the forward's S: otherwise the units of dQ need the row sums of P. The caller checks
    the blocks, the head sizes and that there is no softcap.
    """
    (sixteen, *others) = {spec.site(site).precision for site in ("dv", "dp", "dq", "dk")}
    return (
        spec.qk == spec.qk_recompute
        and spec.qk.precision is Precision.INT8
        and spec.qk.rhs is Granularity.PerBlock
        and sixteen in DTYPES
        and not others
        and not spec.smoothing.q
        and spec.delta is Delta.FROM_O
    )


class _Threads(NamedTuple):
    """The threads of a program that holds one block of tokens."""

    warps: int
    registers_keys: int  #: at most, for a thread of a program for keys
    registers_queries: int

    @classmethod
    def of(cls, *head_sizes: int) -> _Threads:
        """For a block of each of these head sizes."""
        is_in_parts = any(part_count(d) > 1 for d in head_sizes)
        channels = max(padded(d) if part_count(d) == 1 else 64 for d in head_sizes)
        warps = channels // _CHANNELS_OF_A_WARP
        if is_in_parts and warps == 4:
            return cls(warps, _REGISTERS_IN_PARTS, _REGISTERS_IN_PARTS)
        return cls(warps, _REGISTERS_KEYS, _REGISTERS_QUERIES[warps])


@triton.jit
def prepare_keys_kernel(
    grid, k, v, mean, k8, bounds, rounding, lengths, k_blocks, v_blocks, TYPE: tl.constexpr
):
    """Round a block of K, minus its mean, to codes, and compute the `KeyBounds` of the block.

    k, v: `Strided`. mean: `Means` of K, or None. k8: `Operand` of qk_recompute. k_blocks, v_blocks:
    `TokenBlocks` of the spec. TYPE: the 16-bit type of the other products.
    """
    wait_for_earlier_kernels()
    i, h, b = program_coordinates(grid)
    first = i * k_blocks.BLOCK
    if first >= length_of(lengths.cu_k, lengths.n_k, b):
        return
    k_tokens = load_parts(k, mean, lengths, i, first, k_blocks.BLOCK, h, b, k_blocks)
    v_tokens = load_parts(v, None, lengths, i, first, v_blocks.BLOCK, h, b, v_blocks)
    at = h.to(tl.int64) * bounds.tokens + stored_start_of(lengths.cu_k, lengths.n_k, b) + first
    k_amax = row_maxima(_rounded(k_tokens, TYPE))
    v_norm = magnitude(norms_of(_rounded(v_tokens, TYPE)))
    store_block(k8, k_tokens, rounding, lengths, i, h, b, k_blocks)
    store_bounds(bounds.k_amax, bounds.block_k_amax, at, k_amax, k_blocks.BLOCK)
    store_bounds(bounds.v_norm, bounds.block_v_norm, at, v_norm, k_blocks.BLOCK)


@triton.jit
def _rounded(parts, TYPE: tl.constexpr):
    """Return parts rounded to TYPE, float32."""
    found = ()
    for j in tl.static_range(len(parts)):
        found += (parts[j].to(TYPE).to(tl.float32),)
    return found


@triton.jit
def prepare_queries_kernel(
    grid, q, o, do, q8, bounds, rounding, lse2, d_lse, delta, row_stats, dq_sums, lengths,
    scale_log2, growths, q_blocks, o_blocks, sizes, TYPE: tl.constexpr,
):  # fmt: skip
    """Round a block of Q to codes, compute delta, units and row statistics, and clear its sums.

    Queries behind the last one of a sequence get statistics that make P 0.

    q, o, do: `Strided`. q8: `Operand` of qk_recompute. bounds: `KeyBounds`. lse2, d_lse, delta:
    `Rows`. row_stats: see `start_rows`. dq_sums: `DqSums`. growths: `Growths`.
    q_blocks, o_blocks: `TokenBlocks` of the spec. TYPE: the 16-bit type of dp.
    """
    wait_for_earlier_kernels()
    i, h, b = reversed_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = i * sizes.BLOCK_Q
    if first >= n_q:
        return
    local = tl.arange(0, sizes.BLOCK_Q)
    row = first + local
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, row, n_q, float("inf"))
    attended = attended_bounds(bounds, lengths, b, h // sizes.GROUPS, first, row, sizes)
    do_parts = load_parts(do, None, lengths, i, first, sizes.BLOCK_Q, h, b, o_blocks)
    o_parts = load_parts(o, None, lengths, i, first, sizes.BLOCK_Q, h, b, o_blocks)
    row_delta = row_sums64(o_parts[0] * do_parts[0])
    for part in tl.static_range(1, len(o_parts)):
        row_delta += row_sums64(o_parts[part] * do_parts[part])
    row_delta = row_delta.to(tl.float32)
    row_delta = subtract_lse_gradient(row_delta, d_lse, lengths, b, h, row, n_q, row_lse2)
    do_norm = norms_of(_rounded(do_parts, TYPE))
    do_norm = tl.where(row_lse2 != float("inf"), do_norm, 0.0)
    unit = units_of(
        None, do_norm, bounds, attended, None, lengths, b, h, first, row_lse2, row_delta,
        scale_log2, growths, sizes,
    )  # fmt: skip
    # All stores follow all loads, which could not be moved up past a store.
    q_parts = load_parts(q, None, lengths, i, first, sizes.BLOCK_Q, h, b, q_blocks)
    q_scale = store_block(q8, q_parts, rounding, lengths, i, h, b, q_blocks)
    at = h.to(tl.int64) * dq_sums.tokens + stored_start_of(lengths.cu_q, lengths.n_q, b) + first
    store_rows(delta, lengths.cu_q, b, h, row, n_q, row_delta)
    tl.store(row_stats + at * 4 + local[:, None], q_scale * scale_log2)
    start_rows(dq_sums, row_stats, at, unit, row_lse2, row_delta, sizes)


def prepare_backward_in_one_pass(
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
    """Round Q and K of qk_recompute; fill delta, units and row statistics; set the sums to 0.

    row_stats: see `start_rows`. tile: keys that a product of dQ sums over. The others: see
    `prepare_backward`. There is no softcap, and head sizes are from 33 to 128.
    """
    spec, lengths = problem.spec, problem.lengths
    matmul = spec.qk_recompute
    dtype: tl.constexpr = tl.constexpr(_TYPES[DTYPES[spec.dp.precision]])
    (q8, q), (k8, k) = (operands.reserve("qk_recompute", x) for x in ("q", "k"))
    d, d_v = k.x.shape[3], problem.v.shape[3]
    threads = _Threads.of(d, d_v)
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
        num_warps=threads.warps,
        maxnreg=threads.registers_keys,
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
        num_warps=threads.warps,
        maxnreg=threads.registers_queries,
        **LAUNCH,
    )
