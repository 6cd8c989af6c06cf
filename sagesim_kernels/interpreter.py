"""Kernels in Triton's interpreter, with bfloat16 and FP8.

The interpreter keeps bfloat16 numbers as their bits, in uint16. It truncates what it converts to
bfloat16 where a GPU rounds to the nearest number, and it multiplies matrices of the bits as
integers. It converts ties and subnormal numbers of FP8 unlike a GPU. A GPU flushes exponentials
below 2^-126 to 0, and the interpreter does not. While it runs a kernel of this package, it does all
of this as a GPU does.

It also repeats what takes half of its time. At each call of a device function it replaces the
functions of triton.language, and to look up a dtype it builds a table of all. For kernels of this
package it does each once.

It computes each 32-bit integer again in 64 bit, to report an overflow. That takes two fifths of the
time of a call. For kernels of this package it is left out: integers wrap around as on a GPU, and a
wrong address gives wrong results.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
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

INTERPRETED: Final = tl.constexpr(IS_INTERPRETED)
"""`IS_INTERPRETED`, for kernels."""

_MODULE: Final[Any] = interpreter
_BUILDER: Final[Any] = interpreter.interpreter_builder
_HANDLE: Final[Any] = interpreter.TensorHandle
_LOCK: Final = threading.RLock()
_FP8: Final[Any] = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

_SMALLEST_NORMAL: Final = np.float32(2.0**-126)


def interpret(kernel: Any, programs: tuple[int], args: Any, options: Any) -> None:
    """Run an interpreted kernel, in one thread at a time: kernel[programs](*args, **options)."""
    small_floats = {"cast_impl": _cast, "create_fp_to_fp": _fp_to_fp, "create_dot": _dot}
    flushed = {"create_exp2": _exp2}
    with _LOCK:  # another thread replaces the members that are read here, too
        once = {"_patch_lang": _patch_once(), "_get_np_dtype": _numpy_dtype}
        unchecked = {"options": dataclasses.replace(_BUILDER.options, sanitize_overflow=False)}
        with _replaced(_BUILDER, small_floats | flushed | unchecked), _replaced(_MODULE, once):
            kernel[programs](*args, **options)


@contextmanager
def _replaced(owner: Any, members: dict[str, Any]) -> Generator[None]:
    """Let an object have other members for a while."""
    before = {name: vars(owner).get(name) for name in members}
    vars(owner).update(members)
    try:
        yield
    finally:
        for name, member in before.items():
            if member is None:
                delattr(owner, name)
            else:
                setattr(owner, name, member)


def _patch_once() -> Callable[[Any], Any]:
    """Return a function that replaces those of triton.language when it is first called.

    The interpreter restores them at the end of the kernel.
    """
    patch, is_patched = _MODULE._patch_lang, False

    def patch_once(_: Any) -> Any:
        nonlocal is_patched
        if is_patched:
            return _MODULE._LangPatchScope()
        is_patched = True
        return patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))

    return patch_once


_slow_numpy_dtype: Final = _MODULE._get_np_dtype
_numpy_scalar: Final = functools.cache(_slow_numpy_dtype)


def _numpy_dtype(dtype: Any) -> Any:
    """The dtype of the interpreter's arrays, from a table; that of pointers needs none."""
    scalar = dtype.scalar
    return _slow_numpy_dtype(scalar) if scalar.is_ptr() else _numpy_scalar(scalar)


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


def _exp2(x: Any) -> Any:
    y = np.exp2(x.data)
    return _HANDLE(np.where(y < _SMALLEST_NORMAL, y.dtype.type(0), y), x.dtype.scalar)


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
