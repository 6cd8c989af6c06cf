"""Numbers of a row: the logsumexp that the backward reads, and delta, which it subtracts."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.layout import (
    Grid,
    Rows,
    Strided,
    length_of,
    live_queries,
    place_in,
    row_base,
    token_ptrs,
)
from sagesim_kernels.primitives import LAUNCH, row_sums
from sagesim_kernels.problem import Problem, padded

_TILE: Final = 64
"""Queries of one program."""


@triton.jit
def load_rows(rows, cu, b, h, queries, n, missing):
    """A number for each of these queries of sequence b; `missing` from n on."""
    return tl.load(row_base(rows, cu, b, h) + queries, mask=queries < n, other=missing)


@triton.jit
def store_rows(rows, cu, b, h, queries, n, value):
    """Store a number for each of these queries of sequence b that come before n."""
    tl.store(row_base(rows, cu, b, h) + queries, value, mask=queries < n)


@triton.jit
def less_gradient(result, d_lse, lengths, b, h, queries, n_q, row_lse2):
    """Delta less the gradient of the logsumexp; 0 for queries that attend to nothing, whose
    logsumexp has a gradient that is no number."""
    if d_lse is not None:
        result -= load_rows(d_lse, lengths.cu_q, b, h, queries, n_q, 0.0)
    return tl.where(row_lse2 == float("inf"), 0.0, result)


@triton.jit
def products_with_o(
    o, do, lengths, b, h, first, DV: tl.constexpr, DV_PAD: tl.constexpr, TILE: tl.constexpr
):
    """rowsum(dO o O) of queries first..first + TILE; 0 for those that attend to nothing."""
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
def _delta_from_o(
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
    tile, h, b = place_in(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = tile * TILE
    if first >= n_q:
        return
    queries = first + tl.arange(0, TILE)
    result = products_with_o(o, do, lengths, b, h, first, DV, DV_PAD, TILE)
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, queries, n_q, float("inf"))
    result = less_gradient(result, d_lse, lengths, b, h, queries, n_q, row_lse2)
    store_rows(delta, lengths.cu_q, b, h, queries, n_q, result)


def delta_from_o(
    problem: Problem, o: Tensor, do: Tensor, lse2: Tensor, d_lse: Rows | None, delta: Tensor
) -> None:
    """Fill delta, float32 [sequences, heads, n_q], with rowsum(dO o O)."""
    d_v = problem.v.shape[3]
    grid = Grid(-(-problem.longest_q // _TILE), problem.q.shape[1], problem.sequences)
    _delta_from_o[grid.programs](
        grid,
        Strided.of(o),
        Strided.of(do),
        Rows.of(lse2),
        d_lse,
        Rows.of(delta),
        problem.lengths,
        d_v,
        padded(d_v),
        _TILE,
        **LAUNCH,
    )
