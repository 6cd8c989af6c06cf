"""dK, dV and the parts of dQ of 128 keys, in one pass over the queries: the kernel itself."""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sagesim_kernels.hopper.compat import load
from sagesim_kernels.hopper.partitions import (
    NUMBERS,
    ROW,
    joint_compute,
    load_queries,
    load_tokens,
    split_keys,
    split_queries,
)
from sagesim_kernels.hopper.turns import BK, BQ, send
from sagesim_kernels.layout import (
    Lengths,
    causal_offset,
    length_of,
    live_keys,
    live_queries,
    queries_seeing,
    stored_start_of,
)

BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


@gluon.jit
def _sequence(lengths, b, first):
    """Of sequence b: its keys, those of them that a query attends to, the offset of its mask, the
    blocks of queries that attend to keys first..first + BK: the first, the first that no mask cuts,
    and the end; and where its queries and its keys begin in storage."""
    first_live, n_q = live_queries(lengths, b)
    n_k = live_keys(lengths, b)
    offset = causal_offset(lengths, b)
    begin, seeing = queries_seeing(first, BK, BQ, n_k, offset, first_live, n_q)
    end = (n_q + BQ - 1) // BQ
    # A zero that the compiler cannot know: without the loop over the masked blocks, ptxas makes
    # each product of the other one wait for the product before.
    seeing = (seeing + BQ - 1) // BQ + gl.program_id(1)
    start_q = stored_start_of(lengths.cu_q, lengths.n_q, b).to(gl.int32)
    start_k = stored_start_of(lengths.cu_k, lengths.n_k, b).to(gl.int32)
    blocks = (gl.minimum(begin // BQ, end), seeing, end)
    return length_of(lengths.cu_k, lengths.n_k, b), n_k, offset, blocks, start_q, start_k


@gluon.jit(do_not_specialize=["n_q", "n_k", "tiles", "heads", "tokens_q", "tokens_k"])
def one_pass(
    q8, k8, q16, k16, v, do, numbers, k_scale, k_mean, dk, dv, sums, counters, packing, n_q, n_k,
    tiles, heads, tokens_q, tokens_k, scale, STAGED: gl.constexpr, GROUPS: gl.constexpr,
    TOGETHER: gl.constexpr, D: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """A program for each tile of keys.

    TOGETHER: heads of k and v that alternate; programs that run at a time are of more heads then,
    and wait less. packing: `Lengths` without the numbers. tiles: of a head. heads: of k and v.
    tokens_q, tokens_k: in storage, of a head. k_mean: what k16 is still to be smoothed by, or None.
    """
    SLOTS: gl.constexpr = 2 if SPLIT else 1
    STAGES: gl.constexpr = SLOTS + 1
    STAGES16: gl.constexpr = 3
    program = gl.program_id(0)
    index = (program % (tiles * TOGETHER)) // TOGETHER
    z = program // (tiles * TOGETHER) * TOGETHER + program % TOGETHER
    if packing.IS_CAUSAL:
        index = tiles - 1 - index
    b = z // heads
    head = z % heads
    first = index * BK
    stored, n_k, offset, blocks, start_q, start_k = _sequence(
        # In one expression: a constexpr that is assigned is none any more.
        Lengths(packing.cu_q, packing.cu_k, n_q, n_k, packing.IS_CAUSAL, packing.LOWER_RIGHT),
        b,
        first,
    )
    if first >= stored:
        return
    begin, _, end = blocks
    tile = (first, stored, n_k, offset)
    row_q = head * GROUPS * tokens_q + start_q
    row_k = head * tokens_k + start_k + first
    zero = gl.program_id(1)
    if STAGED:
        of_queries = (zero, head * GROUPS, start_q)
        of_keys = (zero, head, start_k)
    else:
        of_queries = (b, head * GROUPS, zero)
        of_keys = (b, head, zero)

    dt: gl.constexpr = v.dtype
    V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, D], dt)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, BQ], dt)
    k8_s = gl.allocate_shared_memory(gl.int8, [1, BK, D], k8.layout)
    k16_s = gl.allocate_shared_memory(dt, [1, BK, D], V)
    v_s = gl.allocate_shared_memory(dt, [1, BK, D], V)
    q8_s = gl.allocate_shared_memory(gl.int8, [STAGES, BQ, D], q8.layout)
    q16_s = gl.allocate_shared_memory(dt, [STAGES16, BQ, D], V)
    do_s = gl.allocate_shared_memory(dt, [STAGES, BQ, D], V)
    ds_s = gl.allocate_shared_memory(dt, [SLOTS, BK, BQ], DS)
    dq_s = gl.allocate_shared_memory(gl.float32, [SLOTS, BQ * D // 32, 32], sums.layout)
    numbers_s = gl.allocate_shared_memory(gl.float32, [STAGES, NUMBERS], ROW)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    if SPLIT:
        ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    else:
        full_k = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    filled = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    kv = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
    for i in gl.static_range(2):
        if SPLIT:
            mbarrier.init(ready.index(i), 1)
        mbarrier.init(filled.index(i), 1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(free.index(i), 1)
    mbarrier.init(kv, 1)
    if not SPLIT:
        mbarrier.init(full_k, 1)
    fence_async_shared()
    if not SPLIT:
        mbarrier.expect(full_k, BK * D * 2)
        load_tokens(k16, of_keys, first, full_k, k16_s.index(0))
    mbarrier.expect(kv, BK * D * (5 if SPLIT else 3))
    load(k8, [row_k, 0], kv, k8_s.index(0))
    load_tokens(v, of_keys, first, kv, v_s.index(0))
    if SPLIT:
        load_tokens(k16, of_keys, first, kv, k16_s.index(0))

    q = (q8, q16, do, numbers)
    q_s = (q8_s, q16_s, do_s, numbers_s)
    k_scales = k_scale + row_k // BQ
    if k_mean is not None:
        k_mean += z.to(gl.int64) * D
    outputs = (dk, dv, packing.cu_k, b, head)
    sent = (begin, end, row_q // BQ, tokens_q // BQ)
    CAUSAL: gl.constexpr = packing.IS_CAUSAL
    if SPLIT:
        gl.warp_specialize(
            [
                (split_keys, (
                    k8_s, v_s, q_s, ds_s, full, ready, filled, kv, k_scales, outputs, blocks, tile,
                    scale, GROUPS, D, STAGES, SLOTS,
                )),
                (split_queries, (
                    k16_s, k_mean, ds_s, dq_s, ready, filled, free, kv, blocks, tile, GROUPS, D,
                    SLOTS,
                )),
                (load_queries, (
                    q, q_s, full, ready, blocks, of_queries, row_q, tokens_q, GROUPS, D, STAGES,
                    STAGES16,
                )),
                (send, (
                    0, sums, dq_s, filled, free, counters, sent, index, n_k, offset, GROUPS, D,
                    CAUSAL, SLOTS,
                )),
                (send, (
                    1, sums, dq_s, filled, free, counters, sent, index, n_k, offset, GROUPS, D,
                    CAUSAL, SLOTS,
                )),
            ],
            [4, 1, 1, 1],
            [72, 24, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (joint_compute, (
                    k8_s, v_s, k16_s, k_mean, q_s, ds_s, dq_s, full, filled, free, kv, full_k,
                    k_scales, outputs, blocks, tile, scale, GROUPS, D, STAGES, STAGES16,
                )),
                (load_queries, (
                    q, q_s, full, filled, blocks, of_queries, row_q, tokens_q, GROUPS, D, STAGES,
                    STAGES16,
                )),
                (send, (
                    0, sums, dq_s, filled, free, counters, sent, index, n_k, offset, GROUPS, D,
                    CAUSAL, SLOTS,
                )),
                (send, (
                    1, sums, dq_s, filled, free, counters, sent, index, n_k, offset, GROUPS, D,
                    CAUSAL, SLOTS,
                )),
            ],
            [1, 1, 1],
            [24, 24, 24],
        )  # fmt: skip
