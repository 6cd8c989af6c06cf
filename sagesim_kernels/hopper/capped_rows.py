"""What the backward for Hopper needs of each query under a softcap, for heads up to 128 channels.

Beside row statistics it needs what smoothing K subtracted from the logits, and the sum of each row
of dS, which then contributes to dQ. This sum is an integer for the same reason as those of dQ; see
`operands.dq_sums`. With 64 bits its unit is so fine that rounding to it changes no float32 number.
"""

# Pyright takes the annotations of Triton's functions literally:
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.hopper.capped_logits import DsSums
from sagesim_kernels.launching import launch, wait_for_earlier_kernels
from sagesim_kernels.operands import (
    LAUNCH,
    DqSums,
    Growths,
    KernelProblem,
    KernelSizes,
    OperandCache,
    Rows,
    RowStatistics,
    Softcap,
    Strided,
    compute_key_bounds,
    head_pointers,
    inverse_of,
    largest,
    length_of,
    load_mean,
    load_rows,
    load_shift,
    load_token_scales,
    magnitude,
    program_coordinates,
    row_units,
    rowsum_do_o,
    store_rows,
    stored_start_of,
    subtract_lse_gradient,
)
from sagesim_kernels.preparation import start_rows

_FINER_BITS = tl.constexpr(24)
"""The unit of a sum of dS, times the largest mean of K, is finer than dQ's unit by this."""


@triton.jit
def inverse_ds_units(dq_unit, mean_amax):
    """Return 1 / unit of the sums of rows of dS, powers of two from 2^-126 to 2^126.

    dq_unit: see `row_units`, with key bounds that contain the mean of K. mean_amax: the bits of the
    largest |mean|. The sum of |dS| is at most 2^30 dq_unit / |mean|, and so at most 2^55 of these
    units. At the limits they are powers of two that float32 has: smaller numbers than 2^-126 are
    flushed to 0, and if the unit should be larger than 2^126, the mean adds less to dQ than a unit.
    """
    exponent = (mean_amax + 0x7FFFFF) >> 23  # of the next power of two, biased by 127
    exponent += 127 - (dq_unit.to(tl.int32, bitcast=True) >> 23) + _FINER_BITS
    return (tl.minimum(tl.maximum(exponent, 1), 253) << 23).to(tl.float32, bitcast=True)


@triton.jit
def capped_rows_kernel(
    grid, q8, o, do, do_right, bounds, k_mean, lse2, d_lse, delta, row_stats, deltas, shifts,
    dq_sums, ds_sums, softcap, lengths, scale, growths, sizes,
):  # fmt: skip
    """Compute delta, units, row statistics and shifts of a block of queries, and clear its sums.

    Queries behind the last one of a sequence get statistics that make P 0.

    q8, do_right: `Operand` of qk_recompute and dp. o, do: `Strided`. bounds: `KeyBounds`. k_mean:
    `Means` of K, or None. lse2, d_lse, delta: `Rows`. row_stats, deltas: see `start_rows`, in
    padded storage as all that follow. shifts: float32, or None. dq_sums: `DqSums`. ds_sums:
    `DsSums`, or None. softcap: `Softcap`. scale: the scale of the logits, divided by the softcap.
    growths: `Growths`.
    """
    wait_for_earlier_kernels()
    i, h, b = program_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = i * sizes.BLOCK_Q
    if first >= n_q:
        return
    local = tl.arange(0, sizes.BLOCK_Q)
    row = first + local
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, row, n_q, float("inf"))
    row_delta = rowsum_do_o(o, do, lengths, b, h, first, sizes.DV, sizes.DV_PAD, sizes.BLOCK_Q)
    row_delta = subtract_lse_gradient(row_delta, d_lse, lengths, b, h, row, n_q, row_lse2)
    unit = row_units(
        q8, do_right, bounds, None, lengths, b, h, first, row_lse2, row_delta, scale, growths, sizes
    )
    _q_base, q_scales = head_pointers(q8, lengths.cu_q, lengths.n_q, b, h)
    factor = load_token_scales(q8, q_scales, first, sizes.BLOCK_Q, n_q) * scale
    at = h.to(tl.int64) * dq_sums.tokens + stored_start_of(lengths.cu_q, lengths.n_q, b) + first
    if shifts is not None:
        shift = load_shift(softcap, lengths.cu_q, b, h, row, n_q)
        # Of a query without keys, Q may be NaN.
        tl.store(shifts + at + local, tl.where(row_lse2 == float("inf"), 0.0, shift))
    if ds_sums is not None:
        mean = load_mean(k_mean, b, h // sizes.GROUPS, 0, sizes.D, tl.arange(0, sizes.D_PAD))
        inverse = inverse_ds_units(unit, largest(magnitude(mean), 1))
        tl.store(ds_sums.inverse_unit + at + local, inverse)
        tl.store(ds_sums.sums + at + local, tl.zeros((sizes.BLOCK_Q,), tl.int64))
    store_rows(delta, lengths.cu_q, b, h, row, n_q, row_delta)
    tl.store(row_stats + at * 4 + local, factor)
    start_rows(dq_sums, row_stats, at, unit, row_lse2, row_delta, sizes, deltas)


def prepare_capped_backward(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor,
    do: Tensor,
    statistics: RowStatistics,
    d_lse: Rows | None,
    dq_sums: DqSums,
    row_stats: Tensor,
    softcap: Softcap,
    *,
    tile: int,
    deltas: Tensor | None = None,
) -> tuple[Tensor | None, DsSums | None]:
    """Do what `prepare_backward_in_one_pass` does, under a softcap.

    Row statistics then have the scale of the logits divided by the softcap. Return the shift of
    each query divided by the softcap, float32 in padded storage, and the sums of the rows of dS,
    which are 0. Both are None if K is not smoothed.
    """
    spec, lengths = problem.spec, problem.lengths
    operands.quantize("qk_recompute")
    q8, k8 = operands.get("qk_recompute", "q"), operands.get("qk_recompute", "k")
    do_right, v = operands.get("dp", "do"), operands.get("dp", "v")
    k_right, to_subtract = operands.get_unsmoothed("dq", "k")
    used = {"k": k8, "v": v, "k_right": k_right}
    mean = operands.k_mean
    bounds = compute_key_bounds(problem, used, tile=tile, to_subtract=to_subtract, k_mean=mean)
    shifts = ds_sums = None
    if mean is not None:
        shifts = torch.empty_like(dq_sums.unit)
        ds_sums = DsSums(
            torch.empty_like(dq_sums.unit, dtype=torch.int64), torch.empty_like(dq_sums.unit)
        )
    grid = problem.query_grid(spec.block_q)
    launch(
        capped_rows_kernel,
        grid.programs,
        grid,
        q8,
        Strided.of(o),
        Strided.of(do),
        do_right,
        bounds,
        mean,
        statistics.lse2,
        d_lse,
        statistics.delta,
        row_stats,
        deltas,
        shifts,
        dq_sums,
        ds_sums,
        softcap,
        lengths,
        problem.scale * softcap.inverse,
        Growths.of(spec),
        KernelSizes.of(problem, spec.block_q),
        **LAUNCH,
    )
    return None if shifts is None else shifts.view(-1), ds_sums


@triton.jit
def sums_of_ds_kernel(grid, ds_sums, out, tokens, lengths, BLOCK: tl.constexpr):
    """Convert the sums of a block of queries to float32. tokens: of a head in padded storage."""
    wait_for_earlier_kernels()
    i, h, b = program_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = i * BLOCK
    if first >= n_q:
        return
    local = tl.arange(0, BLOCK)
    at = h.to(tl.int64) * tokens + stored_start_of(lengths.cu_q, lengths.n_q, b) + first + local
    total = tl.load(ds_sums.sums + at).to(tl.float32)
    total *= inverse_of(tl.load(ds_sums.inverse_unit + at))
    store_rows(out, lengths.cu_q, b, h, first + local, n_q, total)


def sums_of_ds(problem: KernelProblem, ds_sums: DsSums) -> Rows:
    """Return the sum of each row of dS, float32 [sequences, heads, n_q]."""
    block = problem.spec.block_q
    found = problem.q.new_empty(problem.q.shape[:3], dtype=torch.float32)
    out = Rows.of(found)
    grid = problem.query_grid(block)
    launch(
        sums_of_ds_kernel,
        grid.programs,
        grid,
        ds_sums,
        out,
        ds_sums.sums.shape[1],
        problem.lengths,
        block,
        **LAUNCH,
    )
    return out
