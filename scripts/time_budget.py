"""How many runs fit into the minutes for which a machine is lent."""

from __future__ import annotations

import time
from typing import Final

SLACK: Final = 1.1
"""The next run may take so many times as long as the longest run before it."""


class TimeBudget:
    """Says whether another run fits; it counts from its creation.

    Args:
        minutes: the time for all runs.
        first: the time to expect for the first run, in minutes.
    """

    def __init__(self, minutes: float, first: float) -> None:
        self._start = time.monotonic()
        self.end = self._start + 60 * minutes  #: of `time.monotonic`
        self._longest, self._ran = 60 * first, False

    def fits(self) -> bool:
        """Whether there is time for another run. It begins now."""
        self._start = time.monotonic()
        return self._start + self._longest <= self.end

    def is_over(self) -> bool:
        """Whether all time is used."""
        return time.monotonic() > self.end

    def ended(self) -> float:
        """Note that a run has ended. Returns its seconds."""
        seconds = time.monotonic() - self._start
        before = self._longest if self._ran else 0.0
        self._longest, self._ran = max(before, SLACK * seconds), True
        return seconds
