"""What a backward computes before the gradients, for every spec: delta, row sums, units of dQ."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sagesim.spec import AttentionSpec, Delta
from sagesim_kernels.operands import (
    DqSums,
    KernelProblem,
    OperandCache,
    Rows,
    RowScales,
    RowStatistics,
    compute_delta_from_o,
    compute_ds_bounds,
    compute_units,
    has_row_bound,
    memory_of_p_sums,
)


def prepare_backward(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor | None,
    do: Tensor,
    statistics: RowStatistics,
    d_lse: Rows | None,
    dq_sums: DqSums,
    sum_rows: Callable[[Rows | None], None],
    p_bound: Rows | None = None,
    fill_units: Callable[..., None] = compute_units,
) -> RowScales | None:
    """Fill statistics.delta and dq_sums.unit, and return the scales that follow from bounds.

    Args:
        o: the output of the forward; None if delta comes from P.
        do: the gradient of o, any strides.
        statistics: lse2 of the forward, and memory for delta.
        d_lse: the gradient of the logsumexp, or None.
        sum_rows: fills its argument with the row sums of P unless it is None, statistics.delta if
            delta comes from P, and p_bound.
        p_bound: memory for the largest P of each row, if the spec has scales from bounds.
        fill_units: `compute_units`, or a function that does more in the same pass over dO.
    """
    spec = problem.spec
    if spec.delta is Delta.FROM_O:
        assert o is not None
        compute_delta_from_o(problem, o, do, statistics, d_lse)
    p_sums = memory_of_p_sums(problem)
    if p_sums is not None or spec.delta is Delta.FROM_P or p_bound is not None:
        sum_rows(p_sums)
    row_scales = ds_bound = None
    if p_bound is not None:
        row_scales, ds_bound = compute_row_scales(problem, operands, p_bound, statistics)
    fill_units(
        problem,
        {
            "q": operands.get("qk_recompute", "q"),
            "k": operands.get("qk_recompute", "k"),
            "do": operands.get("dp", "do"),
            "v": operands.get("dp", "v"),
            "k_right": operands.get("dq", "k"),
        },
        operands.k_mean if problem.extras.softcap is not None else None,
        statistics,
        p_sums,
        dq_sums,
        ds_bound if has_row_bound(spec, "dq") else None,
    )
    return row_scales


def compute_row_scales(
    problem: KernelProblem, operands: OperandCache, p_bound: Rows, statistics: RowStatistics
) -> tuple[RowScales, Rows | None]:
    """Return the scales of rows of P and dS that follow from bounds, and the bounds of dS.

    dO of dv and Q of dk are rounded, times the bounds. The bounds of dS are None if only P has such
    scales.

    Args:
        p_bound: the largest P of each row.
        statistics: lse2 and delta.
    """
    spec = problem.spec
    p = dk = dq = (None, None)
    if has_row_bound(spec, "dv"):
        p = operands.fold("dv", p_bound)
    ds_bound = None
    if has_row_bound(spec, "dq") or has_row_bound(spec, "dk"):
        do, v = operands.get("dp", "do"), operands.get("dp", "v")
        own = has_row_bound(spec, "dq") and not has_same_codes(spec)
        precision = spec.dq.precision if own else None
        ds_bound, rows = compute_ds_bounds(problem, do, v, p_bound, statistics, precision)
        if rows is not None:
            dq = rows
        if has_row_bound(spec, "dk"):
            dk = operands.fold("dk", ds_bound)
        if has_same_codes(spec):
            dq = dk
    return RowScales(*p, *dk, *dq, *p_bound[1:]), ds_bound


def has_same_codes(spec: AttentionSpec) -> bool:
    """Return whether dS has the same codes, with scales from bounds, for dQ and dK."""
    of_both = has_row_bound(spec, "dq") and has_row_bound(spec, "dk")
    return of_both and spec.dq.precision is spec.dk.precision
