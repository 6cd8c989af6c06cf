"""What a backward needs of queries, in one pass over Q, O and dO.

A warp holds whole tokens of all three tensors, and waits for another warp only if they share a
scale. All loads of tokens begin before the first of their results is used, and before the kernel of
the keys has ended: that kernel does not write these tokens.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagesim_kernels.launching import wait_for_earlier_kernels
from sagesim_kernels.operands import (
    BLOCKS_AT_ONCE,
    KEYS_AT_ONCE,
    attended_bounds,
    clear_sums,
    is_live_query,
    length_of,
    load_rows,
    norms_of_squares,
    reversed_coordinates,
    row_sums64,
    squares_of,
    store_rows,
    stored_start_of,
    subtract_lse_gradient,
    units_of,
)
from sagesim_kernels.preparation.query_rows import store_delta_words, store_row_statistics
from sagesim_kernels.preparation.tiles import (
    WARP,
    as_rows_of,
    in_float32,
    load_tiles,
    store_tiles,
    tokens_of,
)


@constexpr_function
def _layout_of_keys(layout):
    """Return a layout [queries, keys] whose rows are in the threads of those of a `Tile`.

    layout: of the tile.
    """
    across = layout.threads_per_warp[2]
    keys = KEYS_AT_ONCE.value // across
    warps = layout.warps_per_cta[1]
    return gl.BlockedLayout([1, keys], [WARP // across, across], [warps, 1], [1, 0])


@constexpr_function
def _layout_of_blocks(warps):
    """Return a layout of key blocks in which each warp holds all of them."""
    each = BLOCKS_AT_ONCE.value // WARP
    return gl.SliceLayout(0, gl.BlockedLayout([1, each], [1, WARP], [warps, 1], [1, 0]))


@constexpr_function
def _layout_of_sums(warps):
    """Return a layout of sums of dQ, in vectors."""
    return gl.BlockedLayout([4], [WARP], [warps], [0])


@gluon.jit
def _bounds_of(bounds, lengths, b, k_head, block, first, sizes, T: gl.constexpr):
    """Return the `attended_bounds` of the queries of a `Tile`, three [1, tokens] and a scalar.

    block: the first query of the block. first: the first one of the tile.
    """
    KEYS: gl.constexpr = _layout_of_keys(T.LAYOUT)
    queries = first + gl.arange(0, T.TOKENS, gl.SliceLayout(1, KEYS))
    blocks = gl.arange(0, BLOCKS_AT_ONCE, _layout_of_blocks(gl.num_warps()))
    keys = gl.arange(0, KEYS_AT_ONCE, gl.SliceLayout(0, KEYS))
    found = attended_bounds(bounds, lengths, b, k_head, block, first, queries, blocks, keys, sizes)
    ROWS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, T.LAYOUT))
    v_norm = gl.convert_layout(found[0], ROWS)[None, :]
    k_amax = gl.convert_layout(found[1], ROWS)[None, :]
    k_norm = gl.convert_layout(found[2], ROWS)[None, :]
    return v_norm, k_amax, k_norm, found[3]


@gluon.jit
def prepare_queries_kernel(
    grid, q, o, do, q8, bounds, rounding, lse2, d_lse, delta, row_stats, deltas, dq_sums, lengths,
    scale_log2, growths, sizes, TYPE: gl.constexpr, Q_TILE: gl.constexpr, O_TILE: gl.constexpr,
):  # fmt: skip
    """Round some queries of a block to codes, compute delta, units and row statistics.

    Clear as many sums of dQ of the block, not of the same queries.

    Queries behind the last one of a sequence get statistics that make P 0.

    q, o, do: `Strided`. q8: `Operand` of qk_recompute. bounds: `KeyBounds`. lse2, d_lse, delta:
    `Rows`. row_stats, deltas: see `start_rows`. dq_sums: `DqSums`. growths: `Growths`. TYPE: the
    16-bit type of dp. Q_TILE, O_TILE: `Tile` of the first part of Q, and of O and dO.
    """
    part, h, b = reversed_coordinates(grid)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = part * Q_TILE.TOKENS
    block = first // sizes.BLOCK_Q * sizes.BLOCK_Q
    local = tokens_of(Q_TILE)
    row = first + local
    live = is_live_query(lengths, b, row)
    do_tiles = load_tiles(do, lengths.cu_q, first, h, b, live, sizes.DV, O_TILE)
    o_tiles = load_tiles(o, lengths.cu_q, first, h, b, live, sizes.DV, O_TILE)
    q_tiles = load_tiles(q, lengths.cu_q, first, h, b, live, sizes.D, Q_TILE)
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, row, n_q, float("inf"))
    wait_for_earlier_kernels()
    if block >= n_q:
        return
    attended = _bounds_of(bounds, lengths, b, h // sizes.GROUPS, block, first, sizes, Q_TILE)

    row_delta = gl.zeros(local.shape, gl.float64, gl.SliceLayout(2, Q_TILE.LAYOUT))
    squares = row_delta
    for j in gl.static_range(len(do_tiles)):
        numbers = do_tiles[j].to(gl.float32)
        row_delta += as_rows_of(Q_TILE, row_sums64(o_tiles[j].to(gl.float32) * numbers))
        squares += as_rows_of(Q_TILE, squares_of(numbers.to(TYPE).to(gl.float32)))
    row_delta = row_delta.to(gl.float32)
    row_delta = subtract_lse_gradient(row_delta, d_lse, lengths, b, h, row, n_q, row_lse2)
    do_norm = gl.where(row_lse2 != float("inf"), norms_of_squares(squares), 0.0)
    unit = units_of(
        None, do_norm, bounds, attended, None, lengths, b, h, first, row, row_lse2, row_delta,
        scale_log2, growths, sizes,
    )  # fmt: skip

    q_scale = store_tiles(
        q8, in_float32(q_tiles), rounding, lengths.cu_q, lengths.n_q, first, h, b, sizes.D, Q_TILE
    )
    at = h.to(gl.int64) * dq_sums.tokens + stored_start_of(lengths.cu_q, lengths.n_q, b) + block
    store_rows(delta, lengths.cu_q, b, h, row, n_q, row_delta)
    stats = row_stats + at * 4 + (row - block)
    gl.store(stats, q_scale * scale_log2)
    store_row_statistics(stats, unit, row_lse2, row_delta, sizes.BLOCK_Q)
    if deltas is not None:
        store_delta_words(deltas + (at + (row - block)) * 4, row_delta)
    if dq_sums.sums is not None:
        gl.store(dq_sums.unit + at + (row - block), unit)
        COUNT: gl.constexpr = Q_TILE.TOKENS * sizes.D_PAD
        places = gl.arange(0, COUNT, _layout_of_sums(gl.num_warps()))
        places += (first - block) * sizes.D_PAD
        clear_sums(dq_sums, at, places, sizes)
