"""The GPU that Triton compiles for."""

from functools import lru_cache
from typing import Any

from triton.runtime import driver


def compute_capability() -> int:
    """Return the compute capability that Triton compiles for, such as 80 or 90.

    It is that of the current device, unless `sagesim_kernels.bench.foreign_target` chose another.
    """
    active: Any = driver.active
    return active.get_current_target().arch


def multiprocessor_count() -> int:
    """Return the number of multiprocessors of the current device."""
    return _property("multiprocessor_count")


def block_shared_memory() -> int:
    """Return the bytes of shared memory that a block of the current device may use."""
    return _property("max_shared_mem")


def _property(name: str) -> int:
    active: Any = driver.active
    return _property_of(active.get_current_device(), name)


@lru_cache(maxsize=64)
def _property_of(device: int, name: str) -> int:
    # Cached: the driver takes a millisecond to answer, longer than a launch.
    active: Any = driver.active
    return active.utils.get_device_properties(device)[name]
