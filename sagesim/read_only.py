"""Dataclasses with read-only mappings that pickle and `copy.deepcopy` can copy."""

from __future__ import annotations

from dataclasses import fields
from types import MappingProxyType
from typing import Any


def reduce_read_only(self: Any) -> tuple[Any, ...]:
    """The `__reduce__` of a dataclass of which some fields are a `MappingProxyType`.

    Neither pickle nor copy takes such a mapping: the copy is made from plain ones.
    """
    values = {field.name: getattr(self, field.name) for field in fields(self)}
    read_only = {name: dict(x) for name, x in values.items() if isinstance(x, MappingProxyType)}
    return _restored, (type(self), values | read_only, tuple(read_only))


def _restored(kind: type, values: dict[str, Any], read_only: tuple[str, ...]) -> Any:
    return kind(**values | {name: MappingProxyType(values[name]) for name in read_only})
