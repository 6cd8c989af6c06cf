"""Q, K, V and dO rounded to codes for the kernels that multiply them by P and dS in codes.

The kernel computes what `operands.quantize` computes. It reads a tensor once, also if two products
need it. Each thread holds a patch of 4 consecutive tokens and 16 consecutive channels. So it stores
vectors of codes, whether consecutive channels or consecutive tokens are contiguous in memory.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagesim_kernels.hopper.forward_tiles import BLOCK
from sagesim_kernels.launching import launch, wait_for_earlier_kernels
from sagesim_kernels.operands import (
    IN_REGISTERS,
    LAUNCH,
    KernelProblem,
    Operand,
    Wanted,
    arguments_of,
    coordinates_of,
    head_ptr,
    is_live_key,
    is_live_query,
    largest,
    length_of,
    magnitude,
    padded,
    programs_of,
    row_stride,
    scale_and_inverse,
    scales_of_block,
    scattered_ptrs,
    stored_start_of,
    tasks_of,
    to_codes,
    token_in_register_order,
)

_TASKS: Final = 3
"""The tensors of a launch: Q, K and V before a forward, Q, K and dO before a backward."""

_CHANNELS_OF_A_WARP = gl.constexpr(32)
"""Channels of a tile for each warp of its program."""

_REGISTERS: Final = 160
"""At most so many for a thread. With more, fewer programs run on a multiprocessor at a time."""


@triton.constexpr_function
def _layout(channels, along_tokens):
    """Return the layout of a tile [BLOCK, channels].

    along_tokens: whether consecutive registers of a thread hold consecutive tokens, and not
    consecutive channels.
    """
    of_channels, of_tokens = [[0, 1], [0, 2], [0, 4], [0, 8]], [[1, 0], [2, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=of_tokens + of_channels if along_tokens else of_channels + of_tokens,
        lane_bases=[[0, 16], [4, 0], [8, 0], [16, 0], [32, 0]],
        warp_bases=[[0, 32 << i] for i in range((channels // 32).bit_length() - 1)],
        block_bases=[],
        shape=[BLOCK.value, channels],
    )


@gluon.jit
def _in_order_of(out, places):
    """Return the tokens whose codes are at these places of a block of an `Operand`."""
    if out.ORDER == IN_REGISTERS:
        return token_in_register_order(places)
    else:
        return places


@gluon.jit
def _inverse_scales(out, size, local, cu, n, i, h, b, blocks):
    """Store the scales of a tile, and return their inverses, which broadcast to the tile.

    Each scale is computed by one thread, or by few.

    out: `Operand`. size: the `magnitude` of the tile. local: the token of each row.
    """
    TILE: gl.constexpr = size.type.layout
    WARPS: gl.constexpr = blocks.D_PAD // _CHANNELS_OF_A_WARP
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    ptr = scales_of_block(out, cu, n, i, h, b, BLOCK)
    if out.BY_CHANNEL:
        COLUMNS: gl.constexpr = gl.BlockedLayout([BLOCK // 4, 1], [1, 32], [1, WARPS], [1, 0])
        of_threads = largest(size.reshape([BLOCK // 4, 4, blocks.D_PAD]), 1)
        amax = largest(gl.convert_layout(of_threads, COLUMNS), 0)
        scale, inverse = scale_and_inverse(amax)
        column = gl.arange(0, blocks.D_PAD, gl.SliceLayout(0, COLUMNS))
        gl.store(ptr + column, scale, mask=column < blocks.D)
        inverse = gl.convert_layout(inverse, gl.SliceLayout(0, TILE))[None, :]
    else:
        amax = gl.convert_layout(largest(size, 1), ONE)
        if out.TOKENS == 1:
            scale, inverse = scale_and_inverse(amax)
            gl.store(ptr + gl.convert_layout(local, ONE), scale)
            inverse = gl.convert_layout(inverse, gl.SliceLayout(1, TILE))[:, None]
        else:
            scale, inverse = scale_and_inverse(largest(amax, 0))
            gl.store(ptr, scale)
    return inverse


@gluon.jit
def _store_tile(out, tokens, size, local, rounding, cu, n, i, h, b, blocks):
    """Store the codes and scales of a tile to an `Operand`.

    tokens: float32 [BLOCK, D_PAD]. The others: see `_inverse_scales`.
    """
    inverse = _inverse_scales(out, size, local, cu, n, i, h, b, blocks)
    codes = to_codes(tokens * inverse, None, None, rounding)
    if out.ALONG_TOKENS:  # the rows of the tile are in the order of memory
        codes = gl.convert_layout(codes, _layout(blocks.D_PAD, True))
        local = gl.arange(0, BLOCK, gl.SliceLayout(1, codes.type.layout))
    column = gl.arange(0, blocks.D_PAD, gl.SliceLayout(0, codes.type.layout))
    first = stored_start_of(cu, n, b) + i.to(gl.int64) * BLOCK
    base = out.ptr + h.to(gl.int64) * out.stride_h
    ptrs = scattered_ptrs(base, first, local, column, out.stride_n, out.stride_d)
    gl.store(ptrs, codes, mask=(column < out.CHANNELS)[None, :].broadcast_to(codes.shape))


@gluon.jit
def _round_tile(program, grid, x, mean, blocks, out, rounding, other, other_rounding, lengths):
    """Round a tile to the codes of one or two `Operand`; see `operands.quantize_block`."""
    i, h, b = coordinates_of(program, grid)
    if blocks.IS_KEY:
        cu, n = lengths.cu_k, lengths.n_k
    else:
        cu, n = lengths.cu_q, lengths.n_q
    first = i * BLOCK
    if first < length_of(cu, n, b):
        TILE: gl.constexpr = _layout(blocks.D_PAD, False)
        local = gl.arange(0, BLOCK, gl.SliceLayout(1, TILE))
        local = _in_order_of(out, local)
        if other is not None:
            local = _in_order_of(other, local)
        column = gl.arange(0, blocks.D_PAD, gl.SliceLayout(0, TILE))
        if blocks.IS_KEY:
            live = is_live_key(lengths, b, first + local)
        else:
            live = is_live_query(lengths, b, first + local)
        mask = live[:, None] & (column < blocks.D)[None, :]
        base = head_ptr(x, cu, b, h)
        ptrs = scattered_ptrs(base, first, local, column, row_stride(x), x.stride_d)
        tokens = gl.load(ptrs, mask=mask, other=0.0).to(gl.float32)
        if mean is not None:
            of_head = mean.ptr + (b.to(gl.int64) * mean.heads + h) * mean.means * blocks.D
            of_channels = gl.load(of_head + column, mask=column < blocks.D, other=0.0)
            tokens = gl.where(mask, tokens - of_channels[None, :], 0.0)
        size = magnitude(tokens)
        _store_tile(out, tokens, size, local, rounding, cu, n, i, h, b, blocks)
        if other is not None:
            _store_tile(other, tokens, size, local, other_rounding, cu, n, i, h, b, blocks)


@gluon.jit
def hopper_codes_of_operands(
    lengths,
    grid, x, mean, blocks, out, rounding, other, other_rounding,
    grid1, x1, mean1, blocks1, out1, rounding1, other1, other_rounding1,
    grid2, x2, mean2, blocks2, out2, rounding2, other2, other_rounding2,
):  # fmt: skip
    """Do up to three tasks; those that are missing are None. See `operands.quantize_kernel`."""
    wait_for_earlier_kernels()
    program = gl.program_id(0)
    end = programs_of(grid)
    if program < end:
        _round_tile(program, grid, x, mean, blocks, out, rounding, other, other_rounding, lengths)
    if x1 is not None:
        begin = end
        end = begin + programs_of(grid1)
        if (program >= begin) & (program < end):
            _round_tile(
                program - begin, grid1, x1, mean1, blocks1, out1, rounding1, other1,
                other_rounding1, lengths,
            )  # fmt: skip
    if x2 is not None:
        begin = end
        end = begin + programs_of(grid2)
        if (program >= begin) & (program < end):
            _round_tile(
                program - begin, grid2, x2, mean2, blocks2, out2, rounding2, other2,
                other_rounding2, lengths,
            )  # fmt: skip


def quantize(problem: KernelProblem, wanted: Sequence[Wanted]) -> list[Operand]:
    """Do what `operands.quantize` does, for problems with Hopper's kernels for codes."""
    if not wanted:
        return []
    channels = max(padded(each.source.x.shape[3]) for each in wanted)
    found, tasks = tasks_of(problem, wanted, channels)
    launch(
        hopper_codes_of_operands,
        *arguments_of(tasks, problem, _TASKS),
        num_warps=channels // _CHANNELS_OF_A_WARP.value,
        maxnreg=_REGISTERS,
        **LAUNCH,
    )
    return found
