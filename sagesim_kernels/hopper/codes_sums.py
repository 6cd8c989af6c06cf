"""Sums of products of codes, and their addition to dV, dK and the parts of dQ.

The sums over 64 queries or keys are new in each step, because their scales are.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from sagesim_kernels.hopper.backward_maps import ST_INT32
from sagesim_kernels.hopper.dq_parts import BLOCK_Q, to_int32

CHUNK = gl.constexpr(64)
"""Channels of the sums of one product. Sums of more channels would need too many registers."""


@gluon.jit
def start_sums(codes, right, C: gl.constexpr):
    """Start the product of codes [rows, tokens] and chunk C of right [channels, tokens], int32."""
    SUMS: gl.constexpr = codes.type.layout.parent
    zeros = gl.zeros((codes.shape[0], CHUNK), gl.int32, SUMS)
    chunk = right.slice(C * CHUNK, CHUNK, 0).permute((1, 0))
    return warpgroup_mma(codes, chunk, zeros, use_acc=False, is_async=True)


@gluon.jit
def add_sums(total, sums, row_scale, channel_scales, FIRST: gl.constexpr, BY_CHANNEL: gl.constexpr):
    """Return total plus the sums of a product times the scales of rows and of channels.

    channel_scales: in shared memory; the chunk's begin at FIRST. BY_CHANNEL: whether they differ.
    """
    COLUMNS: gl.constexpr = gl.SliceLayout(0, ST_INT32)
    sums = sums.to(gl.float32)
    if BY_CHANNEL:
        column = channel_scales.slice(FIRST, CHUNK).load(COLUMNS)[None, :]
        # Products of two scales would be computed before the sums, and take their registers.
        return gl.fma(sums * row_scale[:, None], column.broadcast_to(total.shape), total)
    else:
        one = gl.max(channel_scales.slice(FIRST, 1).load(COLUMNS), 0)
        return gl.fma(sums, (row_scale * one)[:, None].broadcast_to(total.shape), total)


@gluon.jit
def _start_dq(maps, key_tile, I: gl.constexpr, LAYOUT: gl.constexpr):
    """Start the product of the codes of dS and K of block I of the keys, int32 [BLOCK_Q, D]."""
    D: gl.constexpr = key_tile.k_right.shape[1]
    zeros = gl.zeros((BLOCK_Q, D), gl.int32, LAYOUT)
    codes = maps.codes.slice(I * BLOCK_Q, BLOCK_Q, 0)
    right = key_tile.k_right.index(I).permute((1, 0))
    return warpgroup_mma(codes, right, zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_dq(total, sums, inverse, maps, key_tile, I: gl.constexpr):
    """Return the sums of dQ of block I of the keys in units of rows, plus total unless it is None.

    inverse: 1 / unit of each query.
    """
    LAYOUT: gl.constexpr = sums.type.layout
    steps = maps.steps.slice(I * BLOCK_Q, BLOCK_Q).load(gl.SliceLayout(1, LAYOUT))
    column = key_tile.right_scales.index(I).load(gl.SliceLayout(0, LAYOUT))
    scaled = sums.to(gl.float32) * (steps * inverse)[:, None]
    if total is None:
        return scaled * column[None, :]
    else:
        return gl.fma(scaled, column[None, :].broadcast_to(scaled.shape), total)


@gluon.jit
def dq_units(maps, key_tile, inverse, LAYOUT: gl.constexpr):
    """Return the part of dQ of both blocks of keys in units of its rows, int32 [BLOCK_Q, D].

    inverse: 1 / unit of each query.
    """
    sums = warpgroup_mma_wait(0, deps=[_start_dq(maps, key_tile, 0, LAYOUT)])
    part = _add_dq(None, sums, inverse, maps, key_tile, 0)
    sums = warpgroup_mma_wait(0, deps=[_start_dq(maps, key_tile, 1, LAYOUT)])
    part = _add_dq(part, sums, inverse, maps, key_tile, 1)
    return to_int32(part)
