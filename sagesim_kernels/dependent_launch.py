"""Programmatic dependent launch: a kernel starts while the one before it still runs.

From Hopper on, a GPU may start the programs of a kernel as soon as all programs of the kernel
before it have started. They take the places of programs that end, and wait there until the whole
kernel has ended and its memory is written. This hides the time in which a launch starts: see
docs/data/launch_variants.json.
"""

# gdc_wait is part of Triton's library for CUDA:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

from sagesim_kernels.interpreter import INTERPRETED
from sagesim_kernels.target import compute_capability


def has_dependent_launch() -> bool:
    """Return whether the GPU that Triton compiles for has dependent launches."""
    return compute_capability() >= 90


@triton.jit
def wait_for_earlier_kernels():
    """Wait until all kernels that were launched before have written their memory.

    Every kernel calls this before it accesses global memory.
    """
    if not INTERPRETED and cuda_capability_geq(9, 0):
        gdc_launch_dependents()
        gdc_wait()
