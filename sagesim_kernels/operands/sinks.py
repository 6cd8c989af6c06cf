"""Sinks: one further logit for each head in the sum of a row's exponentials."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.operands.delta import load_rows
from sagesim_kernels.operands.kernel_problem import KernelProblem
from sagesim_kernels.operands.layout import Rows
from sagesim_kernels.operands.results import RowStatistics
from sagesim_kernels.operands.rounding import LOG2_E


def sink_logits(problem: KernelProblem, shift: Tensor | None) -> Tensor | None:
    """Return the sink of each query in base 2, float32 [sequences, heads, n_q]; None without sinks.

    It is relative to the logits of which the forward computes the logsumexp: smoothed, or capped.

    shift: what smoothing K subtracts from the logits, or None.
    """
    sinks = problem.extras.sinks
    if sinks is None:
        return None
    rows = sinks.float()[None, :, None]
    if shift is not None and problem.extras.softcap is None:
        rows = rows - shift
    return (rows * LOG2_E).expand(problem.q.shape[:3]).contiguous()


@triton.jit
def add_sink(row_sum, row_max, sink2, LOG2_UNIT: tl.constexpr = 0.0):
    """Return the row sums and maxima with the sinks, and the square root of each row's factor.

    What was summed up before is relative to the previous maxima. The factor makes it relative to
    the new ones. Its root is returned because GPUs flush exponentials below 2^-126 to 0: the
    exponential of a whole difference would make O 0 in rows whose O is not.

    row_sum, row_max, sink2: float32 [rows], and so are the results.
    row_sum: of rows that attend to a key, at least 2^LOG2_UNIT.
    sink2: in base 2. -inf is no sink.
    LOG2_UNIT: log2 of the factor that remains in the row sums.
    """
    new_max = tl.maximum(row_max, sink2)
    finite_max = tl.where(new_max == -float("inf"), 0.0, new_max)
    sqrt_rescale = tl.exp2((row_max - finite_max) * 0.5)
    if LOG2_UNIT != 0.0:
        sink2 += LOG2_UNIT
    rescaled = row_sum * (sqrt_rescale * sqrt_rescale)
    return rescaled + tl.exp2(sink2 - finite_max), new_max, sqrt_rescale


@triton.jit
def add_sink_of_rows(sink2, lse2, cu, b, h, queries, n_q, row_sum, row_max):
    """Return what `add_sink` does, for these queries of sequence b.

    A row that attends to no key, with a sum of 0 and a maximum of -inf, gets no sink.

    sink2: pointer to the sinks in base 2, float32 [sequences, heads, n_q] with the strides of lse2.
    lse2: `Rows`. queries: [rows]. row_sum, row_max: float32 [rows], and so are the results.
    """
    sinks = Rows(sink2, lse2.stride_b, lse2.stride_h)
    sink = load_rows(sinks, cu, b, h, queries, n_q, 0.0)
    is_empty = (row_sum == 0.0) & (row_max == -float("inf"))
    with_sink, new_max, sqrt_rescale = add_sink(row_sum, row_max, sink)
    row_sum = tl.where(is_empty, 0.0, with_sink)
    return row_sum, tl.where(is_empty, row_max, new_max), sqrt_rescale


def sink_probabilities(sink2: Tensor, lse2: Tensor) -> Tensor:
    """Return the sink's share of each row's sum; 0 for a query that attends to no key."""
    return torch.exp2(sink2 - lse2)


def sink_gradient(problem: KernelProblem, p_sink: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of the sinks, in their dtype.

    delta: rowsum(P o dP), less the gradient of the logsumexp.
    """
    sinks = problem.extras.sinks
    assert sinks is not None
    return -(p_sink * delta).double().sum((0, 2)).to(sinks.dtype)


def ds_row_sums(
    problem: KernelProblem, p_sink: Tensor | None, statistics: RowStatistics, d_lse: Rows | None
) -> Rows | None:
    """Return the sum of each row of dS, float32 [sequences, heads, n_q]; None if it is 0.

    P sums to 1 - p_sink, so that dS = P o (dP - delta) sums to the gradient of the logsumexp plus
    p_sink * delta. With a softcap the sums have no such form; the result is then None as well.

    p_sink: see `sink_probabilities`, or None without sinks. d_lse: the gradient of the logsumexp,
    or None. Both float32 [sequences, heads, n_q].
    """
    if problem.extras.softcap is not None or (p_sink is None and d_lse is None):
        return None
    if p_sink is None:
        return d_lse
    found = p_sink * statistics.delta.ptr
    return Rows.of(found if d_lse is None else found + d_lse.ptr)
