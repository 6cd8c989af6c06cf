"""Tiles of tokens in Gluon: their layouts, and how they are loaded and stored as codes."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagesim_kernels.operands import (
    channels_of_part,
    code_max,
    head_ptr,
    largest,
    length_of,
    magnitude,
    part_count,
    row_stride,
    scale_and_inverse,
    scales_of_block,
    stored_codes,
    stored_rest_of,
    stored_start_of,
    to_codes,
)

WARP = 32
"""Threads."""


class Tile(NamedTuple):
    """Consecutive blocks of tokens that a program holds at once, as one constexpr.

    The channels of a head may be in two tiles, see `tile_of_part`. A thread then holds channels of
    the same tokens in both.
    """

    BLOCKS: Any  #: a power of two
    TOKENS: Any  #: of a block
    FIRST: Any  #: the first channel
    CHANNELS: Any  #: a power of two
    LAYOUT: Any  #: of [blocks, tokens, channels]

    @classmethod
    def of(
        cls, blocks: int, tokens: int, channels: tuple[int, int], across: int, warps: int
    ) -> Tile:
        """Return a tile of `blocks` blocks.

        If there are fewer blocks than warps, several warps share a block. Otherwise a warp holds
        whole blocks, and finds their largest numbers alone.

        channels: the first channel, and how many. across: threads along channels.
        """
        threads = [1, WARP // across, across]
        of_blocks = min(warps, blocks)
        layout = gl.BlockedLayout(
            [1, 1, channels[1] // across], threads, [of_blocks, warps // of_blocks, 1], [2, 1, 0]
        )
        return cls(blocks, tokens, *channels, layout)


@constexpr_function
def tile_of_part(tile: Any, channels: Any, i: Any) -> Any:
    """Return part i of tokens, as a `Tile`: 0 is `tile`, and 1 has the channels behind its last.

    channels: of a head.
    """
    if i == 0:
        return tile
    layout = tile.LAYOUT
    first, count = channels_of_part(channels, tile.CHANNELS, 1)
    # Codes are stored four at a time. Of few channels, several threads hold the same ones.
    vector = max(count // layout.threads_per_warp[2], 4)
    layout = gl.BlockedLayout(
        [1, 1, vector], layout.threads_per_warp, layout.warps_per_cta, layout.order
    )
    return Tile(tile.BLOCKS, tile.TOKENS, first, count, layout)


@gluon.jit
def tokens_of(T: gl.constexpr):
    """Return the tokens of a `Tile`, [blocks, tokens]."""
    ROWS: gl.constexpr = gl.SliceLayout(2, T.LAYOUT)
    block = gl.arange(0, T.BLOCKS, gl.SliceLayout(1, ROWS))
    token = gl.arange(0, T.TOKENS, gl.SliceLayout(0, ROWS))
    return block[:, None] * T.TOKENS + token[None, :]


@gluon.jit
def channels_of(T: gl.constexpr):
    """Return the channels of a `Tile`, [1, 1, channels]."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, T.LAYOUT))
    return T.FIRST + gl.arange(0, T.CHANNELS, COLUMNS)[None, :][:, None, :]


@gluon.jit
def as_rows_of(T: gl.constexpr, rows):
    """Return rows [blocks, tokens] of a tile with the layout of those of the `Tile` T."""
    return gl.convert_layout(rows, gl.SliceLayout(2, T.LAYOUT))


@gluon.jit
def load_tile(x, cu, first, h, b, live, D: gl.constexpr, T: gl.constexpr):
    """Load the tokens from `first` of sequence b and head h of a `Strided`; 0 if not live."""
    row = (first + tokens_of(T)).to(gl.int64)[:, :, None]
    column = channels_of(T)
    ptrs = head_ptr(x, cu, b, h) + row * row_stride(x) + column.to(gl.int64) * x.stride_d
    mask = as_rows_of(T, live)[:, :, None] & (column < D)
    return gl.load(ptrs, mask=mask, other=0.0)


@gluon.jit
def load_tiles(x, cu, first, h, b, live, D: gl.constexpr, T: gl.constexpr):
    """Return what `load_tile` does, a tensor for each part of the channels."""
    tiles = ()
    for j in gl.static_range(part_count(D)):
        tiles += (load_tile(x, cu, first, h, b, live, D, tile_of_part(T, D, j)),)
    return tiles


@gluon.jit
def in_float32(tiles):
    """Return the tensors of all parts in float32."""
    numbers = ()
    for j in gl.static_range(len(tiles)):
        numbers += (tiles[j].to(gl.float32),)
    return numbers


@gluon.jit
def subtract_mean(x, mean, live, T: gl.constexpr):
    """Return a float32 tile minus the mean [1, 1, channels]; tokens that are not live are 0."""
    return gl.where(as_rows_of(T, live)[:, :, None], x - mean, 0.0)


@gluon.jit
def token_maxima(tiles, T: gl.constexpr):
    """Return the largest `magnitude` of each token in tiles, [blocks, tokens] of the first one."""
    found = largest(magnitude(tiles[0]), 2)
    for j in gl.static_range(1, len(tiles)):
        found = gl.maximum(found, as_rows_of(T, largest(magnitude(tiles[j]), 2)))
    return found


@gluon.jit
def _block_maxima(tiles, T: gl.constexpr):
    """Return the largest `magnitude` of each block in tiles, [blocks]."""
    found = largest(magnitude(tiles[0]).reshape([T.BLOCKS, T.TOKENS * T.CHANNELS]), 1)
    for j in gl.static_range(1, len(tiles)):
        # Where threads hold the same channels, a maximum of reshaped tokens would be wrong.
        more = largest(largest(magnitude(tiles[j]), 2), 1)
        found = gl.maximum(found, gl.convert_layout(more, found.type.layout))
    return found


@gluon.jit
def store_tiles(out, tiles, rounding, cu, n, first, h, b, D: gl.constexpr, T: gl.constexpr):
    """Store the codes and scales of tokens from `first` on to the `Operand` out.

    Return the scales, [blocks, tokens] or [blocks, 1]. tiles: a float32 tensor for each part. T: of
    the first one.
    """
    first = gl.to_tensor(first)
    local = tokens_of(T)
    left = stored_rest_of(cu, n, b, first)
    gl.static_assert(out.TOKENS == 1 or out.TOKENS == T.TOKENS, "a scale for a token or a block")
    gl.static_assert(not out.BY_CHANNEL and not out.ALONG_TOKENS, "codes of rows")
    scale_ptr = scales_of_block(out, cu, n, first // T.TOKENS, h, b, T.TOKENS)
    if out.TOKENS == 1:
        amax = token_maxima(tiles, T)
        scale, inverse = scale_and_inverse(amax, code_max(rounding.FORMAT))
        gl.store(scale_ptr + local, scale, mask=local < left)
    else:
        amax = _block_maxima(tiles, T)
        scale, inverse = scale_and_inverse(amax, code_max(rounding.FORMAT))
        block = gl.arange(0, T.BLOCKS, scale.type.layout)
        gl.store(scale_ptr + block, scale, mask=first + block * T.TOKENS < length_of(cu, n, b))
        OF_BLOCKS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, T.LAYOUT))
        scale = gl.convert_layout(scale, OF_BLOCKS)[:, None]
        inverse = gl.convert_layout(inverse, OF_BLOCKS)[:, None]
    for j in gl.static_range(len(tiles)):
        _store_codes(
            out, tiles[j], inverse, rounding, cu, n, first, left, h, b, tile_of_part(T, D, j)
        )
    return scale


@gluon.jit
def _store_codes(out, x, inverse, rounding, cu, n, first, left, h, b, T: gl.constexpr):
    """Store the codes of one part of tokens; see `store_tiles`. left: tokens that have memory."""
    local, column = tokens_of(T), channels_of(T)
    x *= as_rows_of(T, inverse)[:, :, None]
    codes = to_codes(x, (first + local)[:, :, None], column, rounding)
    row = (stored_start_of(cu, n, b) + first + local)[:, :, None]
    ptrs = out.ptr + h.to(gl.int64) * out.stride_h + row * out.stride_n
    mask = (local < left)[:, :, None] & (column < out.CHANNELS)
    gl.store(ptrs + column.to(gl.int64) * out.stride_d, stored_codes(codes), mask=mask)
