"""Programmatic dependent launch: a kernel starts while the one before it still runs.

From Hopper on, a GPU may start the programs of a kernel as soon as all programs of the kernel
before it have ended or have called `wait_for_earlier_kernels`, on multiprocessors where some of
those have ended. They wait there until the kernel before has ended and its writes to memory are
visible. This hides the time that a launch takes: see docs/data/launch_variants.json.
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
    """Wait until all kernels that were launched before have ended and their writes are visible.

    Every kernel calls this before it accesses global memory. Without the wait it would start early
    all the same, and might read what is not written yet.

    A kernel that is not the first one of a call may first read tensors that the kernel before it
    did not write. All others are complete: the kernel before has waited for them. Every path to the
    end of a program has the wait, so that a kernel ends after all earlier ones.
    """
    if not INTERPRETED and cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()
