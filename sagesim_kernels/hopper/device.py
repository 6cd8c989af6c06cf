"""What the host asks the device, and how it tells TMA where tensors are."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

_DTYPES: Final[dict[torch.dtype, Any]] = {
    torch.int8: gl.int8,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
}


def loads(x: Tensor, rows: int) -> TensorDescriptor:
    """So many rows of x [..., rows, channels] at a time, with all channels; zeros behind the last
    row. Strides are multiples of 16 bytes, and channels contiguous. What is expanded is copied, as
    TMA has no stride of 0; the descriptor keeps the copy."""
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
        x = x.contiguous()
    block = (*[1] * (x.ndim - 2), rows, x.shape[-1])
    # Of a dimension of one, torch's stride may be anything.
    strides = [x.stride(i) if x.shape[i] > 1 else x.shape[-1] for i in range(x.ndim - 1)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], list(block), _layout(block, x.dtype))


@lru_cache(maxsize=64)
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[dtype])


def processors() -> int:
    """Multiprocessors of the current device."""
    active: Any = driver.active
    return _processors(active.get_current_device())


@lru_cache(maxsize=64)
def _processors(device: int) -> int:
    # Kept: the driver takes a millisecond to answer, longer than a launch.
    active: Any = driver.active
    return active.utils.get_device_properties(device)["multiprocessor_count"]
