"""Check that a JSON value has the fields that are read from it; errors name the field at fault."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, cast


class Kind(NamedTuple):
    """What a value without fields must be."""

    words: str
    fits: Callable[[Any], bool]


class Each(NamedTuple):
    """An object with names of any kind, whose values all have the same structure."""

    structure: Structure


class Every(NamedTuple):
    """A list whose items all have the same structure."""

    structure: Structure


Structure: TypeAlias = "Kind | Each | Every | Mapping[str, Structure]"
"""A mapping is an object with these fields. Fields whose name ends with ? may be missing."""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_positive(value)


def _has_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, cast("dict[str, Any]", value).values()))


TEXT: Final = Kind("a string", _is_text)
NAME: Final = Kind("a string with a word", _is_name)
FLAG: Final = Kind("true or false", _is_flag)
NUMBER: Final = Kind("a number", _is_number)
POSITIVE: Final = Kind("a positive number", _is_positive)
COUNT: Final = Kind("a positive integer", _is_count)
NUMBERS: Final = Kind("an object of numbers", _has_numbers)


def or_null(kind: Kind) -> Kind:
    """A value of this kind, or null."""

    def fits(value: Any) -> bool:
        return value is None or kind.fits(value)

    return Kind(f"{kind.words} or null", fits)


def check(value: Any, structure: Structure, where: str) -> None:
    """Check a value.

    Args:
        where: what the value is called in errors.

    Raises:
        ValueError: if the value has not this structure; it names the first field at fault.

    >>> check({"gpu": "H100"}, {"gpu": TEXT, "driver?": TEXT}, "machine")
    >>> check({"a": {"ms": -1}}, Each({"ms": POSITIVE}), "runs")
    Traceback (most recent call last):
    ValueError: runs['a'].ms is -1, not a positive number
    """
    match structure:
        case Kind():
            if not structure.fits(value):
                raise ValueError(f"{where} is {_shown(value)}, not {structure.words}")
        case Every():
            if not isinstance(value, list):
                raise ValueError(f"{where} is {_shown(value)}, not a list")
            for i, item in enumerate(value):
                check(item, structure.structure, f"{where}[{i}]")
        case Each():
            for name, item in _object(value, where).items():
                check(item, structure.structure, f"{where}[{name!r}]")
        case _:
            found = _object(value, where)
            for name, inside in structure.items():
                field = name.removesuffix("?")
                if field in found:
                    check(found[field], inside, f"{where}.{field}".removeprefix("."))
                elif field == name:
                    raise ValueError(f"{where} has no {field!r}" if where else f"no {field!r}")


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'it'} is {_shown(value)}, not an object")
    return value


def _shown(value: Any) -> str:
    match value:
        case dict():
            return "an object"
        case list():
            return "a list"
        case _:
            return repr(value)
