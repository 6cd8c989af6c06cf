"""Settings of the whole process that several threads and tasks change at overlapping times."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable


class ProcessWide:
    """Context manager that keeps a setting of the process changed while anyone is inside.

    The first to enter makes the change. The last to leave undoes it. Threads and asyncio tasks may
    enter and leave in any order.

    Args:
        change: returns a context manager that makes the change and undoes it.

    >>> quiet = ProcessWide(lambda: contextlib.redirect_stdout(None))
    >>> with quiet, quiet:
    ...     print("not shown")
    """

    def __init__(self, change: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        self._change, self._inside = change, 0
        self._changed = contextlib.ExitStack()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._changed.enter_context(self._change())
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._changed.close()
