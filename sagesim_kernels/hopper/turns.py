"""The sum of dQ, to which programs add their parts in one order, whichever of them is first.

Each block of 64 queries has a counter of the parts that it has got. Without a mask, parts are added
from the first tile of keys to the last; under the causal mask from the last that the block sees
back to the first. That is also the order of program ids within a head, so a program waits only for
programs of lower ids. The hardware starts programs in the order of their ids, so those have
started, and the lowest id that still runs waits for none: no deadlock. CUDA does not promise this
order. A wait that takes some 2^26 polls, half a minute, thus ends in a trap: an error of the GPU
instead of a hang, or of a sum that is wrong.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sagesim_kernels.hopper.compat import add, store

BQ = gl.constexpr(64)
BK = gl.constexpr(128)
"""Queries and keys of a step."""

_WAIT_FOR_TURN = gl.constexpr("""{
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
"""Poll a counter. The lanes vote, so that all of a warp take the same branches, as `bra.uni` tells
ptxas. The result is a zero: an elementwise operation has to have one."""

_PASS_TURN = gl.constexpr("""{
.reg .pred p;
.reg .u32 t;
mov.u32 $0, 0;
bar.warp.sync 0xffffffff;
fence.acq_rel.gpu;
mov.u32 t, %laneid;
setp.eq.u32 p, t, 0;
@p red.relaxed.gpu.global.add.u32 [$1], 1;
}""")
_SENT_IS_READ = gl.constexpr("cp.async.bulk.wait_group.read 0; mov.u32 $0, 0;")
_SENT_IS_WRITTEN = gl.constexpr(
    "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, 0;"
)


@gluon.jit
def _wait_for_turn(counter, turn):
    """Wait until so many parts are in the sum, and let TMA operations of this warp see them.

    The counter was raised by `_pass_turn`, after a fence: what was written before that fence is
    visible after this one. The second fence extends this from ordinary accesses to those of TMA.
    """
    args = [counter, turn]
    gl.inline_asm_elementwise(_WAIT_FOR_TURN, "=r,l,r", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pass_turn(counter):
    """Raise the counter. Goes after `_wait_until_written`.

    One lane sent the part and waited for it: the barrier of the warp orders this before the lane
    that raises the counter, and the fence makes it visible to the whole GPU.
    """
    gl.inline_asm_elementwise(_PASS_TURN, "=r,l", [counter], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait_until_read():
    """Until what this warp has sent may be overwritten in shared memory."""
    gl.inline_asm_elementwise(_SENT_IS_READ, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait_until_written():
    """Until what this warp has sent is in global memory, also for accesses that are not by TMA."""
    gl.inline_asm_elementwise(_SENT_IS_WRITTEN, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _turn(i, tile, n_k, offset, IS_CAUSAL: gl.constexpr):
    """How many parts block i of queries gets before that of this tile of keys.

    For a tile of which the block sees a key, and n_k keys that any query attends to: the block sees
    keys of the tiles 0, 1 and so on up to that of the last key that its last query sees, no others.
    """
    if IS_CAUSAL:
        return (gl.minimum(n_k, i * BQ + BQ + offset) - 1) // BK - tile
    else:
        return tile


@gluon.jit
def send(
    WHICH: gl.constexpr, sums, dq_s, filled, free, counters, blocks, tile, n_k, offset,
    GROUPS: gl.constexpr, D: gl.constexpr, IS_CAUSAL: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Add to the sum the parts of dQ of every other step: WHICH is 0 or 1, for one of two warps. A
    part takes one of them longer than a step: to wait for its turn, to be written, to pass it on.
    Where both have one slot, a part comes only when the one before has left it.

    blocks: of queries of a head, the first and the end, then the number of a head's first block in
    `counters` and in storage, and the blocks from one head to the next.
    """
    SLOT: gl.constexpr = WHICH % SLOTS
    begin, end, block, stride = blocks
    for head in range(GROUPS):
        before = head * (end - begin)
        for i in range(begin + (before + WHICH) % 2, end, 2):
            at = block + head * stride + i
            counter = counters + at
            turn = _turn(i, tile, n_k, offset, IS_CAUSAL)
            if turn > 0:  # while the product is not there yet
                _wait_for_turn(counter, turn)
            mbarrier.wait(filled.index(WHICH), ((before + i - begin) // 2) & 1)
            if turn == 0:  # so the sum needs no zeros before
                store(sums, [at * (BQ * D // 32), 0], dq_s.index(SLOT))
            else:
                add(sums, [at * (BQ * D // 32), 0], dq_s.index(SLOT))
            _wait_until_read()
            mbarrier.arrive(free.index(SLOT), count=1)
            _wait_until_written()
            _pass_turn(counter)


@gluon.jit
def in_order_of_registers(dq, D: gl.constexpr, SHARED_BY: gl.constexpr):
    """[BQ, D] as [BQ D / 32, 32], four numbers of a thread side by side, then those of the next.

    Stores to shared memory are then 16 bytes wide and free of conflicts. `out_of_order` undoes it.

    SHARED_BY: groups of four warps that share the columns.
    """
    dq = dq.reshape([BQ // 16, 2, 8, SHARED_BY, D // (8 * SHARED_BY), 4, 2])
    dq = dq.permute((4, 3, 0, 2, 5, 1, 6))
    return dq.reshape([BQ * D // 32, 32])


@triton.jit
def out_of_order(dq, ROWS: tl.constexpr, D: tl.constexpr, SHARED_BY: tl.constexpr):
    """A block of so many rows, [ROWS, D], out of what `in_order_of_registers` made of it."""
    dq = dq.reshape([D // (8 * SHARED_BY), SHARED_BY, ROWS // 16, 8, 4, 2, 2])
    return dq.trans(2, 5, 3, 1, 0, 4, 6).reshape([ROWS, D])
