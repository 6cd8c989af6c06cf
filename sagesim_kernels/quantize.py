"""amax -> scale -> codes of Q, K, V and dO, one program for each block of tokens."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim.spec import MAPS, OPERANDS, Granularity, Precision
from sagesim_kernels.layout import (
    ALIGNMENT,
    Grid,
    Strided,
    length_of,
    live_keys,
    live_queries,
    place_in,
    store_tokens,
    stored_start_of,
    stored_tokens,
    tile_ptrs,
    token_ptrs,
)
from sagesim_kernels.operands import Operand
from sagesim_kernels.primitives import LAUNCH, Rounding, magnitude, scale_and_inverse, to_codes
from sagesim_kernels.problem import Problem
from sagesim_kernels.smoothing import Means, block_means, head_means, mean_of

DTYPES: Final = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
"""The unscaled formats a site may have."""

_VECTOR: Final = 16
"""Bytes; rows of operands begin on multiples of it, and are read in vectors of it. Loops that read
channel by channel are slow, and some were miscompiled by ptxas 12.8, Triton 3.6's: see
tests/support/sass.py."""


@triton.jit
def _load_block(
    x,
    mean,
    lengths,
    i,
    h,
    b,
    IS_KEY: tl.constexpr,
    PER_BLOCK_MEAN: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tokens i * BLOCK and on, [BLOCK, D_PAD] in float32, less their mean; zero where not live."""
    if IS_KEY:
        cu, first, last = lengths.cu_k, 0, live_keys(lengths, b)
    else:
        cu = lengths.cu_q
        first, last = live_queries(lengths, b)
    row = i * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, D_PAD)
    mask = ((row >= first) & (row < last))[:, None] & (column < D)[None, :]
    ptrs = token_ptrs(x, cu, b, h, i * BLOCK, BLOCK, column)
    tokens = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if mean is not None:
        index = i if PER_BLOCK_MEAN else 0
        tokens = tl.where(mask, tokens - mean_of(mean, b, h, index, D, D_PAD), 0.0)
    return tokens


@triton.jit
def _encode(
    grid,
    x,
    mean,
    out,
    lengths,
    rounding,
    IS_KEY: tl.constexpr,
    PER_BLOCK_MEAN: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Codes and scales of one block of tokens."""
    i, h, b = place_in(grid)
    if IS_KEY:
        cu, n = lengths.cu_k, lengths.n_k
    else:
        cu, n = lengths.cu_q, lengths.n_q
    if i * BLOCK >= length_of(cu, n, b):
        return
    tokens = _load_block(x, mean, lengths, i, h, b, IS_KEY, PER_BLOCK_MEAN, D, D_PAD, BLOCK)
    start = stored_start_of(cu, n, b) + i.to(tl.int64) * BLOCK
    local, column = tl.arange(0, BLOCK), tl.arange(0, D_PAD)
    scale_ptr = out.scale + h.to(tl.int64) * out.scale_stride_h
    scale_ptr += start // out.TOKENS * out.scale_stride_n
    size = magnitude(tokens)
    if out.BY_CHANNEL:
        scale, inverse = scale_and_inverse(tl.max(size, 0)[None, :])
        tl.store(scale_ptr + column[None, :], scale, mask=column[None, :] < D)
    elif out.TOKENS == 1:
        scale, inverse = scale_and_inverse(tl.max(size, 1)[:, None])
        tl.store(scale_ptr + local[:, None], scale)
    else:
        amax = tl.max(tl.max(size, 1)[:, None], 0)[None, :]
        scale, inverse = scale_and_inverse(amax)
        tl.store(scale_ptr + tl.arange(0, 1)[None, :], scale)
    codes = to_codes(tokens * inverse, (i * BLOCK + local)[:, None], column[None, :], rounding)
    base = out.ptr + h.to(tl.int64) * out.stride_h
    ptrs = tile_ptrs(base, start, BLOCK, column, out.stride_n, out.stride_d)
    tl.store(ptrs, codes, mask=column[None, :] < out.CHANNELS)


@triton.jit
def _copy(
    grid,
    x,
    mean,
    out,
    lengths,
    IS_KEY: tl.constexpr,
    PER_BLOCK_MEAN: tl.constexpr,
    STORED: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of tokens less their mean, rounded to the 16-bit type of `out`.

    STORED: `out` is storage of our own, and gets zeros up to the end of the sequence's.
    """
    i, h, b = place_in(grid)
    if IS_KEY:
        cu, n = lengths.cu_k, lengths.n_k
    else:
        cu, n = lengths.cu_q, lengths.n_q
    tokens = _load_block(x, mean, lengths, i, h, b, IS_KEY, PER_BLOCK_MEAN, D, D_PAD, BLOCK)
    last = length_of(cu, n, b)
    if STORED:
        start = stored_start_of(cu, n, b)
        last = tl.cdiv(last, ALIGNMENT) * ALIGNMENT
        store_tokens(out, None, b, h, start + i * BLOCK, start + last, tokens, D)
    else:
        store_tokens(out, cu, b, h, i * BLOCK, last, tokens, D)


def _in_vectors(x: Tensor) -> Tensor:
    """x [sequences, heads, tokens, channels] in 16 bit, where its rows are whole vectors; else a
    copy whose rows end in zeros."""
    elements = _VECTOR // x.element_size()
    if x.shape[3] % elements:  # where heads lie innermost they still do
        x = torch.nn.functional.pad(x, (0, -x.shape[3] % elements))
    aligned = x.data_ptr() % _VECTOR == 0 and all(n % elements == 0 for n in x.stride()[:3])
    if aligned and x.stride(3) == 1:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _in_16_bit(x: Tensor) -> Operand:
    """Numbers in 16 bit as an operand."""
    x = _in_vectors(x)
    no = tl.constexpr(None)
    return Operand(*Strided.of(x), None, 0, 0, tl.constexpr(x.shape[3]), no, no)


class Operands:
    """The token operands of one pass, each rounded once for every format it is used in.

    Q and K are smoothed as the spec says; q_mean and k_mean are what was subtracted.

    Args:
        do: in the backward, the gradient of o.
        k_mean: the forward's, not to be computed again.
        stored: numbers in 16 bit too are copied to storage of our own, [1, heads, tokens, d], where
            zeros follow each sequence, and stand for queries that attend to nothing and for keys
            that nothing attends to.
    """

    def __init__(
        self,
        problem: Problem,
        do: Tensor | None = None,
        *,
        k_mean: Tensor | None = None,
        stored: bool = False,
    ) -> None:
        self._problem, self.stored = problem, stored
        self.tensors = {"q": problem.q, "k": problem.k, "v": problem.v, "do": do}
        self._made: dict[tuple[object, ...], Operand] = {}
        self.q_mean = self.k_mean = None
        smoothing, lengths, sequences = problem.spec.smoothing, problem.lengths, problem.sequences
        if k_mean is not None:
            self.k_mean = Means.of_heads(k_mean)
        elif smoothing.k:
            self.k_mean = head_means(problem.k, lengths, sequences, problem.longest_k)
        if smoothing.q:
            self.q_mean = block_means(
                problem.q, lengths, sequences, problem.longest_q, problem.spec.block_q
            )

    @property
    def smoothing(self) -> tuple[Means | None, Means | None, Strided]:
        """q_mean, k_mean and K as it was, for a kernel that puts back what was taken out."""
        return self.q_mean, self.k_mean, Strided.of(self._problem.k)

    def at(self, site: str, tensor: str) -> Operand:
        """`tensor` in the format of `site`."""
        matmul = self._problem.spec.site(site)
        how = matmul.lhs if OPERANDS[site][0] == tensor else matmul.rhs
        if matmul.precision is not Precision.INT8:
            key = (tensor, matmul.precision)
            if key not in self._made:
                self._made[key] = self._numbers(*key)
        else:
            key = (tensor, how, OPERANDS[site][0] in MAPS)
            if key not in self._made:
                self._made[key] = self._codes(*key)
        return self._made[key]

    def unsmoothed(self, site: str, tensor: str) -> tuple[Operand, Means | None]:
        """`tensor` for a kernel that takes its mean out itself: as the caller has it, and the mean.

        Where that is not in the format of `site`, or is to be copied: as `at` gives it, and None.
        """
        x, mean, *_ = self._side(tensor)
        precision = self._problem.spec.site(site).precision
        if mean is None or self.stored or DTYPES.get(precision) != x.dtype:
            return self.at(site, tensor), None
        return _in_16_bit(x), mean

    def _side(self, tensor: str) -> tuple[Tensor, Means | None, bool, int, int, Tensor | None]:
        x, problem = self.tensors[tensor], self._problem
        assert x is not None, f"{tensor} is no operand of the forward"
        mean = {"q": self.q_mean, "k": self.k_mean}.get(tensor)
        if tensor in ("k", "v"):
            return x, mean, True, problem.spec.block_k, problem.longest_k, problem.cu_k
        return x, mean, False, problem.spec.block_q, problem.longest_q, problem.cu_q

    def _codes(self, tensor: str, how: Granularity, sums_tokens: bool) -> Operand:
        x, mean, is_key, block, longest, cu = self._side(tensor)
        heads, d = x.shape[1], x.shape[3]
        tokens = stored_tokens(cu, x)
        stored = -(-d // _VECTOR) * _VECTOR
        per_scale = 1 if how is Granularity.PerToken else block
        by_channel = how is Granularity.PerBlockChannel
        codes = torch.empty(heads * tokens * stored, dtype=torch.int8, device=x.device)
        scale = torch.empty(
            (heads, tokens // per_scale, d if by_channel else 1),
            dtype=torch.float32,
            device=x.device,
        )
        stride_n, stride_d = (1, tokens) if sums_tokens else (stored, 1)
        operand = Operand(
            codes,
            0,
            tokens * stored,
            stride_n,
            stride_d,
            scale,
            scale.stride(0),
            scale.stride(1),
            tl.constexpr(stored),
            tl.constexpr(per_scale),
            tl.constexpr(by_channel),
        )
        d_pad = triton.next_power_of_2(stored)
        grid = Grid(-(-longest // block), heads, self._problem.sequences)
        _encode[grid.programs](
            grid,
            Strided.of(x),
            mean,
            operand,
            self._problem.lengths,
            Rounding.of(self._problem.spec, tensor),
            is_key,
            not is_key,
            d,
            d_pad,
            block,
            num_warps=4 if block * d_pad <= 4096 else 8,
            **LAUNCH,
        )
        return operand

    def _numbers(self, tensor: str, precision: Precision) -> Operand:
        x, mean, is_key, block, longest, cu = self._side(tensor)
        if mean is not None or self.stored:
            shape, tokens = x.shape, longest
            if self.stored:
                shape = (1, x.shape[1], stored_tokens(cu, x), x.shape[3])
                tokens = -(-longest // ALIGNMENT.value) * ALIGNMENT.value
            copy = torch.empty(shape, dtype=DTYPES[precision], device=x.device)
            grid = Grid(-(-tokens // block), x.shape[1], self._problem.sequences)
            _copy[grid.programs](
                grid,
                Strided.of(x),
                mean,
                Strided.of(copy),
                self._problem.lengths,
                is_key,
                not is_key,
                self.stored,
                x.shape[3],
                triton.next_power_of_2(x.shape[3]),
                block,
                **LAUNCH,
            )
            x = copy
        return _in_16_bit(x.to(DTYPES[precision]))
