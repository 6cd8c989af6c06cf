"""Means of K over a head and of Q over blocks, summed in float64 and rounded once."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.layout import (
    Grid,
    Lengths,
    Strided,
    live_keys,
    live_queries,
    place_in,
    stored_start_of,
    stored_tokens,
    token_ptrs,
)
from sagesim_kernels.primitives import LAUNCH, row_sums

_AT_ONCE: Final = 16384
"""Numbers that a program adds at once."""

_CHUNK: Final = 128
"""Tokens of K that one program adds."""


class Means(NamedTuple):
    """float32 [sequences, heads, means, channels], contiguous; `mean_of` finds one."""

    ptr: Any
    heads: Any
    means: Any

    @classmethod
    def of_heads(cls, mean: Tensor) -> Means:
        """Of one mean for each sequence and head, [sequences, heads, 1, channels]."""
        return cls(mean, mean.shape[1], 1)


@triton.jit
def mean_of(means, b, h, index, D: tl.constexpr, D_PAD: tl.constexpr):
    """A mean's channels, [1, D_PAD], zero from channel D on."""
    column = tl.arange(0, D_PAD)[None, :]
    row = (b.to(tl.int64) * means.heads + h) * means.means + index
    return tl.load(means.ptr + row * D + column, mask=column < D, other=0.0)


@triton.jit
def key_bias(
    q_mean,
    k_mean,
    raw_k,
    lengths,
    b,
    h,
    k_head,
    block,
    first,
    count: tl.constexpr,
    last,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """What smoothing Q took out of S: the mean of query block `block` times the smoothed keys
    first..first + count, [count].

    last: keys from there on have none.
    """
    local, column = tl.arange(0, count), tl.arange(0, D_PAD)
    ptrs = token_ptrs(raw_k, lengths.cu_k, b, k_head, first, count, column)
    mask = (first + local < last)[:, None] & (column < D)[None, :]
    keys = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if k_mean is not None:
        keys -= mean_of(k_mean, b, k_head, 0, D, D_PAD)
    return row_sums(keys * mean_of(q_mean, b, h, block, D, D_PAD))


@triton.jit
def _live(lengths, b, IS_KEY: tl.constexpr):
    """The tokens first..last of sequence b that the mask leaves."""
    if IS_KEY:
        return tl.cast(0, tl.int32), live_keys(lengths, b)
    else:
        return live_queries(lengths, b)


@triton.jit
def _sum_chunks(
    grid,
    x,
    sums,
    stored_chunks,
    lengths,
    IS_KEY: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):
    """The sum over each chunk's live tokens, float64 [heads, stored_chunks, D].

    A sequence's chunks lie where its tokens do in storage of our own, so there are no more of them
    than of tokens.
    """
    chunk, h, b = place_in(grid)
    if IS_KEY:
        cu, n = lengths.cu_k, lengths.n_k
    else:
        cu, n = lengths.cu_q, lengths.n_q
    first, last = _live(lengths, b, IS_KEY)
    if chunk * CHUNK >= last:
        return
    column = tl.arange(0, D_PAD)
    total = tl.zeros((D_PAD,), tl.float64)
    end = tl.minimum(CHUNK, last - chunk * CHUNK)
    for step in range(0, end, STEP):
        begin = chunk * CHUNK + step
        row = begin + tl.arange(0, STEP)
        mask = ((row >= first) & (row < last))[:, None] & (column < D)[None, :]
        ptrs = token_ptrs(x, cu, b, h, begin, STEP, column)
        total += tl.sum(tl.load(ptrs, mask=mask, other=0.0).to(tl.float64), 0)
    out = h.to(tl.int64) * stored_chunks + stored_start_of(cu, n, b) // CHUNK + chunk
    tl.store(sums + out * D + column, total, mask=column < D)


@triton.jit
def _divide_sums(
    grid,
    sums,
    stored_chunks,
    means,
    lengths,
    chunks,
    IS_KEY: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The mean over `chunks` chunks at a time, float32 [sequences, heads, means, D]."""
    mean, h, b = place_in(grid)
    if IS_KEY:
        cu, n = lengths.cu_k, lengths.n_k
    else:
        cu, n = lengths.cu_q, lengths.n_q
    first, last = _live(lengths, b, IS_KEY)
    column = tl.arange(0, D_PAD)
    stored = h.to(tl.int64) * stored_chunks + stored_start_of(cu, n, b) // CHUNK
    total = tl.zeros((D_PAD,), tl.float64)
    for chunk in range(mean * chunks, tl.minimum((mean + 1) * chunks, tl.cdiv(last, CHUNK))):
        total += tl.load(sums + (stored + chunk) * D + column, mask=column < D, other=0.0)
    start = mean * chunks * CHUNK
    tokens = tl.minimum(start + chunks * CHUNK, last) - tl.maximum(start, first)
    result = (total / tl.maximum(tokens, 1).to(tl.float64)).to(tl.float32)
    out = (b.to(tl.int64) * grid.heads + h) * grid.tiles + mean
    tl.store(means + out * D + column, result, mask=column < D)


def head_means(k: Tensor, lengths: Lengths, sequences: int, longest: int) -> Means:
    """The mean over the live keys of each head and sequence."""
    return _means(k, lengths, sequences, -(-longest // _CHUNK), 1, _CHUNK, is_key=True)


def block_means(q: Tensor, lengths: Lengths, sequences: int, longest: int, block: int) -> Means:
    """The mean over the live queries of each block."""
    blocks = -(-longest // block)
    return _means(q, lengths, sequences, blocks, blocks, block, is_key=False)


def _means(
    x: Tensor,
    lengths: Lengths,
    sequences: int,
    chunks: int,
    means: int,
    chunk: int,
    *,
    is_key: bool,
) -> Means:
    heads, d = x.shape[1], x.shape[3]
    d_pad = triton.next_power_of_2(d)
    cu = lengths.cu_k if is_key else lengths.cu_q
    stored_chunks = stored_tokens(cu, x) // chunk
    sums = torch.empty((heads, stored_chunks, d), dtype=torch.float64, device=x.device)
    out = torch.empty((sequences, heads, means, d), dtype=torch.float32, device=x.device)
    grid = Grid(chunks, heads, sequences)
    step = min(chunk, _AT_ONCE // d_pad)
    _sum_chunks[grid.programs](
        grid,
        Strided.of(x),
        sums,
        stored_chunks,
        lengths,
        is_key,
        d,
        d_pad,
        chunk,
        step,
        num_warps=2,  # the fewer, the sooner their sums are one
        **LAUNCH,
    )
    grid = Grid(means, heads, sequences)
    _divide_sums[grid.programs](
        grid, sums, stored_chunks, out, lengths, chunks // means, is_key, d, d_pad, chunk, **LAUNCH
    )
    return Means(out, heads, means)
