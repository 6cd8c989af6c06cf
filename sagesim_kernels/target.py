"""The GPU that Triton compiles for."""

from typing import Any

from triton.runtime import driver

from sagesim_kernels.interpreter import IS_INTERPRETED


def compute_capability() -> int:
    """Return the compute capability that Triton compiles for, such as 80 or 90.

    It is that of the current device, unless `sagesim_kernels.bench.foreign_target` chose another.
    """
    active: Any = driver.active
    return active.get_current_target().arch


def multiplies_fp8() -> bool:
    """Return whether tensor cores multiply FP8: from Ada on, and in Triton's interpreter."""
    return IS_INTERPRETED or compute_capability() >= 89
