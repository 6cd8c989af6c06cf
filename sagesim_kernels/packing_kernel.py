"""Look at the beginnings of packed sequences on a GPU, without waiting for it."""

# pyright: reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.launching import Tensors, launch, planned, wait_for_earlier_kernels

_BLOCK = tl.constexpr(1024)


@triton.jit
def packing_kernel(cu, count, tokens, most, fits):
    """Store whether `count` sequences are packed as cu says. One program.

    The other arguments: see `is_packing`.
    """
    wait_for_earlier_kernels()
    good = (tl.load(cu) == 0) & (tl.load(cu + count) == tokens)
    for first in range(0, count, _BLOCK):
        i = first + tl.arange(0, _BLOCK)
        is_sequence = i < count
        begin = tl.load(cu + i, mask=is_sequence, other=0).to(tl.int64)
        length = tl.load(cu + i + 1, mask=is_sequence, other=0) - begin
        good &= (tl.min(length, 0) >= 0) & (tl.max(length, 0) <= most)
    tl.store(fits, good)


def is_packing(cu: Tensor, tokens: int, most: int) -> Tensor:
    """Return, as a bool tensor [], whether cu ascends from 0 to `tokens` in steps up to `most`.

    cu: int32 [sequences + 1], contiguous.
    """
    (fits,) = planned(_launch, (cu,), (tokens, most))
    assert fits is not None
    return fits


def _launch(tensors: Tensors, options: tuple[int, int]) -> Tensors:
    (cu,) = tensors
    assert cu is not None
    fits = torch.empty((), dtype=torch.bool, device=cu.device)
    launch(packing_kernel, (1,), cu, cu.shape[0] - 1, *options, fits, num_warps=4)
    return (fits,)
