"""Where the tokens of a problem lie in memory, on the host and on the device.

Every tensor is logically [sequences, heads, tokens, channels] and may have any strides. Packed
sequences of unequal length form a batch of one; `cu_seqlens` holds the index of the first token of
each. INT8 codes, and some copies in 16 bit, lie in padded storage: there every sequence starts at a
multiple of `ALIGNMENT` tokens.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.launching import Specialized

ALIGNMENT = tl.constexpr(128)
"""Tokens. A multiple of every block size of a spec and of every tile that is loaded by TMA."""

_PART: Final = 16
"""The fewest channels of a part of tokens; see `part_columns`."""


class Strided(NamedTuple):
    """A tensor [sequences, heads, tokens, channels] as a kernel argument."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_n: Any
    stride_d: Any
    DIVISOR: Any  #: constexpr, divides the other three strides: see `row_stride`

    @classmethod
    def of(cls, x: Tensor) -> Strided:
        """x with its strides. A batch of one gets stride 0, as all packed sequences are in it."""
        strides = 0 if x.shape[0] == 1 else x.stride(0), *x.stride()[1:]
        return cls(x, *map(Specialized, strides), _divisor(*strides[:3]))


def _divisor(*strides: int) -> tl.constexpr:
    """Return 8 if it divides the strides and Triton does not find out by itself, else 1."""
    by_8, by_16 = (all(x % n == 0 for x in strides) for n in (8, 16))
    return tl.constexpr(8 if by_8 and not by_16 else 1)


class Rows(NamedTuple):
    """A float32 tensor [sequences, heads, tokens] with contiguous tokens, as a kernel argument."""

    ptr: Any
    stride_b: Any
    stride_h: Any

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        """x with its strides. A batch of one gets stride 0, as all packed sequences are in it."""
        assert x.stride(2) == 1 or x.shape[2] <= 1
        return cls(x, 0 if x.shape[0] == 1 else x.stride(0), x.stride(1))


class Lengths(NamedTuple):
    """The lengths of all sequences, and what masks them, as a kernel argument."""

    cu_q: Any  #: int32 [sequences + 1], first query of each; None if all have n_q queries
    cu_k: Any  #: int32 [sequences + 1], first key of each; None if all have n_k keys
    n_q: Any
    n_k: Any
    IS_CAUSAL: Any  #: constexpr bool: queries attend to no key far after the diagonal
    LOWER_RIGHT: Any  #: constexpr bool: the last query is at the last key
    left: Any  #: keys before the diagonal that a query attends to; None: no limit
    right: Any  #: keys after the diagonal, if IS_CAUSAL; None: 0
    seqused_k: Any  #: integers [sequences], the keys that are no padding; None: all
    key_mask: Any  #: int8 [sequences, n_k], 0 for padding; None: none is
    key_counts: Any  #: int32 [sequences, n_k + 1]: how many keys before each are no padding
    key_runs: Any  #: int32 [sequences, 3]: first and end of the first keys in a row that are no
    #: padding, and the end of the last ones; n_k, n_k and 0 if all are padding


class HeadIndex(NamedTuple):
    """Indices of a sequence, a query head, and the head of K and V that the query head uses."""

    b: Any
    h: Any
    k_head: Any


class TokenBlocks(NamedTuple):
    """How a kernel cuts one tensor of tokens into blocks; every field is a constexpr."""

    IS_KEY: Any  #: whether the tokens are keys (K, V) or queries (Q, dO)
    D: Any  #: channels
    D_PAD: Any  #: a power of two, at least D
    BLOCK: Any  #: tokens of a block

    @classmethod
    def of(cls, is_key: bool, d: int, d_pad: int, block: int) -> TokenBlocks:
        return cls(*map(tl.constexpr, (is_key, d, d_pad, block)))


@triton.constexpr_function
def part_count(channels) -> Any:
    """Return of how many parts tokens consist, 1 or 2; see `part_columns`."""
    tile = triton.next_power_of_2(channels)
    return 2 if channels > _PART and channels <= tile // 8 * 5 else 1


@triton.constexpr_function
def channels_of_part(channels, tile, i) -> Any:
    """Return the first channel of part i, and how many it has."""
    if part_count(channels) == 1:
        return 0, tile
    half = triton.next_power_of_2(channels) // 2
    return (half, triton.next_power_of_2(max(channels - half, _PART))) if i else (0, half)


@triton.jit
def part_columns(blocks, i: tl.constexpr):
    """Return the channels of part i of the tokens of a `TokenBlocks`.

    Tensors of Triton have a power of two of channels. A kernel that holds 72 channels in a tensor
    of 128 spends almost half of its instructions on padding. So it holds such tokens in two
    tensors, of 64 and 16 channels. A single tensor takes less time if its padding is at most 3/8.
    """
    bounds: tl.constexpr = channels_of_part(blocks.D, blocks.D_PAD, i)
    return bounds[0] + tl.arange(0, bounds[1])


@triton.jit
def length_of(cu, n, b):
    """Return the number of tokens of sequence b."""
    if cu is None:
        return n
    else:
        return tl.load(cu + b + 1) - tl.load(cu + b)


@triton.jit
def start_of(cu, b):
    """Return the first token of sequence b in a tensor; 0 if sequences are not packed."""
    if cu is None:
        return tl.cast(0, tl.int64)
    else:
        return tl.load(cu + b).to(tl.int64)


@triton.jit
def stored_start_of(cu, n, b):
    """Return the first token of sequence b in padded storage.

    For packed sequences this is the index of the first token in the tensor, rounded down to a
    multiple of `ALIGNMENT`, plus b * `ALIGNMENT`. Sequences then never overlap.
    """
    if cu is None:
        return b.to(tl.int64) * (tl.cdiv(n, ALIGNMENT) * ALIGNMENT)
    else:
        return (tl.load(cu + b).to(tl.int64) // ALIGNMENT + b) * ALIGNMENT


@triton.jit
def stored_rest_of(cu, n, b, first):
    """Return the number of tokens from `first` to the end of the padded storage of sequence b."""
    return tl.cdiv(length_of(cu, n, b), ALIGNMENT) * ALIGNMENT - first


def stored_tokens(cu: Tensor | None, x: Tensor) -> int:
    """Return the tokens of padded storage for x [sequences, heads, tokens, channels]."""
    tokens = ALIGNMENT.value
    if cu is None:
        return x.shape[0] * -(-x.shape[2] // tokens) * tokens
    return (x.shape[2] // tokens + cu.shape[0] - 1) * tokens


@triton.jit
def tile_ptrs(base, first, count: tl.constexpr, columns, stride_n, stride_d):
    """Return pointers to tokens first..first + count after base, [count, columns].

    Offsets are 64 bit: strides are arbitrary, and a head of codes may have 2**31 elements.
    """
    return scattered_ptrs(base, first, tl.arange(0, count), columns, stride_n, stride_d)


@triton.jit
def scattered_ptrs(base, first, local, columns, stride_n, stride_d):
    """Return pointers to tokens first + local after base, [tokens, columns]; see `tile_ptrs`."""
    return (
        base
        + tl.cast(first, tl.int64) * stride_n
        + local.to(tl.int64)[:, None] * stride_n
        + columns.to(tl.int64)[None, :] * stride_d
    )


@triton.jit
def _multiple(stride, DIVISOR: tl.constexpr):
    """Return the stride in a form that shows to the compiler that it is a multiple of DIVISOR."""
    if DIVISOR == 1:
        return stride
    else:
        return stride // DIVISOR * DIVISOR


@triton.jit
def row_stride(x):
    """Return the elements from a token of a `Strided` to the next.

    Triton notices that an integer is divisible by 16, and by nothing less. Head sizes such as 72
    make strides that are divisible by 8: enough for vectors of 16 bytes, if the compiler knows it.
    """
    return _multiple(x.stride_n, x.DIVISOR)


@triton.jit
def head_ptr(x, cu, b, h):
    """Return a pointer to the first token of sequence b and head h of a `Strided`."""
    base = x.ptr + b.to(tl.int64) * _multiple(x.stride_b, x.DIVISOR)
    base += h.to(tl.int64) * _multiple(x.stride_h, x.DIVISOR)
    return base + start_of(cu, b) * row_stride(x)


@triton.jit
def token_ptrs(x, cu, b, h, first, count: tl.constexpr, columns):
    """Return pointers to tokens first..first + count of sequence b and head h of a `Strided`."""
    return tile_ptrs(head_ptr(x, cu, b, h), first, count, columns, row_stride(x), x.stride_d)


@triton.jit
def store_tokens(x, cu, b, h, first, last, value, D: tl.constexpr, is_stored=None):
    """Store value [count, channels] as tokens from `first` of sequence b and head h of a `Strided`.

    Writes tokens before `last` and the first D channels, rounded to the dtype of x, and no token
    where is_stored is False.
    """
    count: tl.constexpr = value.shape[0]
    column = tl.arange(0, value.shape[1])
    ptrs = token_ptrs(x, cu, b, h, first, count, column)
    mask = (first + tl.arange(0, count) < last)[:, None] & (column < D)[None, :]
    if is_stored is not None:
        mask = mask & is_stored[:, None]
    tl.store(ptrs, value.to(x.ptr.dtype.element_ty), mask=mask)


@triton.jit
def row_base(rows, cu, b, h):
    """Return a pointer to the first token's number of sequence b and head h of a `Rows`."""
    return (
        rows.ptr + b.to(tl.int64) * rows.stride_b + h.to(tl.int64) * rows.stride_h + start_of(cu, b)
    )
