"""The logsumexp of the true logits, from that of the smoothed logits in base 2."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.operands.delta import load_rows, store_rows
from sagesim_kernels.operands.kernel_problem import KernelProblem
from sagesim_kernels.operands.layout import (
    Grid,
    Rows,
    Strided,
    length_of,
    program_coordinates,
    token_ptrs,
)
from sagesim_kernels.operands.means import Means, load_mean
from sagesim_kernels.operands.results import ForwardResult
from sagesim_kernels.operands.rounding import LAUNCH, LN_2, row_sums

_LN_2 = tl.constexpr(LN_2)
_TILE: Final = 64
"""Queries of a program."""


@triton.jit
def natural_lse_kernel(
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
    """Compute the natural logsumexp of a tile of queries."""
    tile, h, b = program_coordinates(grid)
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
        shift = row_sums(q_tile * load_mean(k_mean, b, h // GROUPS, 0, D, D_PAD))
        result += shift * scale
    result = tl.where(row_lse2 == float("inf"), -float("inf"), result)
    store_rows(lse, lengths.cu_q, b, h, queries, n_q, result)


def natural_lse(problem: KernelProblem, result: ForwardResult) -> Tensor:
    """Return the logsumexp of the true logits, float32 [sequences, heads, n_q].

    Subtracting the mean of K lowered every logit of a row by q k_mean^T * scale, which is added
    back. The result is -inf for a query that attends to no key.
    """
    lse = torch.full_like(result.lse2, -torch.inf)
    if problem.is_empty:
        return lse
    d = problem.q.shape[3]
    grid = Grid(-(-problem.longest_q // _TILE), problem.q.shape[1], problem.sequences)
    natural_lse_kernel[grid.programs](
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
