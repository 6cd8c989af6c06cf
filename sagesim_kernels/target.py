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
    active: Any = driver.active
    return _multiprocessor_count(active.get_current_device())


@lru_cache(maxsize=64)
def _multiprocessor_count(device: int) -> int:
    # Cached: the driver takes a millisecond to answer, longer than a launch.
    active: Any = driver.active
    return active.utils.get_device_properties(device)["multiprocessor_count"]
