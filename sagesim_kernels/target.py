"""The GPU that Triton compiles for."""

from typing import Any

from triton.runtime import driver


def compute_capability() -> int:
    """Return the compute capability that Triton compiles for, such as 80 or 90.

    It is that of the current device, unless `sagesim_kernels.bench.foreign_target` chose another.
    """
    active: Any = driver.active
    return active.get_current_target().arch
