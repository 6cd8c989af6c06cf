"""What the backward with FP8 products needs of each query before its one pass.

Two kernels: the first computes delta, the bounds on rows of P and dS, and the largest |dO| and |Q|
of each block, times these bounds. The second rounds dO and Q, and computes the row statistics.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.hopper.dq_parts import BLOCK_Q
from sagesim_kernels.launch_plans import launch
from sagesim_kernels.operands import (
    LAUNCH,
    LOG2_E,
    DqSums,
    Grid,
    Growths,
    KernelProblem,
    KernelSizes,
    Operand,
    OperandCache,
    Rounding,
    Rows,
    RowStatistics,
    Strided,
    TokenBlocks,
    best_top,
    clear_tma_sums,
    code_max,
    compute_key_bounds,
    count_of_tops,
    head_pointers,
    inverse_of,
    largest,
    length_of,
    live_queries,
    load_folded,
    load_rows,
    load_token_scales,
    load_tokens,
    magnitude,
    memory_of_codes,
    norms,
    numbers_of,
    over_top,
    program_coordinates,
    row_units,
    rowsum_do_o,
    scale_and_inverse,
    scale_start_of,
    store_codes_of_tokens,
    store_rows,
    stored_start_of,
    subtract_lse_gradient,
    to_codes,
    top_code,
)
from sagesim_kernels.operands.layout import ALIGNMENT

_WARPS: Final = 8
"""Of a program, which holds several blocks of queries at once."""

LOG2_448 = tl.constexpr(8.807354922057604)
"""log2 of the top code of each row of P."""


class CodedRows(NamedTuple):
    """What the one pass reads of the queries."""

    do: Operand  #: right operand of dV
    q: Operand  #: right operand of dK
    statistics: Tensor  #: see `fp8_backward_warps.ROW_STATS`


@triton.jit
def _raise_amax(amax, out, z, lengths, b, h, first):
    """Raise the largest magnitude of the block of `first` to that of z. out: its `Operand`."""
    ptr = amax + h.to(tl.int64) * out.scale_stride_h
    ptr += scale_start_of(out, lengths.cu_q, lengths.n_q, b) + first // out.TOKENS
    tl.atomic_max(ptr, largest(largest(magnitude(z), 1), 0), sem="relaxed")


@triton.jit
def fp8_bounds(
    grid, q8, do16, q, o, do, bounds, v_norm, lse2, row_max, d_lse, delta, p_bound, ds_bound, q_t,
    do_t, q_amax, do_amax, dq_sums, lengths, scale_log2, growths, q_blocks, do_blocks, sizes,
):  # fmt: skip
    """Compute delta, bounds and units of a block of queries, and set its sum of dQ to 0.

    q8, do16: `Operand` of qk_recompute and dp. q, o, do: `Strided`. bounds: `KeyBounds`. v_norm:
    the largest norm of V of each head. lse2, row_max, d_lse, delta, p_bound, ds_bound: `Rows`. q_t,
    do_t: `Operand` of dk and dv. q_amax, do_amax: int32 with the shapes of their scales, 0 at
    first. dq_sums: `DqSums`. growths: `Growths`. q_blocks, do_blocks: `TokenBlocks`.
    """
    i, h, b = program_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = i * sizes.BLOCK_Q
    if first >= tl.cdiv(n_q, ALIGNMENT) * ALIGNMENT:
        return
    local = tl.arange(0, sizes.BLOCK_Q)
    row = first + local
    first_live, _ = live_queries(lengths, b)
    at = h.to(tl.int64) * dq_sums.tokens + stored_start_of(lengths.cu_q, lengths.n_q, b) + first
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, row, n_q, float("inf"))
    has_keys = row_lse2 != float("inf")
    most = load_rows(row_max, lengths.cu_q, b, h, row, n_q, 0.0)
    of_p = tl.where(has_keys, tl.exp2(most - row_lse2), 0.0)
    row_delta = rowsum_do_o(o, do, lengths, b, h, first, sizes.DV, sizes.DV_PAD, sizes.BLOCK_Q)
    row_delta = subtract_lse_gradient(row_delta, d_lse, lengths, b, h, row, n_q, row_lse2)
    base, _scales = head_pointers(do16, lengths.cu_q, lengths.n_q, b, h)
    tokens = load_tokens(do16, base, first, sizes.BLOCK_Q, n_q, sizes.DV_PAD, first_live, has_keys)
    of_do = norms(numbers_of(do16, tokens))
    kv_heads = grid.heads // sizes.GROUPS
    of_v = tl.load(v_norm + b * kv_heads + h // sizes.GROUPS).to(tl.float32, bitcast=True)
    of_ds = tl.where(has_keys, of_p * (of_do * of_v + tl.abs(row_delta)), 0.0)
    store_rows(delta, lengths.cu_q, b, h, row, n_q, row_delta)
    store_rows(p_bound, lengths.cu_q, b, h, row, n_q, of_p)
    store_rows(ds_bound, lengths.cu_q, b, h, row, n_q, of_ds)
    tl.debug_barrier()  # other threads read what this one has stored
    z = load_folded(do, None, p_bound, lengths, i, first, sizes.BLOCK_Q, h, b, n_q, do_blocks)
    _raise_amax(do_amax, do_t, z, lengths, b, h, first)
    z = load_folded(q, None, ds_bound, lengths, i, first, sizes.BLOCK_Q, h, b, n_q, q_blocks)
    _raise_amax(q_amax, q_t, z, lengths, b, h, first)
    unit = row_units(
        q8, do16, bounds, None, lengths, b, h, first, row_lse2, row_delta, scale_log2, growths,
        sizes, ds_bound,
    )  # fmt: skip
    clear_tma_sums(dq_sums, at, sizes)
    tl.store(dq_sums.unit + at + local, unit)


@triton.jit
def _fold(
    x, bound, amax, out, rounding, lengths, i, first, h, b, n_q, blocks, TOPS: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Round tokens times their bounds to the `Operand` out, and return their top codes, [COUNT].

    The first program of a block also stores the scale.
    """
    FORMAT: tl.constexpr = rounding.FORMAT
    MOST: tl.constexpr = code_max(FORMAT) * top_code(FORMAT, TOPS - 1)
    place = h.to(tl.int64) * out.scale_stride_h
    place += scale_start_of(out, lengths.cu_q, lengths.n_q, b) + first // out.TOKENS
    scale, inverse = scale_and_inverse(tl.load(amax + place + tl.zeros((1, 1), tl.int32)), MOST)
    if first % out.TOKENS == 0:
        tl.store(out.scale + place + tl.zeros((1, 1), tl.int32), scale)
    z = load_folded(x, None, bound, lengths, i, first, COUNT, h, b, n_q, blocks)
    y = z * inverse
    best = best_top(y, FORMAT, TOPS)
    queries = (first + tl.arange(0, COUNT))[:, None]
    column = tl.arange(0, blocks.D_PAD)[None, :]
    codes = to_codes(over_top(y, best), queries, column, rounding)
    start = stored_start_of(lengths.cu_q, lengths.n_q, b) + first
    store_codes_of_tokens(out, codes, h, start, COUNT, blocks)
    return tl.reshape(best, (COUNT,))


@triton.jit
def fp8_rows(
    grid, q8, q, do, lse2, row_max, delta, p_bound, ds_bound, q_t, do_t, q_amax, do_amax,
    q_rounding, do_rounding, row_stats, dq_sums, lengths, scale_log2, q_blocks, do_blocks,
    Q_TOPS: tl.constexpr, sizes,
):  # fmt: skip
    """Round dO and Q of a block of queries, and compute its row statistics.

    The arguments are those of `fp8_bounds` and the fields of `CodedRows`. q_rounding, do_rounding:
    `Rounding`. Q_TOPS: top codes of Q to choose from.
    """
    i, h, b = program_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = i * sizes.BLOCK_Q
    if first >= tl.cdiv(n_q, ALIGNMENT) * ALIGNMENT:
        return
    _fold(
        do, p_bound, do_amax, do_t, do_rounding, lengths, i, first, h, b, n_q, do_blocks, 1,
        sizes.BLOCK_Q,
    )  # fmt: skip
    top = _fold(
        q, ds_bound, q_amax, q_t, q_rounding, lengths, i, first, h, b, n_q, q_blocks, Q_TOPS,
        sizes.BLOCK_Q,
    )  # fmt: skip
    local = tl.arange(0, sizes.BLOCK_Q)
    row = first + local
    at = h.to(tl.int64) * dq_sums.tokens + stored_start_of(lengths.cu_q, lengths.n_q, b) + first
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, row, n_q, float("inf"))
    most = load_rows(row_max, lengths.cu_q, b, h, row, n_q, 0.0)
    row_delta = load_rows(delta, lengths.cu_q, b, h, row, n_q, 0.0)
    of_p = load_rows(p_bound, lengths.cu_q, b, h, row, n_q, 0.0)
    of_ds = load_rows(ds_bound, lengths.cu_q, b, h, row, n_q, 0.0)
    unit = tl.load(dq_sums.unit + at + local)
    _q_base, q_scales = head_pointers(q8, lengths.cu_q, lengths.n_q, b, h)
    factor = load_token_scales(q8, q_scales, first, sizes.BLOCK_Q, n_q) * scale_log2
    is_finite = of_ds < float("inf")  # not if it is NaN
    is_coded = is_finite & (of_ds > top * 2.0**-128) & (of_p > 448.0 * 2.0**-128)
    inverse = tl.where(is_coded, tl.math.div_rn(top, tl.where(is_coded, of_ds, top)), 0.0)
    of_dp = inverse * (of_p * (1.0 / 448.0))
    has_p = (row_lse2 != float("inf")) & (of_p > 448.0 * 2.0**-128)
    shift = tl.where(has_p, LOG2_448 - most, -float("inf"))
    ds_scale = tl.where(is_finite, tl.math.div_rn(of_ds, top), float("nan"))
    ptrs = row_stats + at * 5 + local
    tl.store(ptrs, tl.where(has_p, factor, 0.0))
    tl.store(ptrs + sizes.BLOCK_Q, shift)
    tl.store(ptrs + 2 * sizes.BLOCK_Q, of_dp)
    tl.store(ptrs + 3 * sizes.BLOCK_Q, tl.where(is_coded, -of_dp * row_delta, 0.0))
    tl.store(ptrs + 4 * sizes.BLOCK_Q, ds_scale * inverse_of(unit))


def prepare_rows(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor,
    do: Tensor,
    statistics: RowStatistics,
    row_max: Rows,
    d_lse: Rows | None,
    dq_sums: DqSums,
    tile: int,
) -> CodedRows:
    """Fill statistics.delta and dq_sums, and return the operands and statistics of the queries.

    tile: keys that a product of dQ sums over. The other arguments are those of
    `fp8_backward.launch_backward`.
    """
    spec, q, lengths = problem.spec, problem.q, problem.lengths
    heads, block = q.shape[1], BLOCK_Q.value
    sources = operands.source("q"), operands.source("do")
    q_t, do_t = (
        memory_of_codes(source, spec.site(site).precision, spec.site(site).rhs, True)
        for source, site in zip(sources, ("dk", "dv"), strict=True)
    )
    q_amax, do_amax = (
        torch.zeros(x.scale.shape, dtype=torch.int32, device=q.device) for x in (q_t, do_t)
    )
    v_norm = torch.zeros(
        (problem.sequences, problem.k.shape[1]), dtype=torch.int32, device=q.device
    )
    q8, do16 = operands.get("qk_recompute", "q"), operands.get("dp", "do")
    bounds = compute_key_bounds(
        problem,
        {
            "k": operands.get("qk_recompute", "k"),
            "v": operands.get("dp", "v"),
            "k_right": operands.get("dq", "k"),
        },
        tile=tile,
        v_norm=v_norm,
    )
    p_bound, ds_bound = (
        Rows.of(torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)) for _ in range(2)
    )
    row_stats = torch.empty(heads * dq_sums.tokens * 5, dtype=torch.float32, device=q.device)
    q_blocks, do_blocks = (
        TokenBlocks.of(False, x.shape[3], triton.next_power_of_2(out.CHANNELS.value), block)
        for x, out in ((q, q_t), (do, do_t))
    )
    longest = -(-problem.longest_q // ALIGNMENT.value) * ALIGNMENT.value
    grid = Grid(longest // block, heads, problem.sequences)
    sizes = KernelSizes.of(problem, block, block_q=block)
    scale_log2 = problem.scale * LOG2_E
    launch(
        fp8_bounds,
        grid.programs,
        grid,
        q8,
        do16,
        Strided.of(q),
        Strided.of(o),
        Strided.of(do),
        bounds,
        v_norm,
        statistics.lse2,
        row_max,
        d_lse,
        statistics.delta,
        p_bound,
        ds_bound,
        q_t,
        do_t,
        q_amax,
        do_amax,
        dq_sums,
        lengths,
        scale_log2,
        Growths.of(spec),
        q_blocks,
        do_blocks,
        sizes,
        num_warps=_WARPS,
        **LAUNCH,
    )
    launch(
        fp8_rows,
        grid.programs,
        grid,
        q8,
        Strided.of(q),
        Strided.of(do),
        statistics.lse2,
        row_max,
        statistics.delta,
        p_bound,
        ds_bound,
        q_t,
        do_t,
        q_amax,
        do_amax,
        Rounding.of(spec, "q", spec.dk.precision),
        Rounding.of(spec, "do", spec.dv.precision),
        row_stats,
        dq_sums,
        lengths,
        scale_log2,
        q_blocks,
        do_blocks,
        count_of_tops(q_t.FORMAT),
        sizes,
        num_warps=_WARPS,
        **LAUNCH,
    )
    return CodedRows(do_t, q_t, row_stats)
