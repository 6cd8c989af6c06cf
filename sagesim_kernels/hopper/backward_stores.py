"""The stores of a backward program: dK, dV, and parts of dQ."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from sagesim_kernels.gluon_compat import barrier
from sagesim_kernels.hopper.backward_masks import are_live
from sagesim_kernels.hopper.backward_tiles import place_tile, wait_for_tile
from sagesim_kernels.hopper.dq_parts import (
    BLOCK_Q,
    DqBlocks,
    DqStore,
    store_parts,
    wait_for_writes,
)
from sagesim_kernels.hopper.token_loads import origin_of
from sagesim_kernels.operands import head_ptr, row_stride

WARPS = gl.constexpr(8)
"""Warps that compute all gradients of a tile."""

BLOCK_WARPS = gl.constexpr(4)
"""Warps that compute a block of keys, half of a tile."""


@constexpr_function
def whole_rows(channels, warps):
    """Layout in which adjacent threads hold adjacent parts of a row, eight numbers each."""
    return gl.BlockedLayout([1, 8], [32 // (channels // 8), channels // 8], [warps, 1], [1, 0])


@gluon.jit
def store_keys(x, outputs, tile, value, buffer, CHANNELS: gl.constexpr):
    """Store the first CHANNELS of value [keys, D] as the keys of a tile from its first one on.

    Keys that no query attends to get zeros. buffer: see `_in_rows`.
    """
    _store_rows(x, outputs, tile, _in_rows(x, value, buffer), CHANNELS)


@gluon.jit
def _in_rows(x, value, buffer):
    """Return value [keys, D] in the dtype of x.

    A 16-bit result goes through shared memory: adjacent threads then hold adjacent numbers. buffer:
    16 bit [keys, D] in shared memory, which no warp reads any more.
    """
    D: gl.constexpr = buffer.shape[1]
    DTYPE: gl.constexpr = x.ptr.dtype.element_ty
    value = value.to(DTYPE)
    if x.ptr.dtype.element_ty.primitive_bitwidth == 16:
        barrier()
        buffer.store(value.to(buffer.dtype, bitcast=True))
        barrier()
        return buffer.load(whole_rows(D, gl.num_warps())).to(DTYPE, bitcast=True)
    else:
        return value


@gluon.jit
def _store_rows(x, outputs, tile, value, CHANNELS: gl.constexpr):
    """Do what `store_keys` does with what `_in_rows` returns."""
    KEYS: gl.constexpr = value.shape[0]
    D: gl.constexpr = value.shape[1]
    DTYPE: gl.constexpr = x.ptr.dtype.element_ty
    LAYOUT: gl.constexpr = value.type.layout
    row = tile.first + gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
    live = are_live(row, tile, outputs.key_mask)[:, None]
    value = gl.where(live, value, gl.zeros((KEYS, D), DTYPE, LAYOUT))
    column = gl.arange(0, D, gl.SliceLayout(0, LAYOUT)).to(gl.int64)
    base = head_ptr(x, outputs.cu_k, outputs.b, outputs.h)
    ptrs = base + row.to(gl.int64) * row_stride(x)
    mask = (row < tile.length)[:, None]
    if CHANNELS < D:
        mask = mask & (column < CHANNELS)[None, :]
    gl.store(ptrs[:, None] + column[None, :] * x.stride_d, value, mask=mask)


@gluon.jit
def release(bar):
    """Tell the producer that these warps do not read or write a buffer of a tile any more.

    The fence orders their accesses before TMA writes to the buffer.
    """
    fence_async_shared()
    barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def store_dk_dv(dk, dv, outputs, tile, buffer, barriers, KD: gl.constexpr, VD: gl.constexpr):
    """Store dK and dV of a tile or block, and release its V, whose buffer they go through."""
    store_keys(outputs.dv, outputs, tile, dv, buffer, VD)
    dk = _in_rows(outputs.dk, dk * outputs.scale, buffer)
    release(barriers.kv_empty)
    _store_rows(outputs.dk, outputs, tile, dk, KD)


@gluon.jit
def store_dq_of_tiles(
    dq, scheduler, lengths, Q_COPIED: gl.constexpr, GROUPS: gl.constexpr,
    SPLITS: gl.constexpr, SUMMED: gl.constexpr,
):  # fmt: skip
    """Do what `dq_parts.store_parts` does for each tile of keys. One warp."""
    done = 0
    for wave in range(scheduler.waves):
        found = wait_for_tile(scheduler, wave, lengths, SPLITS)
        if found.first >= 0:
            tile = place_tile(found, scheduler, lengths, GROUPS)
            origin = origin_of(
                Q_COPIED, lengths.cu_q, tile.b, tile.first_q_head, tile.start_q
            )  # fmt: skip
            out = DqStore(dq.out, dq.buffer, origin, dq.full, dq.empty)
            loop = tile.loop
            blocks = DqBlocks(
                loop.begin, loop.end, loop.shift, tile.row_q // BLOCK_Q,
                scheduler.tokens_q // BLOCK_Q, None,
            )  # fmt: skip
            store_parts(out, blocks, done, GROUPS, SUMMED)
            done += GROUPS * (loop.end - loop.begin)
    wait_for_writes()
