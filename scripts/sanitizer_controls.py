"""Correct kernels that trigger false positives in compute-sanitizer, and one with a race.

    compute-sanitizer --tool racecheck python scripts/sanitizer_controls.py

The Hopper kernels use the features of the correct ones: warp specialisation, and data that some
warps hand over to others.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from sagesim_kernels.gluon_compat import barrier

PROGRAMS = 4096

NUMBERS = gl.constexpr(2048)
"""Numbers that warps hand over in a step."""

STEPS = gl.constexpr(8)
"""Steps of a hand-over."""


@gluon.jit
def _wait(bar):
    mbarrier.wait(bar, 0)


@gluon.jit
def _arrive(bar):
    mbarrier.arrive(bar, count=1)


@gluon.jit
def specialized_warps():
    """One warp arrives at a barrier, and the other warps wait for it."""
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, 1)
    fence_async_shared()
    gl.warp_specialize([(_wait, (bar,)), (_arrive, (bar,))], [1], [24])


@gluon.jit
def _give(buffer, full, empty, EARLY: gl.constexpr):
    """Store numbers as `codes_warps.compute_dk_dv` stores dS: a barrier of these warps, then one
    thread arrives. EARLY: it arrives before the numbers are stored."""
    OWN: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    for n in range(STEPS):
        slot = n % 2
        mbarrier.wait(empty.index(slot), (n // 2 & 1) ^ 1)
        if EARLY:
            mbarrier.arrive(full.index(slot), count=1)
        buffer.index(slot).store(n + gl.arange(0, NUMBERS, OWN))
        barrier()
        if not EARLY:
            mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _take(buffer, full, empty, out):
    """Load numbers as `codes_warps.compute_dq` loads dS, four at a time. racecheck reports nothing
    of loads of single numbers, be they right or wrong."""
    OWN: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    for n in range(STEPS):
        slot = n % 2
        mbarrier.wait(full.index(slot), n // 2 & 1)
        numbers = buffer.index(slot).load(OWN)
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        at = (gl.program_id(0) * STEPS + n) * NUMBERS + gl.arange(0, NUMBERS, OWN)
        gl.store(out + at, numbers)


@gluon.jit
def _start_hand_over(out, EARLY: gl.constexpr):
    ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    buffer = gl.allocate_shared_memory(gl.int32, [2, NUMBERS], ONE)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), 1)
    fence_async_shared()
    gl.warp_specialize(
        [(_give, (buffer, full, empty, EARLY)), (_take, (buffer, full, empty, out))], [4], [24]
    )


@gluon.jit
def handed_over(out):
    """Eight warps store numbers to shared memory, and four others wait for them and load them."""
    _start_hand_over(out, False)


@gluon.jit
def handed_over_early(out):
    """The same, but the four warps are told before the numbers are stored. This is a race."""
    _start_hand_over(out, True)


def main() -> None:
    specialized_warps[(PROGRAMS,)]()
    steps, count = STEPS.value, NUMBERS.value
    numbers = torch.zeros(steps, count, dtype=torch.int32, device="cuda")
    handed_over[(1,)](numbers, num_warps=8)
    expected = torch.arange(steps)[:, None] + torch.arange(count)
    assert bool((numbers.cpu() == expected).all())
    handed_over_early[(1,)](numbers, num_warps=8)
    print("3 kernels")


if __name__ == "__main__":
    main()
