"""The logsumexp of the true logits, from that of the smoothed logits in base 2."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.launching import launch, wait_for_earlier_kernels
from sagesim_kernels.operands.delta import load_rows, store_rows
from sagesim_kernels.operands.grid import program_coordinates
from sagesim_kernels.operands.kernel_problem import KernelProblem
from sagesim_kernels.operands.layout import Rows, length_of
from sagesim_kernels.operands.logit_shift import compute_logit_shift
from sagesim_kernels.operands.results import ForwardResult
from sagesim_kernels.operands.rounding import LAUNCH, LN_2

_LN_2 = tl.constexpr(LN_2)
_TILE: Final = 64
"""Queries of a program."""


@triton.jit
def upper_lse2(lse2):
    """Return lse2, or slightly more where S - lse2 could overflow an exponential.

    If S is not rounded, it may exceed the largest rounded S of its row, which lse2 follows from.
    """
    return tl.where(tl.abs(lse2) > 16777216.0, lse2 + tl.abs(lse2) * 2.0**-22, lse2)


@triton.jit
def natural_lse_kernel(grid, lse2, shift, lse, lengths, TILE: tl.constexpr):
    """Compute the natural logsumexp of a tile of queries. shift: `Rows`, or None."""
    wait_for_earlier_kernels()
    tile, h, b = program_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = tile * TILE
    if first >= n_q:
        return
    queries = first + tl.arange(0, TILE)
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, queries, n_q, float("inf"))
    result = row_lse2 * _LN_2
    if shift is not None:
        result += load_rows(shift, lengths.cu_q, b, h, queries, n_q, 0.0)
    result = tl.where(row_lse2 == float("inf"), -float("inf"), result)
    store_rows(lse, lengths.cu_q, b, h, queries, n_q, result)


def natural_lse(problem: KernelProblem, result: ForwardResult) -> Tensor:
    """Return the logsumexp of the true logits, float32 [sequences, heads, n_q].

    Subtracting the mean of K lowered every logit of a row by the same number, which is added back;
    with a softcap, the logsumexp is that of the true logits already. The result is -inf for a query
    that attends to no key.
    """
    lse = torch.full_like(result.lse2, -torch.inf)
    if problem.is_empty:
        return lse
    shift = None
    if problem.extras.softcap is None:
        shift = compute_logit_shift(problem, result.k_mean)
    grid = problem.query_grid(_TILE)
    launch(
        natural_lse_kernel,
        grid.programs,
        grid,
        Rows.of(result.lse2),
        None if shift is None else Rows.of(shift),
        Rows.of(lse),
        problem.lengths,
        _TILE,
        **LAUNCH,
    )
    return lse
