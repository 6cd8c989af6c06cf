"""Kernels in Triton's interpreter, with bfloat16 and FP8.

The interpreter keeps bfloat16 numbers as their bits, in uint16. It truncates what it converts to
bfloat16 where a GPU rounds to the nearest number, and it multiplies matrices of the bits as
integers. It converts ties and subnormal numbers of FP8 unlike a GPU. While it runs a kernel of this
package, it does all of this as a GPU does.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter


@triton.jit
def _any_kernel():
    pass


IS_INTERPRETED: Final = isinstance(_any_kernel, interpreter.InterpretedFunction)
"""Whether the kernels were imported under TRITON_INTERPRET=1, and so run on the CPU."""

_BUILDER: Final[Any] = interpreter.interpreter_builder
_HANDLE: Final[Any] = interpreter.TensorHandle
_LOCK: Final = threading.RLock()
_FP8: Final[Any] = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def interpret(kernel: Any, programs: tuple[int], args: Any, options: Any) -> None:
    """Run an interpreted kernel: kernel[programs](*args, **options)."""
    with _small_floats():
        kernel[programs](*args, **options)


@contextmanager
def _small_floats() -> Generator[None]:
    """Let the interpreter compute with bfloat16 and FP8 as a GPU does, in one thread at a time."""
    changed = {"cast_impl": _cast, "create_fp_to_fp": _fp_to_fp, "create_dot": _dot}
    with _LOCK:
        before = {name: vars(_BUILDER).get(name) for name in changed}
        vars(_BUILDER).update(changed)
        try:
            yield
        finally:
            for name, method in before.items():
                if method is None:
                    delattr(_BUILDER, name)
                else:
                    setattr(_BUILDER, name, method)


def _cast(x: Any, to: Any) -> Any:
    if to.scalar in _FP8:
        return _HANDLE(_to_fp8(_widened(x).data, to.scalar), to.scalar)
    if to.scalar != tl.bfloat16:
        return type(_BUILDER).cast_impl(_BUILDER, _widened(x), to)
    return _HANDLE(_to_bfloat16(_widened(x).data), tl.bfloat16)


def _fp_to_fp(x: Any, to: Any, rounding_mode: Any) -> Any:
    if {x.dtype.scalar, to.scalar} & {tl.bfloat16, *_FP8}:
        return _cast(x, to)
    return type(_BUILDER).create_fp_to_fp(_BUILDER, x, to, rounding_mode)


def _dot(a: Any, b: Any, *rest: Any) -> Any:
    return type(_BUILDER).create_dot(_BUILDER, _widened(a), _widened(b), *rest)


def _widened(x: Any) -> Any:
    """The tensor in float32 if it is bfloat16 or FP8."""
    dtype = x.dtype.scalar
    if dtype in _FP8:
        bits = torch.from_numpy(np.ascontiguousarray(x.data))
        return _HANDLE(bits.view(_FP8[dtype]).float().numpy(), tl.float32)
    if dtype != tl.bfloat16:
        return x
    return _HANDLE((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _to_bfloat16(x: NDArray[Any]) -> NDArray[np.uint16]:
    """The bits of numbers in bfloat16. Ties go to even, and a NaN stays one."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype(np.uint16)


def _to_fp8(x: NDArray[Any], to: Any) -> NDArray[np.uint8]:
    """The bits of numbers in FP8. Ties go to even, and numbers too large get the largest code."""
    dtype = _FP8[to]
    most = torch.finfo(dtype).max
    numbers = torch.from_numpy(np.ascontiguousarray(x, np.float32)).clamp(-most, most)
    return numbers.to(dtype).view(torch.uint8).numpy()
