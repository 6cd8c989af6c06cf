"""Prototype in Gluon, for Hopper, of the backward of FACTORED_QK in one kernel, equal to the bit.

    python benchmarks/hopper_backward.py --out docs/data/speed_log/backward.json

Needs a Hopper GPU and Triton 3.6. `hopper_prototypes.py` has one kernel for dQ and another for dK
and dV, which compute S and dP twice: seven products. Here a program owns 128 keys of a head, goes
over the blocks of 64 queries, and adds its part of dQ to a float32 sum in global memory: five
products. The parts are added in a fixed order, so two runs have the same bits.

No part of the package: it takes whole blocks, contiguous tensors, one query head for each of k and
v, and operands that are already quantized, with one scale for 64 tokens of K. Each variant is
checked against float32 before it is timed; times are medians, of zeros, kernel and conversion of dQ
together, without quantization, delta and the statistics that they are given.

The order. Each query block has a counter of the parts that it has got. Under the full mask parts
are added from the first tile of keys to the last, under the causal one from the diagonal back to
the first. That is also the order of program ids within a head, so a program waits only for programs
of lower ids. The hardware starts programs in the order of their ids, so those have started, and the
lowest id that still runs waits for none: no deadlock. CUDA does not promise this order; a wait thus
gives up after a while, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from hopper_prototypes import (
    LOG2_E,
    SHAPES,
    _load_queries,
    exact,
    numbers_of,
    problem,
    report,
    rows_of,
)
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.testing import do_bench

BQ = gl.constexpr(64)
BK = gl.constexpr(128)
WARPS = gl.constexpr(8)
"""Queries and keys of a step, and the warps that compute dK and dV."""

MMA8 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 32]))
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))
KEYS = gl.constexpr(gl.SliceLayout(1, MMA.value))
QUERIES = gl.constexpr(gl.SliceLayout(0, MMA.value))
DS = gl.constexpr(gl.NVMMASharedLayout.get_default_for([128, 64], gl.bfloat16))
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())
"""Layouts of S in int32, of S and dP in float32, of their rows and columns, of dS, of a barrier."""

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
and.b32 v, n, 255;
setp.ne.u32 p, v, 0;
@p bra.uni AGAIN;
ld.relaxed.gpu.global.u32 v, [$3];
setp.ne.u32 p, v, 0;
vote.sync.any.pred p, p, 0xffffffff;
@p bra.uni DONE;
setp.lt.u32 p, n, 1048576;
@p bra.uni AGAIN;
red.relaxed.gpu.global.add.u32 [$3], 1;
DONE:
fence.acq_rel.gpu;
fence.proxy.async.global;
}""")
"""Poll a counter. Every 256th time, see whether another wait gave up; after 2^20 times, give up.

The lanes vote, so that all of a warp take the same branches, as `bra.uni` tells ptxas. The result
is a zero: an elementwise operation has to have one.
"""

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


@builtin
def _reduce_add(desc, coord, src, _semantic=None):
    """Global memory += shared memory, by TMA: Gluon has the operation, but no function for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, src.handle)


@gluon.jit
def _wait_for_turn(counter, turn, gave_up):
    """Wait until so many parts are in the sum, and let TMA operations of this warp see them.

    The counter was raised by `_pass_turn`, after a fence: what was written before that fence is
    visible after this one. The second fence extends this from ordinary accesses to those of TMA.
    """
    args = [counter, turn, gave_up]
    gl.inline_asm_elementwise(_WAIT_FOR_TURN, "=r,l,r,l", args, gl.int32, is_pure=False, pack=1)


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
def _in_order_of_registers(dq, D: gl.constexpr, GROUPS: gl.constexpr):
    """[BQ, D] as [BQ D / 32, 32], four numbers of a thread side by side, then those of the next.

    Stores to shared memory are then 16 bytes wide and free of conflicts. `finish` undoes the order,
    which depends on how many groups of warps share the columns.
    """
    dq = dq.reshape([BQ // 16, 2, 8, GROUPS, D // (8 * GROUPS), 4, 2])
    dq = dq.permute((4, 3, 0, 2, 5, 1, 6))
    return dq.reshape([BQ * D // 32, 32])


@gluon.jit
def _key_scales(at):
    """Of 128 keys: two, loaded once each."""
    which = gl.arange(0, BK, KEYS) // 64
    return gl.where(which == 0, gl.load(at), gl.load(at + 1))


@gluon.jit
def _turn(i, tile, CAUSAL: gl.constexpr):
    """How many parts a query block gets before that of this tile."""
    turn = tile
    if CAUSAL:
        turn = (i * BQ + BQ - 1) // BK - tile
    return turn


@gluon.jit
def _begin_scores(k8_s, v_s, q8_s, do_s, zero, stage):
    """S and dP, transposed, which are not to be read before a wait."""
    s = warpgroup_mma(
        k8_s.index(zero), q8_s.index(stage).permute((1, 0)), gl.zeros((BK, BQ), gl.int32, MMA8),
        use_acc=False, is_async=True,
    )  # fmt: skip
    dp = warpgroup_mma(
        v_s.index(zero), do_s.index(stage).permute((1, 0)), gl.zeros((BK, BQ), gl.float32, MMA),
        use_acc=False, is_async=True,
    )  # fmt: skip
    return s, dp


@gluon.jit
def _begin_dq(ds, k16, D: gl.constexpr, ACC: gl.constexpr):
    dq = gl.zeros((BQ, D), gl.float32, ACC)
    return warpgroup_mma(ds.permute((1, 0)), k16, dq, use_acc=False, is_async=True)


@gluon.jit
def _begin_keys(ks_ptr, row8, first, D: gl.constexpr, ACC: gl.constexpr):
    """The keys of a program, their scales, and zeros for dK and dV."""
    keys = first + gl.arange(0, BK, KEYS)
    k_scale = _key_scales(ks_ptr + (row8 + first) // 64)
    dk = warpgroup_mma_init(gl.zeros((BK, D), gl.float32, ACC))
    dv = warpgroup_mma_init(gl.zeros((BK, D), gl.float32, ACC))
    return keys, k_scale, dk, dv


@gluon.jit
def _probabilities(s, k_scale, q_scale, lse, keys, i, MASKED: gl.constexpr):
    """P, transposed, of the integer sums of S."""
    x = gl.convert_layout(s.to(gl.float32), MMA)
    x = x * (k_scale[:, None] * q_scale[None, :]) - lse[None, :]
    if MASKED:
        queries = i * BQ + gl.arange(0, BQ, QUERIES)
        x = gl.where(keys[:, None] <= queries[None, :], x, -float("inf"))
    return gl.exp2(x)


@gluon.jit
def _store_gradients(dk, dv, dk_s, dv_s, dk_desc, dv_desc, row, scale):
    """Through shared memory, in place of what no warp reads any more."""
    dk_r, dv_r = warpgroup_mma_wait(0, deps=[dk, dv])
    gl.thread_barrier()
    dk_s.store((dk_r * scale).to(gl.bfloat16))
    dv_s.store(dv_r.to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(dk_desc, [row, 0], dk_s)
    tma.async_copy_shared_to_global(dv_desc, [row, 0], dv_s)
    tma.store_wait(0)


@gluon.jit
def _split_load(
    q, q_s, full, ready, blocks, rows, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr
):
    """A stage is free when dS of the step after is there: then the products of its own step are."""
    begin, _, end = blocks
    row8, row16 = rows
    for i in range(begin, end):
        n = i - begin
        if n >= STAGES:
            m = n - STAGES + 1
            mbarrier.wait(ready.index(m % SLOTS), (m // SLOTS) & 1)
        _load_queries(*q, *q_s, full, n % STAGES, row8 + i * BQ, row16 + i * BQ, D, BQ)


@gluon.jit
def _split_keys(
    k8_s, v_s, dk_s, q_s, ds_s, full, ready, filled, kv, ks_ptr, dk_desc, dv_desc, blocks, first,
    rows, scale, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """dK and dV, and dS for the warps that compute dQ."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    begin, seeing, end = blocks
    row8, row16 = rows
    q8_s, q16_s, do_s, st_s = q_s
    keys, k_scale, dk, dv = _begin_keys(ks_ptr, row8, first, D, ACC)
    mbarrier.wait(kv, 0)
    for MASKED in gl.static_range(1, -1, -1):
        for i in range(begin if MASKED else seeing, seeing if MASKED else end):
            n = i - begin
            stage = n % STAGES
            slot = n % SLOTS
            mbarrier.wait(full.index(stage), (n // STAGES) & 1)
            s, dp = _begin_scores(k8_s, v_s, q8_s, do_s, 0, stage)
            s = warpgroup_mma_wait(1, deps=[s])
            q_scale = st_s.index(3 * stage).load(QUERIES)
            lse = st_s.index(3 * stage + 1).load(QUERIES)
            p = _probabilities(s, k_scale, q_scale, lse, keys, i, MASKED)
            p16 = gl.convert_layout(p.to(gl.bfloat16), A)
            dp = warpgroup_mma_wait(0, deps=[dp])
            delta = st_s.index(3 * stage + 2).load(QUERIES)
            dv = warpgroup_mma(p16, do_s.index(stage), dv, is_async=True)
            ds16 = (p * (dp - delta[None, :])).to(gl.bfloat16)
            # dQ of the dS that was in this slot before is there
            mbarrier.wait(filled.index(slot), ((n // SLOTS) & 1) ^ 1)
            ds_s.index(slot).store(ds16)
            fence_async_shared()
            gl.thread_barrier()  # also: these warps are done with the products of the step before
            mbarrier.arrive(ready.index(slot), count=1)
            # of dS in shared memory, as in registers there would be too many of them
            dk = warpgroup_mma(ds_s.index(slot), q16_s.index(stage), dk, is_async=True)
    _store_gradients(dk, dv, dk_s.index(0), v_s.index(0), dk_desc, dv_desc, row16 + first, scale)


@gluon.jit
def _split_queries(
    k16_s, ds_s, dq_s, ready, filled, free, kv, blocks, D: gl.constexpr, SLOTS: gl.constexpr
):
    """Parts of dQ out of dS. Four warps."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    begin, _, end = blocks
    mbarrier.wait(kv, 0)
    for i in range(begin, end):
        n = i - begin
        slot = n % SLOTS
        mbarrier.wait(ready.index(slot), (n // SLOTS) & 1)
        dq_t = _begin_dq(ds_s.index(slot), k16_s.index(0), D, ACC)
        dq = warpgroup_mma_wait(0, deps=[dq_t])
        mbarrier.wait(free.index(slot), ((n // SLOTS) & 1) ^ 1)
        dq_s.index(slot).store(_in_order_of_registers(dq, D, 1))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(filled.index(slot), count=1)


@gluon.jit
def _split_send(
    SLOT: gl.constexpr, dq_desc, dq_s, filled, free, turns, blocks,
    D: gl.constexpr, CAUSAL: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Add the parts of dQ of one slot to the sum. Each slot has a warp, so two turns can go on."""
    counters, gave_up, row, tile = turns
    begin, _, end = blocks
    for i in range(begin + SLOT, end, SLOTS):
        turn = _turn(i, tile, CAUSAL)
        at = row + i * (BQ * D // 32)
        if turn > 0:  # while the product is not there yet
            _wait_for_turn(counters + i, turn, gave_up)
        mbarrier.wait(filled.index(SLOT), ((i - begin) // SLOTS) & 1)
        if turn == 0:  # so the sum needs no zeros before
            tma.async_copy_shared_to_global(dq_desc, [at, 0], dq_s.index(SLOT))
        else:
            _reduce_add(dq_desc, [at, 0], dq_s.index(SLOT))
        _wait_until_read()
        mbarrier.arrive(free.index(SLOT), count=1)
        _wait_until_written()
        _pass_turn(counters + i)


@gluon.jit
def _joint_load(q, q_s, full, empty, blocks, rows, D: gl.constexpr, STAGES: gl.constexpr):
    begin, _, end = blocks
    row8, row16 = rows
    for i in range(begin, end):
        n = i - begin
        stage = n % STAGES
        mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
        _load_queries(*q, *q_s, full, stage, row8 + i * BQ, row16 + i * BQ, D, BQ)


@gluon.jit
def _joint_send(dq_desc, dq_s, filled, free, turns, blocks, D: gl.constexpr, CAUSAL: gl.constexpr):
    """Add the parts of dQ to the sum."""
    counters, gave_up, row, tile = turns
    begin, _, end = blocks
    for i in range(begin, end):
        n = i - begin
        mbarrier.wait(filled.index(0), n & 1)
        at = row + i * (BQ * D // 32)
        turn = _turn(i, tile, CAUSAL)
        if turn == 0:  # so the sum needs no zeros before
            tma.async_copy_shared_to_global(dq_desc, [at, 0], dq_s.index(0))
        else:
            _wait_for_turn(counters + i, turn, gave_up)
            _reduce_add(dq_desc, [at, 0], dq_s.index(0))
        _wait_until_written()
        mbarrier.arrive(free.index(0), count=1)
        _pass_turn(counters + i)


@gluon.jit
def _joint_compute(
    k8_s, v_s, k16_s, q_s, ds_s, dq_s, full, empty, filled, free, kv, ks_ptr, dk_desc, dv_desc,
    blocks, first, rows, scale, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dK, dV and the parts of dQ."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    ACCQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    begin, seeing, end = blocks
    row8, row16 = rows
    q8_s, q16_s, do_s, st_s = q_s
    keys, k_scale, dk, dv = _begin_keys(ks_ptr, row8, first, D, ACC)
    mbarrier.wait(kv, 0)
    for MASKED in gl.static_range(1, -1, -1):
        for i in range(begin if MASKED else seeing, seeing if MASKED else end):
            n = i - begin
            stage = n % STAGES
            # Unknown to the compiler, which would otherwise compute all descriptors before the loop
            # and run out of registers.
            zero = n >> 30
            mbarrier.wait(full.index(stage), (n // STAGES) & 1)
            s, dp = _begin_scores(k8_s, v_s, q8_s, do_s, zero, stage)
            q_scale = st_s.index(3 * stage).load(QUERIES)
            lse = st_s.index(3 * stage + 1).load(QUERIES)
            s = warpgroup_mma_wait(1, deps=[s])
            p = _probabilities(s, k_scale, q_scale, lse, keys, i, MASKED)
            delta = st_s.index(3 * stage + 2).load(QUERIES)
            p16 = gl.convert_layout(p.to(gl.bfloat16), A)
            dp = warpgroup_mma_wait(0, deps=[dp])
            dv = warpgroup_mma(p16, do_s.index(stage), dv, is_async=True)
            ds16 = (p * (dp - delta[None, :])).to(gl.bfloat16)
            ds_s.index(zero).store(ds16)
            fence_async_shared()
            gl.thread_barrier()  # also: all warps are done with the products of the step before
            mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES), count=1, pred=n > 0)
            dq_t = _begin_dq(ds_s.index(zero), k16_s.index(zero), D, ACCQ)
            # of dS in shared memory, as in registers there would be too many of them
            dk = warpgroup_mma(ds_s.index(zero), q16_s.index(stage), dk, is_async=True)
            mbarrier.wait(free.index(0), (n & 1) ^ 1)
            dq = warpgroup_mma_wait(1, deps=[dq_t])
            dq_s.index(0).store(_in_order_of_registers(dq, D, 2))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(filled.index(0), count=1)
    _store_gradients(dk, dv, k16_s.index(0), v_s.index(0), dk_desc, dv_desc, row16 + first, scale)


@gluon.jit(do_not_specialize=["N", "H", "Bt"])
def key_tiles(
    q8, k8, q16, k16, v, do, lse, delta, qs, ks_ptr, dk_desc, dv_desc, dq_desc, counters, gave_up,
    N, H, Bt, scale, CAUSAL: gl.constexpr, D: gl.constexpr, SPLIT: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Eight warps compute dK, dV and dQ; one loads, and one sends dQ.

    Where SPLIT, four other warps compute dQ, and there is a sending warp for each of two slots.
    `_split_*` are what the warps of that kernel do, `_joint_*` those of the other one.
    Barriers: `full` of a stage of loads and `empty` again, `ready` of dS, `filled` of a part of dQ
    in shared memory and `free` again, `kv` of the tile of keys.
    Heads of a group alternate: programs that run together are of more heads, and wait less.
    """
    SLOTS: gl.constexpr = 2 if SPLIT else 1
    STAGES: gl.constexpr = SLOTS + 1  # with more, `_split_load` might see the phase after the next
    tiles = N // BK
    pid = gl.program_id(0)
    tile = (pid % (tiles * GROUP)) // GROUP
    z = pid // (tiles * GROUP) * GROUP + pid % GROUP  # b * H + h
    if CAUSAL:
        tile = tiles - 1 - tile
    b = z // H
    h = z % H
    first = tile * BK
    row16 = z * N
    row8 = h * (Bt * N) + b * N
    k8_s = gl.allocate_shared_memory(gl.int8, [1, BK, D], k8.layout)
    k16_s = gl.allocate_shared_memory(gl.bfloat16, [1, BK, D], k16.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [1, BK, D], v.layout)
    dk_s = k16_s
    if SPLIT:  # K may still be read when dK is there
        dk_s = gl.allocate_shared_memory(gl.bfloat16, [1, BK, D], v.layout)
    q8_s = gl.allocate_shared_memory(gl.int8, [STAGES, BQ, D], q8.layout)
    q16_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BQ, D], q16.layout)
    do_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BQ, D], do.layout)
    ds_s = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BK, BQ], DS)
    dq_s = gl.allocate_shared_memory(gl.float32, [SLOTS, BQ * D // 32, 32], dq_desc.layout)
    st_s = gl.allocate_shared_memory(gl.float32, [3 * STAGES, BQ], lse.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    if SPLIT:
        ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    else:
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    filled = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    kv = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        if not SPLIT:
            mbarrier.init(empty.index(i), 1)
    if SPLIT:
        for i in gl.static_range(SLOTS):
            mbarrier.init(ready.index(i), 1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(filled.index(i), 1)
        mbarrier.init(free.index(i), 1)
    mbarrier.init(kv, 1)
    fence_async_shared()
    mbarrier.expect(kv, BK * D * 5)
    tma.async_copy_global_to_shared(k8, [row8 + first, 0], kv, k8_s.index(0))
    tma.async_copy_global_to_shared(v, [row16 + first, 0], kv, v_s.index(0))
    tma.async_copy_global_to_shared(k16, [row16 + first, 0], kv, k16_s.index(0))
    # Zeros, but the compiler does not know it, and keeps the loop over the masked blocks: without
    # that loop, ptxas makes each product of the other one wait for the product before.
    begin = N >> 31
    seeing = N >> 30
    if CAUSAL:
        begin = first // BQ
        seeing = (first + BK + BQ - 1) // BQ
    blocks = (begin, seeing, N // BQ)
    rows = (row8, row16)
    q = (q8, q16, do, lse, delta, qs)
    q_s = (q8_s, q16_s, do_s, st_s)
    turns = (counters + z * (N // BQ), gave_up, z * N * (D // 32), tile)
    if SPLIT:
        gl.warp_specialize(
            [
                (_split_keys, (
                    k8_s, v_s, dk_s, q_s, ds_s, full, ready, filled, kv, ks_ptr, dk_desc, dv_desc,
                    blocks, first, rows, scale, D, STAGES, SLOTS,
                )),
                (_split_queries, (k16_s, ds_s, dq_s, ready, filled, free, kv, blocks, D, SLOTS)),
                (_split_load, (q, q_s, full, ready, blocks, rows, D, STAGES, SLOTS)),
                (_split_send, (0, dq_desc, dq_s, filled, free, turns, blocks, D, CAUSAL, SLOTS)),
                (_split_send, (1, dq_desc, dq_s, filled, free, turns, blocks, D, CAUSAL, SLOTS)),
            ],
            [4, 1, 1, 1],
            [120, 24, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_joint_compute, (
                    k8_s, v_s, k16_s, q_s, ds_s, dq_s, full, empty, filled, free, kv, ks_ptr,
                    dk_desc, dv_desc, blocks, first, rows, scale, D, STAGES,
                )),
                (_joint_load, (q, q_s, full, empty, blocks, rows, D, STAGES)),
                (_joint_send, (dq_desc, dq_s, filled, free, turns, blocks, D, CAUSAL)),
            ],
            [1, 1],
            [24, 24],
        )  # fmt: skip


@triton.jit
def finish(sum_ptr, dq_ptr, scale, D: tl.constexpr, BQ: tl.constexpr, GROUPS: tl.constexpr):
    """dQ of a query block: scaled, rounded, and out of the order of registers."""
    block = tl.program_id(0).to(tl.int64) * (BQ * D)
    row = tl.arange(0, BQ)[:, None]
    col = tl.arange(0, D)[None, :]
    at = col % 2 + row // 8 % 2 * 2 + col // 2 % 4 * 4 + row % 8 * 16 + row // 16 * 128
    at += BQ * 8 * (col // (D // GROUPS)) + BQ * 8 * GROUPS * (col % (D // GROUPS) // 8)
    x = tl.load(sum_ptr + block + at)
    tl.store(dq_ptr + block + row * D + col, (x * scale).to(dq_ptr.dtype.element_ty))


def tile_of(d: int, is_causal: bool) -> dict[str, bool | int]:
    """The fastest choice, or nearly so, of those that were tried.

    For head size 128, what the split kernel needs does not fit into shared memory.
    """
    return {"split": d == 64, "group": 1 if is_causal else 4}


def outputs(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Where the kernels write: not a number where they do not."""
    found = {name: torch.full_like(x["v"], torch.nan) for name in ("dq", "dk", "dv")}
    found["sum"] = torch.full_like(x["v"], torch.nan, dtype=torch.float32)
    blocks = x["v"][..., 0].numel() // BQ.value
    found["counters"] = torch.zeros(blocks, dtype=torch.int32, device=x["v"].device)
    found["gave_up"] = torch.zeros(1, dtype=torch.int32, device=x["v"].device)
    return found


def arguments(x: dict[str, Tensor], out: dict[str, Tensor], is_causal: bool) -> list[Any]:
    """What `key_tiles` takes. The group has to divide the number of heads of all batches."""
    batch, heads, tokens, d = x["q"].shape
    queries, keys = BQ.value, BK.value
    scale = d**-0.5
    factor = (x["q_scale"] * (scale * LOG2_E)).contiguous()
    sums = TensorDescriptor.from_tensor(
        out["sum"].view(-1, 32), [queries * d // 32, 32], gl.NVMMASharedLayout(128, 32, 2)
    )
    return [
        rows_of(x["q8"], queries), rows_of(x["k8"], keys), rows_of(x["q"], queries),
        rows_of(x["k"], keys), rows_of(x["v"], keys), rows_of(x["do"], queries),
        numbers_of(x["lse2"]), numbers_of(x["delta"]), numbers_of(factor), x["k_scale"],
        rows_of(out["dk"], keys), rows_of(out["dv"], keys), sums, out["counters"], out["gave_up"],
        tokens, heads, batch, scale, is_causal, d, *tile_of(d, is_causal).values(),
    ]  # fmt: skip


def backward(x: dict[str, Tensor], out: dict[str, Tensor], is_causal: bool) -> Callable[[], None]:
    """All of a backward: zeros for the counters, the kernel, and the conversion of dQ."""
    batch, heads, tokens, d = x["q"].shape
    taken = arguments(x, out, is_causal)
    rows = batch * heads * tokens
    groups = 1 if tile_of(d, is_causal)["split"] else 2

    def run() -> None:
        out["counters"].zero_()
        key_tiles[(rows // BK.value,)](*taken, num_warps=WARPS.value, enable_fp_fusion=False)
        finish[(rows // BQ.value,)](out["sum"], out["dq"], d**-0.5, d, BQ.value, groups)

    return run


def assert_equal_runs(runs: list[dict[str, Tensor]]) -> None:
    """No wait gave up, and all gradients are equal to the bit."""
    assert not any(int(run["gave_up"]) for run in runs)
    for name in ("dq", "dk", "dv"):
        assert all(torch.equal(runs[0][name], run[name]) for run in runs[1:]), name


def check(d: int, is_causal: bool) -> None:
    """Raise where a gradient is further from float32 than bfloat16 explains, or runs differ."""
    x = problem(2, 2, 512, d)
    true = exact(x, d**-0.5, is_causal)
    x |= {name: true[name].contiguous() for name in ("lse2", "delta")}
    runs = [outputs(x) for _ in range(2)]
    for out in runs:
        backward(x, out, is_causal)()
    assert_equal_runs(runs)
    for name in ("dq", "dk", "dv"):
        error = float((runs[0][name].float() - true[name]).norm() / true[name].norm())
        assert error < 0.005, (d, is_causal, name, error)


def times(d: int, is_causal: bool) -> dict[str, object]:
    """Milliseconds of 16384 tokens and 2048 channels."""
    tokens = 4096
    x = problem(4, 2048 // d, tokens, d)
    delta = torch.zeros(x["q"].shape[:3], device="cuda")
    # near the true statistics: the time may depend on whether numbers overflow
    x |= {"lse2": torch.full_like(delta, math.log2(tokens)), "delta": delta}
    runs = [outputs(x) for _ in range(2)]
    launches = [backward(x, out, is_causal) for out in runs]
    launches[1]()
    ms = do_bench(launches[0], warmup=10, rep=100, return_mode="median")
    assert_equal_runs(runs)
    row: dict[str, object] = {"head_size": d, "is_causal": is_causal, "kernel": "backward"}
    tile = {"queries": BQ.value, "keys": BK.value} | tile_of(d, is_causal)
    row |= {"tile": tile, "ms": round(ms, 3)}
    print(row, flush=True)
    return row


def rows() -> list[dict[str, object]]:
    """All are checked before any is timed."""
    for shape in SHAPES:
        check(*shape)
    return [times(*shape) for shape in SHAPES]


if __name__ == "__main__":
    report("hopper_backward.py", str(__doc__), rows)
