"""Which of a launch's tiles a program is dealt in each wave; see `tile_scheduler`."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def number_of(wave, programs):
    """Return the number of this program's tile in a wave. There may be no such tile.

    Waves take tiles in snake order: programs 0, 1, ... in even waves, and backwards in odd ones.
    Under a causal mask the later tiles of a group of heads are shorter, so a program with a long
    tile in one wave gets a short tile in the next.
    """
    pid = gl.program_id(0)
    number = wave * programs + pid
    if wave % 2 == 1:
        number = wave * programs + programs - 1 - pid
    return number
