"""One operand of a product as a kernel reads it: codes with scales, or numbers in 16 bit."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sagesim_kernels.layout import start_of, stored_start_of, tile_ptrs


class Operand(NamedTuple):
    """A tensor [sequences, heads, tokens, channels], rounded to its site's format.

    INT8: codes lie where `layout.stored_start_of` says. scale is float32 [heads, scales, channels
    or 1], one for each run of TOKENS tokens; its sequences begin where those of the codes do.
    16 bit: scale is None, and tokens lie as in the caller's tensors, or in storage like the codes.
    """

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_n: Any
    stride_d: Any
    scale: Any
    scale_stride_h: Any
    scale_stride_n: Any
    CHANNELS: Any  #: constexpr, in memory; behind the tensor's own, rows of codes end in zeros
    TOKENS: Any  #: constexpr, tokens that share a scale
    BY_CHANNEL: Any  #: constexpr bool, whether each channel has a scale of its own


@triton.jit
def _in_vectors(stride):
    """A stride of 16-bit numbers as it is, a multiple of 8, in a way that the compiler sees it."""
    return stride // 8 * 8


@triton.jit
def base_of(x, cu, n, b, h):
    """Pointers to the numbers and to the scale of the first token of sequence b and head h."""
    head = h.to(tl.int64)
    if x.scale is None:
        start = start_of(cu, b)
        base = x.ptr + b.to(tl.int64) * _in_vectors(x.stride_b) + head * _in_vectors(x.stride_h)
        return base + start * _in_vectors(x.stride_n), x.ptr
    else:
        start = stored_start_of(cu, n, b)
        scale = x.scale + head * x.scale_stride_h + start // x.TOKENS * x.scale_stride_n
        return x.ptr + head * x.stride_h + start * x.stride_n, scale


@triton.jit
def load_tokens(x, base, first, count: tl.constexpr, last, D_PAD: tl.constexpr, lowest=0):
    """The tokens first..first + count of an operand, [count, D_PAD].

    Zero from token `last` on, before token `lowest`, and behind the last channel.
    """
    row = first + tl.arange(0, count)
    valid = (row < last) & (row >= lowest)
    ptrs = _token_ptrs(x, base, first, count, D_PAD)
    if x.CHANNELS < D_PAD:
        valid = valid[:, None] & (tl.arange(0, D_PAD) < x.CHANNELS)[None, :]
        return tl.load(ptrs, mask=valid, other=0)
    else:
        return tl.load(ptrs, mask=valid[:, None], other=0)


@triton.jit
def load_block(
    x, base, first, count: tl.constexpr, last, D_PAD: tl.constexpr, WHOLE: tl.constexpr, lowest=0
):
    """As `load_tokens`, of a block of the spec that begins before token `last`: its codes are all
    in memory, zeros included. WHOLE: no token of it is to be zero."""
    if x.scale is None and not WHOLE:
        return load_tokens(x, base, first, count, last, D_PAD, lowest)
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
        return tile_ptrs(base, first, count, column, _in_vectors(x.stride_n), x.stride_d)
    else:
        return tile_ptrs(base, first, count, column, x.stride_n, x.stride_d)


@triton.jit
def load_token_scales(x, base, first, count, last):
    """The scales of tokens first..first + count, [count]; 1 where the format has none."""
    if x.scale is None:
        return tl.full((count,), 1.0, tl.float32)
    else:
        row = first + tl.arange(0, count)
        return tl.load(_scale_ptrs(x, base, row), mask=row < last, other=1.0)


@triton.jit
def load_block_scales(x, base, first, count: tl.constexpr):
    """As `load_token_scales`, of a block of the spec of which some token is in memory; [1] where
    its tokens share one."""
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
    """The scales of the block that begins at token `first`, [D_PAD], or [1] where its channels
    share one; 1 where the format has none."""
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
def with_k_scale(s, factor, k, k_scale, BLOCK_K: tl.constexpr):
    """Logits without scales, and what they are still to be multiplied by, with K's scale in the one
    or the other, in every kernel the same, so that P is.

    In the factor where the tokens of a block of the spec share a scale, as one number of a row is
    multiplied then, and not each of its logits.
    """
    if k.TOKENS == BLOCK_K:
        return s, factor * k_scale
    else:
        return s * k_scale, factor


@triton.jit
def tokens_by_tokens(left, right):
    """left [m, d] times the transpose of right [n, d], float32 [m, n], without the scales."""
    if left.dtype == tl.int8:
        return tl.dot(left, tl.trans(right), out_dtype=tl.int32).to(tl.float32)
    else:
        return tl.dot(left, tl.trans(right), out_dtype=tl.float32)
