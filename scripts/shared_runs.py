"""Runs that several processes share: each run is made by one of them, and recorded in one file."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sagesim.files import WriteError, locked  # noqa: E402


@contextlib.contextmanager
def claimed(record: Path) -> Generator[bool]:
    """Whether this process makes the run of a record: it is not there, and no other makes it.

    Other processes of this machine that ask get the answer no until the block ends. The operating
    system ends the claim of a process that is killed.

    Args:
        record: the file that is written, completely or not at all, when the run has ended.

    Raises:
        WriteError: if the folder of the record cannot be written to.
    """
    with contextlib.ExitStack() as stack:
        is_mine = False
        try:
            record.parent.mkdir(parents=True, exist_ok=True)
            # Without the suffix: whoever writes the record locks its full name.
            stack.enter_context(locked(record.with_suffix(""), wait=False))
            is_mine = not record.exists()
        except BlockingIOError:
            pass
        except OSError as error:
            raise WriteError.of(record, error) from None
        yield is_mine
