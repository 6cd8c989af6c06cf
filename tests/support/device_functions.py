"""Functions of kernels as Python functions, for index arithmetic that needs no GPU.

`on_host` takes a function that only computes with integers and loads: no layouts, barriers or
products, unless the caller says what these do. Integers are `Numbers`, and a division truncates, as
it does on a GPU. Floats are `Unknown`: they have a shape alone.
"""

# Values of a kernel have no types here:
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import numpy as np
from triton import language as tl
from triton.experimental.gluon import language as gl
from triton.runtime.jit import ConstexprFunction


class Numbers:
    """An integer or an array of integers, of a kernel."""

    def __init__(self, value: Any) -> None:
        self.value = np.asarray(value)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=ANYTHING)

    def to(self, _dtype: Any, **_options: Any) -> Any:
        return self

    def reshape(self, shape: Any) -> Numbers:
        return Numbers(self.value.reshape(tuple(map(raw, shape))))

    def broadcast_to(self, shape: Any) -> Numbers:
        return Numbers(np.broadcast_to(self.value, tuple(map(raw, shape))))

    def expand_dims(self, axis: int) -> Numbers:
        return Numbers(np.expand_dims(self.value, axis))

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __floordiv__(self, other: Any) -> Numbers:
        quotient = np.abs(self.value) // np.abs(raw(other))
        return Numbers(quotient * np.sign(self.value) * np.sign(raw(other)))

    def __mod__(self, other: Any) -> Numbers:
        return self - self // other * other

    def __getitem__(self, index: Any) -> Numbers:
        return Numbers(self.value[index])

    def __neg__(self) -> Numbers:
        return Numbers(-self.value)

    def __invert__(self) -> Numbers:
        return Numbers(~self.value)


class Unknown:
    """A float, or an array of floats, whose numbers are not computed."""

    def __init__(self, *shape: Any) -> None:
        self.dimensions: tuple[int, ...] = tuple(map(raw, shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.dimensions

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=ANYTHING)

    def to(self, _dtype: Any, **_options: Any) -> Unknown:
        return Unknown(*self.shape)

    def reshape(self, shape: Any) -> Unknown:
        found = Unknown(*shape)
        assert math.prod(found.shape) == math.prod(self.shape), (self.shape, found.shape)
        return found

    def expand_dims(self, axis: int) -> Unknown:
        return Unknown(*self.shape[:axis], 1, *self.shape[axis:])

    def permute(self, order: Any) -> Unknown:
        return Unknown(*(self.shape[raw(axis)] for axis in order))

    def broadcast_to(self, shape: Any) -> Unknown:
        found = Unknown(*shape)
        assert np.broadcast_shapes(self.shape, found.shape) == found.shape
        return found

    def __getitem__(self, index: Any) -> Unknown:
        return Unknown(*np.broadcast_to(False, self.shape)[index].shape)

    def __neg__(self) -> Unknown:
        return Unknown(*self.shape)


class _Anything:
    """A layout, or another value that does not matter here: it has every attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_args: Any, **_options: Any) -> Any:
        return self


ANYTHING = _Anything()

_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)


def compute_on(compute: Callable[..., Any], *values: Any) -> Any:
    """Return compute(*values) as `Numbers`, or as `Unknown` if one of them is. An unknown condition
    holds."""
    if any(isinstance(value, Unknown) for value in values):
        shape = np.broadcast_shapes(*(np.shape(raw(value)) for value in values))
        if compute in _COMPARISONS:
            return Numbers(np.broadcast_to(True, shape))
        return Unknown(*shape)
    return Numbers(compute(*map(raw, values)))


def _reflected(compute: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: compute_on(compute, b, a)


def _plain(compute: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: compute_on(compute, a, b)


_OPERATORS = ("add", "sub", "mul", "truediv", "and_", "or_", "xor", "rshift", "lshift")
for _class in (Numbers, Unknown):
    for _name in (*_OPERATORS, "eq", "ne", "lt", "le", "gt", "ge"):
        setattr(_class, f"__{_name.rstrip('_')}__", _plain(getattr(operator, _name)))
    for _name in ("add", "sub", "mul", "truediv"):
        setattr(_class, f"__r{_name}__", _reflected(getattr(operator, _name)))


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


def on_host(
    function: Any, language: Any = _LANGUAGE, names: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Return a kernel's function, and those that it calls, as a Python function.

    language: in place of `triton.language` and Gluon's. names: what stands for other names.
    """
    names = names or {}
    code = function.fn
    scope: dict[str, Any] = {}
    for name in _names_of(code.__code__):
        value = code.__globals__.get(name)
        if name in names:
            scope[name] = names[name]
        elif value is gl or value is tl:
            scope[name] = language
        elif isinstance(value, ConstexprFunction):
            scope[name] = value.fn
        elif hasattr(value, "fn"):
            scope[name] = on_host(value, language, names)
        elif value is not None:
            scope[name] = raw(value)
    defaults = code.__defaults__ and tuple(map(raw, code.__defaults__))
    return FunctionType(code.__code__, scope, code.__name__, defaults)


def _names_of(code: CodeType) -> set[str]:
    """Return the global names of a function and of its comprehensions."""
    inner = (x for x in code.co_consts if isinstance(x, CodeType))
    return set(code.co_names).union(*map(_names_of, inner))
