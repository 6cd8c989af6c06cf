"""Which keys and heads a program of a backward computes."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagesim_kernels.operands import packed_tile, tile_and_head


@gluon.jit
def place_of(
    program, tiles, heads, all_heads, heads_per_group, packed_tiles, SPLITS: gl.constexpr
):  # fmt: skip
    """Return five indices of a tile of keys, from its place in the order of a launch.

    These are its tile of keys; its head of K and V, over all sequences; its sequence; its head of
    K and V in the sequence; and that head's copy of dK and dV, of which each head has SPLITS.

    The order is that of `tile_and_head`.

    Args:
        tiles: tiles of a head; of all its sequences, unless packed_tiles is None.
        heads: heads of K and V of a sequence.
        all_heads: heads with `tiles` tiles, times SPLITS.
        heads_per_group: see `choose_backward_heads`.
        packed_tiles: see `order_tiles`; None if all sequences have equally many tiles.
        SPLITS: programs for each tile of K and V.
    """
    index, split_head = tile_and_head(program, tiles, all_heads, heads_per_group)
    z = split_head // SPLITS
    head = z % heads
    if packed_tiles is None:
        b = z // heads
    else:
        index, b = packed_tile(packed_tiles, index)
        z = b * heads + head
    return index, z, b, head, head * SPLITS + split_head % SPLITS
