"""Global and shared memory of a simulated kernel; see `simulated_kernels`."""

# Values of a kernel have no types here:
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.support.device_functions import ANYTHING, Numbers, Unknown, raw
from tests.support.simulated_barriers import Barrier, Cell, Program, ProgramError

_DTYPES: Final = {
    torch.int8: gl.int8,
    torch.int32: gl.int32,
    torch.int64: gl.int64,
    torch.float32: gl.float32,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
}
_BEHIND: Final = 256
"""TMA loads zeros behind a tensor. No tile of rows is longer than this."""


def element_type(dtype: Any) -> Any:
    return gl.bfloat16 if dtype is None else raw(dtype)


class Memory:
    """A tensor in global memory. Of floats it knows how often each was stored."""

    def __init__(self, x: Tensor) -> None:
        extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        self.extent = extent if x.numel() else 0
        self.dtype = _DTYPES[x.dtype]
        self.shape = tuple(x.shape)
        self.stores: NDArray[np.int64] = np.zeros(self.extent, dtype=np.int64)
        flat = x.detach().as_strided((self.extent,), (1,))
        self.numbers = None if x.is_floating_point() else flat.numpy()


class Address(NamedTuple):
    """A pointer, or an array of pointers, to numbers of a tensor."""

    memory: Memory
    at: Any  #: elements

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, other: Any) -> Address:
        return Address(self.memory, self.at + raw(other))

    def __getitem__(self, index: Any) -> Address:
        return Address(self.memory, np.asarray(self.at)[index])

    def broadcast_to(self, shape: Any) -> Address:
        return Address(self.memory, np.broadcast_to(self.at, shape))

    def to(self, _dtype: Any) -> Numbers:
        return Numbers(0)

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.at)

    def places(self, mask: Any) -> NDArray[np.int64]:
        """Return where it points, in memory."""
        at = np.asarray(self.at)
        if mask is not None:
            at, mask = np.broadcast_arrays(at, raw(mask))
            at = at[mask]
        if at.size and (at.min() < 0 or at.max() >= self.memory.extent):
            raise ProgramError(
                f"access to {at.min()}..{at.max()} of a tensor {self.memory.shape} with "
                f"{self.memory.extent} elements"
            )
        return at


class Block(NamedTuple):
    """What TMA copies."""

    name: str  #: the kernel's argument
    at: tuple[int, ...]


class Descriptor:
    """A TMA descriptor."""

    def __init__(self, x: TensorDescriptor, name: str) -> None:
        self.name = name
        self.shape, self.block_shape, self.layout = x.shape, list(x.block_shape), ANYTHING
        self.dtype = _DTYPES[x.base.dtype]

    def block(self, at: list[Any], buffer: Shared) -> Block:
        """Return a block that is copied from or to a buffer."""
        places = tuple(int(raw(x)) for x in at)
        assert len(places) == len(self.shape)
        ends = [n + _BEHIND for n in self.shape]
        if len(ends) == 5:  # all tokens may be padding behind the end of a sequence
            ends[3] += self.shape[1]
        if any(not 0 <= x < end for x, end in zip(places, ends, strict=True)):
            raise ProgramError(f"a block at {places} of a tensor {self.shape}")
        size = math.prod(self.block_shape) * self.dtype.primitive_bitwidth // 8
        if size != buffer.bytes:
            raise ProgramError(f"a block {self.block_shape} for a buffer {buffer.shape}")
        return Block(self.name, places)


class Shared:
    """A buffer in shared memory, or a part of one.

    Its cells divide the rows of a buffer evenly, and `columns` of them its channels. Those of
    several buffers follow each other.
    """

    def __init__(
        self,
        dtype: Any,
        shape: Any,
        cells: list[Cell],
        is_whole: bool = False,
        *,
        columns: int = 1,
        row: int = 0,
        channel: int = 0,
        row_axis: int = 0,
    ) -> None:
        self.dtype, self.shape = element_type(dtype), [int(raw(n)) for n in shape]
        self.cells, self.layout, self._is_whole = cells, ANYTHING, is_whole
        self.columns = columns  #: cells side by side, each with some of the channels
        self.row = row  #: the first row of the block [tokens, channels] that it has
        self.channel = channel  #: the first channel
        self._row_axis = row_axis

    def first_channel_along(self, axis: int) -> int:
        """Return the first channel if channels lie along this axis, and 0 if rows do."""
        return 0 if axis == self._row_axis else self.channel

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.primitive_bitwidth // 8

    def index(self, i: Any) -> Any:
        i = int(raw(i))
        if not 0 <= i < self.shape[0]:
            raise ProgramError(f"buffer {i} of {self.shape}")
        cells, each = self.cells, len(self.cells) // self.shape[0]
        if self._is_whole and each > 0:
            cells = cells[i * each : (i + 1) * each]
        return Shared(self.dtype, self.shape[1:], cells, columns=self.columns)

    def slice(self, start: Any, length: Any, dim: int = 0) -> Shared:
        shape, start, length = list(self.shape), int(raw(start)), int(raw(length))
        assert start >= 0
        assert start + length <= shape[dim]
        row, channel, columns = self.row, self.channel, self.columns
        lines = [self.cells[i : i + columns] for i in range(0, len(self.cells), columns)]
        if dim == self._row_axis:
            rows = shape[dim] // len(lines)
            lines = lines[start // rows : -(-(start + length) // rows)]
            row += start
        else:
            channels = shape[dim] // columns
            lines = [line[start // channels : -(-(start + length) // channels)] for line in lines]
            channel += start
        shape[dim] = length
        return Shared(
            self.dtype,
            shape,
            [cell for line in lines for cell in line],
            columns=len(lines[0]),
            row=row,
            channel=channel,
            row_axis=self._row_axis,
        )

    def permute(self, order: Any) -> Shared:
        shape = [self.shape[axis] for axis in order]
        axis = list(order).index(self._row_axis)
        return Shared(
            self.dtype,
            shape,
            self.cells,
            columns=self.columns,
            row=self.row,
            channel=self.channel,
            row_axis=axis,
        )

    def reshape(self, shape: Any) -> Shared:
        assert self.columns == 1
        return Shared(self.dtype, shape, self.cells)

    @property
    def content(self) -> Any:
        """What TMA loaded to these rows, or the integers that were stored to the buffer."""
        content, *others = (cell.content for cell in self.cells)
        if any(other is not content for other in others):
            return None
        if isinstance(content, Block) and self.row and len(content.at) > 1:
            *outer, row, channel = content.at
            return content._replace(at=(*outer, row + self.row, channel))
        return content

    def load(self, _layout: Any = None) -> Unknown | Numbers:
        running().read(self.cells)
        content = self.content
        if self.dtype is gl.int32 and content is None:
            raise ProgramError(f"integers {self.shape} are loaded before they are stored")
        return content if isinstance(content, Numbers) else Loaded(content, *self.shape)

    def store(self, value: Any) -> None:
        assert value.shape == tuple(self.shape), (value.shape, self.shape)
        running().write(self.cells)
        if isinstance(value, Numbers):
            (cell,) = self.cells
            cell.content = value


class Loaded(Unknown):
    """What was loaded from shared memory to registers."""

    def __init__(self, content: Block | None, *shape: Any) -> None:
        super().__init__(*shape)
        self.content = content


class BarrierPlace:
    """A barrier in shared memory."""

    barrier: Barrier


class BarrierPlaces(BarrierPlace):
    """Barriers in shared memory; if there is one, it is used without an index."""

    def __init__(self, count: int) -> None:
        self.shape, self._places = [count, 1], [BarrierPlace() for _ in range(count)]

    def index(self, i: Any) -> BarrierPlace:
        if not 0 <= raw(i) < len(self._places):
            raise ProgramError(f"barrier {raw(i)} of {len(self._places)}")
        return self._places[int(raw(i))]


class Running:
    """The program that runs."""

    program: Program | None = None


def running() -> Program:
    assert Running.program is not None
    return Running.program
