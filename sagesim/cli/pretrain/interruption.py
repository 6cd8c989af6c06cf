"""What Ctrl-C does during training."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sagesim.experiments.pretrain.training.trainer import Progress

_NOTICE = b"\nsagesim: stopping after this step; a second Ctrl-C stops at once\n"


@contextlib.contextmanager
def asked_to_stop(*, shown: bool) -> Generator[threading.Event]:
    """An event that the first Ctrl-C sets, or the first signal that asks the process to end.

    Args:
        shown: print a notice on stderr when the event is set.
    """
    from sagesim.experiments.pretrain.run.interruption import first_signal

    asked = threading.Event()

    def ask() -> None:
        asked.set()
        if shown:
            # print is not allowed here: the signal may have interrupted a print.
            with contextlib.suppress(OSError):
                os.write(2, _NOTICE)

    with first_signal(ask):
        yield asked


def until_unread(show: Progress, asked: threading.Event) -> Progress:
    """Show progress, and set the event if nobody reads it any more, as after `2>&1 | head`."""

    def shown(step: int, loss: float, speed: float) -> None:
        try:
            show(step, loss, speed)
        except BrokenPipeError:
            asked.set()

    return shown
