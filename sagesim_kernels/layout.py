"""Where the tokens of a problem lie in memory, on the host and on the device.

Tensors are logically [sequences, heads, tokens, channels] with any strides. Of packed sequences of
unequal length there is one batch, and `cu_seqlens` says where each begins. Codes, and some copies
in 16 bit, lie in storage of our own: every sequence begins at a multiple of `ALIGNMENT` tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

ALIGNMENT = tl.constexpr(128)
"""Tokens; whole blocks of every spec, and whole tiles of the kernels that load by TMA."""


class Strided(NamedTuple):
    """A tensor [sequences, heads, tokens, channels] for a kernel."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_n: Any
    stride_d: Any

    @classmethod
    def of(cls, x: Tensor) -> Strided:
        """A batch of one has stride 0: packed sequences are all in it."""
        return cls(x, 0 if x.shape[0] == 1 else x.stride(0), *x.stride()[1:])


class Rows(NamedTuple):
    """One float32 number for each token and head: [sequences, heads, tokens], tokens contiguous."""

    ptr: Any
    stride_b: Any
    stride_h: Any

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        assert x.stride(2) == 1 or x.shape[2] <= 1
        return cls(x, 0 if x.shape[0] == 1 else x.stride(0), x.stride(1))


class Lengths(NamedTuple):
    """How many tokens the sequences have, and how the causal mask lies over them."""

    cu_q: Any  #: int32 [sequences + 1], where each begins; None where all have n_q tokens
    cu_k: Any
    n_q: Any
    n_k: Any
    IS_CAUSAL: Any  #: constexpr bool
    LOWER_RIGHT: Any  #: constexpr bool: the last query attends to the last key


class Grid(NamedTuple):
    """A program for each tile, head and sequence, along one axis: a GPU takes no more than 65,535
    along the others."""

    tiles: int
    heads: int
    sequences: int

    @property
    def programs(self) -> tuple[int]:
        return (self.tiles * self.heads * self.sequences,)


@triton.jit
def place_in(grid, LAST_FIRST: tl.constexpr = False):
    """The program's tile, head and sequence; tiles of one head run one after the other, the last
    of them first where that is asked for: under a causal mask it has the most keys."""
    program = tl.program_id(0)
    rest = program // grid.tiles
    tile = program % grid.tiles
    if LAST_FIRST:
        tile = grid.tiles - 1 - tile
    return tile, rest % grid.heads, rest // grid.heads


@triton.jit
def length_of(cu, n, b):
    """Tokens of sequence b."""
    if cu is None:
        return n
    else:
        return tl.load(cu + b + 1) - tl.load(cu + b)


@triton.jit
def start_of(cu, b):
    """The first token of sequence b in a tensor of packed sequences; 0 where none are packed."""
    if cu is None:
        return tl.cast(0, tl.int64)
    else:
        return tl.load(cu + b).to(tl.int64)


@triton.jit
def stored_start_of(cu, n, b):
    """The first token of sequence b in storage of our own.

    Packed sequences get one `ALIGNMENT` more than they begin at, so that none overlap.
    """
    if cu is None:
        return b.to(tl.int64) * (tl.cdiv(n, ALIGNMENT) * ALIGNMENT)
    else:
        return (tl.load(cu + b).to(tl.int64) // ALIGNMENT + b) * ALIGNMENT


def stored_tokens(cu: Tensor | None, x: Tensor) -> int:
    """Tokens that storage of our own has for x [sequences, heads, tokens, channels]."""
    tokens = ALIGNMENT.value
    if cu is None:
        return x.shape[0] * -(-x.shape[2] // tokens) * tokens
    return (x.shape[2] // tokens + cu.shape[0] - 1) * tokens


@triton.jit
def causal_offset(lengths, b):
    """Query i attends to keys 0..i + offset; to all of them where nothing is masked."""
    if lengths.LOWER_RIGHT:
        return length_of(lengths.cu_k, lengths.n_k, b) - length_of(lengths.cu_q, lengths.n_q, b)
    elif lengths.IS_CAUSAL:
        return tl.cast(0, tl.int32)
    else:
        return length_of(lengths.cu_k, lengths.n_k, b)


@triton.jit
def live_queries(lengths, b):
    """The queries first..n of sequence b attend to a key; those before attend to none."""
    n = length_of(lengths.cu_q, lengths.n_q, b)
    if lengths.IS_CAUSAL:
        return tl.maximum(-causal_offset(lengths, b), 0), n
    else:
        return tl.cast(0, tl.int32), n


@triton.jit
def live_keys(lengths, b):
    """The keys 0..live of sequence b have a query that attends to them; those behind have none."""
    n = length_of(lengths.cu_k, lengths.n_k, b)
    if lengths.IS_CAUSAL:
        n_q = length_of(lengths.cu_q, lengths.n_q, b)
        return tl.maximum(tl.minimum(n, n_q + causal_offset(lengths, b)), 0)
    else:
        return n


@triton.jit
def sees(queries, keys, n_k, offset):
    """Whether these queries attend to these keys, broadcastable to each other."""
    return (keys < n_k) & (keys <= queries + offset)


@triton.jit
def keys_seen(first, TILE: tl.constexpr, BLOCK: tl.constexpr, n_k, offset):
    """Of queries first..first + TILE: the end of the whole blocks of keys that all of them attend
    to, and of the keys that any of them does."""
    by_all = tl.maximum(tl.minimum(n_k, first + offset + 1), 0)
    # A zero that the compiler cannot know: of a loop over no block that it could drop, with one
    # token or one tile built in, it makes code that ptxas 12.8 and 12.9 crash on.
    by_all += tl.program_id(1)
    return by_all // BLOCK * BLOCK, tl.minimum(n_k, first + TILE + offset)


@triton.jit
def queries_seeing(first, TILE: tl.constexpr, BLOCK: tl.constexpr, n_k, offset, first_live, n_q):
    """Of keys first..first + TILE: the first block of queries of which any attends to any of them,
    and the first from which on all attend to all of them, or n_q."""
    by_any = tl.maximum(first_live, first - offset)
    by_all = tl.maximum(first_live, first + TILE - 1 - offset)
    if first + TILE > n_k:
        by_all = n_q
    return by_any // BLOCK * BLOCK, tl.minimum(tl.cdiv(by_all, BLOCK) * BLOCK, n_q)


@triton.jit
def tile_ptrs(base, first, count: tl.constexpr, columns, stride_n, stride_d):
    """Pointers to tokens first..first + count, counted from base, [count, columns].

    Every offset is 64 bit: strides may be anything, and a head of codes is as long as the batch.
    """
    local = tl.arange(0, count).to(tl.int64)
    return (
        base
        + tl.cast(first, tl.int64) * stride_n
        + local[:, None] * stride_n
        + columns.to(tl.int64)[None, :] * stride_d
    )


@triton.jit
def token_ptrs(x, cu, b, h, first, count: tl.constexpr, columns):
    """Pointers to tokens first..first + count of sequence b and head h of a `Strided`."""
    base = x.ptr + b.to(tl.int64) * x.stride_b + h.to(tl.int64) * x.stride_h
    base += start_of(cu, b) * x.stride_n
    return tile_ptrs(base, first, count, columns, x.stride_n, x.stride_d)


@triton.jit
def store_tokens(x, cu, b, h, first, last, value, D: tl.constexpr):
    """Store value [count, channels] as tokens first..first + count of sequence b and head h of a
    `Strided`, in its own format: those before token `last`, and the first D channels."""
    count: tl.constexpr = value.shape[0]
    column = tl.arange(0, value.shape[1])
    ptrs = token_ptrs(x, cu, b, h, first, count, column)
    mask = (first + tl.arange(0, count) < last)[:, None] & (column < D)[None, :]
    tl.store(ptrs, value.to(x.ptr.dtype.element_ty), mask=mask)


@triton.jit
def row_base(rows, cu, b, h):
    """A pointer to the number of the first token of sequence b and head h."""
    return (
        rows.ptr + b.to(tl.int64) * rows.stride_b + h.to(tl.int64) * rows.stride_h + start_of(cu, b)
    )
