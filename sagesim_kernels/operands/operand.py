"""An operand of a matrix product as a kernel loads it: codes with scales, or 16-bit values."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.launching import Specialized
from sagesim_kernels.operands.formats import INT8, VALUES, loaded_codes
from sagesim_kernels.operands.layout import (
    ALIGNMENT,
    Strided,
    start_of,
    stored_start_of,
    stored_tokens,
    tile_ptrs,
)
from sagesim_kernels.operands.rounding import code_product

AS_TOKENS = tl.constexpr(0)
"""The order of codes that are summed over: that of the tokens."""
IN_REGISTERS = tl.constexpr(1)
"""See `in_register_order`."""
IN_PAIRS = tl.constexpr(2)
"""See `in_pairs`."""


class Operand(NamedTuple):
    """A tensor [sequences, heads, tokens, channels], rounded to the format of a product.

    Codes lie in padded storage, see `layout.stored_start_of`; their scales are float32
    [heads, scales, channels or 1], see `scale_start_of`. 16-bit values lie in a tensor of the
    caller, or in padded storage as a batch of one.

    The fields are not nested, because Triton 3.6 loses constexprs of nested tuples in loops.
    """

    ptr: Any  #: codes as `formats` describes, or 16-bit values
    stride_b: Any
    stride_h: Any
    stride_n: Any
    stride_d: Any
    scale: Any  #: None in 16 bit
    scale_stride_h: Any
    scale_stride_n: Any
    CHANNELS: Any  #: constexpr, channels in memory; codes after the tensor's own channels are 0
    TOKENS: Any  #: constexpr, consecutive tokens that share a scale; None in 16 bit
    BY_CHANNEL: Any  #: constexpr bool, whether each channel has its own scale; None in 16 bit
    ALONG_TOKENS: Any  #: constexpr bool, whether consecutive tokens are contiguous in memory
    ORDER: Any  #: constexpr, of the tokens of codes along tokens: `AS_TOKENS`, for example
    STORED: Any  #: constexpr bool, whether the tokens lie in padded storage, as codes always do
    FORMAT: Any  #: constexpr, of the codes, see `formats`

    @classmethod
    def of_codes(
        cls,
        codes: Tensor,
        strides: tuple[int, int, int, int],
        channels: int,
        scale: Tensor,
        per_scale: int,
        by_channel: bool,
        *,
        along_tokens: bool,
        order: tl.constexpr,
        how: tl.constexpr = INT8,
    ) -> Operand:
        """Codes and their scales [heads, scales, channels or 1]; `per_scale` tokens share one.

        how: the format of the codes, see `formats`.
        """
        has_many = by_channel or per_scale == 1  # a thread loads several scales of a block
        stride_h = scale.stride(0)
        return cls(
            codes,
            *map(Specialized, strides),
            scale=scale,
            scale_stride_h=Specialized(stride_h) if has_many else stride_h,
            scale_stride_n=Specialized(scale.stride(1)),
            CHANNELS=tl.constexpr(channels),
            TOKENS=tl.constexpr(per_scale),
            BY_CHANNEL=tl.constexpr(by_channel),
            ALONG_TOKENS=tl.constexpr(along_tokens),
            ORDER=order,
            STORED=tl.constexpr(True),
            FORMAT=how,
        )

    @classmethod
    def of_values(cls, x: Tensor, *, stored: bool) -> Operand:
        """16-bit values [sequences, heads, tokens, channels] whose rows are whole vectors.

        stored: whether x is padded storage, a batch of one.
        """
        return cls(
            *Strided.of(x)[:5],
            scale=None,
            scale_stride_h=Specialized(0),
            scale_stride_n=Specialized(0),
            CHANNELS=tl.constexpr(x.shape[3]),
            TOKENS=tl.constexpr(None),
            BY_CHANNEL=tl.constexpr(None),
            ALONG_TOKENS=tl.constexpr(False),
            ORDER=AS_TOKENS,
            STORED=tl.constexpr(stored),
            FORMAT=VALUES,
        )


@triton.jit
def in_register_order(x):
    """Return x [m, n] with columns in the order in which they are summed over in register order.

    A thread holds the columns 2t, 2t + 1, 2t + 8 and 2t + 9 of 16 columns of a product. As a left
    operand in INT8 it has to hold the numbers 4t to 4t + 3. A sum does not depend on the order of
    its terms if both operands have the same: no thread has to exchange codes with another.
    """
    pairs = tl.reshape(x, (x.shape[0], x.shape[1] // 16, 2, 4, 2))
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2, 4)), x.shape)


@triton.jit
def in_pairs(x):
    """Return x [m, n] with columns j and j + 8 of 16 columns next to each other.

    A thread holds the rows j and j + 8 of 16 rows of a product. It can store two codes of a column
    at once if they are neighbours where the rows are summed over.
    """
    halves = tl.reshape(x, (x.shape[0], x.shape[1] // 16, 2, 8))
    return tl.reshape(tl.permute(halves, (0, 1, 3, 2)), x.shape)


@triton.jit
def token_in_register_order(place):
    """Return the token whose code is at a place of codes in register order."""
    return place // 16 * 16 + place % 4 // 2 * 8 + place % 16 // 4 * 2 + place % 2


@triton.jit
def _multiple_of_8(stride):
    """Return the stride, which is a multiple of 8, in a form that shows this to the compiler."""
    return stride // 8 * 8


@triton.jit
def head_pointers(x, cu, n, b, h):
    """Return pointers to the first token, and its scale, of sequence b and head h of an `Operand`.

    The second pointer has no meaning if the operand is in 16 bit.
    """
    head = h.to(tl.int64)
    if x.scale is None:
        start = stored_start_of(cu, n, b) if x.STORED else start_of(cu, b)
        base = x.ptr + b.to(tl.int64) * _multiple_of_8(x.stride_b)
        base += head * _multiple_of_8(x.stride_h)
        return base + start * _multiple_of_8(x.stride_n), x.ptr
    else:
        start = stored_start_of(cu, n, b)
        scale = x.scale + head * x.scale_stride_h
        scale += scale_start_of(x, cu, n, b) * x.scale_stride_n
        return x.ptr + head * x.stride_h + start * x.stride_n, scale


@triton.jit
def scale_start_of(x, cu, n, b):
    """Return the index of the first scale of sequence b of an `Operand`.

    The scales of a sequence start where its codes start, divided by TOKENS. Longer blocks than the
    alignment of padded storage have the order of the sequences, without a gap between two.
    """
    if x.TOKENS <= ALIGNMENT:
        return stored_start_of(cu, n, b) // x.TOKENS
    elif cu is None:
        return b.to(tl.int64) * tl.cdiv(n, x.TOKENS)
    else:
        return tl.load(cu + b).to(tl.int64) // x.TOKENS + b


@triton.jit
def scales_of_block(x, cu, n, i, h, b, BLOCK: tl.constexpr):
    """Return a pointer to the first scale of block i of sequence b and head h of an `Operand`."""
    start = scale_start_of(x, cu, n, b) + i.to(tl.int64) * (BLOCK // x.TOKENS)
    return x.scale + h.to(tl.int64) * x.scale_stride_h + start * x.scale_stride_n


def stored_scales(cu: Tensor | None, x: Tensor, per_scale: int) -> int:
    """Return the scales of a head of x [sequences, heads, tokens, channels]: `scale_start_of`."""
    if per_scale <= ALIGNMENT.value:
        return stored_tokens(cu, x) // per_scale
    if cu is None:
        return x.shape[0] * -(-x.shape[2] // per_scale)
    return x.shape[2] // per_scale + cu.shape[0] - 1


@triton.jit
def load_tokens(
    x, base, first, count: tl.constexpr, last, D_PAD: tl.constexpr, lowest=0, live=None
):
    """Load tokens first..first + count of an `Operand`, [count, D_PAD].

    base: the first pointer of `head_pointers`. Tokens before `lowest` and from `last` on are 0, and
    so are those that are not in live [count], and channels that are not in memory.
    """
    row = first + tl.arange(0, count)
    valid = (row < last) & (row >= lowest)
    if live is not None:
        valid = valid & live
    ptrs = _token_ptrs(x, base, first, count, D_PAD)
    if x.CHANNELS < D_PAD:
        valid = valid[:, None] & (tl.arange(0, D_PAD) < x.CHANNELS)[None, :]
        return tl.load(ptrs, mask=valid, other=0)
    else:
        return tl.load(ptrs, mask=valid[:, None], other=0)


@triton.jit
def load_block(
    x,
    base,
    first,
    count: tl.constexpr,
    last,
    D_PAD: tl.constexpr,
    WHOLE: tl.constexpr,
    lowest=0,
    live=None,
):
    """Load a block of the spec as `load_tokens` does, without a mask over tokens where possible.

    first: before `last`. Codes need no mask, because padded storage holds whole blocks and zeros.
    WHOLE: all tokens are in lowest..last and in `live`.
    """
    if x.scale is None and not WHOLE:
        return load_tokens(x, base, first, count, last, D_PAD, lowest, live)
    else:
        ptrs = _token_ptrs(x, base, first, count, D_PAD)
        if x.CHANNELS < D_PAD:
            return tl.load(ptrs, mask=(tl.arange(0, D_PAD) < x.CHANNELS)[None, :], other=0)
        else:
            return tl.load(ptrs)


@triton.jit
def _token_ptrs(x, base, first, count: tl.constexpr, D_PAD: tl.constexpr):
    column = tl.arange(0, D_PAD)
    if x.scale is None:
        stride_n = _multiple_of_8(x.stride_n)
        return tile_ptrs(base, first, count, column, stride_n, x.stride_d)
    else:
        return tile_ptrs(base, first, count, column, x.stride_n, x.stride_d)


@triton.jit
def load_token_scales(x, base, first, count, last):
    """Load the scales of tokens first..first + count, [count]; 1 in 16 bit and from `last` on.

    base: the second pointer of `head_pointers`.
    """
    if x.scale is None:
        return tl.full((count,), 1.0, tl.float32)
    else:
        row = first + tl.arange(0, count)
        return tl.load(_scale_ptrs(x, base, row), mask=row < last, other=1.0)


@triton.jit
def load_block_scales(x, base, first, count: tl.constexpr):
    """Load the scales of a block of the spec, [count], or [1] if its tokens share one; 1 in 16 bit.

    The block must have a token in memory.
    """
    if x.scale is None:
        return tl.full((count,), 1.0, tl.float32)
    elif count == x.TOKENS:
        return tl.load(_scale_ptrs(x, base, first + tl.arange(0, 1)))
    else:
        return tl.load(_scale_ptrs(x, base, first + tl.arange(0, count)))


@triton.jit
def _scale_ptrs(x, base, row):
    return base + (row // x.TOKENS).to(tl.int64) * x.scale_stride_n


@triton.jit
def load_channel_scales(x, base, first, D: tl.constexpr, D_PAD: tl.constexpr):
    """Load the scales of the block that starts at token `first`, one for each channel, [D_PAD].

    [1] if its channels share one, and [1] with the value 1 in 16 bit.
    """
    if x.scale is None:
        return tl.full((1,), 1.0, tl.float32)
    else:
        ptr = base + tl.cast(first // x.TOKENS, tl.int64) * x.scale_stride_n
        if x.BY_CHANNEL:
            column = tl.arange(0, D_PAD)
            return tl.load(ptr + column, mask=column < D, other=1.0)
        else:
            return tl.load(ptr + tl.arange(0, 1))


@triton.jit
def apply_k_scale(s, factor, k, k_scale, BLOCK_K: tl.constexpr):
    """Multiply K's scale into the logits s or into their factor; return both.

    The logits are s * factor. If the keys of a block share a scale, it goes into the factor: then
    one number a row is multiplied instead of every logit. All kernels use this function, so that
    they compute the same P.

    The power of two changes no bit if the scale of K is at least 2^-116. A smaller scale loses
    bits, because its product with 2^-10 is subnormal. The power of two keeps a sum of codes from
    overflowing when it is multiplied by a large scale of K before a small one of Q.
    """
    if k.scale is None:
        return s, factor
    elif k.TOKENS == BLOCK_K:
        return s, factor * k_scale
    else:
        return s * (k_scale * 2.0**-10), factor * 2.0**10


@triton.jit
def tokens_by_tokens(left, right):
    """Return left [m, d] times the transpose of right [n, d], float32 [m, n], without scales."""
    if left.dtype == tl.int8:
        return code_product(left, tl.trans(right))
    else:
        return tl.dot(left, tl.trans(right), out_dtype=tl.float32)


@triton.jit
def numbers_of(x, tokens):
    """Return loaded tokens of an `Operand` as float32 numbers, without scales."""
    return loaded_codes(tokens, x.FORMAT).to(tl.float32)
