"""Plans: what a forward or backward launches, recorded in one call and repeated in later ones.

To prepare a launch takes the host longer than to launch it: operands are described, tiles are
chosen, and Triton looks at every argument to find the compiled kernel. All of that depends on the
shapes, strides, types and options of a call, and not on the numbers in its tensors. So the first
call of a kind is recorded: its launches, with their compiled kernels, and the operations of PyTorch
between them. Later calls of the kind repeat them with the addresses of their own tensors.

A recorded function must not read numbers of tensors, change its inputs, or keep tensors.
"""

# PyTorch's storages have a private name for their identity:
# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sagesim_kernels.interpreter import IS_INTERPRETED, interpret
from sagesim_kernels.launching.arguments import complete, for_compiler
from sagesim_kernels.launching.compiled import Descriptor, TritonLaunch, check_compiled, launch_of
from sagesim_kernels.launching.dependent import has_dependent_launch
from sagesim_kernels.launching.driver import DriverLaunch
from sagesim_kernels.launching.function import Tensors, compile_plan
from sagesim_kernels.launching.steps import Memory, Operation, Place, Step, tensors_in

Plan = Callable[[Tensors], Tensors]  # repeats the steps of a call with other inputs
Function = Callable[[Tensors, Any], Tensors]

_MOST: Final = 1024
"""Plans that are kept; the oldest one goes first."""

_ALIGNMENT: Final = 16
"""Bytes. Triton compiles kernels for addresses that are multiples of it, and for others."""

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

    tensors: None where an optional one is missing. All are on one device. It is the current one
        during the call, because Triton launches on the current device.
    options: hashable.
    """
    parts = [function, options]
    addresses = 0  # all their bits
    device = -1  # of CPUs
    for x in tensors:
        if x is None:
            parts.append(None)
            continue
        if x.is_neg():  # kernels read memory, which has the opposite sign
            given = tuple(None if x is None else x.resolve_neg() for x in tensors)
            return planned(function, given, options)
        addresses |= x.data_ptr()
        device = x.get_device()
        parts += x.shape, x.stride(), x.dtype, device
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return planned(function, tensors, options)
    if addresses % _ALIGNMENT:
        parts += (None if x is None else x.data_ptr() % _ALIGNMENT for x in tensors)
    key = tuple(parts)
    plan = _plans.get(key)
    if plan is not None:
        return plan(tensors)
    outputs, plan = _record(function, tensors, options)
    with _plans_lock:
        while len(_plans) >= _MOST:
            del _plans[next(iter(_plans))]
        _plans[key] = plan
    return outputs


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which the current device, on which Triton launches, is that of x."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def forget_plans() -> None:
    """Forget all plans. Tests that replace functions of this package call this."""
    with _plans_lock:
        _plans.clear()


def launch(kernel: Any, programs: tuple[int], /, *args: Any, **options: Any) -> None:
    """Launch a kernel. All kernels are launched here, so that plans contain them.

    While a call is recorded, a launch becomes a step of its plan, which is run at the end.
    """
    if not programs[0]:  # the driver refuses such a launch
        return
    recorder: _Recorder | None = getattr(_state, "recorder", None)
    if IS_INTERPRETED:
        if recorder is None:
            interpret(kernel, programs, args, options)
        else:
            recorder.add_interpreted(kernel, programs, args, options)
        return
    args = complete(kernel, args)
    options = {**options, "launch_pdl": has_dependent_launch()}
    compiled = kernel.warmup(*for_compiler(kernel, args), grid=programs, **options)
    check_compiled(compiled)
    if recorder is None:
        compiled[(*programs, 1, 1)](*args)
    else:
        recorder.add_launch(compiled, programs, args)


class _Recorder(TorchDispatchMode):
    """Records the launches and the operations of PyTorch while it is active."""

    def __init__(self, inputs: Tensors) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.memories: list[Memory] = []
        self.inputs = [x is not None for x in inputs]
        self._places: dict[int, Place] = {}
        self._alive: list[Tensor] = []  # so that no other tensor gets the id of one in _places
        for x in inputs:
            if x is None:
                self.memories.append(Memory(0, "input"))
            else:
                self._add_memory(x, "input")

    def place(self, x: Tensor) -> Place:
        """Return the place of a tensor that this recorder has seen."""
        assert id(x) in self._places, f"a tensor {tuple(x.shape)} from outside of the recorded call"
        return self._places[id(x)]

    def add_interpreted(
        self, kernel: Any, programs: tuple[int], args: Any, options: dict[str, Any]
    ) -> None:
        """Add a launch of a kernel by Triton's interpreter, which compiles nothing."""

        def run(*args: Any) -> None:
            interpret(kernel, programs, args, options)

        self.steps.append(TritonLaunch(run, self._placed(args), is_compiled=False))

    def add_launch(self, compiled: Any, programs: tuple[int], args: tuple[Any, ...]) -> None:
        """Add a launch of a compiled kernel. args: all of them."""
        launch = launch_of(compiled, programs, args)
        if isinstance(launch, DriverLaunch):
            launch = launch._replace(parameters=self._placed(launch.parameters))
        else:
            launch = launch._replace(args=self._placed(launch.args))
        self.steps.append(launch)

    def _placed(self, x: Any) -> Any:
        """Return arguments with the places of tensors in place of the tensors."""
        if type(x) is int:  # most are
            return x
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
        given = tensors_in(args)
        start = _STARTS.get(func, "result")
        made: list[int] = []
        for x in tensors_in(result):
            source = next((y for y in given if _share_memory(x, y)), None)
            if source is None:
                made.append(len(self.memories))
                self._add_memory(x, start)
            elif id(x) not in self._places:
                self._add(x, self.place(source), x.data_ptr() - source.data_ptr())
        is_view = not made and not func._schema.is_mutable
        if start == "result" and not is_view:
            run = partial(func, **kwargs)
            self.steps.append(Operation(run, self._placed(args), tuple(made)))
        return result

    def _add_memory(self, x: Tensor, start: str) -> None:
        self.memories.append(Memory(x.untyped_storage().nbytes(), start))
        self._add(x, Place(len(self.memories) - 1, 0, x.dtype, x.shape, x.stride()), 0)

    def _add(self, x: Tensor, source: Place, offset: int) -> None:
        place = Place(source.memory, source.offset + offset, x.dtype, x.shape, x.stride())
        self._places[id(x)] = place
        self._alive.append(x)


def _share_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata


def _record(function: Function, tensors: Tensors, options: Any) -> tuple[Tensors, Plan]:
    """Record a call of the function, and return its outputs and its plan.

    While the function runs, no kernel is launched, so that operations of PyTorch read memory that
    nothing has filled. The plan runs afterwards, and computes the outputs.
    """
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
    places = [None if x is None else recorder.place(x) for x in outputs]
    plan = compile_plan(recorder.steps, recorder.memories, recorder.inputs, places, device)
    del outputs, recorder  # with the memory of the recorded call
    return plan(tensors), plan
