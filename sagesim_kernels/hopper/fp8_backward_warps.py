"""The warps of a backward program with dV, dK and dQ in FP8.

Two consumers, which are warpgroups, own 64 keys each and compute their dK and dV. A producer warp
loads, and a store warp for each consumer adds dQ to its sums. A consumer computes dQ of half of the
channels, from dS of both: with dS of the step before, so that no consumer waits for the other one.
While one of them computes exponentials, the other one's products run.

P and dS are rounded with scales that are known before the loop, see `operands.row_bounds`. Their
codes are left operands of dV and dK in registers. The right operands, dO and Q, lie in memory in
the order in which threads hold the queries of P, see `operands.in_register_order`. dS passes
through shared memory to dQ: a thread holds keys r and r + 8 of each 16, and stores their codes as
one number of 16 bits, so that keys are in pairs there. K has the same order.

Tensor cores do not add FP8 products in full float32. So a sum of dV or dK ends with the block of
queries that shares a scale of dO or Q, see docs/numerics.md, and its parts are added in float32.
Registers do not suffice for a second sum. Each thread keeps its part of it in global memory, which
no other thread reads or writes.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from sagesim_kernels.gluon_compat import barrier, reinterpret, tma_add, tma_load
from sagesim_kernels.hopper.backward_masks import are_live, attends_between, part_of
from sagesim_kernels.hopper.backward_structures import KeyTile, TokenOrigin
from sagesim_kernels.hopper.backward_warps import load_tokens, store_keys
from sagesim_kernels.hopper.dq_parts import (
    BLOCK_Q,
    block_of,
    to_tma_order,
    to_units,
    wait_for_tma_reads,
    wait_for_tma_writes,
)
from sagesim_kernels.hopper.forward_masks import S_COLUMNS, S_FLOAT32, S_ROWS
from sagesim_kernels.hopper.forward_warps import S_INT32

KEYS = gl.constexpr(64)
"""Keys of a consumer."""

ROW_STATS = gl.constexpr(5)
"""Statistics of a row of S, of which each block of queries has 64 in a row.

Q's scale times the scale of the logits; log2 of the top code of P, less the row maximum; a factor
of dP in codes of dS; this factor times -delta; and the scale of dS over the unit of dQ.
"""

_TO_E4M3 = gl.constexpr(
    "{.reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f32 x, $2, $1; "
    "cvt.rn.satfinite.e4m3x2.f32 y, $4, $3; mov.b32 $0, {x, y};}"
)
_IN_PAIRS = gl.constexpr("prmt.b32 $0, $2, $3, 0x5140; prmt.b32 $1, $2, $3, 0x7362;")
_ADD = gl.constexpr("red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11}; mov.b32 $0, 0;")


@gluon.jit
def _to_codes(x):
    """Round x to FP8 codes, ties to even. Numbers beyond the largest code become that code."""
    return gl.inline_asm_elementwise(_TO_E4M3, "=r,r,r,r,r", [x], gl.int8, True, 4)


@gluon.jit
def _as_left_operand(codes, OPERAND: gl.constexpr):
    """Return codes [keys, queries] as a left operand, with queries in register order."""
    M: gl.constexpr = codes.shape[0]
    N: gl.constexpr = codes.shape[1]
    codes = codes.reshape([M, N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([M, N])
    return gl.convert_layout(codes, OPERAND).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _in_pairs(codes):
    """Return codes [keys, queries] as int16 [queries, keys / 2], two keys in a number."""
    M: gl.constexpr = codes.shape[0]
    N: gl.constexpr = codes.shape[1]
    low, high = gl.split(codes.reshape([M // 16, 2, 8, N]).permute((0, 2, 3, 1)))
    pairs = gl.inline_asm_elementwise(_IN_PAIRS, "=r,=r,r,r", [low, high], gl.int16, True, 4)
    return pairs.reshape([M // 2, N]).permute((1, 0))


@gluon.jit
def _start_s(k8, q8):
    """Start S transposed. It may be read only after a wait."""
    zeros = gl.zeros((KEYS, BLOCK_Q), gl.int32, S_INT32)
    return warpgroup_mma(k8, q8.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_dp(v, do):
    """Start dP transposed. It may be read only after a wait."""
    zeros = gl.zeros((KEYS, BLOCK_Q), gl.float32, S_FLOAT32)
    return warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _like(x, of_columns):
    """Return numbers of columns for each element of x [keys, queries]."""
    return of_columns[None, :].broadcast_to(x.shape)


@gluon.jit
def load_columns(x, head, channel, column, bar, buffer):
    """Load tokens from `column` and channels from `channel` of codes [heads, channels, tokens]."""
    D: gl.constexpr = buffer.shape[0]
    TOKENS: gl.constexpr = buffer.shape[1]
    shared = reinterpret(buffer, x.dtype, [1, D, TOKENS], x.layout)
    tma_load(x, [head, channel, column], bar, shared)


@gluon.jit
def _wait_for_ds(barriers, n, pred):
    """Wait until dS of step n, of both consumers, is in shared memory, if pred is true.

    They have then finished with Q in INT8, dO in 16 bit and the row statistics of the step.
    """
    SLOTS: gl.constexpr = barriers.ds_full.shape[0]
    mbarrier.wait(barriers.ds_full.index(n % SLOTS), (n // SLOTS) & 1, pred=pred)


@gluon.jit
def produce_fp8(
    inputs, buffers, barriers, loop, origin, first_head, start, stored_tokens, GROUPS: gl.constexpr
):  # fmt: skip
    """Load the block of queries of each step by TMA, into buffers that are released. One warp.

    After the last step it loads one block of Q and dO more, because each step starts S and dP of
    the next one.

    Args:
        barriers: `CodedBarriers`.
        loop: `QueryLoop`.
        origin: `TokenOrigin` of the first query head.
        first_head: the first query head.
        start: first token of the sequence in padded storage.
        stored_tokens: tokens of a head in padded storage.
    """
    STAGES: gl.constexpr = barriers.q_full.shape[0]
    BLOCKS: gl.constexpr = buffers.q8.shape[0] // STAGES
    D: gl.constexpr = buffers.q8.shape[2]
    steps = loop.end - loop.begin
    for head in range(GROUPS):
        for i in range(loop.begin, loop.end):
            n = head * steps + i - loop.begin
            stage = n % STAGES
            at = TokenOrigin(origin.b, origin.h + head, origin.row)
            block = block_of(i, loop)
            column = start + block * (BLOCKS * BLOCK_Q)
            row = (first_head + head) * stored_tokens + column
            _wait_for_ds(barriers, n - STAGES, n >= STAGES)
            bar = barriers.q_full.index(stage)
            mbarrier.expect(bar, BLOCKS * BLOCK_Q * (D * 3 + ROW_STATS * 4))
            for j in gl.static_range(BLOCKS):
                place = stage * BLOCKS + j
                first = row + j * BLOCK_Q
                tma_load(inputs.q8, [first, 0], bar, buffers.q8.index(place))
                for k in gl.static_range(ROW_STATS):
                    stats = buffers.row_stats.index(place * ROW_STATS + k)
                    tma_load(inputs.row_stats, [first * ROW_STATS + k * BLOCK_Q], bar, stats)
                token = (block * BLOCKS + j) * BLOCK_Q
                load_tokens(inputs.do, at, token, bar, buffers.do.index(place))
            mbarrier.wait(barriers.right_empty.index(stage), ((n // STAGES) & 1) ^ 1)
            bar = barriers.right_full.index(stage)
            mbarrier.expect(bar, BLOCKS * BLOCK_Q * D * 2)
            for j in gl.static_range(BLOCKS):
                h, token = first_head + head, column + j * BLOCK_Q
                place = stage * BLOCKS + j
                load_columns(inputs.do_t, h, 0, token, bar, buffers.do_t.index(place))
                load_columns(inputs.q_t, h, 0, token, bar, buffers.q_t.index(place))
    n = GROUPS * steps
    _wait_for_ds(barriers, n - STAGES, n >= STAGES)
    bar = barriers.q_full.index(n % STAGES)
    mbarrier.expect(bar, BLOCK_Q * D * 3)
    row = first_head * stored_tokens + start
    place = n % STAGES * BLOCKS
    load_tokens(inputs.do, origin, 0, bar, buffers.do.index(place))
    tma_load(inputs.q8, [row, 0], bar, buffers.q8.index(place))


@gluon.jit
def store_dq_half(
    sums, dq_s, barriers, blocks, HALF: gl.constexpr, GROUPS: gl.constexpr,
    SUMMED: gl.constexpr,
):  # fmt: skip
    """Add one consumer's parts of dQ to the sums. One warp.

    sums: see `DqStore`. dq_s: see `compute_gradients`. barriers: `CodedBarriers`. blocks:
    `DqBlocks` of the queries of a step; `first` and `head_stride` count blocks of BLOCK_Q. HALF:
    number of the consumer. SUMMED: see `operands.summed_channels`.
    """
    BLOCKS: gl.constexpr = dq_s.shape[0] // 2
    ROWS: gl.constexpr = dq_s.shape[1]
    BOX: gl.constexpr = sums.block_shape[0]
    COUNT: gl.constexpr = min(max(SUMMED * BLOCK_Q // 32 - HALF * ROWS, 0), ROWS)
    for head in range(GROUPS):
        for i in range(blocks.begin, blocks.end):
            n = head * (blocks.end - blocks.begin) + i - blocks.begin
            block = blocks.first + head * blocks.head_stride + block_of(i, blocks) * BLOCKS
            mbarrier.wait(barriers.dq_full.index(HALF), n & 1)
            for j in gl.static_range(BLOCKS):
                row = ((block + j) * 2 + HALF) * ROWS
                for at in gl.static_range(0, COUNT, BOX):
                    tma_add(sums, [row + at, 0], dq_s.index(HALF * BLOCKS + j).slice(at, BOX))
            wait_for_tma_reads()
            mbarrier.arrive(barriers.dq_empty.index(HALF), count=1)
    wait_for_tma_writes()


@gluon.jit
def _in_thread_order(sums):
    """Return sums [KEYS, D] as [KEYS * D], in the order that registers hold them."""
    D: gl.constexpr = sums.shape[1]
    sums = sums.reshape([KEYS // 16, 2, 8, D // 8, 4, 2])
    return sums.permute((3, 0, 2, 4, 1, 5)).reshape([KEYS * D])


@gluon.jit
def _add_to_memory(sums, ptr, is_first):
    """Add sums to those in memory, or store them there if they are the first.

    Each thread adds to numbers that no other thread reads or writes, in the order of its program.
    """
    sums = _in_thread_order(sums)
    ptrs = ptr + gl.arange(0, sums.shape[0], sums.type.layout)
    if is_first:
        gl.store(ptrs, sums)
    else:
        addresses = ptrs.to(gl.int64)
        gl.inline_asm_elementwise(
            _ADD, "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [addresses, sums], gl.int32, False, 4
        )


@gluon.jit
def _add_from_memory(sums, ptr):
    """Return sums [KEYS, D] plus those that `_add_to_memory` has stored."""
    D: gl.constexpr = sums.shape[1]
    order = _in_thread_order(sums)
    ptrs = ptr + gl.arange(0, order.shape[0], order.type.layout)
    known = gl.load(ptrs, cache_modifier=".cg")
    total = (order + known).reshape([D // 8, KEYS // 16, 8, 4, 2, 2])
    total = total.permute((1, 4, 2, 0, 3, 5)).reshape([KEYS, D])
    return gl.convert_layout(total, sums.type.layout)


@gluon.jit
def _start_dq(ds_s, place, k_t, zero, HALF: gl.constexpr, ACC: gl.constexpr):
    """Start dQ of a block of queries and half of the channels. It may be read only after a wait.

    ds_s, place: dS of both consumers. k_t: see `CodedKeyBuffers`. zero: 0, opaque to the compiler.
    """
    CODES: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    COLUMNS: gl.constexpr = k_t.shape[1]
    dq = gl.zeros((BLOCK_Q, COLUMNS), gl.float32, ACC)
    for i in gl.static_range(2):
        left = reinterpret(ds_s.index(place * 2 + i), gl.float8e4nv, [BLOCK_Q, KEYS], CODES)
        right = k_t.index(zero + 2 * HALF + i).permute((1, 0))
        dq = warpgroup_mma(left, right, dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def _start_dqs(ds_s, slot, k_t, zero, BLOCKS: gl.constexpr, HALF: gl.constexpr, ACC: gl.constexpr):
    """Start dQ of the blocks of a step, see `_start_dq`."""
    found = (_start_dq(ds_s, slot * BLOCKS, k_t, zero, HALF, ACC),)
    if BLOCKS == 2:
        found = (found[0], _start_dq(ds_s, slot * BLOCKS + 1, k_t, zero, HALF, ACC))
    return found


@gluon.jit
def _wait_for_dqs(PENDING: gl.constexpr, dqs, BLOCKS: gl.constexpr):
    """Return dQ of the blocks of a step when at most PENDING later products are not done."""
    if BLOCKS == 1:
        return (warpgroup_mma_wait(PENDING, deps=[dqs[0]]),)
    else:
        first, second = warpgroup_mma_wait(PENDING, deps=[dqs[0], dqs[1]])
        return first, second


@gluon.jit
def _send_dqs(dqs, scales, dq_s, barriers, n, BLOCKS: gl.constexpr, HALF: gl.constexpr):
    """Pass dQ of step n to the store warp. For n = -1 the numbers are not used."""
    mbarrier.wait(barriers.dq_empty.index(HALF), (n & 1) ^ 1, pred=n >= 0)
    for j in gl.static_range(BLOCKS):
        dq_s.index(HALF * BLOCKS + j).store(to_tma_order(to_units(dqs[j], scales[j])))
    fence_async_shared()
    barrier()
    mbarrier.arrive(barriers.dq_full.index(HALF), count=1, pred=n >= 0)


@gluon.jit
def _load_dq_scales(row_stats, place, scale, BLOCKS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the factors of dQ of the blocks of a step. scale: of K in dQ."""
    found = (row_stats.index(place * ROW_STATS + 4).load(LAYOUT) * scale,)
    if BLOCKS == 2:
        found = (found[0], row_stats.index((place + 1) * ROW_STATS + 4).load(LAYOUT) * scale)
    return found


@gluon.jit
def _visible(i, keys, tile):
    """Return which keys each query of block i attends to, transposed [keys, queries]."""
    queries = i * BLOCK_Q + gl.arange(0, BLOCK_Q, S_COLUMNS)
    return attends_between(queries[None, :], keys[:, None], tile.offset, tile.lowest)


@gluon.jit
def compute_gradients(
    HALF: gl.constexpr, key_tile, queries, ds_s, dq_s, barriers, k_scale, k_right_scale,
    right_scales, sums, outputs, loop, tile, GROUPS: gl.constexpr, KD: gl.constexpr,
    VD: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of 64 keys, and dQ of half of the channels. Consumer number HALF.

    S and dP of a step are started in the step before, so that the tensor cores have work while dQ
    is on its way.

    A step has one or two blocks of queries. With two, S and dP of the second are started while the
    first one is computed.

    key_tile: `CodedKeyBuffers`. queries: `CodedQueryBuffers`. ds_s: int16 [slots * blocks * 2,
    BLOCK_Q, KEYS / 2], of both consumers, and dq_s: int32 [2 * blocks, BLOCK_Q * D / 64, 32], of
    each consumer, in shared memory. barriers: `CodedBarriers`. k_scale: pointer to the scale of the
    tile's first key. k_right_scale: pointer to the tile's scale in dQ. right_scales: `RightScales`.
    sums: float32 [2, 2, KEYS * D], memory of the program. outputs: `KeyOutputs`. loop: `QueryLoop`.
    tile: `KeyTile`. KD, VD: channels of K and V. PART: steps whose queries share a scale of dO or
    of Q.
    """
    STAGES: gl.constexpr = barriers.q_full.shape[0]
    BLOCKS: gl.constexpr = queries.q8.shape[0] // STAGES
    D: gl.constexpr = queries.q8.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    DQ_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    SLOTS: gl.constexpr = barriers.ds_full.shape[0]
    DQ_ROWS: gl.constexpr = gl.SliceLayout(1, DQ_ACC)
    first_key = tile.first + HALF * KEYS
    local = gl.arange(0, KEYS, S_ROWS)
    last = gl.minimum(HALF * KEYS + local, tile.length - 1 - tile.first)
    k_scale = gl.load(k_scale + last)
    k_right_scale = gl.load(k_right_scale)
    own = KeyTile(first_key, tile.length, tile.n_live, tile.offset, tile.lowest)
    keys = gl.where(are_live(first_key + local, own, outputs.key_mask), first_key + local, 2**30)
    sums += HALF * (2 * KEYS * D)
    mbarrier.wait(barriers.kv_full, 0)
    mbarrier.wait(barriers.q_full.index(0), 0)
    s_t = _start_s(key_tile.k8.index(HALF), queries.q8.index(0))
    dp = _start_dp(key_tile.v.index(HALF), queries.do.index(0))
    s = warpgroup_mma_wait(1, deps=[s_t]).to(gl.float32)
    dk = warpgroup_mma_init(gl.zeros((KEYS, D), gl.float32, ACC))
    dv = warpgroup_mma_init(gl.zeros((KEYS, D), gl.float32, ACC))
    no_scale = gl.zeros((BLOCK_Q,), gl.float32, DQ_ROWS)
    dq_scales = (no_scale,)
    if BLOCKS == 2:
        dq_scales += (no_scale,)
    n = 0
    part = 0
    for head in range(GROUPS):
        first = loop.begin
        while first < loop.end:
            block = block_of(first, loop)
            stop = first + gl.minimum((block // PART + 1) * PART, loop.end) - block
            if loop.end <= PART:  # the loop goes on with the first block, which has the same scale
                stop = loop.end
            do_scale = gl.load(right_scales.do + head * right_scales.stride + block // PART)
            q_scale = gl.load(right_scales.q + head * right_scales.stride + block // PART)
            dk = warpgroup_mma_init(gl.zeros((KEYS, D), gl.float32, ACC))
            dv = warpgroup_mma_init(gl.zeros((KEYS, D), gl.float32, ACC))
            for RANGE in gl.static_range(2 if loop.unmasked_end is None else 3):
                begin, end = part_of(loop, RANGE)
                for i in range(gl.maximum(first, begin), gl.minimum(stop, end)):
                    stage = n % STAGES
                    phase = (n // STAGES) & 1
                    after = (n + 1) % STAGES
                    # This 0 is opaque to the compiler. With a constant, it computes the descriptors
                    # of all operands before the loop and runs out of registers.
                    zero = n >> 30
                    slot = n % SLOTS
                    ds8s = ()
                    for j in gl.static_range(BLOCKS):
                        place = stage * BLOCKS + j
                        stats = place * ROW_STATS
                        factor = queries.row_stats.index(stats).load(S_COLUMNS)
                        shift = queries.row_stats.index(stats + 1).load(S_COLUMNS)
                        x = gl.convert_layout(s, S_FLOAT32)
                        x = gl.fma(x, factor[None, :] * k_scale[:, None], _like(x, shift))
                        if RANGE != 1:
                            visible = _visible(i * BLOCKS + j, keys, tile)
                            x = gl.where(visible, x, -float("inf"))
                        p = gl.exp2(x)
                        p8 = _as_left_operand(_to_codes(p), OPERAND)
                        # A wait for a barrier contains a branch. ptxas moves the wait for a product
                        # up to the last branch before it, and not above the exponentials.
                        mbarrier.wait(barriers.right_full.index(stage), phase)
                        dp = warpgroup_mma_wait(0, deps=[dp])
                        do_t = queries.do_t.index(place).permute((1, 0))
                        dv = warpgroup_mma(p8, do_t, dv, is_async=True)
                        if j + 1 < BLOCKS:
                            s_t = _start_s(
                                key_tile.k8.index(zero + HALF), queries.q8.index(place + 1)
                            )
                        ds_factor = queries.row_stats.index(stats + 2).load(S_COLUMNS)
                        ds_shift = queries.row_stats.index(stats + 3).load(S_COLUMNS)
                        ds = gl.fma(dp, _like(dp, ds_factor), _like(dp, ds_shift))
                        if RANGE != 1:  # P is 0 there, but 0 times an infinite or NaN dP is NaN
                            ds = gl.where(visible, ds, 0.0)
                        codes = _to_codes(p * ds)
                        ds8s += (_as_left_operand(codes, OPERAND),)
                        if j + 1 < BLOCKS:
                            dp = _start_dp(
                                key_tile.v.index(zero + HALF), queries.do.index(place + 1)
                            )
                            s = warpgroup_mma_wait(1, deps=[s_t]).to(gl.float32)
                        if j == 0:
                            # Both consumers have finished step n - 2, and so dQ of step n - 3.
                            mbarrier.wait(barriers.right_empty.index(stage), phase ^ 1)
                        ds_s.index((slot * BLOCKS + j) * 2 + HALF).store(_in_pairs(codes))
                    scales = dq_scales
                    dq_scales = _load_dq_scales(
                        queries.row_stats, stage * BLOCKS, k_right_scale, BLOCKS, DQ_ROWS
                    )
                    fence_async_shared()
                    barrier()
                    mbarrier.arrive(barriers.ds_full.index(slot), count=1)
                    _wait_for_ds(barriers, n - 1, n > 0)
                    before = (n + SLOTS - 1) % SLOTS
                    dq_ts = _start_dqs(ds_s, before, key_tile.k_t, zero, BLOCKS, HALF, DQ_ACC)
                    for j in gl.static_range(BLOCKS):
                        q_t = queries.q_t.index(stage * BLOCKS + j).permute((1, 0))
                        dk = warpgroup_mma(ds8s[j], q_t, dk, is_async=True)
                    mbarrier.wait(barriers.q_full.index(after), ((n + 1) // STAGES) & 1)
                    place = after * BLOCKS
                    s_t = _start_s(key_tile.k8.index(zero + HALF), queries.q8.index(place))
                    dqs = _wait_for_dqs(1 + BLOCKS, dq_ts, BLOCKS)
                    _send_dqs(dqs, scales, dq_s, barriers, n - 1, BLOCKS, HALF)
                    dp = _start_dp(key_tile.v.index(zero + HALF), queries.do.index(place))
                    s, dk, dv = warpgroup_mma_wait(1, deps=[s_t, dk, dv])
                    s = s.to(gl.float32)
                    barrier()
                    mbarrier.arrive(barriers.right_empty.index(stage), count=1)
                    dk, dv = warpgroup_mma_init(dk), warpgroup_mma_init(dv)
                    n += 1
            dk, dv = warpgroup_mma_wait(1, deps=[dk, dv])
            dk, dv = dk * q_scale, dv * do_scale
            first = stop
            if (first < loop.end) | (head < GROUPS - 1):
                _add_to_memory(dv, sums, part == 0)
                _add_to_memory(dk, sums + KEYS * D, part == 0)
                part += 1
            dk, dv = warpgroup_mma_init(dk), warpgroup_mma_init(dv)
    dp = warpgroup_mma_wait(0, deps=[dp])
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    if n > 0:
        _wait_for_ds(barriers, n - 1, True)
        dq_ts = _start_dqs(ds_s, (n - 1) % SLOTS, key_tile.k_t, 0, BLOCKS, HALF, DQ_ACC)
        dqs = _wait_for_dqs(0, dq_ts, BLOCKS)
        _send_dqs(dqs, dq_scales, dq_s, barriers, n - 1, BLOCKS, HALF)
    if part > 0:
        dv = _add_from_memory(dv, sums)
        dk = _add_from_memory(dk, sums + KEYS * D)
    store_keys(outputs.dv, outputs, own, dv, key_tile.v.index(HALF), VD)
    store_keys(outputs.dk, outputs, own, dk * outputs.scale, key_tile.v.index(HALF), KD)
