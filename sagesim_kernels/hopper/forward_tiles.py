"""Which tile a forward program computes in each wave, and with which blocks of keys."""

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
    packed_tile,
)

BLOCK = gl.constexpr(64)
"""Queries of a consumer, and keys of a step."""


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
    group_tiles = scheduler.head_tiles * scheduler.heads_per_group
    tile = index % group_tiles // scheduler.heads_per_group
    head = index // group_tiles * scheduler.heads_per_group + index % scheduler.heads_per_group
    h = head % scheduler.heads
    if scheduler.packed_tiles is None:
        b = head // scheduler.heads
        if lengths.IS_CAUSAL:  # longest first
            tile = scheduler.head_tiles - 1 - tile
    else:
        tile, b = packed_tile(scheduler.packed_tiles, tile)
    first = tile * ROWS
    is_valid = is_valid & (first < length_of(lengths.cu_q, lengths.n_q, b))
    return Tile(b, h, h // scheduler.groups, gl.where(is_valid, first, -1))


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
