"""Small problems for the kernels that long sequences have on Hopper.

These are the forward with one program on a multiprocessor, see `prefers_two_programs`, and the
backward of tiles with many steps, see `backward_halves`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


class ManySteps(int):
    """A head size up to 128. Its kernels are those that long sequences have."""

    def __repr__(self) -> str:
        return f"{int(self)}_many_steps"


def asks_for_many_steps(value: Any) -> bool:
    """Return whether a parameter of a test is a `ManySteps`, or a tuple that has one."""
    if isinstance(value, tuple):
        return any(map(asks_for_many_steps, value))
    return isinstance(value, ManySteps)


@contextmanager
def in_many_steps(are_asked_for: bool) -> Iterator[None]:
    """Give every problem the kernels of long sequences, if they are asked for."""
    if are_asked_for:
        from sagesim_kernels.hopper import backward, forward

        with (
            mock.patch.object(backward, "has_few_steps", lambda *_: False),
            mock.patch.object(forward, "prefers_two_programs", lambda *_: False),
        ):
            yield
    else:
        yield
