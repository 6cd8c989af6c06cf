"""Which tile a forward program computes in each wave, and with which blocks of keys.

The producer finds the tile of a wave while the consumers compute the one before. It takes several
divisions, one after the other, which the consumers would have to wait for.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagesim_kernels.hopper.dealt_tiles import number_of
from sagesim_kernels.hopper.forward_structures import KeyBlocks, Tile
from sagesim_kernels.operands import (
    causal_offset,
    key_loops_without_padding,
    length_of,
    live_keys,
)

BLOCK = gl.constexpr(64)
"""Queries of a consumer, and keys of a step."""

TILE_FIELDS = gl.constexpr(4)
"""Numbers of a `Tile`."""

_TILE_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def waves(scheduler):
    """Return how many tiles a program is given at most."""
    return (scheduler.tiles + scheduler.programs - 1) // scheduler.programs


@gluon.jit
def tile_of(wave, lengths, scheduler, ROWS: gl.constexpr):
    """Return the `Tile` that this program computes in a wave."""
    index = number_of(wave, scheduler.programs)
    is_valid = index < scheduler.tiles
    index = gl.minimum(index, scheduler.tiles - 1)
    head_tiles = (scheduler.longest_q + ROWS - 1) // ROWS
    group_tiles = head_tiles * scheduler.heads_per_group
    tile = index % group_tiles // scheduler.heads_per_group
    head = index // group_tiles * scheduler.heads_per_group + index % scheduler.heads_per_group
    if lengths.IS_CAUSAL:  # longest first
        tile = head_tiles - 1 - tile
    b = head // scheduler.heads
    first = tile * ROWS
    is_valid = is_valid & (first < length_of(lengths.cu_q, lengths.n_q, b))
    h = head % scheduler.heads
    return Tile(b, h, h // scheduler.groups, gl.where(is_valid, first, -1))


@gluon.jit
def allocate_tiles():
    """Return memory for two tiles, which the producer and the consumers share."""
    return gl.allocate_shared_memory(gl.int32, [2 * TILE_FIELDS, 1], _TILE_LAYOUT)


@gluon.jit
def share_tile(tiles, wave, tile):
    """Store the tile of a wave. The producer calls this, and synchronises with the consumers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in gl.static_range(TILE_FIELDS):
        number = gl.full([1], tile[i], gl.int32, LAYOUT)
        tiles.index(wave % 2 * TILE_FIELDS + i).store(number)


@gluon.jit
def shared_tile(tiles, wave):
    """Return the tile of a wave, to a consumer."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    fields = ()
    for i in gl.static_range(TILE_FIELDS):
        fields += (gl.max(tiles.index(wave % 2 * TILE_FIELDS + i).load(LAYOUT), 0),)
    return Tile(fields[0], fields[1], fields[2], fields[3])


@gluon.jit
def key_blocks(first, ROWS: gl.constexpr, lengths, b):
    """Return the `KeyBlocks` of queries first..first + ROWS of sequence b.

    There is at least one block, so that queries that attend to no key need no code of their own.
    """
    n_k = live_keys(lengths, b)
    begin, whole, whole_end, end = key_loops_without_padding(
        lengths, b, first, ROWS, BLOCK, n_k, causal_offset(lengths, b)
    )
    end = gl.maximum((end + BLOCK - 1) // BLOCK, 1)
    begin = begin // BLOCK
    if lengths.left is not None or lengths.key_mask is not None:
        begin = gl.minimum(begin, end - 1)
    return KeyBlocks(begin, whole // BLOCK, whole_end // BLOCK, end)


@gluon.jit
def masks_every_block(masked_at_end, unmasked, count):
    """Return whether the forward masks all blocks because a key mask leaves few without a mask.

    Masked blocks after the unmasked ones are visited first, and take longer than those before them.

    A sequence has the same bits with seqused_k, with a key mask that leaves the same keys, and
    alone. Logits are rounded in another way where a mask is applied, so each block has to have a
    mask in all of these calls or in none. They have at most two masked blocks at the end. Hence
    this is True only if there are more.

    masked_at_end: blocks after the unmasked ones. count: all blocks.
    """
    return (masked_at_end > 2) & (2 * unmasked < count)


@gluon.jit
def consumer_blocks(first, n_q, tile_blocks, lengths, b):
    """Return the `KeyBlocks` of the queries from `first` that one consumer computes.

    `whole_end` is a block before `end`, and `whole` is at most `whole_end`: the loop that needs no
    mask goes from the block before `whole_end` down to `whole`. Queries behind the last one get the
    first block of the tile.
    """
    HAS_BEGIN: gl.constexpr = lengths.left is not None or lengths.key_mask is not None
    begin, whole, whole_end, end = key_blocks(first, BLOCK, lengths, b)
    if first >= n_q:  # no row is stored
        end = tile_blocks.begin + 1
        if HAS_BEGIN:
            begin = tile_blocks.begin
    if lengths.key_mask is not None:  # the first rows may attend to no key of the tile
        end = gl.maximum(end, tile_blocks.begin + 1)
        begin = gl.maximum(begin, tile_blocks.begin)
    is_empty = whole >= whole_end
    if lengths.key_mask is not None:
        is_empty = is_empty | masks_every_block(end - whole_end, whole_end - whole, end - begin)
    whole_end = gl.minimum(whole_end, end - 1)
    if HAS_BEGIN:
        whole_end = gl.where(is_empty, end - 1, whole_end)
        whole = gl.where(is_empty, whole_end, gl.minimum(whole, whole_end))
    return KeyBlocks(begin, whole, whole_end, end)
