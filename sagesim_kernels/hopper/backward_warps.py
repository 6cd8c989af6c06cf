"""The warps of a backward program.

Eight consumer warps compute dK and dV, one producer warp loads, and one store warp adds dQ to its
sums. For head size 64, four more consumer warps compute dQ, so dS and dQ have two slots each in
shared memory. For head size 128 shared memory has no space for that, and the eight warps compute dQ
too.

Barriers, all in shared memory, are the fields of `Barriers`. Each warp counts its steps from one
query head of the group to the next, and its stages, slots and phases follow from that count.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from sagesim_kernels.gluon_compat import barrier, reinterpret, tma_load
from sagesim_kernels.hopper.backward_maps import (
    ST_COLUMNS,
    ST_FLOAT32,
    ST_INT32,
    ST_ROWS,
    compute_ds,
    compute_p,
)
from sagesim_kernels.hopper.backward_masks import are_live, part_of
from sagesim_kernels.hopper.backward_structures import TokenOrigin
from sagesim_kernels.hopper.capped_logits import add_ds_sums
from sagesim_kernels.hopper.dq_parts import (
    BLOCK_Q,
    TILE_K,
    block_of,
    first_row_of,
    mark_overflow,
    pass_to_store,
)
from sagesim_kernels.operands import head_ptr, row_stride

WARPS = gl.constexpr(8)
"""Warps that compute dK and dV."""

ROW_STATS = gl.constexpr(4 * 64)
"""Row statistics of a block of queries, 64 numbers each: Q's scale times the scale of the logits;
-lse2; delta; and 1 / unit of dQ."""

STATS_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(0, 32, 1))
"""Layout of row statistics in shared memory."""


@constexpr_function
def _whole_rows(channels, warps):
    """Layout in which adjacent threads hold adjacent parts of a row, eight numbers each."""
    return gl.BlockedLayout([1, 8], [32 // (channels // 8), channels // 8], [warps, 1], [1, 0])


@gluon.jit
def load_tokens(x, origin, first, bar, buffer):
    """Load tokens from `first` of a tensor of four dimensions by TMA.

    x: TMA descriptor. origin: `TokenOrigin` of the sequence.
    """
    ROWS: gl.constexpr = buffer.shape[0]
    D: gl.constexpr = buffer.shape[1]
    shared = reinterpret(buffer, x.dtype, [1, 1, ROWS, D], x.layout)
    tma_load(x, [origin.b, origin.h, origin.row + first, 0], bar, shared)


@gluon.jit
def _start_s_and_dp(k8, v, q8, do):
    """Start the products S and dP, both transposed. They may be read only after a wait."""
    s_zeros = gl.zeros((TILE_K, BLOCK_Q), gl.int32, ST_INT32)
    s = warpgroup_mma(k8, q8.permute((1, 0)), s_zeros, use_acc=False, is_async=True)
    dp_zeros = gl.zeros((TILE_K, BLOCK_Q), gl.float32, ST_FLOAT32)
    dp = warpgroup_mma(v, do.permute((1, 0)), dp_zeros, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def _wait_for_k16(k16, bar, mean, COUNT: gl.constexpr, KD: gl.constexpr):
    """Wait for the tile of K in 16 bit, and subtract the mean in shared memory if there is one.

    Rows behind the last token are zeros, and become the mean's negative. They do not contribute,
    because their dS is 0.

    COUNT: warps that call this. KD: channels of K; further channels of the tile stay zeros.
    """
    if mean is None:
        mbarrier.wait(bar, 0)
    else:
        D: gl.constexpr = k16.shape[1]
        ROWS: gl.constexpr = _whole_rows(D, COUNT)
        column = gl.arange(0, D, gl.SliceLayout(0, ROWS))
        if KD < D:
            mean = gl.load(mean + column, mask=column < KD, other=0.0)
        else:
            mean = gl.load(mean + column)
        mbarrier.wait(bar, 0)
        k = k16.load(ROWS).to(gl.float32) - mean[None, :]
        k16.store(k.to(k16.dtype))
        fence_async_shared()
        barrier()


@gluon.jit
def row_stats_of(queries, stage):
    """Return the row statistics of a stage, [4, BLOCK_Q]."""
    stats = queries.row_stats.index(stage)
    return reinterpret(stats, gl.float32, [4, BLOCK_Q], STATS_LAYOUT)


@gluon.jit
def _start_dq(ds, k16, ACC: gl.constexpr):
    D: gl.constexpr = k16.shape[1]
    dq = gl.zeros((BLOCK_Q, D), gl.float32, ACC)
    return warpgroup_mma(ds.permute((1, 0)), k16, dq, use_acc=False, is_async=True)


@gluon.jit
def _start_keys(k_scale, key_mask, tile, D: gl.constexpr, ACC: gl.constexpr):
    """Return index (2^30 if no query attends to it) and scale of each key, and dK and dV of 0."""
    local = gl.arange(0, TILE_K, ST_ROWS)
    # There is a scale for each block of 64 keys, and none behind the sequence's last key.
    second = gl.load(k_scale + gl.minimum(tile.length - 1 - tile.first, 64) // 64)
    scales = gl.where(local < 64, gl.load(k_scale), second)
    dk = warpgroup_mma_init(gl.zeros((TILE_K, D), gl.float32, ACC))
    dv = warpgroup_mma_init(gl.zeros((TILE_K, D), gl.float32, ACC))
    keys = gl.where(are_live(tile.first + local, tile, key_mask), tile.first + local, 2**30)
    return keys, scales, dk, dv


@gluon.jit
def store_keys(x, outputs, tile, value, buffer, CHANNELS: gl.constexpr):
    """Store the first CHANNELS of value [TILE_K, D] as the program's keys.

    Keys that no query attends to get zeros. A 16-bit result goes through shared memory, which is
    large enough for that: adjacent threads then store adjacent numbers. buffer: shared memory that
    no warp reads any more.
    """
    D: gl.constexpr = buffer.shape[1]
    DTYPE: gl.constexpr = x.ptr.dtype.element_ty
    IS_16_BIT: gl.constexpr = x.ptr.dtype.element_ty.primitive_bitwidth == 16
    LAYOUT: gl.constexpr = _whole_rows(D, WARPS) if IS_16_BIT else value.type.layout
    value = value.to(DTYPE)
    if IS_16_BIT:
        shared = reinterpret(buffer, DTYPE, [TILE_K, D], buffer.layout)
        barrier()
        shared.store(value)
        barrier()
        value = shared.load(LAYOUT)
    row = tile.first + gl.arange(0, TILE_K, gl.SliceLayout(1, LAYOUT))
    live = are_live(row, tile, outputs.key_mask)[:, None]
    value = gl.where(live, value, gl.zeros((TILE_K, D), DTYPE, LAYOUT))
    column = gl.arange(0, D, gl.SliceLayout(0, LAYOUT)).to(gl.int64)
    base = head_ptr(x, outputs.cu_k, outputs.b, outputs.h)
    ptrs = base + row.to(gl.int64) * row_stride(x)
    mask = (row < tile.length)[:, None]
    if CHANNELS < D:
        mask = mask & (column < CHANNELS)[None, :]
    gl.store(ptrs[:, None] + column[None, :] * x.stride_d, value, mask=mask)


@gluon.jit
def _store_dk_dv(dk, dv, outputs, tile, buffer, KD: gl.constexpr, VD: gl.constexpr):
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    store_keys(outputs.dv, outputs, tile, dv, buffer, VD)
    store_keys(outputs.dk, outputs, tile, dk * outputs.scale, buffer, KD)


@gluon.jit
def produce(
    inputs, buffers, q_full, released, loop, origin, stored_row, stored_tokens,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Load the block of queries of each step by TMA, into buffers that are released. One warp.

    Args:
        released: barriers [2], for even and odd steps. Before this warp loads step n, it waits for
            the barrier of step n - 2. If other warps compute dQ, the barriers are `ds_full`. After
            the wait no warp reads data of step n - 3, so three stages are enough. Only row
            statistics of step n - 3 may still be read; they have four stages. Otherwise the
            barriers are `dq_full`. After the wait no warp reads data of step n - 2, so two stages
            are enough. Only Q in 16 bit of step n - 2 may still be read; it has three stages.
        loop: `QueryLoop`.
        origin: `TokenOrigin` of the first query head.
        stored_row: row of that head's first token in padded storage.
        stored_tokens: tokens of a head in padded storage.
    """
    STAGES: gl.constexpr = buffers.q8.shape[0]
    STAGES16: gl.constexpr = buffers.q16.shape[0]
    STAGES_STATS: gl.constexpr = buffers.row_stats.shape[0]
    SHIFT_BYTES: gl.constexpr = 0 if buffers.shifts is None else BLOCK_Q * 4
    D: gl.constexpr = buffers.q8.shape[2]
    for head in range(GROUPS):
        for i in range(loop.begin, loop.end):
            n = head * (loop.end - loop.begin) + i - loop.begin
            if n >= 2:
                mbarrier.wait(released.index(n % 2), (n // 2 & 1) ^ 1)
            at = TokenOrigin(origin.b, origin.h + head, origin.row)
            row8 = stored_row + head * stored_tokens
            block = block_of(i, loop)
            stage = n % STAGES
            bar = q_full.index(stage)
            stage16 = n % STAGES16
            mbarrier.expect(bar, BLOCK_Q * D * 5 + ROW_STATS * 4 + SHIFT_BYTES)
            tma_load(inputs.q8, [row8 + block * BLOCK_Q, 0], bar, buffers.q8.index(stage))
            load_tokens(inputs.do, at, block * BLOCK_Q, bar, buffers.do.index(stage))
            stats = (row8 // BLOCK_Q + block) * ROW_STATS
            tma_load(inputs.row_stats, [stats], bar, buffers.row_stats.index(n % STAGES_STATS))
            if buffers.shifts is not None:
                first = row8 + block * BLOCK_Q
                tma_load(inputs.shifts, [first], bar, buffers.shifts.index(stage))
            load_tokens(inputs.q16, at, block * BLOCK_Q, bar, buffers.q16.index(stage16))


@gluon.jit
def compute_dk_dv(
    key_tile, queries, ds_s, barriers, k_scale, outputs, loop, tile, dq_blocks, cap2, ds_sums,
    GROUPS: gl.constexpr, KD: gl.constexpr, VD: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV, and pass dS to the warps that compute dQ. Eight warps.

    key_tile: `KeyBuffers`. queries: `QueryBuffers`. ds_s: 16 bit [slots, TILE_K, BLOCK_Q] in shared
    memory. k_scale: pointer to the scale of the tile's first key. outputs: `KeyOutputs`. loop:
    `QueryLoop`. tile: `KeyTile`. dq_blocks: `DqBlocks`. cap2: `base2` of `Softcap`. ds_sums:
    `DsSums`, or None. KD, VD: channels of K and V.
    """
    STAGES: gl.constexpr = queries.q8.shape[0]
    STAGES_STATS: gl.constexpr = queries.row_stats.shape[0]
    SLOTS: gl.constexpr = ds_s.shape[0]
    D: gl.constexpr = queries.q8.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    keys, k_scale, dk, dv = _start_keys(k_scale, outputs.key_mask, tile, D, ACC)
    mbarrier.wait(barriers.kv_full, 0)
    k8 = key_tile.k8.index(0).load(gl.DotOperandLayout(0, ST_INT32, 4))
    v = key_tile.v.index(0).load(gl.DotOperandLayout(0, ST_FLOAT32, 2))
    for head in range(GROUPS):
        for PART in gl.static_range(2 if loop.unmasked_end is None else 3):
            begin, end = part_of(loop, PART)
            for i in range(begin, end):
                n = head * (loop.end - loop.begin) + i - loop.begin
                stage = n % STAGES
                slot = n % SLOTS
                mbarrier.wait(barriers.q_full.index(stage), (n // STAGES) & 1)
                do = queries.do.index(stage)
                s, dp = _start_s_and_dp(k8, v, queries.q8.index(stage), do)
                s = warpgroup_mma_wait(1, deps=[s])
                stats = row_stats_of(queries, n % STAGES_STATS)
                factor = stats.index(0).load(ST_COLUMNS)
                minus_lse2 = stats.index(1).load(ST_COLUMNS)
                shift = None
                if queries.shifts is not None:
                    shift = queries.shifts.index(stage).load(ST_COLUMNS)
                p, weight = compute_p(
                    PART != 1, s, k_scale, factor, minus_lse2, shift, cap2, keys, i, tile
                )
                p16 = gl.convert_layout(p.to(queries.do.dtype), P_OPERAND)
                dp = warpgroup_mma_wait(0, deps=[dp])
                delta = stats.index(2).load(ST_COLUMNS)
                dv = warpgroup_mma(p16, do, dv, is_async=True)
                ds = compute_ds(PART != 1, weight, dp, delta, cap2, keys, i, tile)
                if ds_sums is not None:
                    add_ds_sums(ds_sums, first_row_of(head, i, dq_blocks), ds)
                ds16 = ds.to(queries.q16.dtype)
                if dq_blocks.units is not None:
                    mark_overflow(dq_blocks, ds16, head, i)
                # dQ has been computed from the dS that was in this slot before.
                mbarrier.wait(barriers.dq_full.index(slot), ((n // SLOTS) & 1) ^ 1)
                ds_s.index(slot).store(ds16)
                fence_async_shared()
                # After this barrier, these warps have also finished the products of the step
                # before.
                barrier()
                mbarrier.arrive(barriers.ds_full.index(slot), count=1)
                # dS is read from shared memory: there are too few registers to hold it there.
                dk = warpgroup_mma(ds_s.index(slot), queries.q16.index(stage), dk, is_async=True)
    _store_dk_dv(dk, dv, outputs, tile, key_tile.v.index(0), KD, VD)


@gluon.jit
def compute_dq(
    k16_s, k_mean, queries, ds_s, dq_s, barriers, loop, scale, GROUPS: gl.constexpr,
    KD: gl.constexpr,
):  # fmt: skip
    """Compute parts of dQ from dS. Four warps.

    k16_s, ds_s: K in 16 bit and dS in shared memory. dq_s: see `DqStore.buffer`. queries:
    `QueryBuffers`. k_mean: pointer to the mean that is subtracted from K, or None. scale: the scale
    of the logits.
    """
    SLOTS: gl.constexpr = ds_s.shape[0]
    D: gl.constexpr = k16_s.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    STAGES_STATS: gl.constexpr = queries.row_stats.shape[0]
    _wait_for_k16(k16_s.index(0), barriers.kv_full, k_mean, 4, KD)
    for n in range(GROUPS * (loop.end - loop.begin)):
        slot = n % SLOTS
        mbarrier.wait(barriers.ds_full.index(slot), (n // SLOTS) & 1)
        dq_t = _start_dq(ds_s.index(slot), k16_s.index(0), ACC)
        stats = row_stats_of(queries, n % STAGES_STATS)
        inverse = stats.index(3).load(gl.SliceLayout(1, ACC))
        dq = warpgroup_mma_wait(0, deps=[dq_t])
        mbarrier.wait(barriers.dq_empty.index(slot), ((n // SLOTS) & 1) ^ 1)
        pass_to_store(dq, inverse, stats, dq_s.index(slot), scale)
        fence_async_shared()
        barrier()
        mbarrier.arrive(barriers.dq_full.index(slot), count=1)


@gluon.jit
def compute_dk_dv_dq(
    key_tile, k_mean, queries, ds_s, dq_s, barriers, k_scale, outputs, loop, tile, dq_blocks,
    cap2, ds_sums, scale, GROUPS: gl.constexpr, KD: gl.constexpr, VD: gl.constexpr,
):  # fmt: skip
    """Compute dK, dV and the parts of dQ. Eight warps.

    The arguments are those of `compute_dk_dv` and `compute_dq`.
    """
    STAGES: gl.constexpr = queries.q8.shape[0]
    STAGES16: gl.constexpr = queries.q16.shape[0]
    D: gl.constexpr = queries.q8.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    DQ_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    keys, k_scale, dk, dv = _start_keys(k_scale, outputs.key_mask, tile, D, ACC)
    _wait_for_k16(key_tile.k16.index(0), barriers.k16_full, k_mean, WARPS, KD)
    mbarrier.wait(barriers.kv_full, 0)
    for head in range(GROUPS):
        for PART in gl.static_range(2 if loop.unmasked_end is None else 3):
            begin, end = part_of(loop, PART)
            for i in range(begin, end):
                n = head * (loop.end - loop.begin) + i - loop.begin
                stage = n % STAGES
                # This 0 is opaque to the compiler. With a constant, it computes the descriptors of
                # all operands before the loop and runs out of registers.
                zero = i >> 30
                do = queries.do.index(stage)
                mbarrier.wait(barriers.q_full.index(stage), (n // STAGES) & 1)
                k8, v = key_tile.k8.index(zero), key_tile.v.index(zero)
                s, dp = _start_s_and_dp(k8, v, queries.q8.index(stage), do)
                stats = row_stats_of(queries, stage)
                factor = stats.index(0).load(ST_COLUMNS)
                minus_lse2 = stats.index(1).load(ST_COLUMNS)
                s = warpgroup_mma_wait(1, deps=[s])
                shift = None
                if queries.shifts is not None:
                    shift = queries.shifts.index(stage).load(ST_COLUMNS)
                p, weight = compute_p(
                    PART != 1, s, k_scale, factor, minus_lse2, shift, cap2, keys, i, tile
                )
                delta = stats.index(2).load(ST_COLUMNS)
                p16 = gl.convert_layout(p.to(queries.do.dtype), P_OPERAND)
                dp = warpgroup_mma_wait(0, deps=[dp])
                dv = warpgroup_mma(p16, do, dv, is_async=True)
                ds = compute_ds(PART != 1, weight, dp, delta, cap2, keys, i, tile)
                if ds_sums is not None:
                    add_ds_sums(ds_sums, first_row_of(head, i, dq_blocks), ds)
                # This overwrites dS of the step before. Other warps may still multiply that dS with
                # Q, but each of them reads only its own rows of dS for this product.
                ds16 = ds.to(queries.q16.dtype)
                ds_s.index(zero).store(ds16)
                if dq_blocks.units is not None:
                    mark_overflow(dq_blocks, ds16, head, i)
                fence_async_shared()
                barrier()
                dq_t = _start_dq(ds_s.index(zero), key_tile.k16.index(zero), DQ_ACC)
                # dS is read from shared memory: there are too few registers to hold it there.
                q16 = queries.q16.index(n % STAGES16)
                dk = warpgroup_mma(ds_s.index(zero), q16, dk, is_async=True)
                inverse = stats.index(3).load(gl.SliceLayout(1, DQ_ACC))
                mbarrier.wait(barriers.dq_empty.index(0), (n & 1) ^ 1)
                dq = warpgroup_mma_wait(1, deps=[dq_t])
                pass_to_store(dq, inverse, stats, dq_s.index(0), scale)
                fence_async_shared()
                # After this barrier, all warps have also finished with dO, and with Q of the step
                # before.
                barrier()
                mbarrier.arrive(barriers.dq_full.index(n % 2), count=1)
    _store_dk_dv(dk, dv, outputs, tile, key_tile.v.index(0), KD, VD)
