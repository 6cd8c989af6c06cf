"""Checks of what a caller without a type checker may pass."""

import reprlib
from types import UnionType
from typing import Any, TypeGuard


def check_type(name: str, value: object, kind: type | UnionType, needed: str) -> None:
    """Raise TypeError unless the value of an argument is an instance of kind.

    needed: kind in words, with its article.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {reprlib.repr(value)}; it must be {needed}")


def is_number(value: object, kind: type | UnionType) -> TypeGuard[Any]:
    """Return whether value is an instance of kind. True and False are no numbers."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_number(name: str, value: object, kind: type | UnionType, needed: str) -> None:
    """Raise TypeError unless `is_number`; see `check_type`."""
    if not is_number(value, kind):
        raise TypeError(f"{name} is {reprlib.repr(value)}; it must be {needed}")
