"""Speed up Triton's interpreter: kernels take two thirds of the time."""

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

from triton.runtime import interpreter


def _hasten() -> None:
    """Cache the built-in functions of triton.language that the interpreter replaces.

    At each call of a device function, the interpreter searches all members of several modules and
    classes for built-in functions, which takes a third of its time. The result never changes.
    """
    names: dict[Any, list[str]] = {}
    is_builtin = interpreter.tl.core.is_builtin

    def getmembers(owner: Any) -> list[tuple[str, Any]]:
        if owner not in names:
            members = inspect.getmembers(owner)
            names[owner] = [name for name, x in members if is_builtin(x)]
        if names[owner] and not is_builtin(getattr(owner, names[owner][0])):
            return []  # the calling device function has replaced them
        return [(name, getattr(owner, name)) for name in names[owner]]

    if isinstance(interpreter.inspect, ModuleType):
        interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": getmembers})


_hasten()
