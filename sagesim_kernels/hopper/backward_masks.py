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
def attends_between(queries, keys, offset, lowest):
    """Return whether each query attends to each key, with one comparison a side; they broadcast.

    keys: their indices, and 2^30 for those that no query attends to. offset: query i attends to no
    key after i + offset. lowest: nor to one before i + lowest; None: no limit.
    """
    is_attended = keys <= queries + offset
    if lowest is not None:
        is_attended = is_attended & (keys >= queries + lowest)
    return is_attended


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
