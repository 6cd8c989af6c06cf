"""P and dS as left operands of products: rounding, their scales, and the exchange between warps."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagesim_kernels.ampere.device import BLOCK, rows_layout
from sagesim_kernels.gluon_compat import reinterpret
from sagesim_kernels.operands import amax, in_register_order, map_inverse, map_scale, map_step


@constexpr_function
def exchange_layout(keys, in_pair_order):
    """Layout of dS, float32 [keys, 64], in shared memory; see `in_pair_order`.

    The numbers of four keys follow each other. A thread stores two of them at once, and loads all
    four, both without bank conflicts.

    in_pair_order: whether rows are in this order, or keys follow each other.
    """
    rows = [8, 1, 2, 4] if in_pair_order else [1, 2, 4, 8]
    bases = [[rows[0], 0], [rows[1], 0], *([0, 1 << i] for i in range(6))]
    bases += [[rows[2], 3], [rows[3], 4]]
    row = 16
    while row < keys:
        bases.append([row, 0])
        row *= 2
    return gl.SharedLinearLayout(bases)


@gluon.jit
def _largest(map, rounding, LAYOUT: gl.constexpr):
    """Return the largest magnitude of each row of a map, or of its block of 64 rows."""
    largest = gl.convert_layout(amax(map, 1), LAYOUT)
    if rounding.PER_TILE:
        BLOCKS: gl.constexpr = map.shape[0] // BLOCK
        tiles = largest.reshape([BLOCKS, BLOCK])
        tiles = amax(tiles, 1)[:, None].broadcast_to([BLOCKS, BLOCK])
        largest = gl.convert_layout(tiles.reshape([map.shape[0]]), LAYOUT)
    return largest


@gluon.jit
def round_to_codes(map, inverse):
    """Round map * inverse to codes, ties to even; see `operands.map_codes`."""
    return _rounded_bits(map, inverse[:, None].broadcast_to(map.shape)).to(gl.int8)


@gluon.jit
def _rounded_bits(map, inverse):
    """Return numbers whose lowest byte is the code of map * inverse, int32."""
    grid = gl.full(map.shape, 12582912.0, gl.float32, map.type.layout)
    return gl.fma(map, inverse, grid).to(gl.int32, bitcast=True)


@gluon.jit
def as_left_codes(map):
    """Return a map [rows, 64] as a left operand of codes, with columns `in_register_order`.

    No thread exchanges numbers with another.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, map.type.layout, 4)
    return gl.convert_layout(in_register_order(map), OPERAND, assert_trivial=True)


@constexpr_function
def _rows_of_tiles(tiles, numbers):
    """Layout [tiles, 64, numbers]: rows as warps of 16 rows hold them, a thread all numbers."""
    registers = [[0, 8, 0]] + [[0, 0, 1 << i] for i in range(numbers.bit_length() - 1)]
    lanes = [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[0, 16, 0], [0, 32, 0]] + ([[1, 0, 0]] if tiles == 2 else [])
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [tiles, BLOCK.value, numbers])


@gluon.jit
def maximum_buffer(rounding, other, ROWS: gl.constexpr, ACROSS: gl.constexpr):
    """Allocate shared memory for the maxima of a map that warps exchange; else return other.

    These are the maximum of each warp if the map has a scale for each tile, [tiles, warps], and
    otherwise, if warps share keys, the maxima of each of them, [ACROSS, keys].
    ACROSS: warps that share keys.
    """
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if rounding.PER_TILE:
        TILES: gl.constexpr = ROWS // BLOCK
        return gl.allocate_shared_memory(gl.float32, [TILES, gl.num_warps() // TILES], LAYOUT)
    elif ACROSS > 1:
        return gl.allocate_shared_memory(gl.float32, [ACROSS, ROWS], LAYOUT)
    else:
        return other


@gluon.jit
def row_maxima(map, rounding, buffer):
    """Return the largest magnitude of each row of a map [keys, queries].

    If the map has a scale for each tile, store the largest of each warp to buffer, for `left_codes`
    and `tile_step` behind a barrier.
    """
    largest = amax(map, 1)
    if rounding.PER_TILE:
        buffer.store(amax(largest.reshape([map.shape[0] // BLOCK, 4, 16]), 2))
    return largest


@gluon.jit
def left_codes(map, largest, rounding, buffer):
    """Return a map [keys, 64 queries] rounded to codes, and the scale of each row.

    largest: what `row_maxima` returned.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, map.type.layout)
    if rounding.PER_TILE:
        TILES: gl.constexpr = map.shape[0] // BLOCK
        LAYOUT: gl.constexpr = _rows_of_tiles(TILES, 4)
        maxima = buffer.load(gl.SliceLayout(1, LAYOUT))
        largest = gl.convert_layout(amax(maxima, 1), gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
        inverse = _of_rows(map_inverse(largest), ROWS)
        scale = _of_rows(map_scale(largest), ROWS)
    else:
        inverse = map_inverse(largest)
        scale = map_scale(largest)
    return round_to_codes(map, inverse), scale


@gluon.jit
def _of_rows(x, LAYOUT: gl.constexpr):
    """Repeat numbers of tiles for each row of 64."""
    rows = x[:, None].broadcast_to([x.shape[0], BLOCK]).reshape([x.shape[0] * BLOCK])
    return gl.convert_layout(rows, LAYOUT, assert_trivial=True)


@gluon.jit
def _largest_of_tile(buffer, i):
    """Return the largest of the maxima of tile i that warps stored."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
    return amax(amax(buffer.slice(i, 1, 0).load(LAYOUT), 1), 0)


@gluon.jit
def tile_step(buffer, i):
    """Return the step of the codes of tile i, from what `row_maxima` stored; see `map_step`."""
    return map_step(_largest_of_tile(buffer, i))


_PAIRS = gl.constexpr("prmt.b32 $0, $2, $3, 0x5140; prmt.b32 $1, $2, $3, 0x7362;")


@gluon.jit
def store_pairs(codes, buffer):
    """Store codes [keys, queries] to buffer, int16 [keys / 2, queries].

    A number of the buffer contains the codes of rows r and r + 8, which one thread holds.
    """
    ROWS: gl.constexpr = codes.shape[0]
    low, high = gl.split(codes.reshape([ROWS // 16, 2, 8, BLOCK]).permute([0, 2, 3, 1]))
    pairs = gl.inline_asm_elementwise(_PAIRS, "=&r,=r,r,r", [low, high], gl.int16, True, 4)
    buffer.store(pairs.reshape([ROWS // 2, BLOCK]))


@gluon.jit
def load_pairs(buffer, LAYOUT: gl.constexpr):
    """Return what `store_pairs` stored as a left operand [queries, keys], in pair order."""
    pairs = buffer.permute((1, 0)).load(gl.DotOperandLayout(0, LAYOUT, 2))
    codes = gl.join(pairs.to(gl.int8), (pairs >> 8).to(gl.int8))
    codes = codes.reshape([BLOCK, buffer.shape[0] * 2])
    return gl.convert_layout(codes, gl.DotOperandLayout(0, LAYOUT, 4), assert_trivial=True)


@gluon.jit
def exchanged_codes(ds, rounding, LAYOUT: gl.constexpr):
    """Load dS [64 keys, queries] as codes of a left operand [queries, keys], and row steps.

    The step is the scale, or less where all codes are 0; see `operands.map_step`.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 4)
    map = ds.permute((1, 0)).load(OPERAND)
    largest = _largest(map, rounding, gl.SliceLayout(1, LAYOUT))
    inverse = gl.convert_layout(map_inverse(largest), gl.SliceLayout(1, OPERAND))
    return round_to_codes(map, inverse), map_step(largest)


@gluon.jit
def maxima(map, rounding, right, buffer):
    """Return the largest magnitude of each row of a map, if it is rounded to codes."""
    if right.dtype == gl.int8:
        return row_maxima(map, rounding, buffer)
    else:
        return 0.0


@gluon.jit
def rounded(map, largest, rounding, right, buffer):
    """Return a map in the format of its product with the right operand, and scales of its rows.

    In 16 bit the scale is 1.
    """
    if right.dtype == gl.int8:
        return left_codes(map, largest, rounding, buffer)
    else:
        return map.to(right.dtype), 1.0


@gluon.jit
def left_operand(map):
    """Return a rounded map as the left operand of a product."""
    if map.dtype == gl.int8:
        return as_left_codes(map)
    else:
        return gl.convert_layout(map, gl.DotOperandLayout(0, map.type.layout, 2))


@gluon.jit
def exchanged(ds, rounding, inverse, maxima, i, LAYOUT: gl.constexpr):
    """Load dS of block i of the keys as a left operand [queries, keys], and a factor of each row.

    inverse: 1 / unit of each query, [queries, 1].
    """
    if ds.dtype == gl.int16:
        return load_pairs(ds, LAYOUT), tile_step(maxima, i) * inverse
    elif ds.dtype == gl.float32:
        codes, scale = exchanged_codes(ds, rounding, LAYOUT)
        return codes, scale[:, None] * inverse
    else:
        return ds.permute((1, 0)).load(gl.DotOperandLayout(0, LAYOUT, 2)), inverse


@gluon.jit
def store_maxima(map, rounding, buffer, ACROSS: gl.constexpr):
    """Store the largest magnitudes of a map that each warp has to the buffer of `maximum_buffer`.

    map: [64 keys, queries]. ACROSS: warps that share keys.
    """
    PARTS: gl.constexpr = map.shape[1] // (8 * ACROSS)
    if rounding.PER_TILE:
        parts = map.reshape([4, 16, PARTS, ACROSS, 8]).permute([0, 3, 1, 2, 4])
        largest = amax(parts.reshape([4 * ACROSS, 16 * PARTS * 8]), 1)
        buffer.store(largest.reshape([1, 4 * ACROSS]))
    else:
        parts = map.reshape([BLOCK, PARTS, ACROSS, 8]).permute([2, 0, 1, 3])
        buffer.store(amax(parts.reshape([ACROSS, BLOCK, PARTS * 8]), 2))


@gluon.jit
def _codes_buffer(tokens):
    """View the first bytes of a buffer [64 tokens, channels] as one for `store_codes`."""
    COUNT: gl.constexpr = tokens.shape[1] * tokens.dtype.primitive_bitwidth // (8 * BLOCK)
    LAYOUT: gl.constexpr = rows_layout(BLOCK, 16)
    return reinterpret(tokens, gl.int16, [COUNT, BLOCK // 2, BLOCK], LAYOUT).index(0)


@gluon.jit
def shared_codes_buffers(k_s, v_s, SHARES_DS: gl.constexpr, DS_TILE: gl.constexpr):
    """Return buffers for the codes of P, for those of dS in dK, and for dS of dQ.

    Codes are stored by `store_codes`. P and dS take the shared memory of a tile of K and V, which
    are in registers then.
    SHARES_DS: whether dQ and dK multiply the same codes. DS_TILE: the layout of dS of dQ.
    """
    p_s = _codes_buffer(k_s)
    if SHARES_DS:
        ds_s = _codes_buffer(v_s)
        return p_s, ds_s, ds_s
    else:
        LAYOUT: gl.constexpr = rows_layout(BLOCK, 16)
        codes = gl.allocate_shared_memory(gl.int16, [BLOCK // 2, BLOCK], LAYOUT)
        return p_s, codes, reinterpret(v_s, gl.float32, [BLOCK, BLOCK], DS_TILE)


@constexpr_function
def _maxima_layout(across):
    """Layout [across, 64] of maxima of keys: a thread holds all of its keys."""
    registers = [[0, 8]] + [[1 << i, 0] for i in range(across.bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    warps = [[0, 0]] * (across.bit_length() - 1) + [[0, 16], [0, 32]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [across, BLOCK.value])


@gluon.jit
def _largest_of_keys(rounding, buffer, ACROSS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the largest magnitude that belongs to the scale of each key, from `store_maxima`."""
    if rounding.PER_TILE:
        return gl.full([BLOCK], _largest_of_tile(buffer, 0), gl.float32, LAYOUT)
    else:
        largest = amax(buffer.load(_maxima_layout(ACROSS)), 0)
        return gl.convert_layout(largest, LAYOUT, assert_trivial=True)


_JOIN = gl.constexpr(
    "prmt.b32 $0, $1, $3, 0x0040; prmt.b32 $0, $0, $2, 0x0410; prmt.b32 $0, $0, $4, 0x4210;"
)
_SPLIT = gl.constexpr("prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;")


@gluon.jit
def store_codes(map, rounding, maxima, buffer, ACROSS: gl.constexpr):
    """Round a map [64 keys, queries] to codes, store them as `store_pairs` does.

    maxima: what `store_maxima` stored. Returns the scale of each key.
    """
    KEYS: gl.constexpr = map.shape[0]
    QUERIES: gl.constexpr = map.shape[1]
    largest = _largest_of_keys(rounding, maxima, ACROSS, gl.SliceLayout(1, map.type.layout))
    codes = _rounded_bits(map, map_inverse(largest)[:, None].broadcast_to(map.shape))
    low, high = gl.split(codes.reshape([KEYS // 16, 2, 8, QUERIES]).permute([0, 2, 3, 1]))
    pairs = gl.inline_asm_elementwise(_JOIN, "=&r,r,r,r,r", [low, high], gl.int16, True, 2)
    buffer.store(pairs.reshape([KEYS // 2, QUERIES]))
    return map_scale(largest)


@constexpr_function
def _pairs_layout(across):
    """Layout [32, 64] of pairs as warps that share 64 keys hold them: all queries of their keys."""
    registers = [[0, 1], [0, 8], [0, 16], [0, 32]]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    warps = [[0, 0]] * (across.bit_length() - 1) + [[8, 0], [16, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [BLOCK.value // 2, BLOCK.value])


@gluon.jit
def load_left_pairs(buffer, LAYOUT: gl.constexpr, ACROSS: gl.constexpr):
    """Return what `store_codes` stored as a left operand [64 keys, queries] in register order."""
    pairs = buffer.load(_pairs_layout(ACROSS))
    low, high = gl.inline_asm_elementwise(
        _SPLIT, "=&r,=r,r,r", [pairs], (gl.int8, gl.int8), True, 4
    )
    codes = gl.join(low, high).reshape([BLOCK // 16, 8, BLOCK, 2]).permute([0, 3, 1, 2])
    codes = in_register_order(codes.reshape([BLOCK, BLOCK]))
    return gl.convert_layout(codes, gl.DotOperandLayout(0, LAYOUT, 4), assert_trivial=True)
