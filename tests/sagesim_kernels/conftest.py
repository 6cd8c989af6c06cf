"""Triton's interpreter, in two thirds of the time."""

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

from triton.runtime import interpreter


def _hasten() -> None:
    """Let the interpreter look up once what it replaces in triton.language.

    At each call of a device function it goes through all members of several modules and classes,
    in search of the built-in ones, which takes a third of its time; they are always the same.
    """
    names: dict[Any, list[str]] = {}
    is_builtin = interpreter.tl.core.is_builtin

    def getmembers(owner: Any) -> list[tuple[str, Any]]:
        if owner not in names:
            members = inspect.getmembers(owner)
            names[owner] = [name for name, x in members if is_builtin(x)]
        if names[owner] and not is_builtin(getattr(owner, names[owner][0])):
            return []  # replaced already, by the function that called this one
        return [(name, getattr(owner, name)) for name in names[owner]]

    if isinstance(interpreter.inspect, ModuleType):
        interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": getmembers})


_hasten()
