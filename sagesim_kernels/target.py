"""The GPU that Triton compiles for."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import torch
from triton.runtime import driver

_LEAST_CAPABILITY: Final = (8, 0)
"""BF16 products and asynchronous copies need it."""


def compute_capability() -> int:
    """Return the compute capability that Triton compiles for, such as 80 or 90.

    It is that of the current device, unless `sagesim_kernels.bench.foreign_target` chose another.
    """
    active: Any = driver.active
    return active.get_current_target().arch


def device_reason(index: int) -> str | None:
    """Return why there are no kernels for a CUDA device of PyTorch, or None."""
    name = torch.cuda.get_device_name(index)
    if torch.version.hip is not None:
        return f"{name} is a GPU of AMD's; the kernels run on NVIDIA GPUs"
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) < _LEAST_CAPABILITY:
        least = ".".join(map(str, _LEAST_CAPABILITY))
        return f"{name} has compute capability {major}.{minor}; the kernels need {least} or higher"
    return None


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


def cuda_device(device: torch.device | str | int | None, asked_by: str) -> torch.device | None:
    """Return the CUDA device that a user names; None is the current one.

    asked_by: the function that the user called.

    Raises:
        ValueError: if it is not a CUDA device, or PyTorch sees no GPU.
    """
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else device
        found = None if found is None else torch.device(found)
    except (RuntimeError, TypeError):  # PyTorch knows no such name, or it is none
        raise ValueError(
            f"device is {device!r}; it must be a CUDA device, such as 'cuda:0'"
        ) from None
    if found is not None and found.type != "cuda":
        raise ValueError(f"{asked_by} knows CUDA devices, not {found}")
    if not torch.cuda.is_available():
        raise ValueError(f"{asked_by} needs a CUDA device, and PyTorch sees none")
    return found
