"""Two correct kernels that trigger false positives in compute-sanitizer.

for tool in racecheck initcheck; do
    compute-sanitizer --tool $tool python scripts/sanitizer_controls.py
done

The Hopper kernels use both features: warp specialisation, and stores by TMA.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sagesim_kernels.gluon_compat import tma_store

PROGRAMS = 4096
BLOCK = 64


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
def store_by_tma(out):
    """Fill a tensor with ones."""
    ONES: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    block = gl.allocate_shared_memory(gl.float32, out.block_shape, out.layout)
    block.store(gl.full(out.block_shape, 1.0, gl.float32, ONES))
    fence_async_shared()
    tma_store(out, [gl.program_id(0) * out.block_shape[0], 0], block)
    tma.store_wait(0)


def main() -> None:
    specialized_warps[(PROGRAMS,)]()
    out = torch.empty(PROGRAMS * BLOCK, 32, device="cuda")
    layout = gl.NVMMASharedLayout(128, 32, 2)
    store_by_tma[(PROGRAMS,)](TensorDescriptor.from_tensor(out, [BLOCK, 32], layout))
    assert bool((out == 1).all())  # reads all of it
    print("2 kernels")


if __name__ == "__main__":
    main()
