"""What Ctrl-C does during training."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator

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
