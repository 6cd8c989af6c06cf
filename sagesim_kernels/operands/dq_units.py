"""The units in which parts of dQ are added: powers of two, from a bound on the sum of each row.

docs/numerics.md, "Sums of dQ", defines bound and unit. theory.dq_sums proves that no sum
overflows. A first kernel computes what the bound needs of each key. A second one takes the maximum
over the keys that a query attends to, and over no others: a key changes no unit of an earlier query
under a causal mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim.spec import AttentionSpec, Granularity, Precision, RoundingMode
from sagesim_kernels.launch_plans import launch
from sagesim_kernels.operands.delta import load_rows
from sagesim_kernels.operands.dq_sums import DqSums
from sagesim_kernels.operands.kernel_problem import KernelProblem, KernelSizes
from sagesim_kernels.operands.layout import (
    Grid,
    Rows,
    length_of,
    program_coordinates,
    stored_start_of,
    stored_tokens,
)
from sagesim_kernels.operands.masking import (
    attends_in,
    causal_offset,
    first_live_key,
    is_unmasked,
    key_loops,
    keys_of,
    live_keys,
    live_queries,
)
from sagesim_kernels.operands.means import Means, load_mean
from sagesim_kernels.operands.operand import (
    Operand,
    head_pointers,
    load_channel_scales,
    load_token_scales,
    load_tokens,
)
from sagesim_kernels.operands.results import RowStatistics
from sagesim_kernels.operands.rounding import LAUNCH, LOG2_E, largest, magnitude

_BLOCKS_AT_ONCE = tl.constexpr(128)
"""Key blocks whose bounds a program reads in one step."""

_KEYS_AT_ONCE = tl.constexpr(32)
"""Keys whose bounds a program reads in one step, if some queries attend to them and some do not."""

_BITS = tl.constexpr(30)
"""A sum is at most 2^30 units, plus half a unit for each part."""

_LARGEST = tl.constexpr(2.0**120)
"""A row whose bound on the sum of |dS| is not below this has the unit NaN."""

_UNDERFLOW = tl.constexpr(2.0**-120)
"""More than the absolute error of that bound, and of the sum of |dS|, in float32."""

_FRACTION = tl.constexpr(2.0**-8)
"""Of norms: a token has at most 256 channels, so that this part of its norm does not overflow."""

_SLACK = tl.constexpr(1.0 + 2.0**-6)
"""More than the relative error of a bound that is computed in float32."""

_NOT_FINITE = tl.constexpr(0x7F800000)
"""The `magnitude` of infinity. That of NaN is larger, every other one is smaller."""


class KeyBounds(NamedTuple):
    """Bounds on each key, and on each block of keys, in padded storage.

    All are the bits of a float32 that is not negative, as int32: [kv heads, tokens] and
    [kv heads, key blocks].
    """

    v_norm: Any  #: 2^-8 times the norm of V; not finite if V is not
    k_amax: Any  #: the largest |K| of dQ's operand; not finite if K is not
    k_norm: Any  #: 2^-8 times the norm of K of the recomputed S, or 0; None if S is exact
    block_v_norm: Any
    block_k_amax: Any
    block_k_norm: Any
    tokens: Any  #: of a head, in padded storage
    IN_16_BIT: Any  #: constexpr bool: dQ's operand is in 16 bit

    @classmethod
    def empty(cls, problem: KernelProblem) -> KeyBounds:
        """Memory for the bounds."""
        spec = problem.spec
        heads, tokens = problem.k.shape[1], stored_tokens(problem.cu_k, problem.k)
        is_exact = spec.qk_recompute.precision.is_scaled

        def memory(count: int) -> tuple[Tensor | None, ...]:
            shape = (2 if is_exact else 3, heads, count)
            found = torch.empty(shape, dtype=torch.int32, device=problem.k.device)
            return (*found, None) if is_exact else tuple(found)

        in_16_bit = tl.constexpr(not spec.dq.precision.is_scaled)
        return cls(*memory(tokens), *memory(tokens // spec.block_k), tokens, in_16_bit)


@triton.jit
def _norms(
    x, base, scales, first, count: tl.constexpr, last, D_PAD: tl.constexpr, lowest=0, live=None
):
    """Return 2^-8 times the norms of tokens of an `Operand`, [count]; no finite one overflows."""
    tokens = load_tokens(x, base, first, count, last, D_PAD, lowest, live).to(tl.float64)
    norms = (tl.sqrt(tl.sum(tokens * tokens, 1)) * _FRACTION).to(tl.float32)
    return norms * load_token_scales(x, scales, first, count, last)


@triton.jit
def _store_bounds(of_keys, of_blocks, at, keys, BLOCK_K: tl.constexpr):
    """Store int32 bounds of a block of keys, and their maximum. at: the first key in storage."""
    tl.store(of_keys + at + tl.arange(0, BLOCK_K), keys)
    tl.store(of_blocks + at // BLOCK_K, largest(keys, 0))


@triton.jit
def key_bounds_kernel(grid, k, v, k_right, k_mean, bounds, lengths, sizes):
    """Compute the `KeyBounds` of a block of keys.

    k, v, k_right: `Operand` of qk_recompute, dp and dq. k_mean: the `Means` of K, if rows of dS
    times the mean are added to the parts of dQ, or None.
    """
    block, h, b = program_coordinates(grid)
    first = block * sizes.BLOCK_K
    if first >= length_of(lengths.cu_k, lengths.n_k, b):
        return
    n_k, low = live_keys(lengths, b), first_live_key(lengths, b)
    live = None
    if lengths.key_mask is not None:
        live = is_unmasked(lengths, b, first + tl.arange(0, sizes.BLOCK_K), n_k)
    at = h.to(tl.int64) * bounds.tokens + stored_start_of(lengths.cu_k, lengths.n_k, b) + first
    v_base, v_scales = head_pointers(v, lengths.cu_k, lengths.n_k, b, h)
    norms = _norms(v, v_base, v_scales, first, sizes.BLOCK_K, n_k, sizes.DV_PAD, low, live)
    _store_bounds(bounds.v_norm, bounds.block_v_norm, at, magnitude(norms), sizes.BLOCK_K)

    k_base, k_scales = head_pointers(k_right, lengths.cu_k, lengths.n_k, b, h)
    tokens = load_tokens(k_right, k_base, first, sizes.BLOCK_K, n_k, sizes.D_PAD, low, live)
    tokens = tokens.to(tl.float32)
    # A region of zeros has the scale 1: its scale alone would be no bound on the order of K.
    tokens *= load_channel_scales(k_right, k_scales, first, sizes.D, sizes.D_PAD)[None, :]
    k_amax = largest(magnitude(tokens), 1)
    if k_mean is not None:
        mean = load_mean(k_mean, b, h, 0, sizes.D, sizes.D_PAD)
        mean_amax = largest(magnitude(mean), 1).to(tl.float32, bitcast=True)
        k_amax = magnitude(k_amax.to(tl.float32, bitcast=True) + mean_amax)
    _store_bounds(bounds.k_amax, bounds.block_k_amax, at, k_amax, sizes.BLOCK_K)

    if bounds.k_norm is not None:
        k_base, k_scales = head_pointers(k, lengths.cu_k, lengths.n_k, b, h)
        norms = _norms(k, k_base, k_scales, first, sizes.BLOCK_K, n_k, sizes.D_PAD, low, live)
        # If K is not finite, P is 0 exactly, or L or the row sum of P is not finite.
        norms = tl.where(norms < float("inf"), norms, 0.0)
        _store_bounds(bounds.k_norm, bounds.block_k_norm, at, magnitude(norms), sizes.BLOCK_K)


@triton.jit
def _with_blocks(found, of_blocks, at, some):
    return tl.maximum(found, tl.load(of_blocks + at, mask=some, other=0))


@triton.jit
def _with_keys(found, of_keys, at, visible):
    keys = tl.load(of_keys + at)
    return tl.maximum(found, largest(tl.where(visible, keys[None, :], 0), 1))


@triton.jit
def _attended_bounds(bounds, lengths, b, k_head, first, queries, sizes):
    """Return the largest `KeyBounds` of the keys that each query attends to, int32 [queries].

    v_norm, k_amax and k_norm, and last the largest k_amax of all key blocks that some of the
    queries attend to.
    """
    n_k, offset = live_keys(lengths, b), causal_offset(lengths, b)
    begin, whole_begin, whole_end, end = key_loops(
        lengths, b, first, sizes.BLOCK_Q, sizes.BLOCK_K, n_k, offset
    )
    at = k_head.to(tl.int64) * bounds.tokens + stored_start_of(lengths.cu_k, lengths.n_k, b)
    any_amax = tl.zeros((_BLOCKS_AT_ONCE,), tl.int32)
    block_v_norm = tl.zeros((_BLOCKS_AT_ONCE,), tl.int32)
    block_k_amax = tl.zeros((_BLOCKS_AT_ONCE,), tl.int32)
    block_k_norm = tl.zeros((_BLOCKS_AT_ONCE,), tl.int32)
    blocks = tl.cdiv(end, sizes.BLOCK_K)
    for index in range(begin // sizes.BLOCK_K, blocks, _BLOCKS_AT_ONCE):
        local = index + tl.arange(0, _BLOCKS_AT_ONCE)
        place, whole = at // sizes.BLOCK_K + local, local < whole_end // sizes.BLOCK_K
        if lengths.left is not None:
            whole = whole & (local >= whole_begin // sizes.BLOCK_K)
        any_amax = _with_blocks(any_amax, bounds.block_k_amax, place, local < blocks)
        block_v_norm = _with_blocks(block_v_norm, bounds.block_v_norm, place, whole)
        block_k_amax = _with_blocks(block_k_amax, bounds.block_k_amax, place, whole)
        if bounds.k_norm is not None:
            block_k_norm = _with_blocks(block_k_norm, bounds.block_k_norm, place, whole)
    v_norm = tl.zeros((sizes.BLOCK_Q,), tl.int32) + largest(block_v_norm, 0)
    k_amax = tl.zeros((sizes.BLOCK_Q,), tl.int32) + largest(block_k_amax, 0)
    k_norm = tl.zeros((sizes.BLOCK_Q,), tl.int32) + largest(block_k_norm, 0)
    for PART in tl.static_range(1 if lengths.left is None else 2):  # pyright: ignore[reportGeneralTypeIssues]
        for key in range(begin if PART else whole_end, whole_begin if PART else end, _KEYS_AT_ONCE):
            keys = key + tl.arange(0, _KEYS_AT_ONCE)
            visible = attends_in(lengths, b, queries[:, None], keys[None, :], n_k, offset)
            v_norm = _with_keys(v_norm, bounds.v_norm, at + keys, visible)
            k_amax = _with_keys(k_amax, bounds.k_amax, at + keys, visible)
            if bounds.k_norm is not None:
                k_norm = _with_keys(k_norm, bounds.k_norm, at + keys, visible)
    return v_norm, k_amax, k_norm, largest(any_amax, 0)


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
    queries = first + tl.arange(0, sizes.BLOCK_Q)
    v_bits, k_bits, k_norm_bits, any_k_bits = _attended_bounds(
        bounds, lengths, b, h // sizes.GROUPS, first, queries, sizes
    )

    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, queries, n_q, float("inf"))
    has_keys = row_lse2 != float("inf")
    # Row sums of P. S and lse2 are rounded; sums of codes are exact, so that S is at most lse2.
    off = tl.where(has_keys, tl.abs(row_lse2), 0.0) * 2.0**-21
    if bounds.k_norm is not None:
        q_base, q_scales = head_pointers(q, lengths.cu_q, lengths.n_q, b, h)
        q_norm = _norms(
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

    do_base, do_scales = head_pointers(do, lengths.cu_q, lengths.n_q, b, h)
    do_norm = _norms(
        do, do_base, do_scales, first, sizes.BLOCK_Q, n_q, sizes.DV_PAD, first_live, has_keys
    )
    row_delta = load_rows(delta, lengths.cu_q, b, h, queries, n_q, 0.0)
    dp = _product_of_norms(do_norm, v_bits.to(tl.float32, bitcast=True))
    of_ds = dp + tl.abs(row_delta)
    ds_sum = tl.where(of_ds == 0.0, 0.0, row_sum) * of_ds  # infinity times 0 would be NaN
    total = growth * ds_sum
    if shared_growth is not None:
        # In float64, so that the order does not matter; see `row_sums`.
        of_block = tl.sum(tl.where(has_keys, ds_sum, 0.0).to(tl.float64), 0)
        total += shared_growth * of_block.to(tl.float32)
    total = total * _SLACK + _UNDERFLOW
    exponent = _exponent_of_product(total, k_bits)
    unit_exponent = tl.maximum(exponent - _BITS, 1)
    if not bounds.IN_16_BIT:
        # Codes that are 0 are multiplied by scales that another row or key may have made large.
        # This keeps the product of the scales, divided by the unit, below 2**127.
        most = total
        if SHARED:
            most = tl.zeros_like(total) + largest(magnitude(total), 0).to(tl.float32, bitcast=True)
        lowest = tl.maximum(_exponent_above(most), _exponent_of_product(most, any_k_bits))
        unit_exponent = tl.maximum(unit_exponent, lowest - 126)
    unit = (unit_exponent << 23).to(tl.float32, bitcast=True)
    # In 16 bit, a part beyond 2**127 may be infinite; codes are multiplied in units.
    limit = 127 + (127 if bounds.IN_16_BIT else 157)
    # A product multiplies all K of a tile, also by the zeros of masked entries.
    is_finite = (total < _LARGEST) & (any_k_bits < _NOT_FINITE) & (exponent < limit)
    is_bad = has_keys & ~is_finite
    if SHARED:  # A NaN of a row is in the scale of its tile.
        is_bad = largest(is_bad.to(tl.int32), 0) > 0
    unit = tl.where(is_bad, float("nan"), unit)
    row = h.to(tl.int64) * dq_sums.tokens + stored_start_of(lengths.cu_q, lengths.n_q, b) + first
    tl.store(dq_sums.unit + row + tl.arange(0, sizes.BLOCK_Q), unit)


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
    k_mean: Means | None,
    statistics: RowStatistics,
    p_sums: Rows | None,
    dq_sums: DqSums,
) -> None:
    """Fill dq_sums.unit.

    operands: q and k of qk_recompute, do and v of dp, and k_right, K of dq.
    k_mean: the mean of K, if parts of dQ contain it; else None.
    p_sums: the row sums of P, or None if P is recomputed from the operands of the forward.
    """
    spec, heads = problem.spec, problem.k.shape[1]
    bounds = KeyBounds.empty(problem)
    sizes = KernelSizes.of(problem, spec.block_q)
    grid = Grid(-(-problem.longest_k // spec.block_k), heads, problem.sequences)
    launch(
        key_bounds_kernel,
        grid.programs,
        grid,
        operands["k"],
        operands["v"],
        operands["k_right"],
        k_mean,
        bounds,
        problem.lengths,
        sizes,
        **LAUNCH,
    )
    grid = Grid(-(-problem.longest_q // spec.block_q), problem.q.shape[1], problem.sequences)
    growth, shared_growth = growths(spec)
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
        growth,
        shared_growth,
        spec.dq.precision.is_scaled and spec.dq.lhs is Granularity.PerTile,
        sizes,
        **LAUNCH,
    )
