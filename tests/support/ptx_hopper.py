"""The instructions of Hopper for `ptx`: barriers in memory, TMA and `wgmma`.

Warps that wait for a barrier in memory are passed over until its phase is complete; if all wait,
`Deadlock` says where. TMA's copies and the products are complete when they are issued. So nothing
is seen of a missing wait or fence, which `simulated_kernels` finds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from torch import Tensor

from tests.support.ptx import (
    SHARED_BYTES,
    WARP,
    WARP_GROUP,
    Blocks,
    Numbers,
    from_bfloat16,
    from_fp8,
    split,
)

_SWIZZLED: Final = {0: 16, 1: 32, 2: 64, 3: 128}
"""A `CUtensorMapSwizzle` -> the bytes of a row within which its 16-byte chunks change places."""

_DESCRIPTOR_SWIZZLE: Final = {0: 16, 1: 128, 2: 64, 3: 32}
"""The same for the two highest bits of a descriptor of `wgmma`."""

_WIDTHS: Final = {"bf16": 2, "f16": 2, "s8": 1, "e4m3": 1, "e5m2": 1}
"""Bytes of an element of an operand."""

_HANDLES: Final = 0xF000_0000
"""Where addresses of tensor maps begin. Nothing is stored there; addresses of parameters have 32
bits."""


def swizzled(address: Numbers, width: int) -> Numbers:
    """Return where bytes of shared memory are stored whose rows of `width` bytes are swizzled."""
    chunks = width // 16
    return address ^ (address >> 7 & chunks - 1) << 4


class TensorMap(NamedTuple):
    """A tensor in global memory, as TMA sees it. Axes are outermost first, sizes in elements."""

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]  #: that a copy moves
    size: int  #: bytes of an element
    swizzle: int

    @classmethod
    def of(cls, descriptor: Any, meta: dict[str, Any]) -> TensorMap:
        """meta: of the descriptor, from the compiled kernel."""
        if descriptor.padding != "zero" or meta["fp4_padded"]:
            raise NotImplementedError(descriptor)
        return cls(
            descriptor.base,
            descriptor.shape,
            descriptor.strides,
            meta["block_size"],
            meta["elem_size"],
            _SWIZZLED[meta["swizzle"]],
        )

    @property
    def nbytes(self) -> int:
        """Of a box."""
        return int(np.prod(self.box)) * self.size

    def shared(self, first: int) -> Numbers:
        """Return where the bytes of a box are in shared memory, [*box, size].

        first: the address of the box.
        """
        if first % 128:
            raise IndexError(f"a box at {first:#x}, which is no multiple of 128 bytes")
        places = swizzled(first + np.arange(self.nbytes), self.swizzle)
        row = self.box[-1] * self.size
        if self.swizzle > 16 and row > self.swizzle:
            raise IndexError(f"a box with rows of {row} bytes, swizzled in {self.swizzle}")
        return places.reshape(*self.box, self.size)

    def inside(self, at: Sequence[int]) -> tuple[Numbers, Numbers]:
        """Return which elements of the box at these coordinates exist, and their byte addresses."""
        exists, address = np.ones(1, bool), np.array([self.base.data_ptr()])
        for first, count, length, stride in zip(
            at, self.box, self.shape, self.strides, strict=True
        ):
            index = first + np.arange(count)
            exists = exists[..., None] & (index >= 0) & (index < length)
            address = address[..., None] + index * stride * self.size
        return exists[0], address[0]


@dataclass
class _Barrier:
    """A barrier in memory."""

    count: int  #: arrivals that complete a phase
    missing: int
    bytes: int = 0  #: that copies have to write in this phase
    phase: int = 0

    def arrive(self, times: int = 0, expected: int = 0) -> None:
        """Arrivals, and bytes that are expected; negative ones have been written."""
        self.missing -= times
        self.bytes += expected
        if self.missing < 0:
            raise AssertionError("more arrivals at a barrier than its phase has")
        if self.missing == 0 and self.bytes == 0:
            self.phase += 1
            self.missing = self.count


class _NotCompared:
    """In place of `SharedAccesses`, which knows nothing of barriers in memory."""

    def barrier(self, blocks: Any = 0) -> None: ...
    def read(self, warp: int, places: Numbers) -> None: ...
    def write(self, warp: int, places: Numbers, same: Numbers | None = None) -> None: ...
    def copy(self, warp: int, places: Numbers) -> None: ...
    def commit(self, warp: int) -> None: ...
    def wait(self, warp: int, most: int) -> None: ...


class HopperBlocks(Blocks):
    """The threads of some blocks on Hopper. maps: address -> tensor map."""

    BLOCKING = frozenset({"mbarrier"})

    def __init__(self, *args: Any, maps: dict[int, TensorMap]) -> None:
        super().__init__(*args)
        self.accesses = _NotCompared()
        self.maps = maps
        self.barriers: dict[int, _Barrier] = {}  #: by the place in `shared`
        #: the barrier of each blocked thread, and the parity for which it waits
        self.awaited = np.zeros((self.threads, 2), np.int64)

    # What changes no result

    def _skip(self, opcode, operands, chosen) -> None: ...

    _fence = _setmaxnreg = _prefetch = _griddepcontrol = _nanosleep = _skip

    # Barriers in memory

    def _mbarrier(self, opcode, operands, chosen) -> None:
        threads = self._each(chosen)
        where = operands[0 if opcode[1] == "init" else 1]
        last = "0" if operands[-1].startswith("[") else operands[-1]
        address = self.base + self._address(where)
        number = self.read(last, np.uint32)  # of arrivals, of bytes, or a parity
        if opcode[1] == "init":
            for each in np.unique(address[threads]):
                count = int(number[threads[0]])
                self.barriers[int(each)] = _Barrier(count, count)
        elif opcode[1] == "arrive":
            expects = opcode[2] == "expect_tx"
            for each in threads:
                self.barriers[int(address[each])].arrive(1, int(number[each]) if expects else 0)
        elif opcode[1:3] == ("try_wait", "parity"):
            self.awaited[threads] = np.stack([address[threads], number[threads]], 1)
            self.is_blocked[threads] = True
            self.is_blocked &= ~self._completed()
            self.write(operands[0], np.ones(self.threads, bool), chosen)
        else:
            raise NotImplementedError

    def _completed(self) -> Numbers:
        result = np.zeros(self.threads, bool)
        waiting = np.flatnonzero(self.is_blocked)
        for address, parity in np.unique(self.awaited[waiting], axis=0):
            if self.barriers[int(address)].phase % 2 != parity:
                result[waiting] |= (self.awaited[waiting] == (address, parity)).all(1)
        return result

    # TMA

    def _cp(self, opcode, operands, chosen) -> None:
        if "bulk" not in opcode:
            super()._cp(opcode, operands, chosen)
            return
        if "tensor" not in opcode:  # groups of stores, which are complete
            return
        threads = self._each(chosen)
        if opcode[1] == "reduce":
            if "add" not in opcode:
                raise NotImplementedError
            for thread in threads:
                self._add_box(*self._box(operands[0], operands[1], thread))
        elif opcode[5].startswith("shared"):
            barrier = self.base + self._address(operands[2])
            for thread in threads:
                box = self._box(operands[1], operands[0], thread)
                self._load_box(*box)
                self.barriers[int(barrier[thread])].arrive(expected=-box[0].nbytes)
        else:
            for thread in threads:
                self._store_box(*self._box(operands[0], operands[1], thread))

    def _box(self, place: str, shared: str, thread: int) -> tuple[TensorMap, list[int], Numbers]:
        """Return the map, the coordinates, and where the box is in shared memory."""
        handle, coordinates = split(place.strip("[]"))
        tensor = self.maps[int(self.read(handle, np.uint64)[thread])]
        inner_first = split(coordinates.strip("{}"))
        at = [int(self.read(x, np.int32)[thread]) for x in reversed(inner_first)]
        places = tensor.shared(int(self._address(shared)[thread]))
        if places.max() >= SHARED_BYTES:
            raise IndexError("a box is not in shared memory")
        return tensor, at, self.base[thread] + places

    def _load_box(self, tensor: TensorMap, at: list[int], places: Numbers) -> None:
        exists, address = tensor.inside(at)
        loaded = np.zeros((*tensor.box, tensor.size), np.uint8)
        loaded[exists] = self._load(address[exists], tensor.size)
        self.shared[places] = loaded

    def _store_box(self, tensor: TensorMap, at: list[int], places: Numbers) -> None:
        exists, address = tensor.inside(at)
        stored = self.shared[places[exists]]
        for found, content, where in self._memory_at(address[exists], tensor.size):
            content[where] = stored[found]

    def _add_box(self, tensor: TensorMap, at: list[int], places: Numbers) -> None:
        exists, address = tensor.inside(at)
        added = np.ascontiguousarray(self.shared[places[exists]]).view(np.int32)[:, 0]
        for found, content, where in self._memory_at(address[exists], 4):
            sums = np.ascontiguousarray(content[where]).view(np.int32)[:, 0] + added[found]
            content[where] = sums[:, None].view(np.uint8)

    # Products

    def _wgmma(self, opcode, operands, chosen) -> None:
        """m64nNkK; all but the product itself is about waiting."""
        if opcode[1] != "mma_async":
            return
        n, of_left, of_right = int(opcode[4][4:].partition("k")[0]), opcode[6], opcode[7]
        results = split(operands[0].strip("{}"))
        # Two signs, unless it is INT8. In 16 bit, whether each operand in shared memory is
        # transposed.
        options = [int(x, 0) for x in operands[4:]]
        sign, transposed = math.prod(options[:2]), [bool(x) for x in options[2:]] or [False]
        accumulates = self.read(operands[3], np.bool_)
        dtype = np.dtype(np.int32 if opcode[5] == "s32" else np.float32)
        before = np.stack([self.read(x, dtype) for x in results], 1)
        after = before.copy()
        for group in np.unique(self._each(chosen) // WARP_GROUP):
            threads = slice(group * WARP_GROUP, (group + 1) * WARP_GROUP)
            first = group * WARP_GROUP
            if operands[1].startswith("{"):
                left = self._fragment(operands[1], of_left, threads)
            else:
                left = self._matrix(operands[1], of_left, 64, first, transposed[0])
            right = self._matrix(operands[2], of_right, n, first, transposed[-1])
            products = sign * (left @ right.T)
            row, column = _places_of_sums(n)
            start = before[threads] if accumulates[first] else np.zeros_like(before[threads])
            after[threads] = (start + products[row, column]).astype(dtype)
        for i, register in enumerate(results):
            self.write(register, np.ascontiguousarray(after[:, i]), chosen)

    def _fragment(self, operand: str, kind: str, threads: slice) -> Numbers:
        """Return a left operand in registers, [64, k]."""
        each = 4 // _WIDTHS[kind]
        words = np.stack([self.read(x, np.uint32) for x in split(operand.strip("{}"))], 1)
        numbers = _numbers(np.ascontiguousarray(words[threads]).view(np.uint8), kind)
        numbers = numbers.reshape(4, 8, 4, 2, 2, each)  # warp, row, column, half k, half row, k
        # The first register is of the first 8 rows, the second of the next 8 rows.
        return numbers.transpose(0, 4, 1, 3, 2, 5).reshape(64, -1)

    def _matrix(
        self, descriptor: str, kind: str, rows: int, thread: int, transposed: bool
    ) -> Numbers:
        """Return an operand in shared memory, [rows, k]. transposed: k is not innermost."""
        bits = int(self.read(descriptor, np.uint64)[thread])
        first, leading, stride = (bits >> at & 0x3FFF for at in (0, 16, 32))
        if bits >> 49 & 7:
            raise NotImplementedError("a base offset")
        first, leading, stride = 16 * first, 16 * leading, 16 * stride
        width, size = _DESCRIPTOR_SWIZZLE[bits >> 62], _WIDTHS[kind]
        row, k = np.arange(rows)[:, None], np.arange(32 // size)[None]
        if transposed:
            if width == 16:
                raise NotImplementedError("without a swizzle")
            inner = row * size
            address = inner % width + inner // width * leading + k % 8 * width + k // 8 * stride
        else:
            inner = k * size
            if width == 16:
                inner = inner % 16 + inner // 16 * leading
            address = row % 8 * width + row // 8 * stride + inner
        places = swizzled(first + address, width)
        if (first + address > SHARED_BYTES - size).any():
            raise IndexError("an operand is not in shared memory")
        places = self.base[thread] + places[..., None] + np.arange(size)
        return _numbers(self.shared[places], kind)


def _numbers(content: Numbers, kind: str) -> Numbers:
    """Return float64 of bytes, [..., elements]. content: uint8 [..., bytes]."""
    content = np.ascontiguousarray(content)
    if kind == "s8":
        numbers = content.view(np.int8)
    elif kind == "bf16":
        numbers = from_bfloat16(content.view(np.uint16))
    elif kind == "f16":
        numbers = content.view(np.float16)
    else:
        numbers = from_fp8(content, f"{kind}x2")
    numbers = numbers.astype(np.float64)
    return numbers[..., 0] if numbers.shape[-1] == 1 else numbers


def _places_of_sums(n: int) -> tuple[Numbers, Numbers]:
    """Return the row and the column of each sum that a thread holds, both [threads, n / 2]."""
    thread, i = np.arange(WARP_GROUP)[:, None], np.arange(n // 2)[None]
    lane = thread % WARP
    row = thread // WARP * 16 + lane // 4 + 8 * (i // 2 % 2)
    return row, 8 * (i // 4) + 2 * (lane % 4) + i % 2


class Maps(dict[int, TensorMap]):
    """Address -> tensor map, of a launch."""

    def add(self, tensor: TensorMap) -> int:
        """Return the map's address."""
        address = _HANDLES + 128 * len(self)
        self[address] = tensor
        return address
