"""The warps of a program of the backward in which P and dS are FP8, with scales from bounds.

They are those of `codes_warps`, with fewer steps: no maximum is looked for, the sums of a product
need no conversion, and dQ and dK multiply the same codes of dS. Row statistics of a query are: Q's
scale times the scale of the logits; log2(1 / scale of P) - lse2; -delta times the ratio; and the
scale of dS / unit of dQ. The ratio, which dP is multiplied by, is scale of P / scale of dS.
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
    warpgroup_mma_wait,
)

from sagesim_kernels.gluon_compat import barrier, reinterpret
from sagesim_kernels.hopper.backward_loads import row_stats_of
from sagesim_kernels.hopper.backward_maps import (
    ST_COLUMNS,
    ST_INT32,
    attends_to,
)
from sagesim_kernels.hopper.backward_masks import part_of
from sagesim_kernels.hopper.backward_stores import store_keys
from sagesim_kernels.hopper.channel_products import products_of
from sagesim_kernels.hopper.codes_maps import BLOCK_K, BLOCKS
from sagesim_kernels.hopper.codes_sums import CHUNK
from sagesim_kernels.hopper.codes_warps import compute_p, joined, start_dp, start_keys, start_s
from sagesim_kernels.hopper.dq_parts import BLOCK_Q, TILE_K, to_int32, to_tma_order
from sagesim_kernels.operands import E4M3, nearest_code

PAIRS = gl.constexpr(gl.NVMMASharedLayout.get_default_for([128, 32], gl.int16))
"""Layout of codes of dS in shared memory, int16 [BLOCKS * BLOCK_Q, BLOCK_K / 2]: pairs of keys."""

_CODES = gl.constexpr(gl.NVMMASharedLayout.get_default_for([128, 64], gl.int8))
"""The same as codes [BLOCKS * BLOCK_Q, BLOCK_K]."""

_JOIN = gl.constexpr("prmt.b32 $0, $2, $3, 0x5140; prmt.b32 $1, $2, $3, 0x7362;")


@gluon.jit
def _left_codes(map, FORMAT: gl.constexpr):
    """Round a map [TILE_K, BLOCK_Q] to codes as a left operand, with queries in register order."""
    map = map.reshape([TILE_K, 4, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([TILE_K, BLOCK_Q])
    operand = gl.convert_layout(map, gl.DotOperandLayout(0, ST_INT32, 4), assert_trivial=True)
    return nearest_code(operand, FORMAT)


@gluon.jit
def _store_pairs(codes, buffer):
    """Store codes of dS [TILE_K, BLOCK_Q] of `_left_codes` to buffer, in the layout `PAIRS`.

    A number of the buffer contains the codes of keys j and j + 8 of 16, which one thread holds.
    """
    bits = (
        codes.to(gl.int8, bitcast=True).reshape([TILE_K // 16, 2, 8, BLOCK_Q]).permute([0, 2, 3, 1])
    )
    low, high = gl.split(bits)
    pairs = gl.inline_asm_elementwise(_JOIN, "=&r,=r,r,r", [low, high], gl.int16, True, 4)
    pairs = pairs.reshape([TILE_K // 2, 4, 4, 2, 2]).permute([0, 1, 3, 2, 4])
    pairs = pairs.reshape([BLOCKS, BLOCK_K // 2, BLOCK_Q]).permute([0, 2, 1])
    buffer.store(pairs.reshape([BLOCKS * BLOCK_Q, BLOCK_K // 2]))


@gluon.jit
def _as_codes(buffer, FORMAT: gl.constexpr):
    """View codes in shared memory, int8, as numbers of their format."""
    DTYPE: gl.constexpr = gl.float8e4nv if FORMAT == E4M3 else gl.float8e5
    return reinterpret(buffer, DTYPE, buffer.shape, buffer.layout)


@gluon.jit
def _wait_for_keys(key_tile, bar, tile):
    """Wait for the tile of keys, and set codes of K to 0 in a block behind the last key.

    No kernel writes such a block in memory. Its dS is 0, but 0 times the code of a NaN is NaN.
    """
    D: gl.constexpr = key_tile.k_right.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [gl.num_warps(), 1], [1, 0])
    mbarrier.wait(bar, 0)
    for i in gl.static_range(1, BLOCKS):
        if tile.first + i * BLOCK_K >= tile.length:
            key_tile.k_right.index(i).store(gl.zeros((D, BLOCK_K), gl.int8, LAYOUT))
            fence_async_shared()
    barrier()


@gluon.jit
def _start_sums(codes, right, C: gl.constexpr, FORMAT: gl.constexpr):
    """Start the product of codes [TILE_K, BLOCK_Q] and chunk C of right [channels, BLOCK_Q]."""
    zeros = gl.zeros((TILE_K, CHUNK), gl.float32, ST_INT32)
    chunk = _as_codes(right, FORMAT).slice(C * CHUNK, CHUNK, 0).permute((1, 0))
    return warpgroup_mma(codes, chunk, zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_sums(total, sums, channel_scales, FIRST: gl.constexpr, BY_CHANNEL: gl.constexpr):
    """Return total plus the sums of a product times the scales of channels.

    channel_scales: in shared memory; the chunk's begin at FIRST. BY_CHANNEL: whether they differ.
    """
    COLUMNS: gl.constexpr = gl.SliceLayout(0, ST_INT32)
    if BY_CHANNEL:
        scales = channel_scales.slice(FIRST, CHUNK).load(COLUMNS)[None, :]
    else:
        one = gl.max(channel_scales.slice(FIRST, 1).load(COLUMNS), 0)
        scales = gl.full((TILE_K, CHUNK), one, gl.float32, ST_INT32)
    return gl.fma(sums, scales.broadcast_to(total.shape), total)


@gluon.jit
def _dq_units(pairs, key_tile, factor, FORMAT: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the part of dQ of both blocks of keys in units of its rows, int32 [BLOCK_Q, D].

    pairs: codes of dS, see `PAIRS`. factor: the scale of dS / unit of each query.
    """
    D: gl.constexpr = key_tile.k_right.shape[1]
    codes = reinterpret(pairs, gl.int8, [BLOCKS * BLOCK_Q, BLOCK_K], _CODES)
    codes = _as_codes(codes, FORMAT)
    part = gl.zeros((BLOCK_Q, D), gl.float32, LAYOUT)
    for i in gl.static_range(BLOCKS):
        zeros = gl.zeros((BLOCK_Q, D), gl.float32, LAYOUT)
        right = _as_codes(key_tile.k_right.index(i), FORMAT).permute((1, 0))
        left = codes.slice(i * BLOCK_Q, BLOCK_Q, 0)
        sums = warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        # The row's factor comes first: K's scale times a sum may overflow.
        sums = sums * factor[:, None]
        column = key_tile.right_scales.index(i).load(gl.SliceLayout(0, LAYOUT))[None, :]
        part = sums * column if i == 0 else gl.fma(sums, column.broadcast_to(sums.shape), part)
    return to_int32(part)


@gluon.jit
def _compute_ds(MASKED: gl.constexpr, p, dp, ratio, minus_delta, keys, i, tile):
    """Return dS transposed, divided by the scale of its row. p: P divided by the scale of its row.

    ratio, minus_delta: row statistics, see above.
    """
    minus_delta = minus_delta[None, :].broadcast_to(dp.shape)
    ds = gl.fma(dp, ratio[None, :].broadcast_to(dp.shape), minus_delta)
    if MASKED:  # P is 0 there, but 0 times an infinite or NaN dP would be NaN
        ds = gl.where(attends_to(keys, i, tile), ds, 0.0)
    return p * ds


@gluon.jit
def compute_fp8_dk_dv_dq(
    key_tile, queries, pairs_s, dq_s, barriers, scales, outputs, loop, tile, GROUPS: gl.constexpr,
    KD: gl.constexpr, VD: gl.constexpr, TOKENS: gl.constexpr, BY_CHANNEL: gl.constexpr,
    FORMAT: gl.constexpr,
):  # fmt: skip
    """Compute dK, dV and the parts of dQ, of 128 channels. Eight warps.

    pairs_s: codes of dS in shared memory, see `PAIRS`. FORMAT: of the codes. The others: see
    `codes_warps.compute_dk_dv_dq`.
    """
    STAGES: gl.constexpr = queries.q8.shape[0]
    D: gl.constexpr = queries.q8.shape[2]
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 32])
    keys, k_scale, dk0 = start_keys(scales, tile, key_tile.right_scales, outputs, KD, TOKENS)
    dv0, dk1, dv1 = dk0, dk0, dk0
    _wait_for_keys(key_tile, barriers.kv_full, tile)
    for head in range(GROUPS):
        for PART in gl.static_range(2 if loop.unmasked_end is None else 3):
            begin, end = part_of(loop, PART)
            for i in range(begin, end):
                n = head * (loop.end - loop.begin) + i - loop.begin
                stage = n % STAGES
                # This 0 is opaque to the compiler. With a constant, it computes the descriptors of
                # all operands before the loop and runs out of registers.
                zero = i >> 30
                mbarrier.wait(barriers.q_full.index(stage), (n // STAGES) & 1)
                stats = row_stats_of(queries, stage)
                s = start_s(key_tile.k8.index(zero), queries.q8.index(stage), KD)
                factor = stats.index(0).load(ST_COLUMNS)
                minus_lse2 = stats.index(1).load(ST_COLUMNS)
                s = warpgroup_mma_wait(0, deps=[s])
                dp = start_dp(key_tile.v.index(zero), queries.do.index(stage), VD)
                p = compute_p(PART != 1, s, k_scale, factor, minus_lse2, keys, i, tile, TOKENS)
                p_codes = _left_codes(p, FORMAT)
                dp = warpgroup_mma_wait(0, deps=[dp])
                ratio = queries.ratios.index(stage).load(ST_COLUMNS)
                minus_delta = stats.index(2).load(ST_COLUMNS)
                do_right, q_right = queries.do_right.index(stage), queries.q_right.index(stage)
                channel_scales = queries.channel_scales.index(stage)
                ds = _compute_ds(PART != 1, p, dp, ratio, minus_delta, keys, i, tile)
                ds_codes = _left_codes(ds, FORMAT)
                # All warps have read the codes of the step before; see the last barrier.
                _store_pairs(ds_codes, pairs_s.index(zero))
                fence_async_shared()
                # One product at a time: the sums of two would need too many registers.
                sums = warpgroup_mma_wait(0, deps=[_start_sums(p_codes, do_right, 0, FORMAT)])
                dv0 = _add_sums(dv0, sums, channel_scales, 0, BY_CHANNEL)
                sums = warpgroup_mma_wait(0, deps=[_start_sums(p_codes, do_right, 1, FORMAT)])
                dv1 = _add_sums(dv1, sums, channel_scales, CHUNK, BY_CHANNEL)
                sums = warpgroup_mma_wait(0, deps=[_start_sums(ds_codes, q_right, 0, FORMAT)])
                dk0 = _add_sums(dk0, sums, channel_scales, D, BY_CHANNEL)
                sums = warpgroup_mma_wait(0, deps=[_start_sums(ds_codes, q_right, 1, FORMAT)])
                dk1 = _add_sums(dk1, sums, channel_scales, D + CHUNK, BY_CHANNEL)
                factor = stats.index(3).load(gl.SliceLayout(1, DQ))
                # Until the store warp has read the last parts of dQ; see `compute_dk_dv_dq`.
                mbarrier.wait(barriers.dq_empty.index(0), (n & 1) ^ 1)
                barrier()  # All warps have stored their codes of dS.
                units = _dq_units(pairs_s.index(zero), key_tile, factor, FORMAT, DQ)
                dq_s.index(0).store(to_tma_order(units))
                fence_async_shared()
                barrier()  # All warps have finished with the block of queries, and with the codes.
                mbarrier.arrive(barriers.dq_full.index(n % 2), count=1)
    buffer = key_tile.v.index(0)
    store_keys(outputs.dv, outputs, tile, joined(dv0, dv1), buffer, VD)
    store_keys(outputs.dk, outputs, tile, joined(dk0, dk1) * outputs.scale, buffer, KD)


@gluon.jit
def compute_fp8_dk_dv(
    key_tile, queries, pairs_s, barriers, scales, outputs, loop, tile, GROUPS: gl.constexpr,
    KD: gl.constexpr, VD: gl.constexpr, TOKENS: gl.constexpr, BY_CHANNEL: gl.constexpr,
    FORMAT: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV, of 64 channels, and pass dS to the warps that compute dQ. Eight warps.

    The arguments are those of `compute_fp8_dk_dv_dq`.
    """
    STAGES: gl.constexpr = queries.q8.shape[0]
    STAGES_STATS: gl.constexpr = queries.row_stats.shape[0]
    SLOTS: gl.constexpr = pairs_s.shape[0]
    D: gl.constexpr = queries.q8.shape[2]
    keys, k_scale, dk = start_keys(scales, tile, key_tile.right_scales, outputs, KD, TOKENS)
    dv = dk
    mbarrier.wait(barriers.kv_full, 0)
    mbarrier.arrive(barriers.scales_full, count=1)
    for head in range(GROUPS):
        for PART in gl.static_range(2 if loop.unmasked_end is None else 3):
            begin, end = part_of(loop, PART)
            for i in range(begin, end):
                n = head * (loop.end - loop.begin) + i - loop.begin
                stage = n % STAGES
                slot = n % SLOTS
                mbarrier.wait(barriers.q_full.index(stage), (n // STAGES) & 1)
                stats = row_stats_of(queries, n % STAGES_STATS)
                s = start_s(key_tile.k8.index(0), queries.q8.index(stage), KD)
                dp = start_dp(key_tile.v.index(0), queries.do.index(stage), VD)
                factor = stats.index(0).load(ST_COLUMNS)
                minus_lse2 = stats.index(1).load(ST_COLUMNS)
                s = warpgroup_mma_wait(products_of(VD, D, 16), deps=[s])
                p = compute_p(PART != 1, s, k_scale, factor, minus_lse2, keys, i, tile, TOKENS)
                p_codes = _left_codes(p, FORMAT)
                ratio = queries.ratios.index(stage).load(ST_COLUMNS)
                minus_delta = stats.index(2).load(ST_COLUMNS)
                dp = warpgroup_mma_wait(0, deps=[dp])
                sums0 = _start_sums(p_codes, queries.do_right.index(stage), 0, FORMAT)
                ds = _compute_ds(PART != 1, p, dp, ratio, minus_delta, keys, i, tile)
                ds_codes = _left_codes(ds, FORMAT)
                # dQ has been computed from the codes that were in this slot before.
                mbarrier.wait(barriers.dq_full.index(slot), ((n // SLOTS) & 1) ^ 1)
                _store_pairs(ds_codes, pairs_s.index(slot))
                fence_async_shared()
                # After this barrier, all warps have stored their codes of dS, and have finished the
                # products of the step before.
                barrier()
                mbarrier.arrive(barriers.ds_full.index(slot), count=1)
                sums1 = _start_sums(ds_codes, queries.q_right.index(stage), 0, FORMAT)
                channel_scales = queries.channel_scales.index(stage)
                sums0 = warpgroup_mma_wait(1, deps=[sums0])
                dv = _add_sums(dv, sums0, channel_scales, 0, BY_CHANNEL)
                sums1 = warpgroup_mma_wait(0, deps=[sums1])
                dk = _add_sums(dk, sums1, channel_scales, D, BY_CHANNEL)
    buffer = key_tile.v.index(0)
    store_keys(outputs.dv, outputs, tile, dv, buffer, VD)
    store_keys(outputs.dk, outputs, tile, dk * outputs.scale, buffer, KD)


@gluon.jit
def compute_fp8_dq(
    key_tile, queries, pairs_s, dq_s, barriers, loop, tile, GROUPS: gl.constexpr,
    FORMAT: gl.constexpr,
):  # fmt: skip
    """Compute parts of dQ from codes of dS. Four warps.

    The arguments are those of `compute_fp8_dk_dv_dq`.
    """
    SLOTS: gl.constexpr = pairs_s.shape[0]
    STAGES_STATS: gl.constexpr = queries.row_stats.shape[0]
    D: gl.constexpr = queries.q8.shape[2]
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    _wait_for_keys(key_tile, barriers.kv_full, tile)
    mbarrier.wait(barriers.scales_full, 0)
    for n in range(GROUPS * (loop.end - loop.begin)):
        slot = n % SLOTS
        mbarrier.wait(barriers.ds_full.index(slot), (n // SLOTS) & 1)
        factor = row_stats_of(queries, n % STAGES_STATS).index(3).load(gl.SliceLayout(1, DQ))
        units = _dq_units(pairs_s.index(slot), key_tile, factor, FORMAT, DQ)
        mbarrier.wait(barriers.dq_empty.index(slot), ((n // SLOTS) & 1) ^ 1)
        dq_s.index(slot).store(to_tma_order(units))
        fence_async_shared()
        barrier()  # All warps have stored their parts, and have read the codes of dS.
        mbarrier.arrive(barriers.dq_full.index(slot), count=1)
