"""How a command ends: its exit code, and one line on stderr for each failure."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Final

from sagesim.files import WriteError
from sagesim.printable import printable
from sagesim.terminal import Failure

_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors that only a write can have."""


def exit_code(program: str, command: Callable[[], int | None], extras: Mapping[str, str]) -> int:
    """Run a command and return its exit code; print one line on stderr if it fails.

    Args:
        program: the name at the beginning of that line.
        command: returns its exit code; None is 0.
        extras: for each package that may be missing, the extra of the distribution that installs
            it.

    Returns:
        The code of the command; 1 if the reader of a pipe closed it; 2 for a `Failure`, a file that
        cannot be written, a missing package or too little memory; 130 for a KeyboardInterrupt, with
        its message.
    """

    def end(code: int, message: str) -> int:
        with contextlib.suppress(BrokenPipeError):
            print(f"{program}: {printable(' '.join(message.split()))}", file=sys.stderr)
        return code

    try:
        code = command()
        sys.stdout.flush()
    except (Failure, WriteError) as failure:
        return end(2, str(failure))
    except ModuleNotFoundError as error:
        extra = extras.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        return end(2, f"{error.name} is not installed: pip install 'sagebwd[{extra}]'")
    except (MemoryError, RuntimeError) as error:  # PyTorch raises kinds of RuntimeError
        found = re.search(r"tried to allocate [\d.]+ \w+", str(error), re.IGNORECASE)
        if found is None and not isinstance(error, MemoryError):
            raise
        return end(2, "not enough memory" + (f": {found[0].lower()}" if found else ""))
    except KeyboardInterrupt as interrupt:
        return end(130, str(interrupt) or "interrupted")
    except BrokenPipeError:
        _discard_output()
        return 1
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _discard_output()
        return end(2, f"{error.filename or 'the output'}: cannot be written: {error.strerror}")
    return code or 0


def _discard_output() -> None:
    """Python flushes stdout when it exits, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
