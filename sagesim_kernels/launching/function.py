"""Compile the steps of a plan to one function of Python.

A walk through the steps would take longer than their launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import groupby
from types import CodeType
from typing import Any, Final

import torch
from torch import Tensor
from triton.runtime import driver

from sagesim_kernels.launching.compiled import Descriptor, TritonLaunch
from sagesim_kernels.launching.driver import DriverLaunch, joined
from sagesim_kernels.launching.steps import Memory, Operation, Place, Step, tensors_in

Tensors = tuple[Tensor | None, ...]

_ALIGNMENT: Final = 512
"""Bytes. PyTorch's allocator aligns memory so, and Triton compiles kernels for aligned memory."""


def compile_plan(
    steps: Sequence[Step],
    memories: Sequence[Memory],
    inputs: Sequence[bool],
    outputs: Sequence[Place | None],
    device: torch.device,
) -> Callable[[Tensors], Tensors]:
    """Return a function from inputs to outputs that repeats the recorded steps.

    Memory that is not returned lies in one allocation, which may start with zeros.

    Args:
        steps: in their order.
        memories: those of the inputs first.
        inputs: whether each one is given; others are None.
        outputs: where they lie.
        device: of all memories.
    """
    returned: dict[int, Place] = {}
    for x in outputs:
        if x is not None and memories[x.memory].start == "anything":
            assert x.memory not in returned, "two outputs share memory"
            assert x.offset == 0, "an output is a part of its memory"
            returned[x.memory] = x
    source = _Source(inputs, returned, device)
    source.add_allocations(memories)
    adding: dict[type, Callable[[Any], None]] = {
        Operation: source.add_operations,
        TritonLaunch: source.add_triton_launches,
        DriverLaunch: source.add_driver_launches,
    }
    for kind, several in groupby(steps, type):
        adding[kind]([*several])
    return source.function(outputs)


class _Source:
    """Lines of a function of Python, and the constants that they use.

    Its variables are m0, m1, ...: the memories of a call as tensors. `inner` is the allocation of
    those that are not returned, of which m0, m1, ... are views where a step takes tensors.
    """

    def __init__(
        self, inputs: Sequence[bool], returned: dict[int, Place], device: torch.device
    ) -> None:
        self.lines = ["".join(f"m{i}, " for i in range(len(inputs))) + "= tensors"]
        self._returned = returned
        self._device = device
        self._has_stream = False
        self._inner: dict[int, tuple[int, int]] = {}  # first byte in the allocation, and size
        self._views: set[int] = set()  # of the allocation that have a variable
        self._constants: dict[str, Any] = {"new": tuple.__new__}

    def add_allocations(self, memories: Sequence[Memory]) -> None:
        """Make the memory of outputs and of steps."""
        for i, (_, _, dtype, shape, stride) in self._returned.items():
            new = partial(torch.empty_strided, shape, stride, dtype=dtype, device=self._device)
            self.lines.append(f"m{i} = {self._constant(new)}()")
        end = zeros = 0
        for start in ("zeros", "anything"):
            for i, memory in enumerate(memories):
                if memory.start == start and i not in self._returned:
                    self._inner[i] = end, memory.size
                    end += -(-memory.size // _ALIGNMENT) * _ALIGNMENT
            if start == "zeros":
                zeros = end
        if self._inner:
            new = partial(torch.empty, end, dtype=torch.uint8, device=self._device)
            self.lines.append(f"inner = {self._constant(new)}()")
        if zeros:
            self.lines.append(f"inner[:{self._constant(zeros)}].zero_()")

    def add_operations(self, steps: Sequence[Operation]) -> None:
        for step in steps:
            made = "".join(f"m{i}, " for i in step.results) or "_, "
            args = self._arguments(step.args, of_addresses=False)
            call = f"{self._constant(step.run)}({args})"
            self.lines.append(f"{made} = {self._constant(_results)}({call}, {len(step.results)})")

    def add_triton_launches(self, steps: Sequence[TritonLaunch]) -> None:
        for step in steps:
            args = self._arguments(step.args, of_addresses=step.is_compiled)
            stream = f"{self._stream()}, " if step.is_compiled else ""
            self.lines.append(f"{self._constant(step.run)}({stream}{args})")

    def add_driver_launches(self, steps: Sequence[DriverLaunch]) -> None:
        """Add launches that follow each other, as one call."""
        names: dict[str, int] = {}  # the tensors that they take, and their indices

        def parameter(x: Any) -> Any:
            if type(x) is int:  # most are
                return x
            if isinstance(x, Descriptor):
                return (*parameter(x.base), x.encoded_at)
            name, offset = self._memory_of(x)
            return names.setdefault(name, len(names)), offset

        launches = [x._replace(parameters=tuple(map(parameter, x.parameters))) for x in steps]
        run = self._constant(joined(launches))
        self.lines.append(f"{run}({', '.join([self._stream(), *names])})")

    def _stream(self) -> str:
        """Return the name of the current stream, which is asked for before the first launch."""
        if not self._has_stream:
            active: Any = driver.active
            current = self._constant(active.get_current_stream)
            self.lines.append(f"stream = {current}({self._device.index})")
            self._has_stream = True
        return "stream"

    def _constant(self, x: Any) -> str:
        """Return the name of a constant."""
        name = f"c{len(self._constants)}"
        self._constants[name] = x
        return name

    def _arguments(self, args: Any, *, of_addresses: bool) -> str:
        return ", ".join(self._expression(x, of_addresses=of_addresses) for x in args)

    def _expression(self, x: Any, *, of_addresses: bool) -> str:
        """Return an expression for an argument of a step.

        of_addresses: a place is an address, and a tuple of any type is a plain one.
        """
        if isinstance(x, Place):
            return self._address(x) if of_addresses else self._tensor(x)
        if isinstance(x, Descriptor):
            return f"{self._constant(x.at)}({self._address(x.base)})"
        if isinstance(x, list):
            return f"[{self._arguments(x, of_addresses=of_addresses)}]"
        if isinstance(x, tuple) and _has_place(x):
            fields = "".join(f"{self._expression(y, of_addresses=of_addresses)}, " for y in x)
            is_plain = of_addresses or type(x) is tuple
            return f"({fields})" if is_plain else f"new({self._constant(type(x))}, ({fields}))"
        return self._constant(x)

    def _memory_of(self, x: Place) -> tuple[str, int]:
        """Return the variable whose memory contains a place, and bytes from its address."""
        if x.memory not in self._inner:
            return f"m{x.memory}", x.offset
        first, _ = self._inner[x.memory]
        return "inner", first + x.offset

    def _address(self, x: Place) -> str:
        name, offset = self._memory_of(x)
        return f"{name}.data_ptr() + {self._constant(offset)}"

    def _tensor(self, x: Place) -> str:
        if x == self._returned.get(x.memory):
            return f"m{x.memory}"
        if x.memory in self._inner and x.memory not in self._views:
            first, size = self._inner[x.memory]
            slice_ = self._constant(slice(first, first + size))
            self.lines.append(f"m{x.memory} = inner[{slice_}]")
            self._views.add(x.memory)
        return f"{self._constant(x.of)}(m{x.memory})"

    def function(self, outputs: Sequence[Place | None]) -> Callable[[Tensors], Tensors]:
        """Return the function of these lines."""
        result = "".join(f"{'None' if x is None else self._tensor(x)}, " for x in outputs)
        body = "".join(f"    {line}\n" for line in (*self.lines, f"return ({result})"))
        names = dict(self._constants)
        exec(_compiled(f"def run(tensors):\n{body}"), names)
        return names["run"]


@lru_cache(maxsize=256)
def _compiled(lines: str) -> CodeType:
    """Return the compiled lines, which are the same for calls that differ in their lengths."""
    return compile(lines, __name__, "exec")


def _results(result: Any, count: int) -> Sequence[Any]:
    """Return the first tensors of an operation's result; something if there is none."""
    return tensors_in(result)[:count] if count else (None,)


def _has_place(x: Any) -> bool:
    """Whether there is a place in an argument."""
    if isinstance(x, (Place, Descriptor)):
        return True
    return isinstance(x, (list, tuple)) and any(map(_has_place, x))
