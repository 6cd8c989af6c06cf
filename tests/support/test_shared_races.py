"""Missing barriers and waits are found, and correct orders are not reported."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.ptx import Program
from tests.support.shared_races import Race, SharedAccesses

BYTES = np.arange(16)
WRONG = {
    "reads without a barrier": lambda x: (x.write(0, BYTES), x.read(1, BYTES)),
    "overwrites without a barrier": lambda x: (x.read(0, BYTES), x.write(1, BYTES)),
    "two write": lambda x: (x.write(0, BYTES), x.write(1, BYTES[:1])),
    "overwrites what several read": lambda x: (
        x.read(0, BYTES),
        x.read(1, BYTES),
        x.write(1, BYTES),
    ),
    "overwrites what several read at once": lambda x: (
        x.read(np.repeat([0, 1], 8), np.tile(BYTES[:8], 2)),
        x.write(1, BYTES[:1]),
    ),
    "several read at once what one wrote": lambda x: (
        x.write(0, BYTES),
        x.read(np.repeat([0, 1], 8), BYTES),
    ),
    "reads before the wait": lambda x: (x.copy(0, BYTES), x.commit(0), x.read(0, BYTES)),
    "waits for too few": lambda x: (
        x.copy(0, BYTES),
        x.commit(0),
        x.wait(0, 1),
        x.read(0, BYTES),
    ),
    "waits after the barrier": lambda x: (
        x.copy(0, BYTES),
        x.commit(0),
        x.barrier(),
        x.wait(0, 0),
        x.read(1, BYTES),
    ),
    "copies over what is read": lambda x: (x.read(1, BYTES), x.copy(0, BYTES)),
    "copies over a copy": lambda x: (x.copy(0, BYTES), x.barrier(), x.copy(0, BYTES)),
}
RIGHT = {
    "barrier between": lambda x: (x.write(0, BYTES), x.barrier(), x.read(1, BYTES)),
    "own bytes": lambda x: (x.write(0, BYTES), x.read(0, BYTES), x.write(0, BYTES)),
    "both read at once, and write their own bytes": lambda x: (
        x.read(np.repeat([0, 1], 8), BYTES),
        x.write(0, BYTES[:8]),
        x.write(1, BYTES[8:]),
    ),
    "both read": lambda x: (x.read(0, BYTES), x.read(1, BYTES)),
    "other bytes": lambda x: (x.write(0, BYTES), x.read(1, BYTES + 16)),
    "wait, then barrier": lambda x: (
        x.copy(0, BYTES),
        x.commit(0),
        x.copy(0, BYTES + 16),
        x.commit(0),
        x.wait(0, 1),
        x.barrier(),
        x.read(1, BYTES),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_finds(name: str) -> None:
    order: Callable[[SharedAccesses], object] = WRONG[name]
    with pytest.raises(Race, match="of shared memory"):
        order(SharedAccesses(64, 2))


@pytest.mark.parametrize("name", RIGHT)
def test_accepts(name: str) -> None:
    RIGHT[name](SharedAccesses(64, 2))


TWO_WARPS = """
.visible .entry kernel(.param .u64 kernel_param_0) {{
    .reg .pred %p<2>;
    .reg .b32 %r<5>;
    mov.u32 %r1, %tid.x;
    setp.eq.b32 %p1, %r1, 99;
    shl.b32 %r2, %r1, 2;
    st.shared.b32 [%r2], %r1;
    {between}
    xor.b32 %r3, %r2, 128;
    ld.shared.b32 %r4, [%r3];
    @!%p1 bra $L_END;
    {at_the_end}
$L_END:
    ret;
}}
"""
"""Each warp reads what the other one wrote. No thread comes to what is at the end."""


def races_of_two_warps(between: str, at_the_end: str = "") -> list[str]:
    program = Program(TWO_WARPS.format(between=between, at_the_end=at_the_end))
    return program.races_without_barriers([], 1, 64, [])


def test_of_two_barriers_the_second_is_redundant() -> None:
    race = "warp 0 reads byte 128 of shared memory, which was written by warp 1"
    assert races_of_two_warps("bar.sync 0;") == [race]
    assert races_of_two_warps("bar.sync 0; bar.sync 0;") == [race, ""]


def test_a_barrier_that_no_thread_meets_is_an_error() -> None:
    with pytest.raises(ValueError, match="do not meet 1 of 2 barriers"):
        races_of_two_warps("bar.sync 0;", at_the_end="bar.sync 0;")
