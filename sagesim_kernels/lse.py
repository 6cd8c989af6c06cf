"""The logsumexp of the true logits, out of that of the smoothed ones."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.delta import load_rows
from sagesim_kernels.forward import ForwardResult
from sagesim_kernels.layout import Grid, Rows, Strided, length_of, place_in, row_base, token_ptrs
from sagesim_kernels.primitives import LAUNCH, LN_2, row_sums
from sagesim_kernels.problem import Problem
from sagesim_kernels.smoothing import Means, mean_of

_LN_2 = tl.constexpr(LN_2)
_TILE: Final = 64
"""Queries of one program."""


@triton.jit
def _natural_lse(
    grid,
    lse2,
    q,
    k_mean,
    lse,
    lengths,
    scale,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    tile, h, b = place_in(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = tile * TILE
    if first >= n_q:
        return
    queries = first + tl.arange(0, TILE)
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, queries, n_q, float("inf"))
    result = row_lse2 * _LN_2
    if k_mean is not None:
        column = tl.arange(0, D_PAD)
        ptrs = token_ptrs(q, lengths.cu_q, b, h, first, TILE, column)
        mask = (queries < n_q)[:, None] & (column < D)[None, :]
        q_tile = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        shift = row_sums(q_tile * mean_of(k_mean, b, h // GROUPS, 0, D, D_PAD))
        result += shift * scale
    result = tl.where(row_lse2 == float("inf"), -float("inf"), result)
    tl.store(row_base(lse, lengths.cu_q, b, h) + queries, result, mask=queries < n_q)


def natural_lse(problem: Problem, result: ForwardResult) -> Tensor:
    """lse of the true logits, float32 [sequences, heads, n_q]; -inf where a row attends to nothing.

    The mean that was taken out of K counts again: q k_mean^T * scale is what it took out of a row.
    """
    lse = torch.full_like(result.lse2, -torch.inf)
    if problem.is_empty:
        return lse
    d = problem.q.shape[3]
    grid = Grid(-(-problem.longest_q // _TILE), problem.q.shape[1], problem.sequences)
    _natural_lse[grid.programs](
        grid,
        Rows.of(result.lse2),
        Strided.of(problem.q),
        None if result.k_mean is None else Means.of_heads(result.k_mean),
        Rows.of(lse),
        problem.lengths,
        problem.scale,
        problem.groups,
        d,
        triton.next_power_of_2(d),
        _TILE,
        **LAUNCH,
    )
    return lse
