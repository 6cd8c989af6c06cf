"""The warps of a backward program.

Eight consumer warps compute dK and dV, one producer warp loads, and one store warp adds dQ to its
sums. For head size 64, four more consumer warps compute dQ, so dS and dQ have two slots each in
shared memory. For head size 128 shared memory has no space for that, and the eight warps compute dQ
too.

Barriers, all in shared memory, are the fields of `Barriers`. Each warp counts its tiles of keys and
its steps in all of them. Its stages, slots and phases follow from these counts.
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
from sagesim_kernels.hopper.backward_structures import (
    KeyOutputs,
    KeyTile,
    QueryLoop,
    TokenOrigin,
)
from sagesim_kernels.hopper.backward_tiles import tile_of
from sagesim_kernels.hopper.capped_logits import add_ds_sums
from sagesim_kernels.hopper.dq_parts import (
    BLOCK_Q,
    TILE_K,
    DqBlocks,
    DqStore,
    block_of,
    first_row_of,
    mark_overflow,
    pass_to_store,
    store_parts,
    wait_for_writes,
)
from sagesim_kernels.hopper.program_places import origin_of
from sagesim_kernels.operands import head_ptr, key_mask_of, row_stride

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
def load_k16(k16, origin, first, buffer, bar):
    """Load a tile of K in 16 bit. k16: TMA descriptor. The others: see `load_tokens`."""
    D: gl.constexpr = buffer.shape[2]
    mbarrier.expect(bar, TILE_K * D * 2)
    load_tokens(k16, origin, first, bar, buffer.index(0))


@gluon.jit
def load_kv(keys, row, origin, first, buffers, bar):
    """Load codes of K, and V, of a tile.

    keys: `KeyInputs`. row: the tile's first key in padded storage, over all heads. buffers:
    `KeyBuffers`. The others: see `load_tokens`.
    """
    D: gl.constexpr = buffers.v.shape[2]
    mbarrier.expect(bar, TILE_K * D * 3)
    tma_load(keys.k8, [row, 0], bar, buffers.k8.index(0))
    load_tokens(keys.v, origin, first, bar, buffers.v.index(0))


@gluon.jit
def _start_s_and_dp(k8, v, q8, do):
    """Start the products S and dP, both transposed. They may be read only after a wait."""
    s_zeros = gl.zeros((TILE_K, BLOCK_Q), gl.int32, ST_INT32)
    s = warpgroup_mma(k8, q8.permute((1, 0)), s_zeros, use_acc=False, is_async=True)
    dp_zeros = gl.zeros((TILE_K, BLOCK_Q), gl.float32, ST_FLOAT32)
    dp = warpgroup_mma(v, do.permute((1, 0)), dp_zeros, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def _wait_for_k16(k16, bar, wave, mean, z, COUNT: gl.constexpr, KD: gl.constexpr):
    """Wait for a tile of K in 16 bit, and subtract the mean in shared memory if there is one.

    Rows behind the last token are zeros, and become the mean's negative. They do not contribute,
    because their dS is 0.

    wave: tiles of the program before this one. mean: pointer to the means of all heads, or None.
    z: the head, over all sequences. COUNT: warps that call this. KD: channels of K; further
    channels of the tile stay zeros.
    """
    if mean is None:
        mbarrier.wait(bar, wave & 1)
    else:
        mean += z.to(gl.int64) * KD
        D: gl.constexpr = k16.shape[1]
        ROWS: gl.constexpr = _whole_rows(D, COUNT)
        # The 0 is opaque to the compiler. Without it, addresses for all tiles stay in registers.
        column = gl.arange(0, D, gl.SliceLayout(0, ROWS)) + (wave >> 30)
        if KD < D:
            mean = gl.load(mean + column, mask=column < KD, other=0.0)
        else:
            mean = gl.load(mean + column)
        mbarrier.wait(bar, wave & 1)
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
    """Store the first CHANNELS of value [TILE_K, D] as the keys of a tile.

    Keys that no query attends to get zeros. buffer: see `_in_rows`.
    """
    _store_rows(x, outputs, tile, _in_rows(x, value, buffer), CHANNELS)


@gluon.jit
def _in_rows(x, value, buffer):
    """Return value [TILE_K, D] in the dtype of x.

    A 16-bit result goes through shared memory: adjacent threads then hold adjacent numbers. buffer:
    shared memory that is large enough for that, and that no warp reads any more.
    """
    D: gl.constexpr = buffer.shape[1]
    DTYPE: gl.constexpr = x.ptr.dtype.element_ty
    value = value.to(DTYPE)
    if x.ptr.dtype.element_ty.primitive_bitwidth == 16:
        shared = reinterpret(buffer, DTYPE, [TILE_K, D], buffer.layout)
        barrier()
        shared.store(value)
        barrier()
        return shared.load(_whole_rows(D, WARPS))
    else:
        return value


@gluon.jit
def _store_rows(x, outputs, tile, value, CHANNELS: gl.constexpr):
    """Do what `store_keys` does with what `_in_rows` returns."""
    D: gl.constexpr = value.shape[1]
    DTYPE: gl.constexpr = x.ptr.dtype.element_ty
    LAYOUT: gl.constexpr = value.type.layout
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
def _release(bar):
    """Tell the producer that this warpgroup has read a buffer, or written to it, for the last time.

    The fence orders these accesses before TMA writes to the buffer.
    """
    fence_async_shared()
    barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _store_dk_dv(dk, dv, outputs, tile, key_buffers, barriers, KD: gl.constexpr, VD: gl.constexpr):
    """Store dK and dV of a tile, and release its V if they go through the same buffer."""
    buffer = key_buffers.results.index(0)
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    store_keys(outputs.dv, outputs, tile, dv, buffer, VD)
    dk = _in_rows(outputs.dk, dk * outputs.scale, buffer)
    if barriers.ds_full is None:
        _release(barriers.kv_empty)
    _store_rows(outputs.dk, outputs, tile, dk, KD)


@gluon.jit
def produce(
    keys, inputs, key_buffers, buffers, barriers, scheduler, lengths, IS_COPIED: gl.constexpr,
    GROUPS: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Load tiles of keys after the first, and the queries of each step, by TMA. One warp.

    If other warps compute dQ, they load K in 16 bit. Before this warp loads the queries of step n,
    it waits for a barrier of step n - 2. If other warps compute dQ, the barrier is `ds_full`. After
    the wait no warp reads data of step n - 3, so three stages are enough. Only row statistics of
    step n - 3 may still be read; they have four stages. Otherwise the barrier is `dq_full`. After
    the wait no warp reads data of step n - 2, so two stages are enough. Only Q in 16 bit of step
    n - 2 may still be read; it has three stages.

    keys: `KeyInputs`. inputs: `QueryInputs`. key_buffers: `KeyBuffers`. buffers: `QueryBuffers`.
    scheduler: `KeyScheduler`. IS_COPIED: whether the 16-bit tensors lie in padded storage.
    """
    done = 0
    for wave in range(scheduler.waves):
        tile = tile_of(wave, scheduler, lengths, GROUPS, SPLITS)
        if tile.is_valid:
            if wave > 0:
                origin = origin_of(IS_COPIED, tile.b, tile.head, tile.start_k)
                first = tile.keys.first
                if barriers.k16_empty is not None:
                    mbarrier.wait(barriers.k16_empty, (wave & 1) ^ 1)
                    load_k16(keys.k16, origin, first, key_buffers.k16, barriers.k16_full)
                mbarrier.wait(barriers.kv_empty, (wave & 1) ^ 1)
                load_kv(keys, tile.row_k, origin, first, key_buffers, barriers.kv_full)
            origin = origin_of(IS_COPIED, tile.b, tile.first_q_head, tile.start_q)
            _load_queries(
                inputs, buffers, barriers, tile.loop, origin, tile.row_q, scheduler.tokens_q, done,
                GROUPS,
            )  # fmt: skip
            done += GROUPS * (tile.loop.end - tile.loop.begin)


@gluon.jit
def _load_queries(
    inputs, buffers, barriers, loop, origin, stored_row, stored_tokens, done, GROUPS: gl.constexpr
):
    """Load the block of queries of each step of a tile into buffers that are released.

    Args:
        loop: `QueryLoop`.
        origin: `TokenOrigin` of the first query head.
        stored_row: row of that head's first token in padded storage.
        stored_tokens: tokens of a head in padded storage.
        done: steps of the program before this tile.
    """
    STAGES: gl.constexpr = buffers.q8.shape[0]
    STAGES16: gl.constexpr = buffers.q16.shape[0]
    STAGES_STATS: gl.constexpr = buffers.row_stats.shape[0]
    SHIFT_BYTES: gl.constexpr = 0 if buffers.shifts is None else BLOCK_Q * 4
    D: gl.constexpr = buffers.q8.shape[2]
    for head in range(GROUPS):
        for i in range(loop.begin, loop.end):
            n = done + head * (loop.end - loop.begin) + i - loop.begin
            if n >= 2:
                if barriers.ds_full is not None:
                    mbarrier.wait(barriers.ds_full.index(n % 2), (n // 2 & 1) ^ 1)
                else:
                    mbarrier.wait(barriers.dq_full.index(n % 2), (n // 2 & 1) ^ 1)
            at = TokenOrigin(origin.b, origin.h + head, origin.row)
            row8 = stored_row + head * stored_tokens
            block = block_of(i, loop)
            stage = n % STAGES
            bar = barriers.q_full.index(stage)
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
def store_dq_of_tiles(
    dq, scheduler, lengths, IS_COPIED: gl.constexpr, GROUPS: gl.constexpr,
    SPLITS: gl.constexpr, SUMMED: gl.constexpr,
):  # fmt: skip
    """Do what `dq_parts.store_parts` does for each tile of keys. One warp."""
    done = 0
    for wave in range(scheduler.waves):
        tile = tile_of(wave, scheduler, lengths, GROUPS, SPLITS)
        if tile.is_valid:
            origin = origin_of(IS_COPIED, tile.b, tile.first_q_head, tile.start_q)
            out = DqStore(dq.out, dq.buffer, origin, dq.full, dq.empty)
            loop = tile.loop
            blocks = DqBlocks(
                loop.begin, loop.end, loop.shift, tile.row_q // BLOCK_Q,
                scheduler.tokens_q // BLOCK_Q, None,
            )  # fmt: skip
            store_parts(out, blocks, done, GROUPS, SUMMED)
            done += GROUPS * (loop.end - loop.begin)
    wait_for_writes()


@gluon.jit
def compute_keys(
    key_buffers, k_mean, queries, ds_s, dq_s, barriers, scheduler, lengths, k_scale, dk, dv,
    dq_units, cap2, ds_sums, scale, GROUPS: gl.constexpr, SPLITS: gl.constexpr, KD: gl.constexpr,
    VD: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of tiles of keys, and their parts of dQ or dS. Eight warps.

    key_buffers: `KeyBuffers`. k_mean: pointer to the means that are subtracted from K, or None.
    queries: `QueryBuffers`. ds_s: 16 bit [slots, TILE_K, BLOCK_Q] in shared memory. dq_s: see
    `DqStore.buffer`. scheduler: `KeyScheduler`. k_scale: a scale for each 64 keys in padded
    storage. dk, dv: `Strided`. dq_units: the units of dQ, or None. cap2: `base2` of `Softcap`.
    ds_sums: `DsSums`, or None. scale: the scale of the logits. KD, VD: channels of K and V.
    """
    done = 0
    for wave in range(scheduler.waves):
        dealt = tile_of(wave, scheduler, lengths, GROUPS, SPLITS)
        if dealt.is_valid:
            # A function cannot return a structure with a None.
            key_mask = None
            if lengths.key_mask is not None:
                key_mask = key_mask_of(lengths, dealt.b)
            dk_scale = scale if SPLITS == 1 else 1.0  # the sum of the parts is multiplied
            outputs = KeyOutputs(dk, dv, lengths.cu_k, dealt.b, dealt.out_head, dk_scale, key_mask)
            lowest = dealt.keys.lowest if lengths.left is not None else None
            tile = KeyTile(
                dealt.keys.first, dealt.keys.length, dealt.keys.n_live, dealt.keys.offset, lowest
            )
            unmasked_end = dealt.loop.unmasked_end if lengths.left is not None else None
            loop = QueryLoop(
                dealt.loop.begin, dealt.loop.unmasked, unmasked_end, dealt.loop.end,
                dealt.loop.shift,
            )  # fmt: skip
            units = dq_units if queries.do.dtype == gl.float16 else None
            dq_blocks = DqBlocks(
                loop.begin, loop.end, loop.shift, dealt.row_q // BLOCK_Q,
                scheduler.tokens_q // BLOCK_Q, units,
            )  # fmt: skip
            scales = k_scale + dealt.row_k // BLOCK_Q
            if barriers.ds_full is not None:
                _compute_dk_dv(
                    key_buffers, queries, ds_s, barriers, scales, outputs, loop, tile, dq_blocks,
                    cap2, ds_sums, done, wave, GROUPS, KD, VD,
                )  # fmt: skip
            else:
                _compute_dk_dv_dq(
                    key_buffers, k_mean, dealt.z, queries, ds_s, dq_s, barriers, scales, outputs,
                    loop, tile, dq_blocks, cap2, ds_sums, scale, done, wave, GROUPS, KD, VD,
                )  # fmt: skip
            done += GROUPS * (loop.end - loop.begin)


@gluon.jit
def _compute_dk_dv(
    key_buffers, queries, ds_s, barriers, k_scale, outputs, loop, tile, dq_blocks, cap2, ds_sums,
    done, wave, GROUPS: gl.constexpr, KD: gl.constexpr, VD: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of a tile, and pass dS to the warps that compute dQ.

    k_scale: pointer to the scale of the tile's first key. outputs: `KeyOutputs`. loop: `QueryLoop`.
    tile: `KeyTile`. dq_blocks: `DqBlocks`. done, wave: steps and tiles of the program before this
    tile. The others: see `compute_keys`.
    """
    STAGES: gl.constexpr = queries.q8.shape[0]
    STAGES_STATS: gl.constexpr = queries.row_stats.shape[0]
    SLOTS: gl.constexpr = ds_s.shape[0]
    D: gl.constexpr = queries.q8.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    keys, key_scales, dk, dv = _start_keys(k_scale, outputs.key_mask, tile, D, ACC)
    mbarrier.wait(barriers.kv_full, wave & 1)
    k8 = key_buffers.k8.index(0).load(gl.DotOperandLayout(0, ST_INT32, 4))
    v = key_buffers.v.index(0).load(gl.DotOperandLayout(0, ST_FLOAT32, 2))
    _release(barriers.kv_empty)
    for head in range(GROUPS):
        for PART in gl.static_range(2 if loop.unmasked_end is None else 3):
            begin, end = part_of(loop, PART)
            for i in range(begin, end):
                n = done + head * (loop.end - loop.begin) + i - loop.begin
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
                    PART != 1, s, key_scales, factor, minus_lse2, shift, cap2, keys, i, tile
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
                # After this barrier, these warps have also finished the products of the
                # step before.
                barrier()
                mbarrier.arrive(barriers.ds_full.index(slot), count=1)
                # dS is read from shared memory: there are too few registers to hold it
                # there.
                q16 = queries.q16.index(stage)
                dk = warpgroup_mma(ds_s.index(slot), q16, dk, is_async=True)
    _store_dk_dv(dk, dv, outputs, tile, key_buffers, barriers, KD, VD)


@gluon.jit
def compute_dq(
    k16, k16_s, k_mean, queries, ds_s, dq_s, barriers, scheduler, lengths, scale,
    IS_COPIED: gl.constexpr, GROUPS: gl.constexpr, SPLITS: gl.constexpr, KD: gl.constexpr,
):  # fmt: skip
    """Load K in 16 bit, and compute parts of dQ from dS. Four warps.

    k16: TMA descriptor. k16_s, ds_s: K in 16 bit and dS in shared memory. dq_s: see
    `DqStore.buffer`. queries: `QueryBuffers`. k_mean: pointer to the means that are subtracted from
    K, or None. scheduler: `KeyScheduler`. scale: the scale of the logits.
    """
    SLOTS: gl.constexpr = ds_s.shape[0]
    D: gl.constexpr = k16_s.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    STAGES_STATS: gl.constexpr = queries.row_stats.shape[0]
    done = 0
    for wave in range(scheduler.waves):
        tile = tile_of(wave, scheduler, lengths, GROUPS, SPLITS)
        if tile.is_valid:
            if wave > 0:
                barrier()  # All four warps have seen K of the tile before, and multiplied with it.
                origin = origin_of(IS_COPIED, tile.b, tile.head, tile.start_k)
                load_k16(k16, origin, tile.keys.first, k16_s, barriers.k16_full)
            _wait_for_k16(k16_s.index(0), barriers.k16_full, wave, k_mean, tile.z, 4, KD)
            steps = GROUPS * (tile.loop.end - tile.loop.begin)
            for i in range(steps):  # Triton 3.6 would begin `range(done, ...)` at 0
                n = done + i
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
            done += steps


@gluon.jit
def _compute_dk_dv_dq(
    key_buffers, k_mean, z, queries, ds_s, dq_s, barriers, k_scale, outputs, loop, tile, dq_blocks,
    cap2, ds_sums, scale, done, wave, GROUPS: gl.constexpr, KD: gl.constexpr, VD: gl.constexpr,
):  # fmt: skip
    """Compute dK, dV and the parts of dQ of a tile.

    z: the head of K, over all sequences. The others: see `_compute_dk_dv` and `compute_keys`.
    """
    STAGES: gl.constexpr = queries.q8.shape[0]
    STAGES16: gl.constexpr = queries.q16.shape[0]
    D: gl.constexpr = queries.q8.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    DQ_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    keys, key_scales, dk, dv = _start_keys(k_scale, outputs.key_mask, tile, D, ACC)
    k16 = key_buffers.k16.index(0)
    _wait_for_k16(k16, barriers.k16_full, wave, k_mean, z, WARPS, KD)
    mbarrier.wait(barriers.kv_full, wave & 1)
    for head in range(GROUPS):
        for PART in gl.static_range(2 if loop.unmasked_end is None else 3):
            begin, end = part_of(loop, PART)
            for i in range(begin, end):
                n = done + head * (loop.end - loop.begin) + i - loop.begin
                stage = n % STAGES
                # This 0 is opaque to the compiler. With a constant, it computes the
                # descriptors of all operands before the loop and runs out of registers.
                zero = i >> 30
                do = queries.do.index(stage)
                mbarrier.wait(barriers.q_full.index(stage), (n // STAGES) & 1)
                k8, v = key_buffers.k8.index(zero), key_buffers.v.index(zero)
                s, dp = _start_s_and_dp(k8, v, queries.q8.index(stage), do)
                stats = row_stats_of(queries, stage)
                factor = stats.index(0).load(ST_COLUMNS)
                minus_lse2 = stats.index(1).load(ST_COLUMNS)
                s = warpgroup_mma_wait(1, deps=[s])
                shift = None
                if queries.shifts is not None:
                    shift = queries.shifts.index(stage).load(ST_COLUMNS)
                p, weight = compute_p(
                    PART != 1, s, key_scales, factor, minus_lse2, shift, cap2, keys, i, tile
                )
                delta = stats.index(2).load(ST_COLUMNS)
                p16 = gl.convert_layout(p.to(queries.do.dtype), P_OPERAND)
                dp = warpgroup_mma_wait(0, deps=[dp])
                dv = warpgroup_mma(p16, do, dv, is_async=True)
                ds = compute_ds(PART != 1, weight, dp, delta, cap2, keys, i, tile)
                if ds_sums is not None:
                    add_ds_sums(ds_sums, first_row_of(head, i, dq_blocks), ds)
                # This overwrites dS of the step before. Other warps may still multiply that
                # dS with Q, but each of them reads only its own rows of dS for this
                # product.
                ds16 = ds.to(queries.q16.dtype)
                ds_s.index(zero).store(ds16)
                if dq_blocks.units is not None:
                    mark_overflow(dq_blocks, ds16, head, i)
                fence_async_shared()
                barrier()
                dq_t = _start_dq(ds_s.index(zero), key_buffers.k16.index(zero), DQ_ACC)
                # dS is read from shared memory: there are too few registers to hold it
                # there.
                q16 = queries.q16.index(n % STAGES16)
                dk = warpgroup_mma(ds_s.index(zero), q16, dk, is_async=True)
                inverse = stats.index(3).load(gl.SliceLayout(1, DQ_ACC))
                mbarrier.wait(barriers.dq_empty.index(0), (n & 1) ^ 1)
                dq = warpgroup_mma_wait(1, deps=[dq_t])
                pass_to_store(dq, inverse, stats, dq_s.index(0), scale)
                fence_async_shared()
                # After this barrier, all warps have also finished with dO, and with Q of
                # the step before.
                barrier()
                mbarrier.arrive(barriers.dq_full.index(n % 2), count=1)
    _release(barriers.k16_empty)
    _store_dk_dv(dk, dv, outputs, tile, key_buffers, barriers, KD, VD)
