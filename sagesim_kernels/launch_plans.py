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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime import driver

from sagesim_kernels.compiled_launch import Descriptor, check_compiled, launcher_of
from sagesim_kernels.dependent_launch import has_dependent_launch
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
_plans_lock: Final = threading.Lock()  # PyTorch runs backwards in threads of its own
_state: Final = threading.local()


def planned(function: Function, tensors: Tensors, options: Any) -> Tensors:
    """Return function(tensors, options), by its plan if one was recorded for such a call.

    tensors: None where an optional one is missing. options: hashable.
    """
    # Kernels read memory, where a tensor with PyTorch's negative bit has the opposite sign.
    tensors = tuple(x.resolve_neg() if x is not None and x.is_neg() else x for x in tensors)
    key = (function, options, *map(_kind, tensors))
    plan = _plans.get(key)
    if plan is not None:
        return plan(tensors)
    outputs, plan = _record(function, tensors, options)
    with _plans_lock:
        while len(_plans) >= _MOST:
            del _plans[next(iter(_plans))]
        _plans[key] = plan
    return outputs


def forget_plans() -> None:
    """Forget all plans. Tests that replace functions of this package call this."""
    with _plans_lock:
        _plans.clear()


def launch(kernel: Any, programs: tuple[int], /, *args: Any, **options: Any) -> None:
    """Launch a kernel. All kernels are launched here, so that plans contain them."""
    if not programs[0]:  # the driver refuses such a launch
        return
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
    options = {**options, "launch_pdl": has_dependent_launch()}
    check_compiled(kernel.warmup(*args, grid=programs, **options))
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

    def of(self, memory: Tensor) -> Tensor:
        """Return the tensor at this place of a call's memory, which is a tensor."""
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
    args: Any
    results: tuple[int, ...]  #: the memories that it makes


class _Launch(NamedTuple):
    """A launch of a kernel."""

    run: Any  #: takes the stream, if the kernel is compiled, and the arguments
    args: Any
    takes_addresses: bool  #: of memory, as compiled kernels do, in place of tensors


class _Recorder(TorchDispatchMode):
    """Records the launches and the operations of PyTorch while it is active."""

    def __init__(self, inputs: Tensors) -> None:
        super().__init__()
        self.steps: list[_Operation | _Launch] = []
        self.memories: list[_Memory] = []
        self.inputs = [x is not None for x in inputs]
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

            def run(*args: Any) -> None:
                interpret(kernel, programs, args, options)

            self.steps.append(_Launch(run, self._placed(args), takes_addresses=False))
        else:
            bound = kernel.signature.bind(*args)
            bound.apply_defaults()
            run, args = launcher_of(compiled, programs, tuple(bound.arguments.values()))
            self.steps.append(_Launch(run, self._placed(args), takes_addresses=True))

    def _placed(self, x: Any) -> Any:
        """Return arguments with the places of tensors in place of the tensors."""
        if isinstance(x, Tensor):
            return self.place(x)
        if isinstance(x, Descriptor):
            return x._replace(base=self.place(x.base))
        if isinstance(x, list):
            return [self._placed(each) for each in x]
        if isinstance(x, tuple):
            return tuple.__new__(type(x), map(self._placed, x))
        return x

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
            self.steps.append(_Operation(run, self._placed(args), tuple(made)))
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

    Memory that is not returned lies in one allocation, which may start with zeros. The steps are
    compiled to one function of Python: a walk through them would take longer than the launches.
    """

    def __init__(self, recorder: _Recorder, outputs: Tensors, device: torch.device) -> None:
        places = [None if x is None else recorder.place(x) for x in outputs]
        returned: dict[int, _Place] = {}
        for x in places:
            if x is not None and recorder.memories[x.memory].start == "anything":
                assert x.memory not in returned, "two outputs share memory"
                returned[x.memory] = x
        self._run = _compile(recorder, returned, places, device)

    def __call__(self, tensors: Tensors) -> Tensors:
        """Repeat the steps with these inputs."""
        return self._run(tensors)


def _compile(
    recorder: _Recorder,
    returned: dict[int, _Place],
    outputs: Sequence[_Place | None],
    device: torch.device,
) -> Callable[[Tensors], Tensors]:
    """Return a function that repeats the recorded steps.

    Its variables are m0, m1, ...: the call's memories as tensors, and a0, a1, ...: their addresses.

    returned: the memories that are made, and that outputs use.
    """
    takes_addresses = any(isinstance(x, _Launch) and x.takes_addresses for x in recorder.steps)
    takes_tensors = any(not (isinstance(x, _Launch) and x.takes_addresses) for x in recorder.steps)
    source = _Source(recorder.inputs)
    for i, (_, _, dtype, shape, stride) in returned.items():
        new = partial(torch.empty_strided, shape, stride, dtype=dtype, device=device)
        source.lines.append(f"m{i} = {source.constant(new)}()")
    inner = [(i, x) for i, x in enumerate(recorder.memories) if i not in returned]
    starts: dict[int, tuple[int, int]] = {}  # a memory's first byte in the allocation, its bytes
    end = zeros = 0
    for start in ("zeros", "anything"):
        for i, memory in inner:
            if memory.start == start:
                starts[i] = end, memory.size
                end += -(-memory.size // _ALIGNMENT) * _ALIGNMENT
        if start == "zeros":
            zeros = end
    if starts:
        new, options = source.constant(torch.empty), f"device={source.constant(device)}"
        source.lines.append(
            f"inner = {new}({end}, dtype={source.constant(torch.uint8)}, {options})"
        )
    if zeros:
        source.lines.append(f"inner[:{zeros}].zero_()")
    if takes_tensors:
        source.lines += [f"m{i} = inner[{x}:{x + n}]" for i, (x, n) in starts.items()]
    if takes_addresses:
        known = [i for i, x in enumerate(recorder.inputs) if x]
        source.lines += [f"a{i} = m{i}.data_ptr()" for i in (*known, *returned)]
        if starts:
            source.lines.append("start = inner.data_ptr()")
        source.lines += [f"a{i} = start + {x}" for i, (x, _) in starts.items()]
        active: Any = driver.active
        stream = source.constant(active.get_current_stream)
        source.lines.append(f"stream = {stream}({device.index})")
    for step in recorder.steps:
        run = source.constant(step.run)
        if isinstance(step, _Operation):
            made = "".join(f"m{i}, " for i in step.results) or "_, "
            leaves = source.constant(_results)
            args = source.arguments(step.args, of_addresses=False)
            source.lines.append(f"{made} = {leaves}({run}({args}), {len(step.results)})")
            if takes_addresses:
                source.lines += [f"a{i} = m{i}.data_ptr()" for i in step.results]
        else:
            args = source.arguments(step.args, of_addresses=step.takes_addresses)
            source.lines.append(f"{run}({'stream, ' if step.takes_addresses else ''}{args})")
    places = (None if x is None else source.expression(x, of_addresses=False) for x in outputs)
    return source.function("".join(f"{x}, " for x in places))


def _results(result: Any, count: int) -> Sequence[Any]:
    """Return the first tensors of an operation's result; something if there is none."""
    return tree_leaves(result)[:count] if count else (None,)


class _Source:
    """Lines of a function of Python, and the constants that they use."""

    def __init__(self, inputs: Sequence[bool]) -> None:
        self.lines = ["".join(f"m{i}, " for i in range(len(inputs))) + "= tensors"]
        self._constants: dict[str, Any] = {"new": tuple.__new__}

    def constant(self, x: Any) -> str:
        """Return the name of a constant."""
        name = f"c{len(self._constants)}"
        self._constants[name] = x
        return name

    def arguments(self, args: Any, *, of_addresses: bool) -> str:
        return ", ".join(self.expression(x, of_addresses=of_addresses) for x in args)

    def expression(self, x: Any, *, of_addresses: bool) -> str:
        """Return an expression for an argument with places; see `_Recorder._placed`.

        of_addresses: a place is an address, and a tuple of any type is a plain one.
        """
        if isinstance(x, _Place):
            if of_addresses:
                return f"a{x.memory} + {x.offset}" if x.offset else f"a{x.memory}"
            return f"{self.constant(x.of)}(m{x.memory})"
        if isinstance(x, Descriptor):
            base = self.expression(x.base, of_addresses=True)
            return f"*{self.constant(x.cached())}({base})"
        if isinstance(x, list):
            return f"[{self.arguments(x, of_addresses=of_addresses)}]"
        if isinstance(x, tuple) and _has_place(x):
            fields = "".join(f"{self.expression(y, of_addresses=of_addresses)}, " for y in x)
            is_plain = of_addresses or type(x) is tuple
            return f"({fields})" if is_plain else f"new({self.constant(type(x))}, ({fields}))"
        return self.constant(x)

    def function(self, result: str) -> Callable[[Tensors], Tensors]:
        """Return the function of these lines."""
        body = "".join(f"    {line}\n" for line in (*self.lines, f"return ({result})"))
        names = dict(self._constants)
        exec(f"def run(tensors):\n{body}", names)
        return names["run"]


def _has_place(x: Any) -> bool:
    """Whether there is a place in an argument."""
    if isinstance(x, (_Place, Descriptor)):
        return True
    return isinstance(x, (list, tuple)) and any(map(_has_place, x))


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
