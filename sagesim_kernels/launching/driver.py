"""Launch compiled kernels by the CUDA driver's function, with parameters that are converted once.

Triton's launcher converts every argument at every launch, and a kernel has dozens. Most are the
same in all calls of a kind: only the stream, the addresses of tensors and their TMA descriptors
change. `launches.c` repeats all launches of a plan in one call. This module of C is compiled for
the first plan, by the C compiler that Triton needs too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

_INTEGERS: Final = {f"{sign}{bits}": 2**bits - 1 for sign in "iu" for bits in (8, 16, 32, 64)} | {
    "i1": 0xFF,
    "u1": 0xFF,
}
"""The integers that a kernel may take, by Triton's names of their types, and all their bits."""

_FLOATS: Final[dict[str, Any]] = {"fp32": ctypes.c_float, "fp64": ctypes.c_double}

_SCRATCH: Final = 2
"""Addresses that Triton adds to a kernel's parameters; null if a kernel uses no such memory."""

_WARP: Final = 32


class DriverLaunch(NamedTuple):
    """A launch of a compiled kernel."""

    name: str
    function: int  #: the driver's handle of the kernel
    programs: int
    threads: int
    shared_bytes: int
    is_dependent: bool  #: see `launching.dependent`
    parameters: tuple[Any, ...]
    """An integer has the bits of a number. All others change from call to call: tensors and TMA
    descriptors here, and what `joined` says there."""


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
    parameters: list[Any] = []
    for kind, x in zip(compiled.src.signature.values(), args, strict=True):
        _append(parameters, kind, x)
    warps, _, shared = compiled.packed_metadata
    return DriverLaunch(
        compiled.name,
        compiled.function,
        programs,
        _WARP * warps,
        shared,
        compiled.run.launch_pdl,
        (*parameters, *[0] * _SCRATCH),
    )


def _append(parameters: list[Any], kind: Any, x: Any) -> None:
    """Append the parameters of an argument; a constant is none. kind: its type, or a tuple."""
    if isinstance(kind, tuple):
        for pair in zip(kind, x, strict=True):
            _append(parameters, *pair)
    elif kind in _INTEGERS:
        parameters.append(x & _INTEGERS[kind])
    elif kind == "constexpr":
        return
    elif kind.startswith("*"):
        assert isinstance(x, Tensor)
        parameters.append(x)
    elif kind.startswith("tensordesc"):
        parameters.append(x)
        parameters.extend(size & _INTEGERS["i32"] for size in x.shape)
        parameters.extend(stride & _INTEGERS["i64"] for stride in x.strides)
    elif kind in _FLOATS:
        parameters.append(int.from_bytes(bytes(_FLOATS[kind](x)), "little"))
    else:
        raise ValueError(f"a kernel takes an argument {x!r} of the type {kind!r}")


def joined(launches: Sequence[DriverLaunch]) -> Callable[..., None]:
    """Return a function that repeats launches. It takes the stream and the tensors of a call.

    launches: their parameters that change are (tensor, offset), the index of a tensor and bytes
        from its address; or (tensor, offset, encode) for a TMA descriptor. encode makes Triton's
        object with the encoded descriptor of an address.
    """
    address = ctypes.cast(_driver().cuLaunchKernelEx, ctypes.c_void_p).value
    names = [x.name for x in launches]

    def failed(index: int, error: int) -> None:
        """Bind a context if the thread has none, so that the launch is tried again; else raise."""
        if not _bind_context():
            raise RuntimeError(f"{names[index]} was not launched: {_message(error)}")

    module = _module()
    plan = module.prepare(address, tuple(tuple(x[1:]) for x in launches), failed)
    return partial(module.run, plan)


@cache
def _module() -> Any:
    """Return the module of launches.c."""
    from triton.backends import nvidia
    from triton.runtime.build import compile_module_from_src

    (package,) = nvidia.__path__
    source = Path(__file__).with_name("launches.c").read_text(encoding="utf-8")
    return compile_module_from_src(source, "launches", include_dirs=[f"{package}/include"])


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _bind_context() -> bool:
    """Bind the context of the current device to this thread, and return whether that was done.

    CUDA's runtime binds it when a thread first uses the device, and a launch here may come before.
    A thread that has a context keeps it.
    """
    bound, device = ctypes.c_void_p(), ctypes.c_int()
    driver = _driver()
    driver.cuCtxGetCurrent(ctypes.byref(bound))
    if bound.value is not None:
        return False
    return not (
        driver.cuDeviceGet(ctypes.byref(device), torch.cuda.current_device())
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(bound), device)
        or driver.cuCtxSetCurrent(bound)
    )


def _message(error: int) -> str:
    """Return what the driver says of an error."""
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(error, ctypes.byref(text))
    return text.value.decode() if text.value else f"CUDA error {error}"
