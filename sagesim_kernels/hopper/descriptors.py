"""TMA descriptors of tensors, and the size of the device."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sagesim_kernels.hopper.dq_parts import BLOCK_Q
from sagesim_kernels.operands import DqSums, Operand, channels_at_once

_DTYPES: Final[dict[torch.dtype, Any]] = {
    torch.int8: gl.int8,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
}

SCALES = gl.constexpr(gl.NVMMASharedLayout(0, 32, 1))
"""Layout of scales in shared memory."""


def tma_descriptor(x: Tensor, rows: int, channels: int) -> TensorDescriptor:
    """Return a descriptor that loads tiles [rows, channels] of x [..., rows, channels].

    x may have fewer channels than a tile. Rows and channels behind the last one are loaded as
    zeros. The channels of x have to be contiguous, and its other strides multiples of 16 bytes. TMA
    has no stride of 0, so an expanded tensor is copied; the descriptor holds the copy.
    """
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
        x = x.contiguous()
    block = (*[1] * (x.ndim - 2), rows, channels)
    # torch may give any stride to a dimension of size 1.
    strides = [x.stride(i) if x.shape[i] > 1 else x.shape[-1] for i in range(x.ndim - 1)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], list(block), _layout(block, x.dtype))


def right_descriptor(x: Operand, tokens: int, channels: int) -> TensorDescriptor:
    """Return a descriptor that loads tiles [channels, tokens] of codes that are summed over."""
    return tma_descriptor(x.ptr.view(-1, x.stride_d), channels, tokens)


def key_scales_of(k: Operand, keys: int) -> TensorDescriptor | None:
    """Return a descriptor that loads the scales of `keys` keys; None if keys share a scale."""
    if k.TOKENS.value != 1:
        return None
    return TensorDescriptor.from_tensor(k.scale.view(-1), [keys], SCALES.value)


def sums_descriptor(sums: DqSums, d: int, channels: int) -> TensorDescriptor:
    """Return the descriptor by which TMA adds to sums of dQ.

    d: channels of Q. channels: of a tile.
    """
    rows = BLOCK_Q.value * channels_at_once(d, channels) // 32
    layout = gl.NVMMASharedLayout(128, 32, 2)
    return TensorDescriptor.from_tensor(sums.sums.view(-1, 32), [rows, 32], layout)


@lru_cache(maxsize=64)
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[dtype])
