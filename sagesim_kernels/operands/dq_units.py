"""The units in which parts of dQ are added: powers of two, from a bound on the sum of each row.

docs/numerics.md, "Sums of dQ", defines bound and unit. theory.dq_sums proves that no sum
overflows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sagesim.spec import AttentionSpec, Granularity, RoundingMode
from sagesim_kernels.launching import launch, wait_for_earlier_kernels
from sagesim_kernels.operands.delta import load_rows
from sagesim_kernels.operands.dq_sums import DqSums, start_sums
from sagesim_kernels.operands.grid import program_coordinates
from sagesim_kernels.operands.kernel_problem import KernelProblem, KernelSizes
from sagesim_kernels.operands.key_bounds import (
    BLOCKS_AT_ONCE,
    KEYS_AT_ONCE,
    attended_bounds,
    compute_key_bounds,
    token_norms,
)
from sagesim_kernels.operands.layout import ALIGNMENT, Rows, length_of, stored_start_of
from sagesim_kernels.operands.masking import keys_of, live_queries
from sagesim_kernels.operands.means import Means
from sagesim_kernels.operands.operand import Operand, head_pointers
from sagesim_kernels.operands.results import RowStatistics
from sagesim_kernels.operands.rounding import LAUNCH, LOG2_E, largest, magnitude
from sagesim_kernels.operands.row_bounds import SMALLEST_SHARE, has_row_bound

_BITS = tl.constexpr(30)
"""A sum is at most 2^30 units, plus half a unit for each part."""

_LARGEST = tl.constexpr(2.0**120)
"""A row whose bound on the sum of |dS| is not below this has the unit NaN."""

_UNDERFLOW = tl.constexpr(2.0**-120)
"""More than the absolute error of that bound, and of the sum of |dS|, in float32."""

_SLACK = tl.constexpr(1.0 + 2.0**-6)
"""More than the relative error of a bound that is computed in float32."""

_NOT_FINITE = tl.constexpr(0x7F800000)
"""The `magnitude` of infinity. That of NaN is larger, every other one is smaller."""


@triton.jit
def _product_of_norms(x, y):
    """Return 2^16 x y for norms times 2^-8. It overflows only if the result does; NaN stays."""
    x_first = x < y
    smaller = tl.where(x_first, x, y)
    return tl.where(x_first, y, x) * (smaller * 65536.0)


@triton.jit
def _exponent_above(x):
    """Return the exponent, biased by 127, of the least power of two that is not below x >= 0."""
    return (x.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23


@triton.jit
def _exponent_of_product(x, bits):
    """Return the same of x times the float32 with these bits, or 2^-126. Nothing overflows."""
    bits = tl.maximum(bits, 1 << 23)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    return _exponent_above(x * mantissa) + (bits >> 23) - 127


@triton.jit
def row_units(
    q, do, bounds, p_sums, lengths, b, h, first, row_lse2, row_delta, scale_log2, growths, sizes,
    ds_bound=None,
):  # fmt: skip
    """Return the units of queries first..first + BLOCK_Q, float32 [BLOCK_Q].

    q, do: `Operand` of qk_recompute and dp. bounds: `KeyBounds`. p_sums: the row sums of P, or None
    if P is recomputed from the operands of the forward. row_lse2, row_delta: of the queries.
    scale_log2: the magnitude of the logit scale, times log2(e). growths: `Growths`. ds_bound:
    `Rows` of the bounds from which dQ's scales of dS follow, or None.
    """
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first_live, _ = live_queries(lengths, b)
    has_keys = row_lse2 != float("inf")
    do_base, do_scales = head_pointers(do, lengths.cu_q, lengths.n_q, b, h)
    do_norm = token_norms(
        do, do_base, do_scales, first, sizes.BLOCK_Q, n_q, sizes.DV_PAD, first_live, has_keys
    )
    queries = first + tl.arange(0, sizes.BLOCK_Q)
    attended = attended_bounds(
        bounds, lengths, b, h // sizes.GROUPS, first, first, queries,
        tl.arange(0, BLOCKS_AT_ONCE), tl.arange(0, KEYS_AT_ONCE), sizes,
    )  # fmt: skip
    return units_of(
        q, do_norm, bounds, attended, p_sums, lengths, b, h, first, queries, row_lse2, row_delta,
        scale_log2, growths, sizes, ds_bound,
    )  # fmt: skip


@triton.jit
def units_of(
    q, do_norm, bounds, attended, p_sums, lengths, b, h, first, queries, row_lse2, row_delta,
    scale_log2, growths, sizes, ds_bound=None,
):  # fmt: skip
    """Return what `row_units` does.

    queries: all of a block from `first` on. With exact S and without Growths.shared and IN_TILE,
    they may be some of its queries. q: None if S is exact. do_norm: the norms of dO of dp, see
    `norms_of_squares`; 0 for queries without keys. attended: the `attended_bounds` of the queries.
    """
    v_bits, k_bits, k_norm_bits, any_k_bits = attended
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first_live, _ = live_queries(lengths, b)
    has_keys = row_lse2 != float("inf")
    # Row sums of P. S and lse2 are rounded; sums of codes are exact, so that S is at most lse2.
    off = tl.where(has_keys, tl.abs(row_lse2), 0.0) * 2.0**-21
    if bounds.k_norm is not None:
        q_base, q_scales = head_pointers(q, lengths.cu_q, lengths.n_q, b, h)
        q_norm = token_norms(
            q, q_base, q_scales, first, sizes.BLOCK_Q, n_q, sizes.D_PAD, first_live, has_keys
        )
        k_norm = k_norm_bits.to(tl.float32, bitcast=True)
        off += q_norm * (scale_log2 * (sizes.D_PAD * 2.0**-5)) * k_norm
    # 2**127 is near the largest float32; NaN stays.
    row_sum = tl.exp2(tl.where(off > 127.0, float("inf"), off))
    if bounds.k_norm is None:
        most = tl.maximum(keys_of(lengths, b, queries), 1).to(tl.float32)
        row_sum = tl.where(row_sum > most, most, row_sum)  # NaN stays
    if p_sums is not None:
        sums = load_rows(p_sums, lengths.cu_q, b, h, queries, n_q, 0.0)
        row_sum = sums if bounds.k_norm is None else row_sum * sums

    dp = _product_of_norms(do_norm, v_bits.to(tl.float32, bitcast=True))
    of_ds = dp + tl.abs(row_delta)
    ds_sum = tl.where(of_ds == 0.0, 0.0, row_sum) * of_ds  # infinity times 0 would be NaN
    total = growths.of_row * ds_sum
    if growths.shared is not None:
        # In float64, so that the order does not matter; see `row_sums`.
        of_block = tl.sum(tl.where(has_keys, ds_sum, 0.0).to(tl.float64), 0)
        total += growths.shared * of_block.to(tl.float32)
    if ds_bound is not None:
        row_bound = load_rows(ds_bound, lengths.cu_q, b, h, queries, n_q, 0.0)
        if growths.of_bound is not None:
            keys = keys_of(lengths, b, queries).to(tl.float32)
            total += growths.of_bound * keys * row_bound
    total = total * _SLACK + _UNDERFLOW
    exponent = _exponent_of_product(total, k_bits)
    unit_exponent = tl.maximum(exponent - _BITS, 1)
    if not bounds.IN_16_BIT:
        # Codes that are 0 are multiplied by scales that another row or key may have made large.
        # This keeps the product of the scales, divided by the unit, below 2**127.
        most = total
        if growths.IN_TILE:
            most = tl.zeros_like(total) + largest(magnitude(total), 0).to(tl.float32, bitcast=True)
        if ds_bound is not None:  # it may be larger: it is over all keys of the head
            most = tl.maximum(most, row_bound)
        lowest = tl.maximum(_exponent_above(most), _exponent_of_product(most, any_k_bits))
        unit_exponent = tl.maximum(unit_exponent, lowest - 126)
    unit = (unit_exponent << 23).to(tl.float32, bitcast=True)
    # In 16 bit, a part beyond 2**127 may be infinite; codes are multiplied in units.
    limit = 127 + (127 if bounds.IN_16_BIT else 157)
    # A product multiplies all K of a tile, also by the zeros of masked entries.
    is_finite = (total < _LARGEST) & (any_k_bits < _NOT_FINITE) & (exponent < limit)
    if ds_bound is not None:
        is_finite = is_finite & (row_bound < _LARGEST)
    is_bad = has_keys & ~is_finite
    if growths.IN_TILE:  # A NaN of a row is in the scale of its tile.
        is_bad = largest(is_bad.to(tl.int32), 0) > 0
    return tl.where(is_bad, float("nan"), unit)


@triton.jit
def units_kernel(
    grid, q, do, bounds, lse2, delta, p_sums, dq_sums, lengths, scale_log2, growths, sizes, ds_bound
):  # fmt: skip
    """Compute the units of a block of queries, and clear its sums; see `row_units`."""
    wait_for_earlier_kernels()
    block, h, b = program_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = block * sizes.BLOCK_Q
    if first >= n_q:
        return
    queries = first + tl.arange(0, sizes.BLOCK_Q)
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, queries, n_q, float("inf"))
    row_delta = load_rows(delta, lengths.cu_q, b, h, queries, n_q, 0.0)
    unit = row_units(
        q, do, bounds, p_sums, lengths, b, h, first, row_lse2, row_delta, scale_log2, growths,
        sizes, ds_bound,
    )  # fmt: skip
    at = h.to(tl.int64) * dq_sums.tokens + stored_start_of(lengths.cu_q, lengths.n_q, b) + first
    start_sums(dq_sums, at, unit, sizes)


class Growths(NamedTuple):
    """The most that rounding dS to dQ's format adds to the sum of a row's magnitudes."""

    of_row: Any  #: a multiple of the sum of the row
    shared: Any  #: a multiple of the sums of all rows of its block of queries, or None
    IN_TILE: Any  #: constexpr bool: the rows of a tile of dS share a scale
    of_bound: Any  #: a multiple of the row's bound for each key, or None

    @classmethod
    def of(cls, spec: AttentionSpec) -> Growths:
        """Rounding to the nearest code at most doubles a magnitude.

        Stochastic rounding makes the smallest code of a smaller number. In INT8, it is amax / 127.
        """
        matmul = spec.dq
        in_tile = matmul.precision.is_scaled and matmul.lhs is Granularity.PerTile
        of_row, shared, of_bound = 2.0, None, None  # subnormal numbers of FP16 may double, too
        if matmul.precision.is_scaled and spec.rounding.mode is RoundingMode.STOCHASTIC:
            added = spec.block_k / 127
            if has_row_bound(spec, "dq"):
                of_bound = SMALLEST_SHARE[matmul.precision]
            else:
                of_row, shared = (1.0, added) if in_tile else (1.0 + added, None)
        return cls(of_row, shared, tl.constexpr(in_tile), of_bound)


def memory_of_p_sums(problem: KernelProblem) -> Rows | None:
    """Return memory for the row sums of P if the units depend on them, else None.

    They do if the backward recomputes P from other operands than those of the forward.
    """
    if problem.spec.qk == problem.spec.qk_recompute:
        return None
    shape, device = problem.q.shape[:3], problem.q.device
    return Rows.of(torch.empty(shape, dtype=torch.float32, device=device))


def compute_units(
    problem: KernelProblem,
    operands: dict[str, Operand],
    k_mean: Means | None,
    statistics: RowStatistics,
    p_sums: Rows | None,
    dq_sums: DqSums,
    ds_bound: Rows | None = None,
) -> None:
    """Fill dq_sums.unit, and set the sums to 0.

    operands: q and k of qk_recompute, do and v of dp, and k_right, K of dq.
    k_mean: the mean of K, if parts of dQ contain it; else None.
    p_sums: the row sums of P, or None if P is recomputed from the operands of the forward.
    ds_bound: the bounds from which dQ's scales of dS follow, or None.
    """
    block = min(problem.spec.block_q, ALIGNMENT.value)  # no scale of dS is that of a longer tile
    bounds = compute_key_bounds(problem, operands, k_mean=k_mean)
    grid = problem.query_grid(block)
    launch(
        units_kernel,
        grid.programs,
        grid,
        operands["q"],
        operands["do"],
        bounds,
        *statistics,
        p_sums,
        dq_sums,
        problem.lengths,
        abs(problem.scale) * LOG2_E,
        Growths.of(problem.spec),
        KernelSizes.of(problem, block, block_q=block),
        ds_bound,
        **LAUNCH,
    )
