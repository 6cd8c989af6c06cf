"""Scales of the rows of P and dS that follow from bounds, before the backward computes these maps.

docs/numerics.md, "Scales from bounds", defines them. The rows of dO and Q are multiplied by the
bounds before they are rounded for dV and dK. theory.row_bounds proves that no code overflows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim.spec import SITES, AttentionSpec, Granularity, MatmulSpec, Precision
from sagesim_kernels.launching import launch, wait_for_earlier_kernels
from sagesim_kernels.operands.delta import load_rows, store_rows
from sagesim_kernels.operands.formats import (
    CODE_MAX,
    code_max,
    count_of_tops,
    nearest_number,
    top_code,
)
from sagesim_kernels.operands.grid import program_coordinates
from sagesim_kernels.operands.kernel_problem import KernelProblem, KernelSizes
from sagesim_kernels.operands.layout import (
    ALIGNMENT,
    Rows,
    Strided,
    TokenBlocks,
    length_of,
    stored_start_of,
)
from sagesim_kernels.operands.masking import (
    first_live_key,
    is_unmasked,
    live_keys,
    live_queries,
)
from sagesim_kernels.operands.operand import (
    Operand,
    head_pointers,
    load_token_scales,
    load_tokens,
    numbers_of,
    scales_of_block,
)
from sagesim_kernels.operands.quantization import (
    TokenTensor,
    load_source,
    memory_of_codes,
    store_codes_of_tokens,
)
from sagesim_kernels.operands.rounding import (
    LAUNCH,
    Rounding,
    largest,
    magnitude,
    scale_and_inverse,
    to_codes,
)

if TYPE_CHECKING:
    from sagesim_kernels.operands.results import RowStatistics

_TILE: Final = 32
"""Tokens that a program holds at once."""

SMALLEST_SHARE: Final = {
    Precision.INT8: 1 / 127,
    Precision.FP8_E4M3: 2.0**-9 / 240,
    Precision.FP8_E5M2: 2.0**-16 / 32768,
}
"""The smallest code of a row over its top code, at most."""


class RowScales(NamedTuple):
    """The scales of each row of P and dS and their inverses, float32 [sequences, heads, n_q].

    None for a product whose map has other scales. The inverse is 0 if it would overflow, or if the
    scale is not finite.
    """

    p_inverse: Any
    p_scale: Any
    dk_inverse: Any
    dk_scale: Any
    dq_inverse: Any
    dq_scale: Any
    stride_b: Any  #: of all of them
    stride_h: Any


class FoldedRows(NamedTuple):
    """The scale of each row of a map and its inverse, as `fold` chose the row's top code."""

    inverse: Tensor
    scale: Tensor


def has_row_bound(spec: AttentionSpec, site: str) -> bool:
    """Return whether the map of a site has scales from bounds on its rows."""
    matmul = spec.site(site)
    return matmul.precision.is_scaled and matmul.lhs is Granularity.PerRowBound


def has_row_bounds(spec: AttentionSpec) -> bool:
    """Return whether the map of any site has scales from bounds on its rows."""
    return any(has_row_bound(spec, site) for site in SITES)


@triton.jit
def sum_pairwise(x):
    """Return the sum of each row of x [m, n], float32, in an order that no compiler chooses.

    The second half of the columns is added to the first until one is left; n is a power of two.
    """
    if x.shape[1] == 1:
        return tl.reshape(x, (x.shape[0],))
    else:
        halves = tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1))
        first, second = tl.split(halves)
        return sum_pairwise(first + second)


@triton.jit
def norms(x):
    """Return the norm of each row of x [m, n], float32; it overflows only if it exceeds float32.

    The row is divided by a power of two first.
    """
    biased = largest(magnitude(x), 1) >> 23
    exponent = tl.minimum(tl.maximum(biased - 126, -126), 127)
    exponent = tl.where(biased == 255, 0, exponent)  # NaN and infinity stay
    bits = tl.where(exponent == 127, 1 << 22, (127 - exponent) << 23)  # 2**-127 is subnormal
    scaled = x * bits.to(tl.float32, bitcast=True)[:, None]
    root = tl.sqrt_rn(sum_pairwise(scaled * scaled))
    return root * ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def v_norms_kernel(grid, v, most, lengths, sizes):
    """Compute the largest norm of V of each sequence and head, without padding.

    v: `Operand` of dp. most: int32 [sequences, kv heads], 0 at first, the bits of a float32.
    """
    wait_for_earlier_kernels()
    tile, h, b = program_coordinates(grid)
    first = tile * sizes.TILE
    n_k, low = live_keys(lengths, b), first_live_key(lengths, b)
    if first >= n_k:
        return
    keys = first + tl.arange(0, sizes.TILE)
    live = None
    if lengths.key_mask is not None:
        live = is_unmasked(lengths, b, keys, n_k)
    base, scales = head_pointers(v, lengths.cu_k, lengths.n_k, b, h)
    tokens = load_tokens(v, base, first, sizes.TILE, n_k, sizes.DV_PAD, low, live)
    scale = load_token_scales(v, scales, first, sizes.TILE, n_k)
    found = norms(numbers_of(v, tokens) * scale[:, None])
    is_key = (keys >= low) & (keys < n_k)
    if lengths.key_mask is not None:
        is_key = is_key & live
    # A scale may be NaN where there is no key.
    found = largest(tl.where(is_key, magnitude(found), 0), 0)
    tl.atomic_max(most + b * grid.heads + h, found, sem="relaxed")


@triton.jit
def _store_scales(inverse, scale, lengths, b, h, queries, n_q, bound, top):
    """Store the scale bound / top of rows, and its inverse, which is 0 where it overflows."""
    is_finite = bound < float("inf")  # not if it is NaN
    vanishes = bound <= top * 2.0**-128
    divisor = tl.where(vanishes | (bound != bound), top, bound)
    found = tl.where(is_finite & (vanishes == 0), tl.math.div_rn(top, divisor), 0.0)
    store_rows(inverse, lengths.cu_q, b, h, queries, n_q, found)
    found = tl.where(is_finite, tl.math.div_rn(bound, top), float("nan"))
    store_rows(scale, lengths.cu_q, b, h, queries, n_q, found)


@triton.jit
def ds_bounds_kernel(
    grid, do, v_norm, p_bound, lse2, delta, ds_bound, inverse, scale, lengths, TOP, sizes
):  # fmt: skip
    """Compute the bound on each row of dS.

    do: `Operand` of dp. v_norm: what `v_norms_kernel` computes. p_bound, ds_bound: `Rows`. inverse,
    scale: `Rows` of the scales with the top code TOP, or None.
    """
    wait_for_earlier_kernels()
    tile, h, b = program_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = tile * sizes.TILE
    if first >= n_q:
        return
    queries = first + tl.arange(0, sizes.TILE)
    first_live, _ = live_queries(lengths, b)
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, queries, n_q, float("inf"))
    has_keys = row_lse2 != float("inf")
    base, scales = head_pointers(do, lengths.cu_q, lengths.n_q, b, h)
    tokens = load_tokens(do, base, first, sizes.TILE, n_q, sizes.DV_PAD, first_live, has_keys)
    do_scale = load_token_scales(do, scales, first, sizes.TILE, n_q)
    of_do = norms(numbers_of(do, tokens) * do_scale[:, None])
    kv_heads = grid.heads // sizes.GROUPS
    of_v = tl.load(v_norm + b * kv_heads + h // sizes.GROUPS).to(tl.float32, bitcast=True)
    row_delta = load_rows(delta, lengths.cu_q, b, h, queries, n_q, 0.0)
    of_p = load_rows(p_bound, lengths.cu_q, b, h, queries, n_q, 0.0)
    bound = tl.where(has_keys, of_p * (of_do * of_v + tl.abs(row_delta)), 0.0)
    store_rows(ds_bound, lengths.cu_q, b, h, queries, n_q, bound)
    if inverse is not None:
        top = tl.full((sizes.TILE,), TOP, tl.float32)
        _store_scales(inverse, scale, lengths, b, h, queries, n_q, bound, top)


@triton.jit
def _load_folded(x, mean, bound, lengths, i, first, COUNT: tl.constexpr, h, b, n_q, blocks):
    """Load tokens of block i as `load_source` does, times the bounds of their rows."""
    column = tl.arange(0, blocks.D_PAD)
    tokens = load_source(x, mean, lengths, i, first, COUNT, h, b, blocks, column)
    queries = first + tl.arange(0, COUNT)
    return tokens * load_rows(bound, lengths.cu_q, b, h, queries, n_q, 0.0)[:, None]


@triton.jit
def quotient(y, divisor):
    """Return y [rows, n] / divisor [1, 1], correctly rounded; divisor is a top code.

    It takes fewer instructions than a division. The test of this function tries every mantissa.
    """
    inverse = tl.math.div_rn(tl.full((1, 1), 1.0, tl.float32), divisor)
    near = y * inverse
    return tl.fma(tl.fma(-near, tl.broadcast_to(divisor, y.shape), y), inverse, near)


@triton.jit
def _better_top(y, best, least, top, FORMAT: tl.constexpr):
    """Return the better of two top codes for each row of y, and what it loses.

    top: one of the codes. best, least: the other and what it loses, [rows, 1].
    """
    lost = nearest_number(quotient(y, top), FORMAT) * top - y
    loss = sum_pairwise(lost * lost)[:, None]
    return tl.where(loss < least, top, best), tl.minimum(least, loss)


@triton.jit
def fold_kernel(
    grid, x, mean, bound, out, inverse, scale, rounding, lengths, blocks, TILE: tl.constexpr
):  # fmt: skip
    """Round a block of dO or Q with its rows multiplied by bounds, and choose their top codes.

    x, mean, out, rounding, blocks: as those of `quantize_kernel`. bound: `Rows` of the bounds of a
    map. inverse, scale: `Rows` of the scales of the map.
    """
    wait_for_earlier_kernels()
    i, h, b = program_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    begin = i * blocks.BLOCK
    if begin >= n_q:
        return
    amax = tl.zeros((1, blocks.D_PAD), tl.int32)
    for first in range(begin, tl.minimum(begin + blocks.BLOCK, n_q), TILE):
        z = _load_folded(x, mean, bound, lengths, i, first, TILE, h, b, n_q, blocks)
        amax = tl.maximum(amax, largest(magnitude(z), 0)[None, :])
    if not out.BY_CHANNEL:
        amax = largest(amax, 1)[:, None]
    FORMAT: tl.constexpr = rounding.FORMAT
    TOPS: tl.constexpr = count_of_tops(FORMAT)
    LAST: tl.constexpr = top_code(FORMAT, TOPS - 1)
    STEP: tl.constexpr = code_max(FORMAT) - top_code(FORMAT, 1)  # but the last one may be smaller
    # With the smallest top code, the largest number of a region gets the largest code.
    MOST: tl.constexpr = code_max(FORMAT) * LAST
    of_block, inverse_of_block = scale_and_inverse(amax, MOST)
    ptr = scales_of_block(out, lengths.cu_q, lengths.n_q, i, h, b, blocks.BLOCK)
    if out.BY_CHANNEL:
        column = tl.arange(0, blocks.D_PAD)[None, :]
        tl.store(ptr + column, of_block, mask=column < blocks.D)
    else:
        tl.store(ptr + tl.arange(0, 1)[None, :], of_block)

    start = stored_start_of(lengths.cu_q, lengths.n_q, b)
    end = tl.minimum(begin + blocks.BLOCK, tl.cdiv(n_q, ALIGNMENT) * ALIGNMENT)
    for first in range(begin, end, TILE):
        z = _load_folded(x, mean, bound, lengths, i, first, TILE, h, b, n_q, blocks)
        y = z * inverse_of_block
        best = tl.full((TILE, 1), code_max(FORMAT), tl.float32)
        if TOPS > 1:
            least = tl.full((TILE, 1), float("inf"), tl.float32)
            top = tl.full((1, 1), code_max(FORMAT), tl.float32)
            # Not unrolled: that took compilers up to a minute.
            for _ in range(TOPS):
                best, least = _better_top(y, best, least, top, FORMAT)
                top = tl.maximum(top - STEP, LAST)
        queries = first + tl.arange(0, TILE)
        y = tl.math.div_rn(y, tl.broadcast_to(best, (TILE, blocks.D_PAD)))
        column = tl.arange(0, blocks.D_PAD)
        codes = to_codes(y, queries[:, None], column[None, :], rounding)
        store_codes_of_tokens(out, codes, h, start + first, TILE, blocks, column)
        of_rows = load_rows(bound, lengths.cu_q, b, h, queries, n_q, 0.0)
        tops = tl.reshape(best, (TILE,))
        _store_scales(inverse, scale, lengths, b, h, queries, n_q, of_rows, tops)


def fold(
    problem: KernelProblem, source: TokenTensor, matmul: MatmulSpec, bound: Rows
) -> tuple[Operand, FoldedRows]:
    """Round dO of dv or Q of dk with its rows multiplied by the bounds of the map.

    bound: of the rows of P or dS.
    """
    d = source.x.shape[3]
    device = problem.q.device
    out = memory_of_codes(source, matmul.precision, matmul.rhs, contract_tokens=True)
    rows = FoldedRows(
        *(torch.empty(problem.q.shape[:3], dtype=torch.float32, device=device) for _ in range(2))
    )
    grid = problem.query_grid(source.block)
    launch(
        fold_kernel,
        grid.programs,
        grid,
        Strided.of(source.x),
        source.mean,
        bound,
        out,
        Rows.of(rows.inverse),
        Rows.of(rows.scale),
        Rounding.of(problem.spec, source.name, matmul.precision),
        problem.lengths,
        TokenBlocks.of(source.is_key, d, triton.next_power_of_2(out.CHANNELS.value), source.block),
        _TILE,
        **LAUNCH,
    )
    return out, rows


def compute_ds_bounds(
    problem: KernelProblem,
    do: Operand,
    v: Operand,
    p_bound: Rows,
    statistics: RowStatistics,
    precision: Precision | None,
) -> tuple[Rows, FoldedRows | None]:
    """Return the bounds on the rows of dS, and their scales with the largest code of `precision`.

    do, v: of dp. p_bound: of the rows of P. precision: None for no scales.
    """
    device = problem.q.device
    of_v = torch.zeros((problem.sequences, problem.k.shape[1]), dtype=torch.int32, device=device)
    sizes = KernelSizes.of(problem, _TILE)
    grid = problem.key_grid(_TILE)
    launch(v_norms_kernel, grid.programs, grid, v, of_v, problem.lengths, sizes, **LAUNCH)
    count = 1 if precision is None else 3
    bound, *scales = (
        torch.empty(problem.q.shape[:3], dtype=torch.float32, device=device) for _ in range(count)
    )
    rows = FoldedRows(*scales) if scales else None
    grid = problem.query_grid(_TILE)
    launch(
        ds_bounds_kernel,
        grid.programs,
        grid,
        do,
        of_v,
        p_bound,
        *statistics,
        Rows.of(bound),
        None if rows is None else Rows.of(rows.inverse),
        None if rows is None else Rows.of(rows.scale),
        problem.lengths,
        tl.constexpr(0.0 if precision is None else CODE_MAX[precision]),
        sizes,
        **LAUNCH,
    )
    return Rows.of(bound), rows
