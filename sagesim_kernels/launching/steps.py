"""What a plan consists of: memories, and steps that use them; see `launching.plans`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sagesim_kernels.launching.compiled import TritonLaunch
from sagesim_kernels.launching.driver import DriverLaunch


class Place(NamedTuple):
    """Where a recorded tensor lies: at an offset from the start of a memory of the call."""

    memory: int  #: an index
    offset: int  #: bytes
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, memory: Tensor) -> Tensor:
        """Return the tensor at this place of a call's memory, which is a tensor."""
        if self.offset == 0 and self[2:] == (memory.dtype, memory.shape, memory.stride()):
            return memory
        start = memory.storage_offset() * memory.element_size() + self.offset
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        storage = memory.untyped_storage()
        return empty.set_(storage, start // self.dtype.itemsize, self.shape, self.stride)


class Memory(NamedTuple):
    """A memory that a recorded call makes, or one of its inputs."""

    size: int  #: bytes
    start: str  #: what it contains at first: "anything", "zeros", or an "input" or a "result"


class Operation(NamedTuple):
    """An operation of PyTorch."""

    run: Any
    args: Any
    results: tuple[int, ...]  #: the memories that it makes


Step = Operation | TritonLaunch | DriverLaunch
"""Arguments have a `Place` for each tensor, and a `Descriptor` with a place for its memory."""


def tensors_in(x: Any) -> list[Tensor]:
    """Return the tensors in arguments or results of an operation."""
    if isinstance(x, Tensor):
        return [x]
    return [y for each in x for y in tensors_in(each)] if isinstance(x, (tuple, list)) else []
