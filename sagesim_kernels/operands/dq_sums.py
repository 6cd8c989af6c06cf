"""Sums of dQ as integers, to which programs add in any order with the same result.

A program that owns a block of keys computes one part of each row of dQ. A sum of floats would
depend on the order of the parts. So each query has a unit, a power of two, and the parts are added
as multiples of it, in int32. The unit follows from a bound on the sum of the magnitudes of all
parts, which is known before the first part:

    B_i = growth R_i (||dO_i|| max_j ||V_j|| + |delta_i|) max_jc |K_jc|
    unit_i = 2^(e - 30), where 2^e is the least power of two that is not below B_i

R_i bounds the sum of row i of P; growth bounds what rounding dS adds. theory.dq_sums proves that no
sum overflows, and bounds the error. If a part may be NaN or infinite, so is the unit, and dQ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim.spec import AttentionSpec, Granularity, Precision, RoundingMode
from sagesim_kernels.operands.delta import load_rows
from sagesim_kernels.operands.kernel_problem import KernelProblem, KernelSizes
from sagesim_kernels.operands.layout import (
    Grid,
    Rows,
    Strided,
    length_of,
    program_coordinates,
    store_tokens,
    stored_start_of,
    stored_tokens,
)
from sagesim_kernels.operands.masking import (
    causal_offset,
    key_loop_bounds,
    live_keys,
    live_queries,
)
from sagesim_kernels.operands.means import SubtractedMeans, load_k_mean
from sagesim_kernels.operands.operand import (
    Operand,
    head_pointers,
    load_channel_scales,
    load_token_scales,
    load_tokens,
)
from sagesim_kernels.operands.results import RowStatistics
from sagesim_kernels.operands.rounding import IS_INTERPRETED, LAUNCH, LOG2_E, magnitude, to_int32
from sagesim_kernels.target import compute_capability

_AT_ONCE = tl.constexpr(128)
"""Key blocks whose bounds a program reads in one step."""

_BITS = tl.constexpr(30)
"""A sum is at most 2^30 units, plus half a unit for each part."""

_LARGEST = tl.constexpr(2.0**120)
"""A row whose bound on the sum of |dS| is not below this has the unit NaN."""

_FRACTION = tl.constexpr(2.0**-8)
"""Of norms: a token has at most 256 channels, so that this part of its norm does not overflow."""

_SLACK = tl.constexpr(1.0 + 2.0**-6)
"""More than the relative error of a bound that is computed in float32."""


class DqSums(NamedTuple):
    """The sums of dQ in padded storage, in units of their rows, and the units."""

    sums: Any  #: int32 [heads, tokens, channels]; each block of queries in the order of `_order`
    unit: Any  #: float32 [heads, tokens]
    tokens: Any  #: of a head, in padded storage
    DIRECT: Any  #: constexpr bool: each thread adds the elements of a part that it holds

    @classmethod
    def empty(cls, problem: KernelProblem, rows: int, channels: int, warps: int) -> DqSums:
        """Sums of 0, and memory for the units.

        rows, channels: the size of the smallest part that is added, with padded channels.
        warps: of a program that adds parts.
        """
        tokens, heads = stored_tokens(problem.cu_q, problem.q), problem.q.shape[1]
        device = problem.q.device
        return cls(
            torch.zeros((heads, tokens, channels), dtype=torch.int32, device=device),
            torch.empty((heads, tokens), dtype=torch.float32, device=device),
            tokens,
            tl.constexpr(_has_one_owner(rows, channels, warps)),
        )


def _has_one_owner(rows: int, columns: int, warps: int) -> bool:
    """Whether no two threads hold the same element of a part of dQ [rows, columns].

    In the layouts of mma.sync and wgmma, a warp holds at least 16 rows and 8 columns, and warps
    follow each other along either axis. The layouts of data center Blackwell are others.
    """
    if IS_INTERPRETED:
        return False
    has_tensor_memory = compute_capability() // 10 in (10, 11)
    return not has_tensor_memory and rows >= 16 * warps and columns >= 8 * warps


class KeyBounds(NamedTuple):
    """Bounds on each block of keys, float32 [kv heads, key blocks in padded storage]."""

    v_norm: Any  #: 2^-8 times the largest norm of V that is finite
    k_amax: Any  #: the largest |K| of dQ's operand, NaN if there is one
    k_norm: Any  #: 2^-8 times the largest norm of K of the recomputed S; None if that is exact
    blocks: Any  #: of a head, in padded storage
    IN_16_BIT: Any  #: constexpr bool: dQ's operand is in 16 bit


@triton.jit
def _norms(x, base, scales, first, count: tl.constexpr, last, D_PAD: tl.constexpr, lowest=0):
    """Return 2^-8 times the norms of tokens of an `Operand`, [count], which no finite token overflows."""
    tokens = load_tokens(x, base, first, count, last, D_PAD, lowest).to(tl.float64)
    norms = (tl.sqrt(tl.sum(tokens * tokens, 1)) * _FRACTION).to(tl.float32)
    return norms * load_token_scales(x, scales, first, count, last)


@triton.jit
def key_bounds_kernel(grid, k, v, k_right, bounds, lengths, sizes):
    """Compute the `KeyBounds` of a block of keys.

    k, v, k_right: `Operand` of qk_recompute, dp and dq.
    """
    block, h, b = program_coordinates(grid)
    first = block * sizes.BLOCK_K
    if first >= length_of(lengths.cu_k, lengths.n_k, b):
        return
    n_k = live_keys(lengths, b)
    start = stored_start_of(lengths.cu_k, lengths.n_k, b) // sizes.BLOCK_K
    at = h.to(tl.int64) * bounds.blocks + start + block
    v_base, v_scales = head_pointers(v, lengths.cu_k, lengths.n_k, b, h)
    norms = _norms(v, v_base, v_scales, first, sizes.BLOCK_K, n_k, sizes.DV_PAD)
    # A key whose V is not finite makes delta NaN or infinite in every row that attends to it.
    tl.store(bounds.v_norm + at, tl.max(tl.where(norms < float("inf"), norms, 0.0), 0))
    k_base, k_scales = head_pointers(k_right, lengths.cu_k, lengths.n_k, b, h)
    if k_right.scale is None:
        tokens = load_tokens(k_right, k_base, first, sizes.BLOCK_K, n_k, sizes.D_PAD)
        largest = tl.max(tl.max(magnitude(tokens.to(tl.float32)), 1), 0)
    else:
        scale = load_channel_scales(k_right, k_scales, first, sizes.D, sizes.D_PAD)
        if k_right.BY_CHANNEL:
            scale = tl.where(tl.arange(0, sizes.D_PAD) < sizes.D, scale, 0.0)
        largest = tl.max(magnitude(127.0 * scale), 0)
    tl.store(bounds.k_amax + at, largest.to(tl.float32, bitcast=True))
    if bounds.k_norm is not None:
        k_base, k_scales = head_pointers(k, lengths.cu_k, lengths.n_k, b, h)
        norms = _norms(k, k_base, k_scales, first, sizes.BLOCK_K, n_k, sizes.D_PAD)
        tl.store(bounds.k_norm + at, tl.max(norms, 0))


@triton.jit
def _exponent_above(x):
    """Return the exponent, biased by 127, of the least power of two that is not below x >= 0."""
    return (x.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23


@triton.jit
def units_kernel(
    grid,
    q,
    do,
    bounds,
    lse2,
    delta,
    p_sums,
    dq_sums,
    lengths,
    scale_log2,
    growth,
    shared_growth,
    SHARED: tl.constexpr,
    sizes,
):
    """Compute the units of a block of queries.

    q, do: `Operand` of qk_recompute and dp. bounds: `KeyBounds`. p_sums: the row sums of P, or None
    if P is recomputed from the operands of the forward. scale_log2: the magnitude of the logit
    scale, times log2(e). growth, shared_growth: what rounding can add to a row sum of dS: a
    multiple of the row sum, and of that of all rows of the block. SHARED: whether the rows of a
    tile of dS share a scale.
    """
    block, h, b = program_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = block * sizes.BLOCK_Q
    if first >= n_q:
        return
    first_live, _ = live_queries(lengths, b)
    n_k, offset = live_keys(lengths, b), causal_offset(lengths, b)
    queries = first + tl.arange(0, sizes.BLOCK_Q)
    k_head = h // sizes.GROUPS

    _, end = key_loop_bounds(first, sizes.BLOCK_Q, sizes.BLOCK_K, n_k, offset)
    start = stored_start_of(lengths.cu_k, lengths.n_k, b) // sizes.BLOCK_K
    at = k_head.to(tl.int64) * bounds.blocks + start
    v_norm = tl.zeros((_AT_ONCE,), tl.float32)
    k_norm = tl.zeros((_AT_ONCE,), tl.float32)
    k_amax = tl.zeros((_AT_ONCE,), tl.int32)
    blocks = tl.cdiv(end, sizes.BLOCK_K)
    for index in range(0, blocks, _AT_ONCE):
        local = index + tl.arange(0, _AT_ONCE)
        some = local < blocks
        v_norm = tl.maximum(v_norm, tl.load(bounds.v_norm + at + local, mask=some, other=0.0))
        size = tl.load(bounds.k_amax + at + local, mask=some, other=0.0)
        k_amax = tl.maximum(k_amax, magnitude(size))
        if bounds.k_norm is not None:
            k_norm = tl.maximum(k_norm, tl.load(bounds.k_norm + at + local, mask=some, other=0.0))

    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, queries, n_q, float("inf"))
    has_keys = row_lse2 != float("inf")
    # Row sums of P. S and lse2 are rounded; sums of codes are exact, so that S is at most lse2.
    off = tl.where(has_keys, tl.abs(row_lse2), 0.0) * 2.0**-21
    if bounds.k_norm is not None:
        q_base, q_scales = head_pointers(q, lengths.cu_q, lengths.n_q, b, h)
        q_norm = _norms(q, q_base, q_scales, first, sizes.BLOCK_Q, n_q, sizes.D_PAD, first_live)
        off += q_norm * tl.max(k_norm, 0) * scale_log2 * (sizes.D_PAD * 2.0**-5)
        row_sum = tl.exp2(off)
    else:
        row_sum = tl.minimum(tl.exp2(off), tl.maximum(n_k, 1).to(tl.float32))
    if p_sums is not None:
        sums = load_rows(p_sums, lengths.cu_q, b, h, queries, n_q, 0.0)
        row_sum = sums if bounds.k_norm is None else row_sum * sums

    do_base, do_scales = head_pointers(do, lengths.cu_q, lengths.n_q, b, h)
    do_norm = _norms(do, do_base, do_scales, first, sizes.BLOCK_Q, n_q, sizes.DV_PAD, first_live)
    row_delta = load_rows(delta, lengths.cu_q, b, h, queries, n_q, 0.0)
    ds_sum = row_sum * (do_norm * 256.0 * (tl.max(v_norm, 0) * 256.0) + tl.abs(row_delta))
    total = growth * ds_sum
    if shared_growth is not None:
        total += shared_growth * tl.sum(ds_sum, 0)
    # The bound is total * k, and k is mantissa * 2**exponent, so that nothing overflows.
    total *= _SLACK
    k_bits = tl.max(k_amax, 0)
    mantissa = ((k_bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    exponent = _exponent_above(total * mantissa) + tl.maximum(k_bits >> 23, 1) - 127
    unit_exponent = tl.maximum(exponent - _BITS, _exponent_above(total) - 126)
    unit = (tl.maximum(unit_exponent, 1) << 23).to(tl.float32, bitcast=True)
    # In 16 bit, a part beyond 2**127 may be infinite; codes are multiplied in units.
    limit = 127 + (127 if bounds.IN_16_BIT else 157)
    is_finite = (total < _LARGEST) & (k_bits < 0x7F800000) & (exponent < limit)
    is_bad = has_keys & ~is_finite
    if SHARED:  # A NaN of a row is in the scale of its tile.
        is_bad = tl.max(is_bad.to(tl.int32), 0) > 0
    unit = tl.where(is_bad, float("nan"), unit)
    row = h.to(tl.int64) * dq_sums.tokens + stored_start_of(lengths.cu_q, lengths.n_q, b) + first
    tl.store(dq_sums.unit + row + tl.arange(0, sizes.BLOCK_Q), unit)


@triton.jit
def inverse_units(dq_sums, at, count: tl.constexpr):
    """Return 1 / unit of `count` queries, exactly; any number where the unit is NaN.

    at: the index of the first query in padded storage, over all heads.
    """
    unit = tl.load(dq_sums.unit + at + tl.arange(0, count))
    return ((254 << 23) - unit.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def mark_nonfinite(dq_sums, at, part):
    """Set the units of the rows of a part [queries, channels] to NaN where it is not finite.

    at: as for `inverse_units`. Every program that stores to a unit stores NaN.
    """
    is_bad = tl.max(magnitude(part), 1) >= 0x7F800000
    unit = dq_sums.unit + at + tl.arange(0, part.shape[0])
    tl.store(unit, tl.full((part.shape[0],), float("nan"), tl.float32), mask=is_bad)


@triton.jit
def _order(DIRECT: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    """Return where a block [rows, columns] keeps each element.

    With DIRECT, the 64 elements of 8 rows and 8 columns are together, first those of even columns:
    a warp holds the result of mma.sync and wgmma so that an instruction adds to 32 neighbours.
    """
    row, column = tl.arange(0, rows)[:, None], tl.arange(0, columns)[None, :]
    if DIRECT:
        group = (row // 8 * (columns // 8) + column // 8) * 2 + column % 2
        return group * 32 + row % 8 * 4 + column % 8 // 2
    else:
        return row * columns + column


_ADD = tl.constexpr("red.relaxed.gpu.global.add.s32 [$1], $2; mov.b32 $0, 0;")


@triton.jit
def add_part(dq_sums, at, part):
    """Add a part of dQ, float32 [queries, channels] in units, to the sums of a block of queries.

    at: as for `inverse_units`.
    """
    units = to_int32(part)
    order = _order(dq_sums.DIRECT, part.shape[0], part.shape[1])
    ptrs = dq_sums.sums + at * part.shape[1] + order
    if dq_sums.DIRECT:
        tl.inline_asm_elementwise(
            _ADD, "=r,l,r", [ptrs, units], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        # Without knowledge of alignment, the lanes of a warp add to neighbours.
        tl.atomic_add(tl.multiple_of(ptrs, (1, 1)), units, sem="relaxed")


@triton.jit
def finish_dq_kernel(grid, dq_sums, lse2, d_lse, subtracted, dq, lengths, scale, sizes):
    """Convert the sums of a block of queries to dQ."""
    block, h, b = program_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = block * sizes.BLOCK_Q
    if first >= n_q:
        return
    queries = first + tl.arange(0, sizes.BLOCK_Q)
    at = h.to(tl.int64) * dq_sums.tokens + stored_start_of(lengths.cu_q, lengths.n_q, b) + first
    order = _order(dq_sums.DIRECT, sizes.BLOCK_Q, sizes.D_PAD)
    total = tl.load(dq_sums.sums + at * sizes.D_PAD + order).to(tl.float32)
    total *= tl.load(dq_sums.unit + at + tl.arange(0, sizes.BLOCK_Q))[:, None]
    if d_lse is not None and subtracted.k_mean is not None:
        # A row of dS then sums to the gradient of its logsumexp and not to 0, so the mean that was
        # subtracted from K contributes to dQ.
        row_lse2 = load_rows(lse2, lengths.cu_q, b, h, queries, n_q, float("inf"))
        gain = load_rows(d_lse, lengths.cu_q, b, h, queries, n_q, 0.0)[:, None]
        mean = load_k_mean(subtracted, b, h // sizes.GROUPS, sizes)
        total += tl.where((row_lse2 < float("inf"))[:, None], gain * mean, 0.0)
    store_tokens(dq, lengths.cu_q, b, h, first, n_q, total * scale, sizes.D)


def growths(spec: AttentionSpec) -> tuple[float, float | None]:
    """Return the most that rounding dS to dQ's format adds to the sum of a row's magnitudes.

    The first number is a multiple of the sum of the row, the second one of the sums of all rows of
    its block of queries, or None. Rounding to the nearest code at most doubles a magnitude.
    Stochastic rounding makes a code of at most 1 of a smaller one, whose unit is the amax / 127.
    """
    matmul = spec.dq
    if matmul.precision is not Precision.INT8:
        return 2.0, None  # subnormal numbers of FP16 may double
    if spec.rounding.mode is not RoundingMode.STOCHASTIC:
        return 2.0, None
    added = spec.block_k / 127
    return (1.0, added) if matmul.lhs is Granularity.PerTile else (1.0 + added, None)


def compute_units(
    problem: KernelProblem,
    operands: dict[str, Operand],
    statistics: RowStatistics,
    p_sums: Rows | None,
    dq_sums: DqSums,
) -> None:
    """Fill dq_sums.unit.

    operands: q and k of qk_recompute, do and v of dp, and k_right, K of dq.
    p_sums: the row sums of P, or None if P is recomputed from the operands of the forward.
    """
    spec = problem.spec
    heads, blocks = problem.k.shape[1], stored_tokens(problem.cu_k, problem.k) // spec.block_k
    count = 2 if spec.qk_recompute.precision.is_scaled else 3
    memory = torch.empty((count, heads, blocks), dtype=torch.float32, device=problem.k.device)
    k_norm = memory[2] if count == 3 else None
    in_16_bit = tl.constexpr(not spec.dq.precision.is_scaled)
    bounds = KeyBounds(memory[0], memory[1], k_norm, blocks, in_16_bit)
    sizes = KernelSizes.of(problem, spec.block_q)
    grid = Grid(-(-problem.longest_k // spec.block_k), heads, problem.sequences)
    key_bounds_kernel[grid.programs](
        grid,
        operands["k"],
        operands["v"],
        operands["k_right"],
        bounds,
        problem.lengths,
        sizes,
        **LAUNCH,
    )
    grid = Grid(-(-problem.longest_q // spec.block_q), problem.q.shape[1], problem.sequences)
    growth, shared_growth = growths(spec)
    units_kernel[grid.programs](
        grid,
        operands["q"],
        operands["do"],
        bounds,
        *statistics,
        p_sums,
        dq_sums,
        problem.lengths,
        abs(problem.scale) * LOG2_E,
        growth,
        shared_growth,
        spec.dq.precision.is_scaled and spec.dq.lhs is Granularity.PerTile,
        sizes,
        **LAUNCH,
    )


def finish_dq(
    problem: KernelProblem,
    dq_sums: DqSums,
    lse2: Rows,
    d_lse: Rows | None,
    subtracted: SubtractedMeans,
    dq: Tensor,
) -> None:
    """Fill dq, any strides, from its sums."""
    block = problem.spec.block_q
    grid = Grid(-(-problem.longest_q // block), problem.q.shape[1], problem.sequences)
    finish_dq_kernel[grid.programs](
        grid,
        dq_sums,
        lse2,
        d_lse,
        subtracted,
        Strided.of(dq),
        problem.lengths,
        problem.scale,
        KernelSizes.of(problem, block),
        **LAUNCH,
    )
