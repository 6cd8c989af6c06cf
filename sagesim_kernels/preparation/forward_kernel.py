"""Smooth and round K, and round Q, in one launch.

A program holds a tile of several blocks in registers. It reads its head of K twice: first for the
mean, then to round it. The second time, K comes from the cache.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagesim_kernels.launching import wait_for_earlier_kernels
from sagesim_kernels.operands import (
    code_max,
    coordinates_of,
    first_live_key,
    head_ptr,
    is_live_key,
    is_live_query,
    largest,
    length_of,
    live_keys,
    magnitude,
    programs_of,
    row_stride,
    scale_and_inverse,
    scales_of_block,
    stored_codes,
    stored_rest_of,
    stored_start_of,
    to_codes,
)

_WARP = 32
_VECTOR = 16
"""Bytes that a thread loads at once."""


class Tile(NamedTuple):
    """Consecutive blocks of tokens that a program holds at once, as one constexpr."""

    BLOCKS: Any  #: a power of two
    TOKENS: Any  #: of a block
    CHANNELS: Any  #: a power of two, at least 32
    LAYOUT: Any  #: of [blocks, tokens, channels]

    @classmethod
    def of(cls, blocks: int, tokens: int, channels: int, itemsize: int, warps: int) -> Tile:
        """Return a tile of `blocks` blocks.

        If there are fewer blocks than warps, several warps share a block. Otherwise a warp holds
        whole blocks, and finds their largest numbers alone. A block has at least as many tokens as
        the threads that share one of its channels. itemsize: bytes of an element.
        """
        vector = _VECTOR // itemsize
        across = channels // vector
        of_blocks = min(warps, blocks)
        threads = [1, _WARP // across, across]
        layout = gl.BlockedLayout(
            [1, 1, vector], threads, [of_blocks, warps // of_blocks, 1], [2, 1, 0]
        )
        return cls(blocks, tokens, channels, layout)


@constexpr_function
def _layout_of_channels(warps):
    """Return a layout [channels] in which each thread holds as few channels as possible."""
    return gl.BlockedLayout([1], [_WARP], [warps], [0])


@gluon.jit
def _tokens_of(T: gl.constexpr):
    """Return the tokens of a `Tile`, [blocks, tokens]."""
    ROWS: gl.constexpr = gl.SliceLayout(2, T.LAYOUT)
    block = gl.arange(0, T.BLOCKS, gl.SliceLayout(1, ROWS))
    token = gl.arange(0, T.TOKENS, gl.SliceLayout(0, ROWS))
    return block[:, None] * T.TOKENS + token[None, :]


@gluon.jit
def _for_all_tokens(numbers, T: gl.constexpr):
    """Return numbers [channels] with the layout of a `Tile`, [1, 1, channels]."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, T.LAYOUT))
    return gl.convert_layout(numbers, COLUMNS)[None, :][:, None, :]


@gluon.jit
def _channels_of(T: gl.constexpr):
    """Return the channels of a `Tile`, [1, 1, channels]."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, T.LAYOUT))
    return gl.arange(0, T.CHANNELS, COLUMNS)[None, :][:, None, :]


@gluon.jit
def _load(x, cu, first, h, b, live, D: gl.constexpr, T: gl.constexpr):
    """Load the tokens from `first` of sequence b and head h of a `Strided`; 0 if not live."""
    row = (first + _tokens_of(T)).to(gl.int64)[:, :, None]
    column = _channels_of(T)
    ptrs = head_ptr(x, cu, b, h) + row * row_stride(x) + column.to(gl.int64) * x.stride_d
    return gl.load(ptrs, mask=live[:, :, None] & (column < D), other=0.0)


@gluon.jit
def _store(out, x, rounding, cu, n, first, h, b, T: gl.constexpr):
    """Store the codes and scales of x float32, the tokens from `first`, to the `Operand` out."""
    first = gl.to_tensor(first)
    local, column = _tokens_of(T), _channels_of(T)
    left = stored_rest_of(cu, n, b, first)
    gl.static_assert(out.TOKENS == 1 or out.TOKENS == T.TOKENS, "a scale for a token or a block")
    gl.static_assert(not out.BY_CHANNEL and not out.ALONG_TOKENS, "codes of rows")
    scale_ptr = scales_of_block(out, cu, n, first // T.TOKENS, h, b, T.TOKENS)
    if out.TOKENS == 1:
        scale, inverse = scale_and_inverse(largest(magnitude(x), 2), code_max(rounding.FORMAT))
        gl.store(scale_ptr + local, scale, mask=local < left)
        inverse = inverse[:, :, None]
    else:
        blocks = magnitude(x).reshape([T.BLOCKS, T.TOKENS * T.CHANNELS])
        scale, inverse = scale_and_inverse(largest(blocks, 1), code_max(rounding.FORMAT))
        block = gl.arange(0, T.BLOCKS, scale.type.layout)
        gl.store(scale_ptr + block, scale, mask=first + block * T.TOKENS < length_of(cu, n, b))
        OF_BLOCKS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, T.LAYOUT))
        inverse = gl.convert_layout(inverse, OF_BLOCKS)[:, None][:, :, None]
    codes = to_codes(x * inverse, (first + local)[:, :, None], column, rounding)
    row = (stored_start_of(cu, n, b) + first + local)[:, :, None]
    ptrs = out.ptr + h.to(gl.int64) * out.stride_h + row * out.stride_n
    mask = (local < left)[:, :, None] & (column < out.CHANNELS)
    gl.store(ptrs + column.to(gl.int64) * out.stride_d, stored_codes(codes), mask=mask)


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
        tokens = _tokens_of(T)
        counts = tokens * 0
        for first in range(0, length, T.BLOCKS * T.TOKENS):
            counts += is_live_key(lengths, b, first + tokens).to(gl.int32)
        return gl.sum(gl.sum(counts, 1), 0)


@gluon.jit
def _prepare_head(k, means, k8, rounding, lengths, h, b, D: gl.constexpr, T: gl.constexpr):
    """Compute the mean of a head of K, and round the head minus its mean."""
    TOKENS: gl.constexpr = T.BLOCKS * T.TOKENS
    WARPS: gl.constexpr = gl.num_warps()
    tokens = _tokens_of(T)
    length = length_of(lengths.cu_k, lengths.n_k, b)
    zeros = (tokens * 0)[:, :, None] + _channels_of(T) * 0
    total = _sums_of_threads(zeros, T)  # has the layout of the sums
    for first in range(0, length, TOKENS):
        live = is_live_key(lengths, b, first + tokens)
        total += _sums_of_threads(_load(k, lengths.cu_k, first, h, b, live, D, T), T)
    # A division of float64 takes many instructions, so a thread divides few channels.
    total = gl.convert_layout(gl.sum(total, 0), _layout_of_channels(WARPS))
    count = gl.maximum(_live_count(lengths, b, length, T), 1)
    mean = (total / count.to(gl.float64)).to(gl.float32)
    column = gl.arange(0, T.CHANNELS, mean.type.layout)
    out = means.ptr + (b.to(gl.int64) * means.heads + h) * D
    gl.store(out + column, mean, mask=column < D)
    mean = _for_all_tokens(mean, T)
    for first in range(0, length, TOKENS):
        live = is_live_key(lengths, b, first + tokens)
        x = _load(k, lengths.cu_k, first, h, b, live, D, T).to(gl.float32)
        rest = gl.where(live[:, :, None], x - mean, 0.0)
        _store(k8, rest, rounding, lengths.cu_k, lengths.n_k, first, h, b, T)


@gluon.jit
def _round_queries(q, q8, rounding, lengths, part, h, b, D: gl.constexpr, T: gl.constexpr):
    """Round the queries of tile number `part` of a head."""
    first = part * (T.BLOCKS * T.TOKENS)
    if first < length_of(lengths.cu_q, lengths.n_q, b):
        live = is_live_query(lengths, b, first + _tokens_of(T))
        x = _load(q, lengths.cu_q, first, h, b, live, D, T).to(gl.float32)
        _store(q8, x, rounding, lengths.cu_q, lengths.n_q, first, h, b, T)


@gluon.jit
def prepare_forward_kernel(
    q_grid, k_grid, q, k, means, q8, k8, q_rounding, k_rounding, lengths, D: gl.constexpr,
    Q_TILE: gl.constexpr, K_TILE: gl.constexpr,
):  # fmt: skip
    """Smooth and round a head of K, or round a tile of Q.

    The first programs, those of K, take longer than the others.

    q_grid: the tiles of Q. k_grid: one tile for each head of K. q, k: `Strided`. means: `Means` of
    K. q8, k8: `Operand` of qk. D: channels of a head. Q_TILE, K_TILE: `Tile`.
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
