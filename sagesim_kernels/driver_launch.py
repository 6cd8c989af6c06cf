"""Launch a compiled kernel by the CUDA driver's function, with parameters that stay in memory.

Triton's launcher converts every argument at every launch, and a kernel has dozens. Most are the
same in all calls of a kind. Here they are converted once, and a launch writes only the stream, the
addresses of its tensors and the places of its TMA descriptors.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

_NUMBERS: Final[dict[str, Any]] = {
    "i1": ctypes.c_int8,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8,
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}
"""The numbers that a kernel may take, by Triton's names of their types."""

_SCRATCH: Final = 2
"""Addresses that Triton adds to a kernel's parameters; null if a kernel uses no such memory."""

_MAP_BYTES: Final = 128
"""Of an encoded TMA descriptor. It lies at the end of Triton's object."""

_WARP: Final = 32

_DEPENDENT: Final = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, with a value that is an integer."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest_of_value", ctypes.c_int * 15),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


class DriverLaunch(NamedTuple):
    """A launch whose addresses change from call to call."""

    run: Callable[..., None]
    """Takes the stream, the addresses of `tensors`, and the encoded `descriptors`."""
    tensors: list[Any]
    descriptors: list[Any]


def is_plain_launch(compiled: Any) -> bool:
    """Return whether a kernel needs no clusters, no memory from Triton and no cooperative grid."""
    launcher = compiled.run
    return not (
        compiled.packed_metadata[1] != 1
        or launcher.launch_cooperative_grid
        or launcher.global_scratch_size
        or launcher.profile_scratch_size
    )


def prepare_launch(compiled: Any, programs: int, args: tuple[Any, ...]) -> DriverLaunch:
    """Convert the parameters of a launch.

    compiled: a kernel for which `is_plain_launch` is true. args: those of the kernel, all of them.

    Raises:
        ValueError: if a parameter has a type that is not known here.
    """
    types = compiled.src.signature.values()
    parameters = [x for pair in zip(types, args, strict=True) for x in _flat(*pair)]
    tensors = [x for kind, x in parameters if kind == "tensor"]
    maps = [i for i, (kind, _) in enumerate(parameters) if kind == "descriptor"]
    parameters += [("tensor", None)] * _SCRATCH
    memory = (ctypes.c_uint64 * len(parameters))()  # addresses of tensors are its first numbers
    pointers = (ctypes.c_void_p * len(parameters))()  # to each parameter; a launch sets `maps`
    tensors_first = sorted(range(len(parameters)), key=lambda i: parameters[i][0] != "tensor")
    for slot, i in enumerate(tensors_first):
        at = slot * ctypes.sizeof(ctypes.c_uint64)
        pointers[i] = ctypes.addressof(memory) + at
        kind, value = parameters[i]
        if kind in _NUMBERS:
            _NUMBERS[kind].from_buffer(memory, at).value = value
    warps, _, shared = compiled.packed_metadata
    config = _Config((programs, 1, 1), (_WARP * warps, 1, 1), shared)
    if compiled.run.launch_pdl:  # see `dependent_launch`
        config.attributes = ctypes.pointer(_Attribute(_DEPENDENT, value=1))
        config.attribute_count = 1
    call_driver, where = _driver().cuLaunchKernelEx, ctypes.byref(config)
    function, count = ctypes.c_void_p(compiled.function), len(tensors)
    pack = struct.Struct(f"{count}Q").pack_into
    lock = threading.Lock()  # PyTorch runs backwards in threads of its own

    def run(stream: int, *changing: Any) -> None:
        with lock:
            config.stream = stream
            pack(memory, 0, *changing[:count])
            for i, x in zip(maps, changing[count:], strict=True):
                pointers[i] = id(x) + type(x).__basicsize__ - _MAP_BYTES
            error = call_driver(where, function, pointers, None)
            if error and _bind_context():
                error = call_driver(where, function, pointers, None)
        if error:
            raise RuntimeError(f"{compiled.name} was not launched: {_message(error)}")

    return DriverLaunch(run, tensors, [parameters[i][1] for i in maps])


def _flat(kind: Any, x: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of an argument: what each is, and its value.

    What it is: "tensor", "descriptor", or the type of a number. A constant is no parameter.
    """
    if isinstance(kind, tuple):
        for pair in zip(kind, x, strict=True):
            yield from _flat(*pair)
    elif kind == "constexpr":
        return
    elif kind.startswith("*"):
        assert isinstance(x, Tensor)
        yield "tensor", x
    elif kind.startswith("tensordesc"):
        yield "descriptor", x
        yield from (("i32", size) for size in x.shape)
        yield from (("i64", stride) for stride in x.strides)
    elif kind in _NUMBERS:
        yield kind, x
    else:
        raise ValueError(f"a kernel takes an argument {x!r} of the type {kind!r}")


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_void_p
    driver.cuLaunchKernelEx.argtypes = (pointer, pointer, pointer, pointer)
    return driver


def _bind_context() -> bool:
    """Bind the context of the current device to this thread. Return False if it has one.

    CUDA's runtime binds it when a thread first uses the device, and a launch here may come before.
    """
    bound, device = ctypes.c_void_p(), ctypes.c_int()
    driver = _driver()
    driver.cuCtxGetCurrent(ctypes.byref(bound))
    if bound.value is not None:
        return False
    driver.cuDeviceGet(ctypes.byref(device), torch.cuda.current_device())
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(bound), device)
    driver.cuCtxSetCurrent(bound)
    return True


def _message(error: int) -> str:
    """Return what the driver says of an error."""
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(error, ctypes.byref(text))
    return text.value.decode() if text.value else f"CUDA error {error}"
