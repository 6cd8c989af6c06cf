"""Checks of what a caller without a type checker may pass."""

import reprlib
from types import UnionType


def check_type(name: str, value: object, kind: type | UnionType, needed: str) -> None:
    """Raise TypeError unless the value of an argument is an instance of kind.

    needed: kind in words, with its article.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {reprlib.repr(value)}; it must be {needed}")
