"""Windows and padding in the backward: the live keys of a tile, and the parts of its loop."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def are_live(keys, tile, key_mask):
    """Return whether any query attends to each of these keys of a sequence.

    tile: `KeyTile`. key_mask: see `KeyOutputs`.
    """
    live = keys < tile.n_live
    if tile.lowest is not None:
        live = live & (keys >= tile.lowest)
    if key_mask is not None:
        live = live & (gl.load(key_mask + keys, mask=keys < tile.length, other=0) != 0)
    return live


@gluon.jit
def part_of(loop, PART: gl.constexpr):
    """Return begin and end of one of three parts of a `QueryLoop`; part 1 alone needs no mask."""
    if PART == 0:
        return loop.begin, loop.unmasked
    elif PART == 2:
        return loop.unmasked_end, loop.end
    elif loop.unmasked_end is None:
        return loop.unmasked, loop.end
    else:
        return loop.unmasked, loop.unmasked_end
