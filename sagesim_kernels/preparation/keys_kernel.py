"""What a backward needs of keys, in one pass over K and V."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagesim_kernels.launching import wait_for_earlier_kernels
from sagesim_kernels.operands import (
    is_live_key,
    largest,
    length_of,
    magnitude,
    mean_ptr,
    norms_of_squares,
    program_coordinates,
    squares_of,
    stored_start_of,
)
from sagesim_kernels.preparation.tiles import (
    as_rows_of,
    channels_of,
    load_tiles,
    store_tiles,
    subtract_mean,
    tile_of_part,
    token_maxima,
    tokens_of,
)


@gluon.jit
def _smoothed(x, mean, h, b, live, D: gl.constexpr, T: gl.constexpr):
    """Return a tile of K minus the mean of its head, float32. mean: `Means`, or None."""
    x = x.to(gl.float32)
    if mean is not None:
        column = channels_of(T)
        of_head = gl.load(mean_ptr(mean, b, h, 0, D) + column, mask=column < D, other=0.0)
        x = subtract_mean(x, of_head, live, T)
    return x


@gluon.jit
def _store_bounds(of_keys, of_blocks, at, local, bounds):
    """Store bounds of a block of keys and their maximum. at: the first key in padded storage."""
    gl.store(of_keys + at + local, bounds)
    gl.store(of_blocks + at // local.shape[1], largest(largest(bounds, 1), 0))


@gluon.jit
def prepare_keys_kernel(
    grid, k, v, mean, k8, bounds, rounding, lengths, sizes, TYPE: gl.constexpr,
    K_TILE: gl.constexpr, V_TILE: gl.constexpr,
):  # fmt: skip
    """Round a block of K, minus its mean, to codes, and compute the `KeyBounds` of the block.

    k, v: `Strided`. mean: `Means` of K, or None. k8: `Operand` of qk_recompute. TYPE: the 16-bit
    type of the other products. K_TILE, V_TILE: `Tile` of the first part of K and of V.
    """
    wait_for_earlier_kernels()
    i, h, b = program_coordinates(grid)
    cu = lengths.cu_k
    first = i * K_TILE.TOKENS
    if first >= length_of(cu, lengths.n_k, b):
        return
    local = tokens_of(K_TILE)
    live = is_live_key(lengths, b, first + local)
    k_tiles = load_tiles(k, cu, first, h, b, live, sizes.D, K_TILE)
    v_tiles = load_tiles(v, cu, first, h, b, live, sizes.DV, V_TILE)
    numbers = ()
    rounded = ()
    for j in gl.static_range(len(k_tiles)):
        x = _smoothed(k_tiles[j], mean, h, b, live, sizes.D, tile_of_part(K_TILE, sizes.D, j))
        numbers += (x,)
        rounded += (x.to(TYPE).to(gl.float32),)
    squares = gl.zeros(local.shape, gl.float64, gl.SliceLayout(2, K_TILE.LAYOUT))
    for j in gl.static_range(len(v_tiles)):
        squares += as_rows_of(K_TILE, squares_of(v_tiles[j].to(TYPE).to(gl.float32)))
    at = h.to(gl.int64) * bounds.tokens + stored_start_of(cu, lengths.n_k, b) + first
    store_tiles(k8, numbers, rounding, cu, lengths.n_k, first, h, b, sizes.D, K_TILE)
    of_k, of_v = token_maxima(rounded, K_TILE), magnitude(norms_of_squares(squares))
    _store_bounds(bounds.k_amax, bounds.block_k_amax, at, local, of_k)
    _store_bounds(bounds.v_norm, bounds.block_v_norm, at, local, of_v)
