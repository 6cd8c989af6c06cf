"""Parts of dQ: their units, and their way from registers to global memory.

Each program computes one part of dQ for every block of 64 queries that attends to its tile of keys.
A part is rounded to units of its rows, see `operands.dq_sums`, and TMA adds it to the integer sums.
If there is one tile of keys, its part is all of dQ: the program converts it to what the sum would
become, and TMA stores it.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from sagesim_kernels.gluon_compat import reinterpret, tma_add, tma_store
from sagesim_kernels.hopper.token_loads import of_next_head, token_coordinates
from sagesim_kernels.operands import inverse_of

BLOCK_Q = gl.constexpr(64)
"""Queries of a step."""

TILE_K = gl.constexpr(128)
"""Keys of a program."""


class DqStore(NamedTuple):
    """The path of a part of dQ from shared memory to global memory."""

    out: Any
    """TMA descriptor of the sums, int32 [rows, 32], in blocks of BLOCK_Q or of all rows; or a
    `token_descriptor` of dQ, if a part is all of dQ."""
    buffer: Any
    """In shared memory: int32 [slots, BLOCK_Q * D / 32, 32], or 16 bit [slots, BLOCK_Q, D]."""
    origin: Any  #: `TokenOrigin` of the first query head in dQ
    full: Any  #: barriers [2], for even and odd steps: the part is in shared memory
    empty: Any  #: barriers [slots]: the part has been read from shared memory


class DqBlocks(NamedTuple):
    """The blocks of queries that get a part of dQ from a program."""

    begin: Any  #: see `QueryLoop`
    end: Any
    shift: Any
    first: Any  #: index of block 0 of the first head, over all heads
    head_stride: Any  #: blocks from one head to the next
    units: Any
    """float32, the units of all queries, if dS may overflow and parts are added; else None."""


_TO_INT32 = gl.constexpr("cvt.rni.s32.f32 $0, $1;")
_WAIT_FOR_READS = gl.constexpr("cp.async.bulk.wait_group.read 0; mov.u32 $0, 0;")
_WAIT_FOR_WRITES = gl.constexpr("cp.async.bulk.wait_group 0; mov.u32 $0, 0;")


@gluon.jit
def _wait_for_tma_reads():
    """Wait until TMA has read what this warp stores, so that the buffer can be overwritten."""
    gl.inline_asm_elementwise(_WAIT_FOR_READS, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def block_of(i, loop):
    """Return the block of queries of iteration i. loop: `QueryLoop` or `DqBlocks`."""
    block = i + loop.shift
    return gl.where(block < loop.end, block, block - (loop.end - loop.begin))


@gluon.jit
def first_row_of(head, i, blocks):
    """Return the first query of iteration i and a head of the group, over all heads.

    blocks: `DqBlocks`.
    """
    return (blocks.first + head * blocks.head_stride + block_of(i, blocks)) * BLOCK_Q


@gluon.jit
def start_dq(ds, k16, ACC: gl.constexpr):
    """Start the product of a part of dQ: dS transposed [keys, BLOCK_Q], and K.

    See `channel_products.start_sum`.
    """
    D: gl.constexpr = k16.shape[1]
    dq = gl.zeros((BLOCK_Q, D), gl.float32, ACC)
    return warpgroup_mma(ds.permute((1, 0)), k16, dq, use_acc=False, is_async=True)


@gluon.jit
def store_dq(dq, blocks, GROUPS: gl.constexpr, SUMMED: gl.constexpr):
    """Do what `store_parts` does for a program's only tile of keys, until all is written."""
    store_parts(dq, blocks, 0, GROUPS, SUMMED)
    wait_for_writes()


@gluon.jit
def store_parts(dq, blocks, done, GROUPS: gl.constexpr, SUMMED: gl.constexpr):
    """Add a tile's parts of dQ to the sums, or store them if they are all of dQ. One warp.

    dq: `DqStore`. blocks: `DqBlocks`. done: steps of the program before this tile. GROUPS: query
    heads for each head of K and V. SUMMED: see `operands.summed_channels`.
    """
    SLOTS: gl.constexpr = dq.buffer.shape[0]
    ROWS: gl.constexpr = dq.buffer.shape[1]
    BOX: gl.constexpr = dq.out.block_shape[0]
    for head in range(GROUPS):
        for i in range(blocks.begin, blocks.end):
            n = done + head * (blocks.end - blocks.begin) + i - blocks.begin
            block = block_of(i, blocks)
            mbarrier.wait(dq.full.index(n % 2), (n // 2) & 1)
            part = dq.buffer.index(n % SLOTS)
            row = (blocks.first + head * blocks.head_stride + block) * ROWS
            if dq.buffer.dtype != gl.int32:
                origin = of_next_head(dq.origin, head)
                part = reinterpret(part, dq.out.dtype, dq.out.block_shape, dq.out.layout)
                tma_store(dq.out, token_coordinates(dq.out, origin, block * BLOCK_Q), part)
            elif BOX == ROWS:
                tma_add(dq.out, [row, 0], part)
            else:
                for at in gl.static_range(0, SUMMED * BLOCK_Q // 32, BOX):
                    tma_add(dq.out, [row + at, 0], part.slice(at, BOX))
            _wait_for_tma_reads()
            mbarrier.arrive(dq.empty.index(n % SLOTS), count=1)


@gluon.jit
def wait_for_writes():
    """Wait until all that this warp stored is in global memory.

    dQ, or its sums, are complete when all programs have ended.
    """
    gl.inline_asm_elementwise(_WAIT_FOR_WRITES, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def to_units(part, inverse_units):
    """Round a part of dQ [BLOCK_Q, D] to int32, in units of its rows, as `operands` does."""
    return to_int32(part * inverse_units[:, None])


@gluon.jit
def to_int32(x):
    """Round float32 numbers to integers, ties to even."""
    return gl.inline_asm_elementwise(_TO_INT32, "=r,r", [x], gl.int32, True, 1)


@gluon.jit
def pass_to_store(part, inverse_units, minus_lse2, buffer, scale):
    """Store a part of dQ [BLOCK_Q, channels] to shared memory, as `store_dq` expects it.

    inverse_units: 1 / unit of the rows. minus_lse2: of the rows; needed if the part is all of dQ.
    buffer: a slot of `DqStore.buffer`, or the part of it that has these channels. scale: the scale
    of the logits.
    """
    units = to_units(part, inverse_units)
    if buffer.dtype == gl.int32:
        buffer.store(to_tma_order(units))
    else:
        total = units.to(gl.float32) * inverse_of(inverse_units)[:, None]
        if buffer.dtype == gl.float16:
            # dS may have overflowed, which sums learn from `mark_overflow`.
            total = gl.where(gl.abs(part) < float("inf"), total, float("nan"))
        # A query that attends to no key may share a tile with a NaN. NaN != -inf.
        total = gl.where((minus_lse2 != -float("inf"))[:, None], total, 0.0)
        buffer.store((total * scale).to(buffer.dtype))


@gluon.jit
def to_tma_order(part):
    """Return a part [BLOCK_Q, D] as [BLOCK_Q * D / 32, 32], in the order that registers hold it.

    Four numbers of a thread are adjacent, then come four of the next thread. Stores to shared
    memory are then 16 bytes wide and free of bank conflicts. `operands.dq_sums.from_tma_order` is
    the inverse.
    """
    D: gl.constexpr = part.shape[1]
    part = part.reshape([BLOCK_Q // 16, 2, 8, D // 8, 4, 2])
    return part.permute((3, 0, 2, 4, 1, 5)).reshape([BLOCK_Q * D // 32, 32])


@gluon.jit
def mark_overflow(blocks, ds, head, i):
    """Set the units of queries to NaN whose dS overflowed to infinity in float16.

    Every program that stores to a unit stores NaN. Other infinities are in the units already.

    blocks: `DqBlocks`. ds: float16 [keys, queries] of iteration i and a head of the group.
    """
    KEYS: gl.constexpr = ds.shape[0]
    QUERIES: gl.constexpr = ds.shape[1]
    # A thread adds the magnitudes of its own keys; threads do not exchange sums.
    sums = gl.sum(gl.abs(ds.to(gl.float32)).reshape([KEYS // 16, 2, 8, QUERIES]), 1)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, sums.type.layout))
    first = (blocks.first + head * blocks.head_stride + block_of(i, blocks)) * QUERIES
    ptrs = blocks.units + first + gl.arange(0, QUERIES, COLUMNS)
    nan = gl.full(sums.shape, float("nan"), gl.float32, sums.type.layout)
    gl.store(ptrs[None, None, :].broadcast_to(sums.shape), nan, mask=~(sums < float("inf")))
