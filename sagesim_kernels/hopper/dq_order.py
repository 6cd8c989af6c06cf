"""The sum of dQ in global memory, to which programs add their parts in a fixed order.

Each program computes one part of dQ for every block of 64 queries that attends to its tile of keys.
Float32 sums depend on the order of their terms, so the parts of a block are added in one order,
whichever program is ready first. `dq_semaphore` holds, for each block of queries, the number of
parts that are in its sum; a program waits until that number is its own position in the order.

Without a mask the order goes from the first tile of keys to the last. Under the causal mask it goes
from the last tile that the block attends to back to the first.

Why there is no deadlock: within a head, both orders are those of the program ids, so a program only
waits for programs with lower ids. The hardware starts programs in the order of their ids, so those
have started, and the lowest id that still runs waits for no other. CUDA does not guarantee that
order of starts. A wait of about 2^26 polls, half a minute, therefore ends in a trap: the GPU
reports an error, instead of hanging or returning a wrong sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sagesim_kernels.gluon_compat import tma_add, tma_store

BLOCK_Q = gl.constexpr(64)
"""Queries of a step."""

TILE_K = gl.constexpr(128)
"""Keys of a program."""


class DqStore(NamedTuple):
    """The path of a part of dQ from shared memory to the sum in global memory."""

    accum: Any  #: TMA descriptor of the sum, float32 [rows, 32]
    buffer: Any  #: float32 [slots, BLOCK_Q * D / 32, 32] in shared memory
    full: Any  #: barriers [2], for even and odd steps: the part is in shared memory
    empty: Any  #: barriers [slots]: the part has been read from shared memory
    semaphore: Any  #: int32, the parts in the sum of each block of queries


class DqBlocks(NamedTuple):
    """The blocks of queries that get a part of dQ from a program."""

    begin: Any  #: first block of each head
    end: Any
    first: Any  #: index in `DqStore.semaphore` of block 0 of the first head
    head_stride: Any  #: blocks from one head to the next


class DqPosition(NamedTuple):
    """What determines the position of a program's parts in the order."""

    tile: Any  #: index of the program's tile of keys
    n_k: Any  #: keys that any query attends to
    offset: Any  #: query i attends to keys 0..i + offset


_WAIT = gl.constexpr("""{
.reg .pred p;
.reg .u32 n, v;
mov.u32 $0, 0;
mov.u32 n, 0;
AGAIN:
ld.relaxed.gpu.global.u32 v, [$1];
setp.ge.u32 p, v, $2;
vote.sync.all.pred p, p, 0xffffffff;
@p bra.uni DONE;
add.u32 n, n, 1;
setp.lt.u32 p, n, 67108864;
@p bra.uni AGAIN;
trap;
DONE:
fence.acq_rel.gpu;
fence.proxy.async.global;
}""")
"""Poll a semaphore. The lanes of a warp vote, so that all of them take the same branch; `bra.uni`
promises this to ptxas. The result is a zero, because an elementwise operation needs a result."""

_SIGNAL = gl.constexpr("""{
.reg .pred p;
.reg .u32 t;
mov.u32 $0, 0;
bar.warp.sync 0xffffffff;
fence.acq_rel.gpu;
mov.u32 t, %laneid;
setp.eq.u32 p, t, 0;
@p red.relaxed.gpu.global.add.u32 [$1], 1;
}""")
_WAIT_FOR_READS = gl.constexpr("cp.async.bulk.wait_group.read 0; mov.u32 $0, 0;")
_WAIT_FOR_WRITES = gl.constexpr(
    "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, 0;"
)


@gluon.jit
def _wait_for_semaphore(semaphore, parts):
    """Wait until that many parts are in the sum, and visible to TMA operations of this warp.

    `_signal_semaphore` raised the semaphore after a fence. What was written before that fence is
    visible after the first fence here. The second fence extends this from ordinary accesses to
    those of TMA.
    """
    args = [semaphore, parts]
    gl.inline_asm_elementwise(_WAIT, "=r,l,r", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def _signal_semaphore(semaphore):
    """Raise the semaphore by 1. Call `_wait_for_tma_writes` first.

    One lane issued the part's TMA operation and waited for it. The barrier of the warp orders that
    before the lane that raises the semaphore, and the fence makes it visible to the whole GPU.
    """
    gl.inline_asm_elementwise(_SIGNAL, "=r,l", [semaphore], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait_for_tma_reads():
    """Wait until TMA has read what this warp stores, so that the buffer can be overwritten."""
    gl.inline_asm_elementwise(_WAIT_FOR_READS, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait_for_tma_writes():
    """Wait until what this warp stores is in global memory, also for accesses other than TMA's."""
    gl.inline_asm_elementwise(_WAIT_FOR_WRITES, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _parts_before(i, position, IS_CAUSAL: gl.constexpr):
    """Return how many parts block i of queries gets before the part of this tile of keys.

    The block has to attend to a key of the tile. It attends to keys of the tiles 0, 1, ... up to
    the tile with the last key that its last query attends to, and to no other tiles.
    """
    if IS_CAUSAL:
        last_key = gl.minimum(position.n_k, i * BLOCK_Q + BLOCK_Q + position.offset) - 1
        return last_key // TILE_K - position.tile
    else:
        return position.tile


@gluon.jit
def store_dq(
    WARP: gl.constexpr, dq, blocks, position, GROUPS: gl.constexpr, IS_CAUSAL: gl.constexpr
):
    """Add parts of dQ to the sum: those of the even steps if WARP is 0, of the odd steps if 1.

    There are two store warps, because one part takes a warp longer than a step: it waits for the
    semaphore, waits for the write, and signals the semaphore. If the two warps share one slot in
    shared memory, a part arrives there only after the part before has left it.

    dq: `DqStore`. blocks: `DqBlocks`. position: `DqPosition`. GROUPS: query heads for each head of
    K and V.
    """
    SLOT: gl.constexpr = WARP % dq.buffer.shape[0]
    ROWS: gl.constexpr = dq.buffer.shape[1]
    for head in range(GROUPS):
        steps_before = head * (blocks.end - blocks.begin)
        for i in range(blocks.begin + (steps_before + WARP) % 2, blocks.end, 2):
            block = blocks.first + head * blocks.head_stride + i
            semaphore = dq.semaphore + block
            parts = _parts_before(i, position, IS_CAUSAL)
            if parts > 0:  # overlaps with the product that computes this part
                _wait_for_semaphore(semaphore, parts)
            mbarrier.wait(dq.full.index(WARP), ((steps_before + i - blocks.begin) // 2) & 1)
            if parts == 0:  # the first part is stored, so the sum need not be initialised
                tma_store(dq.accum, [block * ROWS, 0], dq.buffer.index(SLOT))
            else:
                tma_add(dq.accum, [block * ROWS, 0], dq.buffer.index(SLOT))
            _wait_for_tma_reads()
            mbarrier.arrive(dq.empty.index(SLOT), count=1)
            _wait_for_tma_writes()
            _signal_semaphore(semaphore)


@gluon.jit
def to_register_order(dq, D: gl.constexpr, COLUMN_GROUPS: gl.constexpr):
    """Return dq [BLOCK_Q, D] as [BLOCK_Q * D / 32, 32], in the order that registers hold it.

    Four numbers of a thread are adjacent, then come four of the next thread. Stores to shared
    memory are then 16 bytes wide and free of bank conflicts. `from_register_order` is the inverse.

    COLUMN_GROUPS: warpgroups that divide the columns among them.
    """
    dq = dq.reshape([BLOCK_Q // 16, 2, 8, COLUMN_GROUPS, D // (8 * COLUMN_GROUPS), 4, 2])
    dq = dq.permute((4, 3, 0, 2, 5, 1, 6))
    return dq.reshape([BLOCK_Q * D // 32, 32])


@triton.jit
def from_register_order(dq, ROWS: tl.constexpr, D: tl.constexpr, COLUMN_GROUPS: tl.constexpr):
    """Return a block [ROWS, D] from the numbers that `to_register_order` made of it."""
    dq = dq.reshape([D // (8 * COLUMN_GROUPS), COLUMN_GROUPS, ROWS // 16, 8, 4, 2, 2])
    return dq.trans(2, 5, 3, 1, 0, 4, 6).reshape([ROWS, D])
