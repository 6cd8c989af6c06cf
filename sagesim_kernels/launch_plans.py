"""Plans: what a forward or backward launches, recorded in one call and repeated in later ones.

To prepare a launch takes the host longer than to launch it: operands are described, tiles are
chosen, and Triton looks at every argument to find the compiled kernel. All of that depends on the
shapes, strides, types and options of a call, and not on the numbers in its tensors. So the first
call of a kind is recorded: its launches, with their compiled kernels, and the operations of PyTorch
between them. Later calls of the kind repeat them with the addresses of their own tensors.

A recorded function must not read numbers of tensors on the host, and must not keep tensors.
"""

# PyTorch's recorders of operations use private names:
# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime import driver

from sagesim_kernels.interpreter import IS_INTERPRETED, interpret

Tensors = tuple[Tensor | None, ...]
Function = Callable[[Tensors, Any], Tensors]

_MOST: Final = 1024
"""Plans that are kept; the oldest one goes first."""

_ALIGNMENT: Final = 512
"""Bytes. PyTorch's allocator aligns memory so, and Triton compiles kernels for aligned memory."""

_STARTS: Final = {
    torch.ops.aten.empty.memory_format: "anything",
    torch.ops.aten.empty_like.default: "anything",
    torch.ops.aten.empty_strided.default: "anything",
    torch.ops.aten.new_empty.default: "anything",
    torch.ops.aten.new_empty_strided.default: "anything",
    torch.ops.aten.zeros.default: "zeros",
    torch.ops.aten.zeros_like.default: "zeros",
    torch.ops.aten.new_zeros.default: "zeros",
}
"""The operations that make memory for kernels to write to, and what it contains at first."""

_plans: Final[dict[Any, Plan]] = {}
_state: Final = threading.local()


def planned(function: Function, tensors: Tensors, options: Any) -> Tensors:
    """Return function(tensors, options), by its plan if one was recorded for such a call.

    tensors: None where an optional one is missing. options: hashable.
    """
    key = (function, options, *map(_kind, tensors))
    plan = _plans.get(key)
    if plan is not None:
        return plan(tensors)
    outputs, plan = _record(function, tensors, options)
    while len(_plans) >= _MOST:
        _plans.pop(next(iter(_plans)), None)
    _plans[key] = plan
    return outputs


def forget_plans() -> None:
    """Forget all plans. Tests that replace functions of this package call this."""
    _plans.clear()


def launch(kernel: Any, programs: tuple[int], /, *args: Any, **options: Any) -> None:
    """Launch a kernel. All kernels are launched here, so that plans contain them."""
    recorder: _Recorder | None = getattr(_state, "recorder", None)
    if recorder is None:
        _run(kernel, programs, args, options)
    else:
        with _disable_current_modes():  # Triton's interpreter calls PyTorch
            compiled = _run(kernel, programs, args, options)
        recorder.add_launch(kernel, compiled, programs, args, options)


def _run(kernel: Any, programs: tuple[int], args: Any, options: dict[str, Any]) -> Any:
    """Launch a kernel, and return it compiled, or None if it is interpreted."""
    if IS_INTERPRETED:
        return interpret(kernel, programs, args, options)
    return kernel[programs](*args, **options)


def _kind(x: Tensor | None) -> Any:
    """Return what a plan depends on of a tensor."""
    if x is None:
        return None
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16


class _Place(NamedTuple):
    """Where a recorded tensor lies: at an offset from the start of a memory of the call."""

    memory: int  #: an index
    offset: int  #: bytes
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, memories: list[Any]) -> Tensor:
        """Return the tensor at this place of a call's memories, which are tensors."""
        memory = memories[self.memory]
        if self.offset == 0 and self[2:] == (memory.dtype, memory.shape, memory.stride()):
            return memory
        start = memory.storage_offset() * memory.element_size() + self.offset
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        storage = memory.untyped_storage()
        return empty.set_(storage, start // self.dtype.itemsize, self.shape, self.stride)


class _Memory(NamedTuple):
    """A memory that a recorded call makes, or one of its inputs."""

    size: int  #: bytes
    start: str  #: what it contains at first: "anything", "zeros", or an "input" or a "result"


class _Operation(NamedTuple):
    """An operation of PyTorch."""

    run: Any
    args: Callable[[list[Any]], tuple[Any, ...]]  #: makes the arguments of the memories
    results: tuple[int, ...]  #: the memories that it makes


class _Launch(NamedTuple):
    """A launch of a kernel."""

    run: Any
    args: Callable[[list[Any]], tuple[Any, ...]]
    """Makes the arguments of the memories' addresses; for the interpreter, of the memories."""


class _Address:
    """Memory, as far as a TMA descriptor asks."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def _describe(kind: type, fields: dict[str, Any], address: int) -> Any:
    """Return a TMA descriptor with these fields, of the memory at an address."""
    descriptor = object.__new__(kind)
    descriptor.__dict__.update(fields, base=_Address(address))
    return descriptor


class _Recorder(TorchDispatchMode):
    """Records the launches and the operations of PyTorch while it is active."""

    def __init__(self, inputs: Tensors) -> None:
        super().__init__()
        self.steps: list[_Operation | _Launch] = []
        self.memories: list[_Memory] = []
        self._places: dict[int, _Place] = {}
        self._alive: list[Tensor] = []  # so that no other tensor gets the id of one in _places
        for x in inputs:
            if x is None:
                self.memories.append(_Memory(0, "input"))
            else:
                self._add_memory(x, "input")

    def place(self, x: Tensor) -> _Place:
        """Return the place of a tensor that this recorder has seen."""
        assert id(x) in self._places, f"a tensor {tuple(x.shape)} from outside of the recorded call"
        return self._places[id(x)]

    def add_launch(
        self, kernel: Any, compiled: Any, programs: tuple[int], args: Any, options: dict[str, Any]
    ) -> None:
        if compiled is None:  # Triton's interpreter compiles nothing

            def run(*args: Any, stream: int | None) -> None:
                interpret(kernel, programs, args, options)

            self.steps.append(_Launch(run, self._maker(args, of_addresses=False)))
        else:
            bound = kernel.signature.bind(*args)
            bound.apply_defaults()
            args = tuple(bound.arguments.values())
            # Not compiled[programs], which prepares data for Triton's hooks at every launch.
            handles = (compiled.function, compiled.packed_metadata, None, None, None)

            def run(*args: Any, stream: int | None) -> None:
                compiled.run(*programs, 1, 1, stream, *handles, *args)

            self.steps.append(_Launch(run, self._maker(args, of_addresses=True)))

    def _maker(self, args: Any, *, of_addresses: bool) -> Callable[[list[Any]], Any]:
        """Return a function that makes arguments, of addresses or of memories.

        It is compiled, because it runs at every launch: one expression is faster than a walk
        through the arguments.
        """
        constants: list[Any] = []

        def name(x: Any) -> str:
            constants.append(x)
            return f"c[{len(constants) - 1}]"

        def source(x: Any) -> str:
            if isinstance(x, Tensor):
                place = self.place(x)
                if of_addresses:
                    return f"a[{place.memory}]+{place.offset}"
                return f"{name(place)}.of(a)"
            if isinstance(x, list):
                return f"[{', '.join(map(source, x))}]"
            if isinstance(x, tuple):
                fields = f"({''.join(f'{source(field)},' for field in x)})"
                is_plain = of_addresses or type(x) is tuple
                return fields if is_plain else f"new({name(type(x))}, {fields})"
            if isinstance(getattr(x, "base", None), Tensor):  # a TMA descriptor
                fields = name({**vars(x), "base": None})
                return f"describe({name(type(x))}, {fields}, {source(x.base)})"
            return name(x)

        code = f"lambda a: {source(tuple(args))}"
        return eval(code, {"c": constants, "describe": _describe, "new": tuple.__new__})

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        start = _STARTS.get(func, "result")
        made: list[int] = []
        for x in tree_leaves(result):
            source = next((y for y in given if _share_memory(x, y)), None)
            if source is None:
                made.append(len(self.memories))
                self._add_memory(x, start)
            elif id(x) not in self._places:
                self._add(x, self.place(source), x.data_ptr() - source.data_ptr())
        is_view = not made and not func._schema.is_mutable
        if start == "result" and not is_view:
            run = partial(func, **kwargs)
            self.steps.append(_Operation(run, self._maker(args, of_addresses=False), tuple(made)))
        return result

    def _add_memory(self, x: Tensor, start: str) -> None:
        self.memories.append(_Memory(x.untyped_storage().nbytes(), start))
        self._add(x, _Place(len(self.memories) - 1, 0, x.dtype, x.shape, x.stride()), 0)

    def _add(self, x: Tensor, source: _Place, offset: int) -> None:
        place = _Place(source.memory, source.offset + offset, x.dtype, x.shape, x.stride())
        self._places[id(x)] = place
        self._alive.append(x)


def _share_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata


class Plan:
    """The steps of a call, and the memory that they need.

    Memory that is not returned lies in two allocations, of which one starts with zeros.
    """

    def __init__(self, recorder: _Recorder, outputs: Tensors, device: torch.device) -> None:
        self._steps, self._device = recorder.steps, device
        self._memories = len(recorder.memories)
        self._is_interpreted = device.type == "cpu"
        self._needs_tensors = self._is_interpreted or any(
            isinstance(step, _Operation) for step in self._steps
        )
        self._outputs = [None if x is None else recorder.place(x) for x in outputs]
        self._returned: list[_Place] = []
        for x in self._outputs:
            if x is not None and recorder.memories[x.memory].start == "anything":
                self._returned.append(x)
        known = {x.memory for x in self._returned}
        assert len(known) == len(self._returned), "two outputs share memory"
        self._inner: list[tuple[int, int, int]] = []  # memory, its first byte, its bytes
        first = 0
        for start in ("zeros", "anything"):
            for i, memory in enumerate(recorder.memories):
                if memory.start == start and i not in known:
                    self._inner.append((i, first, memory.size))
                    first += -(-memory.size // _ALIGNMENT) * _ALIGNMENT
            if start == "zeros":
                self._zeros = first
        self._bytes = first

    def __call__(self, tensors: Tensors) -> Tensors:
        """Repeat the steps with these inputs."""
        device = self._device
        memories: list[Any] = [*tensors, *(None,) * (self._memories - len(tensors))]
        for memory, _, dtype, shape, stride in self._returned:
            memories[memory] = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        inner = torch.empty(self._bytes, dtype=torch.uint8, device=device)
        if self._zeros:
            inner[: self._zeros].zero_()
        if self._needs_tensors:
            for memory, first, size in self._inner:
                memories[memory] = inner[first : first + size]
        found = memories
        stream = None
        addresses: list[int] = []
        if not self._is_interpreted:
            found = addresses = [0 if x is None else x.data_ptr() for x in memories]
            start = inner.data_ptr()
            for memory, first, _ in self._inner:
                addresses[memory] = start + first
            active: Any = driver.active
            stream = active.get_current_stream(device.index)
        for step in self._steps:
            if isinstance(step, _Launch):
                step.run(*step.args(found), stream=stream)
            else:
                result = step.run(*step.args(memories))
                for memory, x in zip(step.results, tree_leaves(result), strict=False):
                    memories[memory] = x
                    if addresses:
                        addresses[memory] = x.data_ptr()
        return tuple(None if x is None else x.of(memories) for x in self._outputs)


def _record(function: Function, tensors: Tensors, options: Any) -> tuple[Tensors, Plan]:
    """Call the function, and return its outputs and its plan."""
    # New objects, because one tensor may be several inputs, which are several tensors next time.
    inputs = tuple(None if x is None else x.detach() for x in tensors)
    device = next(x.device for x in inputs if x is not None)
    recorder = _Recorder(inputs)
    assert getattr(_state, "recorder", None) is None, "a recorded function calls another one"
    _state.recorder = recorder
    try:
        with recorder:
            outputs = function(inputs, options)
    finally:
        _state.recorder = None
    return outputs, Plan(recorder, outputs, device)
