"""P and dS as codes: their scales, the left operands of dV and dK, and the codes of dS for dQ."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagesim_kernels.hopper.backward_maps import ST_INT32, ST_ROWS
from sagesim_kernels.hopper.dq_parts import BLOCK_Q, TILE_K
from sagesim_kernels.operands import amax, map_inverse, map_scale, map_step

BLOCK_K = gl.constexpr(64)
"""Keys of a block of the spec. A warpgroup computes the maps of one block."""

BLOCKS = gl.constexpr(TILE_K.value // BLOCK_K.value)
"""Blocks of keys of a program."""

EXCHANGE = gl.constexpr(
    gl.SharedLinearLayout(
        [
            [8, 0],
            [1, 0],
            *([0, 1 << i] for i in range(6)),
            [2, 3],
            [4, 4],
            [16, 0],
            [32, 0],
            [64, 0],
        ]
    )
)
"""Layout of dS, float32 [TILE_K, BLOCK_Q], in shared memory.

The numbers of four keys follow each other. A thread stores two of them at once, and loads all four,
both without bank conflicts.
"""


@constexpr_function
def query_rows(warps):
    """Layout of dS [TILE_K, BLOCK_Q] in which a thread holds keys of one block and one query.

    A thread of four warps holds the whole block, one of eight warps half of it.
    """
    keys = [[8, 0], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0]]
    queries = [[0, 1 << i] for i in range(6)]
    if warps == 4:
        registers, lanes, rest = keys, queries[:5], queries[5:]
    else:
        registers, lanes, rest = keys[:5], [*queries[:4], keys[5]], queries[4:]
    shape = [TILE_K.value, BLOCK_Q.value]
    return gl.DistributedLinearLayout(registers, lanes, [*rest, [BLOCK_K.value, 0]], [], shape)


_SUM_ROWS = gl.constexpr(gl.SliceLayout(1, ST_INT32.value))
"""Layout of one number for each row of a product of codes, a key."""

_WARP_MAXIMA = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 8, 0]],
        [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[0, 16, 0], [0, 32, 0], [1, 0, 0]],
        [],
        [BLOCKS.value, BLOCK_K.value, 4],
    )
)
"""Layout [BLOCKS, BLOCK_K, 4]: keys as the warps hold them, and four numbers of each thread."""

MAXIMA = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
"""Layout of the maxima of warps, [BLOCKS, 4], in shared memory."""


@gluon.jit
def row_maxima(map, buffers, slot):
    """Return the largest magnitude of each key of a map [TILE_K, BLOCK_Q].

    buffers: float32 [slots, BLOCKS, 4] in shared memory. The slot gets the largest of each warp.
    None unless a tile has one scale.
    """
    largest = amax(amax(map.reshape([TILE_K, 8, 8]), 1), 1)  # a tree is faster than a chain
    largest = gl.convert_layout(largest, ST_ROWS, assert_trivial=True)
    if buffers is not None:
        buffers.index(slot).store(amax(largest.reshape([BLOCKS, 4, BLOCK_K // 4]), 2))
    return largest


@gluon.jit
def _tile_maxima(buffer):
    """Return the largest magnitude of the tile of each key, from what `row_maxima` stored."""
    numbers = buffer.load(gl.SliceLayout(1, _WARP_MAXIMA))
    tiles = gl.convert_layout(amax(numbers, 1), gl.SliceLayout(1, gl.SliceLayout(2, _WARP_MAXIMA)))
    rows = tiles[:, None].broadcast_to([BLOCKS, BLOCK_K]).reshape([TILE_K])
    return gl.convert_layout(rows, ST_ROWS, assert_trivial=True)


@gluon.jit
def _rounded(map, inverse):
    """Round map * inverse to codes, ties to even; see `operands.map_codes`."""
    grid = gl.full(map.shape, 12582912.0, gl.float32, map.type.layout)
    return gl.fma(map, inverse.broadcast_to(map.shape), grid).to(gl.int32, bitcast=True).to(gl.int8)


@gluon.jit
def left_codes(map, largest, buffers, slot):
    """Return the codes of a map [TILE_K, BLOCK_Q] as a left operand, and the scale of each key.

    Queries are in `operands.in_register_order`, so that no thread exchanges codes with another.

    largest, buffers: what `row_maxima` returned and stored; a barrier has to be in between.
    """
    if buffers is not None:
        largest = _tile_maxima(buffers.index(slot))
    codes = _rounded(map, map_inverse(largest)[:, None])
    codes = codes.reshape([TILE_K, 4, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([TILE_K, BLOCK_Q])
    operand = gl.convert_layout(codes, gl.DotOperandLayout(0, ST_INT32, 4), assert_trivial=True)
    scale = gl.convert_layout(map_scale(largest), _SUM_ROWS, assert_trivial=True)
    return operand, scale


@gluon.jit
def store_query_codes(ds, maps, slot):
    """Store the codes of dS for dQ, and the step of each query.

    A step is the scale, or less where all codes are 0; see `operands.map_step`.

    ds: in the layout of `query_rows`. maps: `CodeMaps`, of which `codes` and `steps` are stored.
    slot: of `ds_maxima`.
    """
    ds = ds.reshape([BLOCKS, BLOCK_K, BLOCK_Q])
    if maps.ds_maxima is None:
        BY_QUERY: gl.constexpr = gl.SliceLayout(1, ds.type.layout)
        largest = amax(amax(ds.reshape([BLOCKS, 8, 8, BLOCK_Q]), 2), 1)
        largest = gl.convert_layout(largest, BY_QUERY, assert_trivial=True)
    else:
        TILES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, ds.type.layout))
        WARP_MAXIMA: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, gl.num_warps()], [1, 0])
        largest = amax(maps.ds_maxima.index(slot).load(WARP_MAXIMA), 1)
        largest = gl.convert_layout(largest, TILES)[:, None].broadcast_to([BLOCKS, BLOCK_Q])
    inverse = map_inverse(largest)[:, None, :].broadcast_to(ds.shape)
    codes = _rounded(ds, inverse).permute([0, 2, 1])
    maps.codes.store(codes.reshape([BLOCKS * BLOCK_Q, BLOCK_K]))
    maps.steps.store(map_step(largest).reshape([BLOCKS * BLOCK_Q]))
