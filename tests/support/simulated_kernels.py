"""Gluon's kernels for Hopper on the CPU, without their floats.

The source of a kernel runs as Python, with all of its indices, loops, barriers and copies. Every
access to memory has to be in its tensor. See `simulated_barriers` for what else is checked.
"""

# Values of a kernel have no types here:
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.support.device_functions import ANYTHING, Numbers, Unknown, compute_on, on_host, raw
from tests.support.simulated_barriers import Cell, Product, Program, ProgramError
from tests.support.simulated_memory import (
    Address,
    BarrierPlace,
    BarrierPlaces,
    Block,
    Descriptor,
    Memory,
    Running,
    Shared,
    element_type,
    running,
)

_MOST_BUFFERS: Final = 16
"""What has a longer first axis is one buffer."""

_ROWS: Final = 64
"""Rows and channels of a cell, if a buffer has several times as many."""


class Operands(NamedTuple):
    """The operands of a product, if they are blocks that TMA loaded."""

    left: Block | None
    right: Block | None


class _Launch:
    """The program that runs, and its place in the launch."""

    index = 0
    programs = 0
    products: dict[tuple[int, str], list[Operands]]
    stores: dict[int, list[Block]]


def _allocate(dtype: Any, shape: Any, _layout: Any) -> Shared | BarrierPlaces:
    shape = [int(raw(n)) for n in shape]
    if raw(dtype) is gl.int64:
        return BarrierPlaces(shape[0])
    count = shape[0] if len(shape) > 1 and shape[0] <= _MOST_BUFFERS else 1
    parts = columns = 1
    if len(shape) == 3:
        parts, columns = (n // _ROWS if n % _ROWS == 0 else 1 for n in shape[1:])
    name = f"{element_type(dtype)} {shape}"
    cells = [Cell(f"{name}, {i}, part {j}") for i in range(count) for j in range(parts * columns)]
    return Shared(dtype, shape, cells, is_whole=True, columns=columns)


def _reinterpret(buffer: Shared, dtype: Any, shape: Any, _layout: Any) -> Shared:
    columns = buffer.columns if int(raw(shape[-1])) == buffer.shape[-1] else 1
    found = Shared(dtype, shape, buffer.cells, columns=columns)
    assert found.bytes <= buffer.bytes, (shape, buffer.shape)
    return found


class Site(NamedTuple):
    """Where a kernel waits for something, or tells others of it."""

    operation: str
    file: str
    function: str
    line: int


class Sites:
    """The sites that were reached, and one that is left out."""

    reached: ClassVar[set[Site]] = set()
    left_out: ClassVar[Site | None] = None


def _at_site(operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which a kernel calls, so that it does nothing where it is left out."""

    def call(*args: Any, **options: Any) -> Any:
        here = inspect.currentframe()
        assert here is not None
        frame = here.f_back
        assert frame is not None
        code = frame.f_code
        site = Site(operation, Path(code.co_filename).name, code.co_name, frame.f_lineno)
        Sites.reached.add(site)
        return None if site == Sites.left_out else function(*args, **options)

    return call


class _Barriers:
    """Stands for Gluon's mbarrier."""

    @staticmethod
    def init(bar: BarrierPlace, count: Any) -> None:
        bar.barrier = running().barrier(int(raw(count)))

    wait = staticmethod(
        _at_site("wait", lambda bar, phase: running().wait(bar.barrier, int(raw(phase))))
    )
    arrive = staticmethod(
        _at_site("arrive", lambda bar, count=1: running().arrive(bar.barrier, count))
    )

    @staticmethod
    def expect(bar: BarrierPlace, size: Any, pred: Any = True) -> None:
        if bool(raw(pred)):
            running().arrive(bar.barrier, expected_bytes=int(raw(size)))


def _tma_load(x: Descriptor, at: Any, bar: BarrierPlace, buffer: Shared, pred: Any = True) -> None:
    if bool(raw(pred)):
        running().copy(bar.barrier, buffer.bytes, buffer.cells, x.block(at, buffer))


def _tma_store(x: Descriptor, at: Any, buffer: Shared) -> None:
    _Launch.stores.setdefault(_Launch.index, []).append(x.block(at, buffer))
    running().start_store(buffer.cells)


class _Sums(Unknown):
    """The result of a product by wgmma, which is there when the product has ended."""

    def __init__(self, product: Product, end: int, *shape: Any) -> None:
        super().__init__(*shape)
        self.product = product
        self.end = end  #: the channel behind the last one that it sums over

    @property
    def shape(self) -> tuple[int, ...]:
        if not self.product.has_ended:
            raise ProgramError("sums are used while wgmma computes them")
        return self.dimensions


def _first_channel(left: Any, right: Any) -> int:
    """Return the first channel that a product sums over, 0 unless it has a part of two blocks."""
    first = left.first_channel_along(1) if isinstance(left, Shared) else 0
    other = right.first_channel_along(0) if isinstance(right, Shared) else 0
    if first != other:
        raise ProgramError(f"a product of channels from {first} and from {other} on")
    return first


def _product(left: Any, right: Any, acc: Any, *, use_acc: Any = True, is_async: bool = False):
    shape = acc.dimensions  # a product may add to sums that are not there yet
    assert (left.shape[0], right.shape[1]) == shape and left.shape[1] == right.shape[0]
    cells = [cell for x in (left, right) if isinstance(x, Shared) for cell in x.cells]
    channel = _first_channel(left, right)
    sums = _Sums(running().start_product(cells), channel + left.shape[1], *shape)
    operands = Operands(*(getattr(x, "content", None) for x in (left, right)))
    products = _Launch.products.setdefault((_Launch.index, running().group), [])
    if channel == 0:
        products.append(operands)
    elif not (use_acc and getattr(acc, "end", None) == channel and products[-1] == operands):
        raise ProgramError(f"the product from channel {channel} on is added to another sum")
    if not is_async:
        running().finish_products(0)
    return sums


def _wait_for_products(most: Any, deps: Any) -> Any:
    running().finish_products(raw(most))
    return deps[0] if len(deps) == 1 else tuple(deps)


def _load(pointer: Address, mask: Any = None, other: Any = 0) -> Any:
    places = pointer.places(mask)
    shape = pointer.shape if mask is None else np.broadcast_shapes(pointer.shape, mask.shape)
    if pointer.memory.numbers is None:
        return Unknown(*shape)
    numbers = pointer.memory.numbers[places].astype(np.int64)
    if mask is None:
        return Numbers(numbers)
    found = np.full(shape, raw(other), dtype=np.int64)
    found[np.broadcast_to(raw(mask), shape)] = numbers
    return Numbers(found)


def _store(pointer: Address, value: Any, mask: Any = None) -> None:
    np.broadcast_shapes(pointer.shape, np.shape(raw(value)))
    np.add.at(pointer.memory.stores, pointer.places(mask).ravel(), 1)


def _inline_asm(asm: Any, _constraints: Any, args: Any, dtype: Any, is_pure: Any = True, pack=1):
    del is_pure, pack
    asm = raw(asm)
    if "cp.async.bulk.wait_group" in asm:
        running().finish_stores()
    for x in args:
        if isinstance(x, Address):
            x.places(None)
    shape = np.broadcast_shapes(*(np.shape(raw(x)) for x in args))
    return tuple(Unknown(*shape) for _ in dtype) if isinstance(dtype, tuple) else Unknown(*shape)


def _reduced(x: Any, axis: int) -> Any:
    return Unknown(*np.delete(x.shape, axis))


def _reduce(compute: Any) -> Callable[[Any, int], Any]:
    return lambda x, axis: (
        _reduced(x, axis) if isinstance(x, Unknown) else Numbers(compute(x.value, axis))
    )


def _sum(x: Any, axis: int) -> Any:
    return _reduced(x, axis) if isinstance(x, Unknown) else Numbers(x.value.sum(axis))


def _converted(x: Any, *_args: Any, **_options: Any) -> Any:
    return Unknown(*x.shape) if isinstance(x, Unknown) else x


def _numbers(shape: Any, *_args: Any) -> Unknown:
    return Unknown(*shape)


def _full(shape: Any, value: Any, *_args: Any) -> Unknown | Numbers:
    if isinstance(raw(value), (int, np.ndarray)):
        return Numbers(np.full([int(raw(n)) for n in shape], raw(value)))
    return Unknown(*shape)


def _assert(condition: Any, message: str) -> None:
    assert raw(condition), message


def _warp_specialize(functions: Any, _warps: Any, _registers: Any) -> None:
    assert len(functions) == len(_warps) + 1 == len(_registers) + 1
    running().run_groups([lambda f=f, args=args: f(*args) for f, args in functions])


class _Language:
    """Stands for the languages of Triton and Gluon."""

    constexpr = gl.constexpr
    allocate_shared_memory = staticmethod(_allocate)
    zeros, full = staticmethod(_numbers), staticmethod(_full)
    load, store = staticmethod(_load), staticmethod(_store)
    inline_asm_elementwise = staticmethod(_inline_asm)
    warp_specialize = staticmethod(_warp_specialize)
    sum = staticmethod(_sum)
    max, min = staticmethod(_reduce(np.max)), staticmethod(_reduce(np.min))
    static_assert = staticmethod(_assert)
    static_range = staticmethod(lambda *args: range(*(int(raw(x)) for x in args)))
    minimum = staticmethod(lambda a, b, **_: compute_on(np.minimum, a, b))
    maximum = staticmethod(lambda a, b, **_: compute_on(np.maximum, a, b))
    where = staticmethod(lambda c, a, b: compute_on(np.where, c, a, b))
    fma = staticmethod(lambda a, b, c: a * b + c)
    abs = exp2 = log2 = rsqrt = staticmethod(lambda x: x)
    convert_layout = staticmethod(_converted)
    cdiv = staticmethod(lambda a, b: (a + (raw(b) - 1)) // b)
    cast = to_tensor = staticmethod(lambda x, *_args: x if hasattr(x, "shape") else Numbers(raw(x)))
    join = staticmethod(lambda a, _b: Unknown(*a.shape, 2))
    split = staticmethod(lambda x: (Unknown(*x.shape[:-1]),) * 2)
    program_id = staticmethod(lambda axis: Numbers(0 if axis else _Launch.index))
    num_programs = staticmethod(lambda _axis: Numbers(_Launch.programs))
    num_warps = staticmethod(lambda: 4)
    to_linear_layout = ANYTHING
    PropagateNan = ANYTHING

    @staticmethod
    def arange(first: Any, end: Any, _layout: Any = None) -> Numbers:
        return Numbers(np.arange(raw(first), raw(end)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("int", "uint", "float", "bfloat")):
            return getattr(gl, name)
        assert name.endswith(("Layout", "Layouts")), f"{name} is not simulated"
        return ANYTHING


def _range(*args: Any) -> Iterator[Numbers]:
    return (Numbers(i) for i in range(*(int(raw(x)) for x in args)))


_NAMES: Final = {
    "mbarrier": _Barriers(),
    "tma_load": _tma_load,
    "tma_store": _tma_store,
    "tma_add": _tma_store,
    "fence_async_shared": _at_site("fence", lambda: running().fence()),
    "warpgroup_mma": _product,
    "warpgroup_mma_init": lambda x: x,
    "warpgroup_mma_wait": _wait_for_products,
    "reinterpret": _reinterpret,
    "barrier": lambda: None,
    "tanh": lambda x: x,
    "inverse_of": lambda x: x,
    "range": _range,
}


_functions: Final[dict[Any, Callable[..., Any]]] = {}


def _on_host(kernel: Any) -> Callable[..., Any]:
    if kernel.fn not in _functions:
        _functions[kernel.fn] = on_host(kernel, _Language(), _NAMES)
    return _functions[kernel.fn]


class Run:
    """What a launch did."""

    def __init__(self) -> None:
        self.memories: dict[int, Memory] = {}  #: by the address of the tensor
        self.products: dict[tuple[int, str], list[Operands]] = {}  #: of a program and a group
        self.stores: dict[int, list[Block]] = {}  #: by TMA, of a program
        self.constants: dict[str, Any] = {}  #: by the name of the parameter

    def argument(self, x: Any, name: str, is_constant: bool = False) -> Any:
        """Return an argument as the simulated kernel takes it."""
        if isinstance(x, Tensor):
            return Address(self.memories.setdefault(x.data_ptr(), Memory(x)), 0)
        if isinstance(x, TensorDescriptor):
            return Descriptor(x, name)
        if isinstance(x, gl.constexpr):
            return x.value
        if isinstance(x, tuple) and not is_constant:
            values = (self.argument(field, name) for field in x)
            return type(x)(*values) if hasattr(x, "_fields") else tuple(values)
        if isinstance(x, int) and not isinstance(x, bool) and not is_constant:
            return Numbers(x)
        return x


def simulate(kernel: Any, programs: tuple[int], args: Any, seed: int = 0) -> Run:
    """Run all programs of a launch, one after the other."""
    function, run = _on_host(kernel), Run()
    values = [
        run.argument(x, param.name, param.is_constexpr)
        for x, param in zip(args, kernel.params, strict=True)
    ]
    run.constants = {
        param.name: x for x, param in zip(values, kernel.params, strict=True) if param.is_constexpr
    }
    _Launch.programs, _Launch.products, _Launch.stores = programs[0], run.products, run.stores
    for index in range(programs[0]):
        _Launch.index, Running.program = index, Program(seed + index)
        try:
            function(*values)
            running().end()
        except ProgramError as error:
            raise ProgramError(f"{kernel.__name__}, program {index}: {error}") from None
    return run
