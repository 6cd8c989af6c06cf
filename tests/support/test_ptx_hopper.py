"""Barriers in memory, swizzled shared memory and tensor maps, as Hopper has them."""

from functools import partial

import numpy as np
import pytest
import torch

from tests.support.ptx import Deadlock, Program
from tests.support.ptx_hopper import HopperBlocks, Maps, TensorMap, swizzled

TWO_WARPS = """
.visible .entry kernel(.param .u64 kernel_param_0) {{
    .reg .pred %p<5>;
    .reg .b32 %r<5>;
    mov.u32 %r1, %tid.x;
    mov.b32 %r2, global_smem;
    setp.eq.b32 %p1, %r1, 0;
    setp.eq.b32 %p2, %r1, 32;
    @%p1 mbarrier.init.shared::cta.b64 [%r2], {arrivals};
    bar.sync 0;
    @%p2 {arrive} _, [%r2]{bytes};
    setp.lt.u32 %p3, %r1, 32;
    @%p3 bra $L_WAIT;
    bra.uni $L_END;
$L_WAIT:
    {{
    .reg .pred complete;
    waitLoop:
    mbarrier.try_wait.parity.shared.b64 complete, [%r2], {parity};
    @!complete bra.uni waitLoop;
    }}
$L_END:
    ret;
}}
"""
"""The second warp arrives at a barrier, and the first one waits."""


def run(
    arrivals: int = 1, parity: int = 0, arrive: str = "mbarrier.arrive.shared::cta.b64", bytes=""
) -> None:
    ptx = TWO_WARPS.format(arrivals=arrivals, parity=parity, arrive=arrive, bytes=bytes)
    Program(ptx).run([], 1, 64, [], partial(HopperBlocks, maps=Maps()))


def test_an_arrival_completes_a_phase():
    run()
    run(arrivals=2, parity=1)  # the phase before the first one is complete


@pytest.mark.parametrize(
    "given",
    [
        {"arrivals": 2},
        {"arrive": "mbarrier.arrive.expect_tx.shared.b64", "bytes": ", 128"},
    ],
    ids=["an arrival", "a copy"],
)
def test_a_phase_that_never_completes_is_a_deadlock(given):
    with pytest.raises(Deadlock, match=r"mbarrier\.try_wait\.parity"):
        run(**given)


def test_too_many_arrivals_at_a_phase():
    with pytest.raises(AssertionError, match="more arrivals"):
        run(arrivals=0)


@pytest.mark.parametrize("width", [16, 32, 64, 128])
def test_a_swizzle_permutes_the_chunks_of_a_row(width):
    """Chunks of 16 bytes with one index in 8 rows of 128 bytes are in as many banks as it can."""
    places = swizzled(np.arange(1024), width)
    assert sorted(places) == list(range(1024))
    rows = places.reshape(-1, width)
    assert (rows // width == np.arange(1024 // width)[:, None]).all()
    chunks = places.reshape(8, 8, 16)[:, 0, 0] % 128
    assert len(set(chunks)) == width // 16


def test_a_box_beyond_the_tensor():
    """Axes are clipped each on its own, and elements are addressed by strides."""
    base = torch.arange(60, dtype=torch.int32).reshape(3, 20)[:, :10]
    tensor = TensorMap(base, base.shape, base.stride(), (2, 4), 4, 16)
    exists, address = tensor.inside((2, -1))
    assert exists.tolist() == [[False, True, True, True], [False] * 4]
    assert ((address[0, 1:] - base.data_ptr()) // 4).tolist() == [40, 41, 42]
    with pytest.raises(IndexError, match="no multiple of 128"):
        tensor.shared(64)
