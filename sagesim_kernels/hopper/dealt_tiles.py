"""Which of a launch's tiles a program is dealt in each wave; see `tile_scheduler`.

One warp of a program finds the tile of a wave, while the others compute the tile before. It takes
several divisions, one after the other. The other warps read what it found from shared memory.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def allocate_tiles(FIELDS: gl.constexpr):
    """Return memory for two tiles, each of FIELDS integers: int32 [2 * FIELDS, 1]."""
    return gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], _LAYOUT)


@gluon.jit
def share_tile(tiles, wave, tile):
    """Store the integers of the tile of a wave. The caller synchronises with those that read."""
    FIELDS: gl.constexpr = tiles.shape[0] // 2
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for i in gl.static_range(FIELDS):
        number = gl.full([1], tile[i], gl.int32, LAYOUT)
        tiles.index(wave % 2 * FIELDS + i).store(number)


@gluon.jit
def shared_tile(tiles, wave):
    """Return the integers of the tile of a wave, a tuple."""
    FIELDS: gl.constexpr = tiles.shape[0] // 2
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    fields = ()
    for i in gl.static_range(FIELDS):
        fields += (gl.max(tiles.index(wave % 2 * FIELDS + i).load(LAYOUT), 0),)
    return fields


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
