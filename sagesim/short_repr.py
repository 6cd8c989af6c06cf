"""A representation of dataclasses in one line: tensors are a dtype and a shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, cast

from torch import Tensor


def short_repr(self: Any) -> str:
    """Return the `__repr__` of a dataclass, without the numbers of its tensors.

    Fields that have their default are left out.
    """
    given = {f.name: getattr(self, f.name) for f in fields(self) if not _is_default(self, f)}
    return f"{type(self).__name__}({_arguments(given)})"


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_short(value)}" for name, value in values.items())


def _is_default(x: Any, field: Any) -> bool:
    value, default = getattr(x, field.name), field.default
    return default is not MISSING and not isinstance(value, Tensor) and value == default


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return "{" + ", ".join(f"{key!r}: {_short(x)}" for key, x in items) + "}"
    named: Any = getattr(value, "_asdict", None)
    if named is not None:
        return f"{type(value).__name__}({_arguments(named())})"
    if isinstance(value, tuple):
        shown = [_short(x) for x in cast("tuple[Any, ...]", value)]
        return f"({', '.join(shown)},)" if len(shown) == 1 else f"({', '.join(shown)})"
    return short_repr(value) if _has_tensors(value) else repr(value)


def _has_tensors(x: Any) -> bool:
    return is_dataclass(x) and any(isinstance(getattr(x, f.name), Tensor) for f in fields(x))
