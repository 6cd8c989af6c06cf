"""Which problems the kernels for mma.sync compute."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from triton.runtime import driver

from sagesim.spec import AttentionSpec, Precision, RoundingMode
from sagesim_kernels.operands import DTYPES, KernelProblem, padded
from sagesim_kernels.support import IS_INTERPRETED

CHANNELS: Final = (64, 128)
"""Channels of a tile: those of the problem, padded to a power of two."""

BLOCK: Final = 64


def serves(problem: KernelProblem) -> bool:
    """Return whether the kernels compute the backward of the problem on the current device."""
    return (
        not IS_INTERPRETED
        and padded(problem.q.shape[3]) == padded(problem.v.shape[3]) in CHANNELS
        and _serves_spec(problem.spec)
        and has_mma_sync()
    )


def has_mma_sync() -> bool:
    """Return whether mma.sync is the fastest instruction, or near it, of the current device.

    Data center Blackwell has a faster one. So has Hopper, but not for the left operands in INT8
    that these kernels keep in registers.
    """
    active: Any = driver.active
    arch = active.get_current_target().arch
    return arch >= 80 and arch // 10 not in (10, 11)


@lru_cache(maxsize=256)
def _serves_spec(spec: AttentionSpec) -> bool:
    return (
        spec.block_q == spec.block_k == BLOCK
        and not spec.smoothing.q
        and spec.dp.precision in DTYPES
        and spec.rounding.mode is RoundingMode.HALF_EVEN
        and all(
            spec.site(site).precision in (*DTYPES, Precision.INT8)
            for site in ("qk_recompute", "dv", "dq", "dk")
        )
    )
