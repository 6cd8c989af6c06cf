"""Triton's interpreter: whether it computes bfloat16."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl


@triton.jit
def _square_kernel(x, square, SIZE: tl.constexpr):
    """Round x [SIZE, SIZE] to bfloat16, and multiply it by itself."""
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tile = tl.load(x + at).to(tl.bfloat16)
    tl.store(square + at, tl.dot(tile, tile))


@lru_cache(maxsize=1)
def interprets_bfloat16() -> bool:
    """Return whether the interpreter computes bfloat16 as a GPU does.

    That of Triton 3.9 truncates where a GPU rounds to the nearest number, and multiplies matrices
    of the bits as integers.
    """
    x = torch.full((16, 16), 1.0 + 3 * 2.0**-9)  # the nearest number is 1 + 2^-7
    square = torch.empty_like(x)
    _square_kernel[(1,)](x, square, 16)
    return bool((square == 16 * (1 + 2.0**-7) ** 2).all())
