"""Smooth and round K, and round Q, in one launch.

A program holds a tile of several blocks in registers. It reads its head of K twice: first for the
mean, then to round it. The second time, K comes from the cache.
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
    coordinates_of,
    first_live_key,
    is_live_key,
    is_live_query,
    length_of,
    live_keys,
    mean_ptr,
    part_count,
    programs_of,
)
from sagesim_kernels.preparation.tiles import (
    WARP,
    channels_of,
    in_float32,
    load_tile,
    load_tiles,
    store_tiles,
    subtract_mean,
    tile_of_part,
    tokens_of,
)


@constexpr_function
def _layout_of_channels(warps):
    """Return a layout [channels] in which each thread holds as few channels as possible."""
    return gl.BlockedLayout([1], [WARP], [warps], [0])


@gluon.jit
def _for_all_tokens(numbers, T: gl.constexpr):
    """Return numbers [channels] with the layout of a `Tile`, [1, 1, channels]."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, T.LAYOUT))
    return gl.convert_layout(numbers, COLUMNS)[None, :][:, None, :]


@gluon.jit
def _sums_of_threads(x, T: gl.constexpr):
    """Return the sums of the tokens that a thread holds, float64 [threads, channels]."""
    THREADS: gl.constexpr = T.LAYOUT.threads_per_warp[1] * T.LAYOUT.warps_per_cta[1]
    parts = x.to(gl.float64).reshape([T.BLOCKS, T.TOKENS // THREADS, THREADS, T.CHANNELS])
    return gl.sum(parts, 1).reshape([T.BLOCKS * THREADS, T.CHANNELS])


@gluon.jit
def _live_count(lengths, b, length, T: gl.constexpr):
    """Return how many keys of sequence b a query attends to."""
    if lengths.key_mask is None:
        return gl.maximum(live_keys(lengths, b) - first_live_key(lengths, b), 0)
    else:
        tokens = tokens_of(T)
        counts = tokens * 0
        for first in range(0, length, T.BLOCKS * T.TOKENS):
            counts += is_live_key(lengths, b, first + tokens).to(gl.int32)
        return gl.sum(gl.sum(counts, 1), 0)


@gluon.jit
def _mean_of_head(k, means, lengths, h, b, D: gl.constexpr, T: gl.constexpr):
    """Compute and store the mean of a head of K, one part of its channels; [1, 1, channels]."""
    TOKENS: gl.constexpr = T.BLOCKS * T.TOKENS
    tokens, channels = tokens_of(T), channels_of(T)
    length = length_of(lengths.cu_k, lengths.n_k, b)
    zeros = (tokens * 0)[:, :, None] + channels * 0
    total = _sums_of_threads(zeros, T)  # has the layout of the sums
    for first in range(0, length, TOKENS):
        live = is_live_key(lengths, b, first + tokens)
        total += _sums_of_threads(load_tile(k, lengths.cu_k, first, h, b, live, D, T), T)
    # A division of float64 takes many instructions, so a thread divides few channels.
    total = gl.convert_layout(gl.sum(total, 0), _layout_of_channels(gl.num_warps()))
    count = gl.maximum(_live_count(lengths, b, length, T), 1)
    mean = (total / count.to(gl.float64)).to(gl.float32)
    column = T.FIRST + gl.arange(0, T.CHANNELS, mean.type.layout)
    gl.store(mean_ptr(means, b, h, 0, D) + column, mean, mask=column < D)
    return _for_all_tokens(mean, T)


@gluon.jit
def _prepare_head(k, means, k8, rounding, lengths, h, b, D: gl.constexpr, T: gl.constexpr):
    """Compute the mean of a head of K, and round the head minus its mean."""
    of_parts = ()
    for j in gl.static_range(part_count(D)):
        of_parts += (_mean_of_head(k, means, lengths, h, b, D, tile_of_part(T, D, j)),)
    for first in range(0, length_of(lengths.cu_k, lengths.n_k, b), T.BLOCKS * T.TOKENS):
        live = is_live_key(lengths, b, first + tokens_of(T))
        tiles = in_float32(load_tiles(k, lengths.cu_k, first, h, b, live, D, T))
        numbers = ()
        for j in gl.static_range(len(tiles)):
            numbers += (subtract_mean(tiles[j], of_parts[j], live, tile_of_part(T, D, j)),)
        store_tiles(k8, numbers, rounding, lengths.cu_k, lengths.n_k, first, h, b, D, T)


@gluon.jit
def _round_queries(q, q8, rounding, lengths, part, h, b, D: gl.constexpr, T: gl.constexpr):
    """Round the queries of tile number `part` of a head."""
    first = part * (T.BLOCKS * T.TOKENS)
    if first < length_of(lengths.cu_q, lengths.n_q, b):
        live = is_live_query(lengths, b, first + tokens_of(T))
        numbers = in_float32(load_tiles(q, lengths.cu_q, first, h, b, live, D, T))
        store_tiles(q8, numbers, rounding, lengths.cu_q, lengths.n_q, first, h, b, D, T)


@gluon.jit
def prepare_forward_kernel(
    q_grid, k_grid, q, k, means, q8, k8, q_rounding, k_rounding, lengths, D: gl.constexpr,
    Q_TILE: gl.constexpr, K_TILE: gl.constexpr,
):  # fmt: skip
    """Smooth and round a head of K, or round a tile of Q.

    The first programs, those of K, take longer than the others.

    q_grid: the tiles of Q. k_grid: one tile for each head of K. q, k: `Strided`. means: `Means` of
    K. q8, k8: `Operand` of qk. D: channels of a head. Q_TILE, K_TILE: `Tile` of the first part
    of the channels.
    """
    wait_for_earlier_kernels()
    program = gl.program_id(0)
    heads = programs_of(k_grid)
    if program < heads:
        _, h, b = coordinates_of(program, k_grid)
        _prepare_head(k, means, k8, k_rounding, lengths, h, b, D, K_TILE)
    else:
        part, h, b = coordinates_of(program - heads, q_grid)
        _round_queries(q, q8, q_rounding, lengths, part, h, b, D, Q_TILE)
