"""What a backward needs of keys and queries, in one pass over each, if QK alone is in codes.

A program for a block of keys reads K and V once: it smooths and rounds K, and bounds both. After
that, a program for some queries of a block reads Q, O and dO once: it rounds Q, computes delta and
the units of dQ, and sets sums of dQ to 0.
"""

# Pyright takes the annotations of Triton's functions literally:
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
import triton.language as tl
from torch import Tensor

from sagesim_kernels.launching import launch
from sagesim_kernels.operands import (
    DTYPES,
    LAUNCH,
    LOG2_E,
    DqSums,
    Growths,
    KernelProblem,
    KernelSizes,
    KeyBounds,
    OperandCache,
    Rounding,
    Rows,
    RowStatistics,
    Strided,
    channels_of_part,
    padded,
)
from sagesim_kernels.preparation.keys_kernel import prepare_keys_kernel
from sagesim_kernels.preparation.queries_kernel import prepare_queries_kernel
from sagesim_kernels.preparation.tiles import Tile

_TYPES: Final = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

_CHANNELS_OF_A_THREAD: Final = 16
"""Of each token that the thread holds."""

_KEY_ELEMENTS: Final = 1024
_QUERY_ELEMENTS: Final = 512
"""Of each tensor, that a warp holds at once. Of three tensors it holds fewer: threads would have so
many registers that fewer loads are in flight."""


def prepare_backward_in_one_pass(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor,
    do: Tensor,
    statistics: RowStatistics,
    d_lse: Rows | None,
    dq_sums: DqSums,
    row_stats: Tensor,
    *,
    tile: int,
    deltas: Tensor | None = None,
) -> None:
    """Round Q and K of qk_recompute; fill delta, units and row statistics; set the sums to 0.

    row_stats, deltas: see `start_rows`. tile: keys that a product of dQ sums over. The others: see
    `prepare_backward`. There is no softcap, and head sizes are from 33 to 128.
    """
    spec, lengths = problem.spec, problem.lengths
    matmul = spec.qk_recompute
    dtype: tl.constexpr = tl.constexpr(_TYPES[DTYPES[spec.dp.precision]])
    (q8, q), (k8, k) = (operands.reserve("qk_recompute", x) for x in ("q", "k"))
    d, d_v = k.x.shape[3], problem.v.shape[3]
    block_q, block_k = spec.block_q, spec.block_k
    bounds = KeyBounds.empty(problem, tile)
    k_tile, v_tile, warps = _tiles(block_k, d, d_v, _KEY_ELEMENTS)
    grid = problem.key_grid(block_k)
    launch(
        prepare_keys_kernel,
        grid.programs,
        grid,
        Strided.of(k.x),
        Strided.of(problem.v),
        k.mean,
        k8,
        bounds,
        Rounding.of(spec, "k", matmul.precision),
        lengths,
        KernelSizes.of(problem, block_k),
        dtype,
        k_tile,
        v_tile,
        num_warps=warps,
        **LAUNCH,
    )
    q_tile, o_tile, warps = _tiles(q8.TOKENS.value, d, d_v, _QUERY_ELEMENTS)
    tokens = q_tile.TOKENS
    grid = problem.query_grid(tokens, together=block_q // tokens)
    launch(
        prepare_queries_kernel,
        grid.programs,
        grid,
        Strided.of(q.x),
        Strided.of(o),
        Strided.of(do),
        q8,
        bounds,
        Rounding.of(spec, "q", matmul.precision),
        statistics.lse2,
        d_lse,
        statistics.delta,
        row_stats,
        deltas,
        dq_sums,
        lengths,
        problem.scale * LOG2_E,
        Growths.of(spec),
        KernelSizes.of(problem, block_q),
        dtype,
        q_tile,
        o_tile,
        num_warps=warps,
        **LAUNCH,
    )


@lru_cache(maxsize=64)
def _tiles(tokens: int, d: int, d_v: int, elements: int) -> tuple[Tile, Tile, int]:
    """Return tiles of tokens with d and with d_v channels, and the warps of a program for them.

    tokens: of a tile; 1 for as many as a warp holds. elements: of each tensor, that a warp holds.
    """
    parts = [channels_of_part(x, padded(x), 0) for x in (d, d_v)]
    widest = max(channels for _, channels in parts)
    across = widest // _CHANNELS_OF_A_THREAD
    of_a_warp = elements // widest
    if tokens == 1:
        tokens = of_a_warp
    warps = tokens // of_a_warp
    first, second = (Tile.of(1, tokens, part, across, warps) for part in parts)
    return first, second, warps
