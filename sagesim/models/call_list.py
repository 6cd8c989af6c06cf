"""The calls that a context has received, for its messages."""

from __future__ import annotations

from typing import Final

from sagesim.models.sdpa_mode import SdpaCall

_SHOWN: Final = 20


class CallList:
    """The first calls in words, and how many there are; false if there is none.

    A call that a later forward or a backward repeats counts once.
    """

    def __init__(self) -> None:
        self._shown: dict[int, str] = {}
        self._count = 0
        self.are_inside = False  #: whether a context inside this one received calls

    def add(self, call: SdpaCall) -> None:
        """Add a call. One without an index repeats another one."""
        if call.index is None:
            return
        self._count = max(self._count, call.index + 1)
        if len(self._shown) < _SHOWN:
            self._shown.setdefault(call.index, str(call))

    def __bool__(self) -> bool:
        return self._count > 0

    def __str__(self) -> str:
        more = self._count - len(self._shown)
        return ", ".join(self._shown.values()) + (f" and {more} more" if more > 0 else "")
