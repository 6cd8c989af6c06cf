"""The integers that kernels take.

Triton compiles a kernel for whether each integer is 1, and for whether 16 divides it. So calls with
other lengths would compile kernels anew, which takes seconds. Here kernels are compiled for the
`Specialized` integers alone, which make them faster: strides, so that threads load vectors, and the
lengths of sequences that are not packed, so that threads mask vectors. All other integers are
replaced when a kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

_ALIGNMENT: Final = 16
"""The only divisor that Triton looks for."""

_ANY: Final = 17
"""An integer that Triton takes for any other one of 32 bits: not 1, and no multiple of 16."""

_ANY_LONG: Final = 2**31 + 17
"""Such an integer of 64 bits."""


class Specialized(int):
    """An integer that kernels are compiled for: whether it is 1, and whether 16 divides it."""

    __slots__ = ()

    @classmethod
    def if_aligned(cls, x: int) -> int:
        """Return x as such an integer if 16 divides it, else as any integer."""
        return x if x % _ALIGNMENT else cls(x)


def complete(kernel: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return all arguments of a kernel of Triton, with the defaults of those that are missing."""
    missing = kernel.params[len(args) :]
    return (*args, *(x.default for x in missing)) if missing else args


def for_compiler(kernel: Any, args: Iterable[Any]) -> list[Any]:
    """Return the arguments that a kernel of Triton is compiled with. args: all of them."""
    return [
        x if param.is_constexpr else _any(x) for param, x in zip(kernel.params, args, strict=True)
    ]


def _any(x: Any) -> Any:
    """Return an argument with other integers in place of all that are not `Specialized`."""
    if type(x) is int:
        return _ANY if -(2**31) <= x < 2**31 else _ANY_LONG
    if isinstance(x, tuple):
        return tuple.__new__(type(x), map(_any, x))
    return x
