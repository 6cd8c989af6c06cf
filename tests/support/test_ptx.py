"""Blocks that run in lock step have registers, shared memory and barriers of their own."""

import numpy as np
import pytest

from tests.support.ptx import Deadlock, Program, Range
from tests.support.shared_races import Race

THREADS = 128
STEPS = """
.visible .entry kernel(.param .u64 kernel_param_0) {{
    .reg .pred %p<5>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<4>;
    ld.param.b64 %rd1, [kernel_param_0];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    shl.b32 %r3, %r1, 2;
    xor.b32 %r4, %r3, 128;
    mov.b32 %r5, %r2;
    mov.b32 %r6, 0;
$L_STEP:
    add.s32 %r7, %r1, %r5;
    st.shared.b32 [%r3], %r7;
    bar.sync 0;
    ld.shared.b32 %r8, [%r4];
    add.s32 %r6, %r6, %r8;
    {behind}
    sub.s32 %r5, %r5, 1;
    setp.ge.s32 %p1, %r5, 0;
    @%p1 bra $L_STEP;
    mad.lo.s32 %r7, %r2, 128, %r1;
    mul.wide.s32 %rd2, %r7, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.b32 [%rd3], %r6;
    ret;
}}
"""
"""Block i has i + 1 steps. In each, every thread adds a number that a thread of another warp has
stored."""


def sums(grid: int, behind: str = "bar.sync 0;") -> np.ndarray:
    result = np.zeros((grid, THREADS), np.int32)
    first = result.ctypes.data
    memory = [Range(first, first + result.nbytes)]
    Program(STEPS.format(behind=behind)).run([first], grid, THREADS, memory)
    return result


@pytest.mark.parametrize("grid", [1, 3, 40])
def test_each_block_has_its_own_steps(grid: int) -> None:
    block, thread = np.ogrid[:grid, :THREADS]
    expected = (block + 1) * (thread ^ 32) + block * (block + 1) // 2
    np.testing.assert_array_equal(sums(grid), expected)


def test_a_race_of_one_block_is_found() -> None:
    """The first block has no second step, in which it would overwrite what others read."""
    sums(1, behind="")
    with pytest.raises(Race, match=r"warp 0 writes byte 0 of .* was read by warp 1"):
        sums(2, behind="")


TWO_BARRIERS = """
    setp.eq.s32 %p2, %r5, 2;
    setp.lt.s32 %p3, %r1, 32;
    and.pred %p4, %p2, %p3;
    @%p4 bra $L_OTHER;
    bar.sync 0;
    bra.uni $L_MEET;
$L_OTHER:
    bar.sync 1;
$L_MEET:
"""
"""In a step that the first two blocks do not have, a warp waits at another barrier."""


def test_a_block_whose_threads_wait_at_two_barriers_is_a_deadlock() -> None:
    sums(2, behind=TWO_BARRIERS)
    with pytest.raises(Deadlock, match="all threads wait"):
        sums(3, behind=TWO_BARRIERS)


def test_popc_counts_the_bits_that_are_set() -> None:
    found = sums(1, behind="bar.sync 0; popc.b32 %r6, %r6;")
    assert found[0].tolist() == [(thread ^ 32).bit_count() for thread in range(THREADS)]
