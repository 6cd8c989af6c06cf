"""Functions of kernels as Python functions, for index arithmetic that needs no GPU.

`on_host` takes a function that only computes with integers and loads: no layouts, barriers or
products. Integers are `Numbers`, and a division truncates, as it does on a GPU.
"""

# Values of a kernel have no types here:
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false

from __future__ import annotations

import operator
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
from triton import language as tl
from triton.experimental.gluon import language as gl


class Numbers:
    """An integer or an array of integers, of a kernel."""

    def __init__(self, value: Any) -> None:
        self.value = np.asarray(value)

    def to(self, _dtype: Any) -> Numbers:
        return self

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __floordiv__(self, other: Any) -> Numbers:
        quotient = np.abs(self.value) // np.abs(raw(other))
        return Numbers(quotient * np.sign(self.value) * np.sign(raw(other)))

    def __getitem__(self, index: Any) -> Numbers:
        return Numbers(self.value[index])

    def __neg__(self) -> Numbers:
        return Numbers(-self.value)


def compute_on(compute: Callable[..., Any], *values: Any) -> Numbers:
    """Return compute(*values) as `Numbers`."""
    return Numbers(compute(*map(raw, values)))


def _reflected(compute: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: compute_on(compute, b, a)


def _plain(compute: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: compute_on(compute, a, b)


for _name in ("add", "sub", "mul", "and_", "or_", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Numbers, f"__{_name.rstrip('_')}__", _plain(getattr(operator, _name)))
for _name in ("add", "sub", "mul"):
    setattr(Numbers, f"__r{_name}__", _reflected(getattr(operator, _name)))


def raw(value: Any) -> Any:
    """Return what numpy computes with."""
    if isinstance(value, Numbers):
        return value.value
    return value.value if isinstance(value, gl.constexpr) else value


class Pointer:
    """A pointer into an array, which it takes as flat."""

    def __init__(self, array: Any, at: Any = 0) -> None:
        self.array, self.at = np.asarray(array).ravel(), at

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.array, self.at + raw(other))


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Numbers:
    if mask is None:
        return Numbers(checked_load(pointer))
    at = np.where(raw(mask), pointer.at, 0)
    return Numbers(np.where(raw(mask), checked_load(Pointer(pointer.array, at)), other))


def checked_load(pointer: Pointer) -> Any:
    """Return what is at the pointer, all of it in the array."""
    assert np.all((np.asarray(pointer.at) >= 0) & (np.asarray(pointer.at) < pointer.array.size))
    return pointer.array[pointer.at]


_LANGUAGE = SimpleNamespace(
    minimum=lambda a, b: compute_on(np.minimum, a, b),
    maximum=lambda a, b: compute_on(np.maximum, a, b),
    where=lambda c, a, b: compute_on(np.where, c, a, b),
    cdiv=lambda a, b: (a + (raw(b) - 1)) // b,
    cast=lambda a, _dtype: Numbers(raw(a)),
    program_id=lambda _axis: Numbers(0),
    arange=lambda first, end, _layout=None: Numbers(np.arange(raw(first), raw(end))),
    min=lambda a, axis: compute_on(lambda x: x.min(axis), a),
    max=lambda a, axis: compute_on(lambda x: x.max(axis), a),
    load=_load,
    constexpr=gl.constexpr,
    int32=None,
    int64=None,
)


def on_host(function: Any) -> Callable[..., Any]:
    """Return a kernel's function, and those that it calls, as a Python function."""
    code = function.fn
    names: dict[str, Any] = {}
    for name in code.__code__.co_names:
        value = code.__globals__.get(name)
        if value is gl or value is tl:
            names[name] = _LANGUAGE
        elif hasattr(value, "fn"):
            names[name] = on_host(value)
        elif value is not None:
            names[name] = raw(value)
    return FunctionType(code.__code__, names, code.__name__, code.__defaults__)
