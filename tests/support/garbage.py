"""Garbage collection in processes that run tests or compile kernels."""

import gc


def collect_garbage_rarely() -> None:
    """Make this process faster: hardly any of its objects are garbage that only `gc` can free.

    Objects that exist already are never looked at again.
    """
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
