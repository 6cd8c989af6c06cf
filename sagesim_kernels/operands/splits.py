"""Parts of dK and dV of several programs, and their sum in a fixed order.

If there are few heads of K and V, the query heads of a group are divided among programs.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.launching import launch, wait_for_earlier_kernels
from sagesim_kernels.operands.grid import program_coordinates
from sagesim_kernels.operands.kernel_problem import KernelProblem, padded
from sagesim_kernels.operands.layout import Strided, length_of, store_tokens, token_ptrs
from sagesim_kernels.operands.rounding import LAUNCH

_BLOCK = tl.constexpr(64)
"""Keys of a program that adds parts."""

_FEWEST_HEADS: Final = 4
"""With fewer heads, the query heads of a group are divided among programs of the backward."""


def query_heads_per_program(heads: int, groups: int, most: int) -> int:
    """Return how many query heads of a group a program of the backward computes.

    At most `most`, and fewer if there are so few heads of K and V that their programs would not
    keep a GPU busy. The choice decides in which order dK and dV are added up. So it depends on
    nothing but the numbers of heads: a sequence gives the same bytes in every batch.

    heads: heads of K and V of a sequence. groups: query heads for each of them.
    """
    divisors = [n for n in range(min(groups, most), 0, -1) if groups % n == 0]
    return next((n for n in divisors if heads * groups // n >= _FEWEST_HEADS), 1)


@triton.jit
def add_splits_kernel(
    grid, parts, out, lengths, scale, SPLITS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr
):
    """Add up the parts of a block of keys, and multiply the sum by scale."""
    wait_for_earlier_kernels()
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


class Splits(NamedTuple):
    """How programs of a backward divide the query heads of a group."""

    programs: int  #: for each tile of keys
    query_heads: int  #: of a program

    @classmethod
    def of(cls, problem: KernelProblem, most: int) -> Splits:
        """Return the division for a problem; a program has at most `most` query heads."""
        query_heads = query_heads_per_program(problem.k.shape[1], problem.groups, most)
        return cls(problem.groups // query_heads, query_heads)

    def parts(self, grad: Tensor) -> Tensor:
        """Return the gradient itself if one program computes it, else memory for its parts.

        grad: of K or V, [sequences, heads, keys, channels]. Parts are float32 [sequences,
        heads * programs, keys, channels].
        """
        if self.programs == 1:
            return grad
        sequences, heads, *tokens = grad.shape
        shape = (sequences, heads * self.programs, *tokens)
        return torch.empty(shape, dtype=torch.float32, device=grad.device)

    def factor(self, scale: float) -> float:
        """Return the factor of each part, if scale is that of the gradient."""
        return scale if self.programs == 1 else 1.0

    def add(self, problem: KernelProblem, parts: Tensor, grad: Tensor, scale: float) -> None:
        """Fill grad, any strides, with scale times the sum of its parts.

        Do nothing if grad is the only part.
        """
        if self.programs == 1:
            return
        grid = problem.key_grid(_BLOCK.value)
        launch(
            add_splits_kernel,
            grid.programs,
            grid,
            Strided.of(parts),
            Strided.of(grad),
            problem.lengths,
            scale,
            self.programs,
            grad.shape[3],
            padded(grad.shape[3]),
            **LAUNCH,
        )
