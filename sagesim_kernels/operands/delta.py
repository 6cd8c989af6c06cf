"""Row statistics: access to one number for each query, and delta = rowsum(dO o O)."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.launching import launch, wait_for_earlier_kernels
from sagesim_kernels.operands.grid import program_coordinates
from sagesim_kernels.operands.kernel_problem import KernelProblem, padded
from sagesim_kernels.operands.layout import Rows, Strided, length_of, row_base, token_ptrs
from sagesim_kernels.operands.masking import live_queries
from sagesim_kernels.operands.results import RowStatistics
from sagesim_kernels.operands.rounding import LAUNCH, row_sums

_TILE: Final = 64
"""Queries of a program."""


@triton.jit
def load_rows(rows, cu, b, h, queries, n, missing):
    """Load the numbers of these queries of sequence b; queries from n on get `missing`."""
    return tl.load(row_base(rows, cu, b, h) + queries, mask=queries < n, other=missing)


@triton.jit
def store_rows(rows, cu, b, h, queries, n, value):
    """Store the numbers of those queries of sequence b that come before n."""
    tl.store(row_base(rows, cu, b, h) + queries, value, mask=queries < n)


@triton.jit
def subtract_lse_gradient(result, d_lse, lengths, b, h, queries, n_q, row_lse2):
    """Return delta minus the gradient of the logsumexp.

    It is 0 for queries that attend to no key: the gradient of their logsumexp, -inf, may be NaN.
    """
    if d_lse is not None:
        result -= load_rows(d_lse, lengths.cu_q, b, h, queries, n_q, 0.0)
    return tl.where(row_lse2 == float("inf"), 0.0, result)


@triton.jit
def rowsum_do_o(
    o, do, lengths, b, h, first, DV: tl.constexpr, DV_PAD: tl.constexpr, TILE: tl.constexpr
):
    """Return rowsum(dO o O) of queries first..first + TILE; 0 if a query attends to no key."""
    first_live, n_q = live_queries(lengths, b)
    column = tl.arange(0, DV_PAD)
    queries = first + tl.arange(0, TILE)
    mask = ((queries < n_q) & (queries >= first_live))[:, None] & (column < DV)[None, :]
    o_ptrs = token_ptrs(o, lengths.cu_q, b, h, first, TILE, column)
    do_ptrs = token_ptrs(do, lengths.cu_q, b, h, first, TILE, column)
    o_tile = tl.load(o_ptrs, mask=mask, other=0.0).to(tl.float32)
    do_tile = tl.load(do_ptrs, mask=mask, other=0.0).to(tl.float32)
    return row_sums(o_tile * do_tile)


@triton.jit
def delta_kernel(
    grid,
    o,
    do,
    lse2,
    d_lse,
    delta,
    lengths,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute delta of a tile of queries from O and dO."""
    wait_for_earlier_kernels()
    tile, h, b = program_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = tile * TILE
    if first >= n_q:
        return
    queries = first + tl.arange(0, TILE)
    result = rowsum_do_o(o, do, lengths, b, h, first, DV, DV_PAD, TILE)
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, queries, n_q, float("inf"))
    result = subtract_lse_gradient(result, d_lse, lengths, b, h, queries, n_q, row_lse2)
    store_rows(delta, lengths.cu_q, b, h, queries, n_q, result)


def compute_delta_from_o(
    problem: KernelProblem, o: Tensor, do: Tensor, statistics: RowStatistics, d_lse: Rows | None
) -> None:
    """Fill statistics.delta with rowsum(dO o O), less the gradient of the logsumexp."""
    d_v = problem.v.shape[3]
    grid = problem.query_grid(_TILE)
    launch(
        delta_kernel,
        grid.programs,
        grid,
        Strided.of(o),
        Strided.of(do),
        statistics.lse2,
        d_lse,
        statistics.delta,
        problem.lengths,
        d_v,
        padded(d_v),
        _TILE,
        **LAUNCH,
    )
