"""The memory allocator of the process."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""Parameters of glibc's mallopt; see its manual page."""


def keep_freed_memory() -> None:
    """Let malloc keep memory of up to 1 GB that is freed, and use it again.

    By default glibc returns large tensors to the operating system when they are freed. Clearing the
    pages of the next tensor then takes as long as computing its elements. Does nothing on systems
    without glibc.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**30)
        mallopt(_M_TRIM_THRESHOLD, 2**30)
