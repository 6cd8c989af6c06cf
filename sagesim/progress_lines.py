"""Progress as lines of text, for stderr that is not a terminal."""

from __future__ import annotations

import math
import sys
import time
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress, Task, TaskID

FIRST_AFTER: Final = 3.0
"""Seconds until the first line. A fast command prints none."""

EVERY: Final = 10.0
"""Seconds between lines."""


class ProgressLines(Progress):
    """Prints a line with the number of steps done and the time left every few seconds.

    Args:
        what: what is done, for example "measuring layers".
        hint: printed with the first line.
        console: for what is printed besides, on stderr.
    """

    def __init__(self, what: str, hint: str, console: Console) -> None:
        super().__init__(console=console, disable=True)
        self._what, self._hint, self._due = what, hint, time.monotonic() + FIRST_AFTER

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._print(self._tasks[task_id])

    def update(self, task_id: TaskID, **fields: Any) -> None:
        super().update(task_id, **fields)
        self._print(self._tasks[task_id])

    def _print(self, task: Task) -> None:
        if time.monotonic() < self._due or not task.total:
            return
        words = [f"{' '.join((self._what, task.description)).strip()}: {task.completed:g}"]
        words.append(f"of {task.total:g}")
        if task.time_remaining is not None:
            words[-1] += f", about {duration(float(task.time_remaining))} left"
        if self._hint:
            words.append(f"({self._hint})")
        print(*words, file=sys.stderr, flush=True)
        self._due, self._hint = time.monotonic() + EVERY, ""


def duration(seconds: float) -> str:
    """A duration in words.

    >>> duration(7.2), duration(130.0), duration(4000.0)
    ('8 s', '2 min 10 s', '1 h 7 min')
    """
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60 + (rest >= 30)} min"
