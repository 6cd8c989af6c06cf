"""Ctrl-C and the signals that end a process: the first one asks, the second one does not wait."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Generator
from typing import Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, the request of a job scheduler, and a terminal that is closed."""


@contextlib.contextmanager
def first_signal(asked: Callable[[], None]) -> Generator[None]:
    """Inside the block, the first of `SIGNALS` calls `asked` and nothing else.

    The next one acts as it does outside of the block. A signal that the process ignores, as under
    nohup, stays ignored. Only the main thread may enter the block.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}

    def restore() -> None:
        for number, old in before.items():
            signal.signal(number, old)

    def first(_number: int, _frame: object) -> None:
        restore()
        asked()

    for number in before:
        signal.signal(number, first)
    try:
        yield
    finally:
        restore()
