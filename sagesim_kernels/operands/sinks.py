"""Sinks: one further logit for each head in the sum of a row's exponentials."""

from __future__ import annotations

import torch
from torch import Tensor

from sagesim_kernels.operands.kernel_problem import KernelProblem
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
    problem: KernelProblem, p_sink: Tensor | None, delta: Tensor, d_lse: Tensor | None
) -> Tensor | None:
    """Return the sum of each row of dS, float32 [sequences, heads, n_q]; None if it is 0.

    P sums to 1 - p_sink, so that dS = P o (dP - delta) sums to the gradient of the logsumexp plus
    p_sink * delta. With a softcap the sums have no such form; the result is then None as well.
    """
    if problem.extras.softcap is not None or (p_sink is None and d_lse is None):
        return None
    if p_sink is None:
        return d_lse
    found = p_sink * delta
    return found if d_lse is None else found + d_lse
