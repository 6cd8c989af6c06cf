"""A disk on which no file can grow."""

import contextlib
import resource


@contextlib.contextmanager
def full_disk():
    """Inside the block, files can be created, but every write of a byte to a file fails.

    The limit of a file's size stands in for a full disk. It also reaches C++. Python ignores its
    signal, so a write fails with EFBIG where it would fail with ENOSPC.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
