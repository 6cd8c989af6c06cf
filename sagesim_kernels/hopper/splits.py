"""Parts of dK and dV of several programs, and their sum in a fixed order.

If there are few heads of K and V, the query heads of a group are divided among programs: see
`tile_scheduler.query_heads_per_program`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.launch_plans import launch
from sagesim_kernels.operands import (
    LAUNCH,
    Grid,
    KernelProblem,
    Strided,
    length_of,
    padded,
    program_coordinates,
    store_tokens,
    token_ptrs,
)

_BLOCK = tl.constexpr(64)
"""Keys of a program."""


def empty_splits(grad: Tensor, splits: int) -> Tensor:
    """Return memory for the parts, float32 [sequences, heads * splits, keys, channels].

    grad: the gradient of K or V, [sequences, heads, keys, channels].
    """
    sequences, heads, *tokens = grad.shape
    return torch.empty(
        (sequences, heads * splits, *tokens), dtype=torch.float32, device=grad.device
    )


@triton.jit
def add_splits_kernel(
    grid, parts, out, lengths, scale, SPLITS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr
):
    """Add up the parts of a block of keys, and multiply the sum by scale."""
    i, h, b = program_coordinates(grid)
    n_k = length_of(lengths.cu_k, lengths.n_k, b)
    first = i * _BLOCK
    if first >= n_k:
        return
    column = tl.arange(0, D_PAD)
    mask = (first + tl.arange(0, _BLOCK) < n_k)[:, None] & (column < D)[None, :]
    total = tl.zeros((_BLOCK, D_PAD), tl.float32)
    for split in range(SPLITS):
        ptrs = token_ptrs(parts, lengths.cu_k, b, h * SPLITS + split, first, _BLOCK, column)
        total += tl.load(ptrs, mask=mask, other=0.0)
    store_tokens(out, lengths.cu_k, b, h, first, n_k, total * scale, D)


def add_splits(problem: KernelProblem, parts: Tensor, grad: Tensor, scale: float) -> None:
    """Fill grad, any strides, with scale times the sum of its parts; see `empty_splits`."""
    heads, d = grad.shape[1], grad.shape[3]
    grid = Grid(-(-problem.longest_k // _BLOCK.value), heads, problem.sequences)
    launch(
        add_splits_kernel,
        grid.programs,
        grid,
        Strided.of(parts),
        Strided.of(grad),
        problem.lengths,
        scale,
        parts.shape[1] // heads,
        d,
        padded(d),
        **LAUNCH,
    )
