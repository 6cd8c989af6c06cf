"""What smoothing K subtracts from each row of logits: q . mean(K) * scale."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.launching import launch, wait_for_earlier_kernels
from sagesim_kernels.operands.delta import store_rows
from sagesim_kernels.operands.grid import program_coordinates
from sagesim_kernels.operands.kernel_problem import KernelProblem
from sagesim_kernels.operands.layout import Rows, Strided, length_of, token_ptrs
from sagesim_kernels.operands.masking import is_live_query
from sagesim_kernels.operands.means import Means, load_mean
from sagesim_kernels.operands.rounding import LAUNCH, row_sums

_TILE: Final = 64
"""Queries of a program."""


@triton.jit
def logit_shift_kernel(
    grid,
    q,
    k_mean,
    shift,
    lengths,
    scale,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute the shift of a tile of queries; 0 for queries that attend to no key."""
    wait_for_earlier_kernels()
    tile, h, b = program_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = tile * TILE
    if first >= n_q:
        return
    queries = first + tl.arange(0, TILE)
    column = tl.arange(0, D_PAD)
    ptrs = token_ptrs(q, lengths.cu_q, b, h, first, TILE, column)
    mask = is_live_query(lengths, b, queries)[:, None] & (column < D)[None, :]
    q_tile = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    result = row_sums(q_tile * load_mean(k_mean, b, h // GROUPS, 0, D, tl.arange(0, D_PAD))) * scale
    store_rows(shift, lengths.cu_q, b, h, queries, n_q, result)


def compute_logit_shift(problem: KernelProblem, k_mean: Tensor | None) -> Tensor | None:
    """Return the shift, float32 [sequences, heads, n_q]; None if K is not smoothed.

    k_mean: float32 [sequences, kv heads, 1, d], or None.
    """
    if k_mean is None:
        return None
    d = problem.q.shape[3]
    shift = torch.empty(problem.q.shape[:3], dtype=torch.float32, device=problem.q.device)
    grid = problem.query_grid(_TILE)
    launch(
        logit_shift_kernel,
        grid.programs,
        grid,
        Strided.of(problem.q),
        Means.of_heads(k_mean),
        Rows.of(shift),
        problem.lengths,
        problem.scale,
        problem.groups,
        d,
        triton.next_power_of_2(d),
        _TILE,
        **LAUNCH,
    )
    return shift
