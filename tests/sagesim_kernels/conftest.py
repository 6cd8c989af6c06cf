"""For the tests of the kernels: a better interpreter, and no plan of an earlier test.

With the changes here, kernels take half of the time in Triton's interpreter, and compute bfloat16.
The interpreter keeps bfloat16 as the bits in uint16. Without the functions here it truncates what
it converts to bfloat16, and multiplies matrices of bits as integers.
"""

import functools
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter

from sagesim_kernels import launch_plans


def _hasten() -> None:
    """Do once what the interpreter repeats.

    At each call of a device function, it searches several modules and classes for the built-in
    functions of triton.language and replaces them, although the calling kernel has replaced them
    already. To look up a dtype, it builds a table of all dtypes.
    """
    is_builtin, scalar_type = interpreter.tl.core.is_builtin, interpreter.tl.core.dtype
    replace, numpy_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    numpy_scalar = functools.cache(numpy_dtype)

    @functools.cache
    def languages(fn: Any) -> list[Any]:
        visible = fn.__globals__.values()
        return [x for x in (interpreter.tl, interpreter.tl.core) if any(x is y for y in visible)]

    def replace_once(fn: Any) -> Any:
        if any(is_builtin(language.load) for language in languages(fn)):
            return replace(fn)
        return None

    def look_up(dtype: Any) -> Any:
        scalar = dtype.scalar
        return numpy_scalar(scalar) if type(scalar) is scalar_type else numpy_dtype(dtype)

    interpreter._patch_lang, interpreter._get_np_dtype = replace_once, look_up


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    """The bits of float32 numbers in bfloat16, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype(np.uint16)


def _from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _add_bfloat16() -> None:
    """Convert to and from bfloat16 as IEEE conversions do, and multiply matrices of it."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    bfloat16, float32 = interpreter.tl.bfloat16, interpreter.tl.float32
    cast, dot = builder.cast_impl, builder.create_dot

    def convert(self: Any, source: Any, to: Any, *_: Any) -> Any:
        here, there = source.dtype.scalar, to.scalar
        if here == bfloat16:
            source = handle(_from_bfloat16(source.data), float32)
        if there != bfloat16:
            return cast(self, source, to)
        return handle(_to_bfloat16(source.data.astype(np.float32)), bfloat16)

    def multiply(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (convert(self, x, float32) if x.dtype.scalar == bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    builder.cast_impl, builder.create_dot = convert, multiply


_hasten()
_add_bfloat16()


class _NoPlans(dict[Any, Any]):
    def __setitem__(self, key: Any, plan: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def no_plan_of_another_test() -> None:
    launch_plans.forget_plans()


@pytest.fixture
def unplanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep no plans, for tests that replace functions of the host."""
    monkeypatch.setattr(launch_plans, "_plans", _NoPlans())
