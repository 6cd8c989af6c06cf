"""The warps of a program of the backward in which P and dS are codes.

Eight consumer warps compute dK and dV, one producer warp loads, and one store warp adds dQ to its
sums. For head size 64, four more consumer warps compute dQ; for head size 128 the eight warps do.
Every product but dP is of codes. The sums of a product over 64 queries or keys are new in each
step, because their scales are.

Barriers, all in shared memory, are the fields of `CodeBarriers`.
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
    warpgroup_mma_wait,
)

from sagesim_kernels.gluon_compat import barrier, tma_load
from sagesim_kernels.hopper.backward_loads import ROW_STATS, row_stats_of
from sagesim_kernels.hopper.backward_maps import (
    ST_COLUMNS,
    ST_FLOAT32,
    ST_INT32,
    ST_ROWS,
    compute_ds,
)
from sagesim_kernels.hopper.backward_masks import are_live, attends_between, part_of
from sagesim_kernels.hopper.backward_stores import WARPS, store_keys
from sagesim_kernels.hopper.channel_products import start_product
from sagesim_kernels.hopper.codes_maps import (
    BLOCK_K,
    BLOCKS,
    left_codes,
    query_rows,
    row_maxima,
    store_query_codes,
)
from sagesim_kernels.hopper.codes_sums import CHUNK, add_sums, dq_units, start_sums
from sagesim_kernels.hopper.dq_parts import BLOCK_Q, TILE_K, block_of, to_tma_order
from sagesim_kernels.hopper.token_loads import load_tokens, of_next_head


@gluon.jit
def produce(
    inputs, buffers, q_full, released, loop, origin, stored_row, stored_tokens, first_head,
    stored_start, GROUPS: gl.constexpr, Q_CHANNELS: gl.constexpr, DO_CHANNELS: gl.constexpr,
):  # fmt: skip
    """Load the block of queries of each step by TMA, into buffers that are released. One warp.

    Args:
        inputs: `CodeInputs`.
        buffers: `CodeBuffers`.
        q_full: barriers [stages].
        released: barriers [2], for even and odd steps. Before this warp loads step n, it waits for
            the barrier of step n - 2. If other warps compute dQ, the barriers are `ds_full`. After
            the wait no warp reads data of step n - 3, so three stages are enough. Only row
            statistics of step n - 3 may still be read; they have four stages. Otherwise the
            barriers are `dq_full`, and two stages are enough.
        loop: `QueryLoop`.
        origin: `TokenOrigin` of the first query head.
        stored_row: row of that head's first token in padded storage.
        stored_tokens: tokens of a head in padded storage.
        first_head: the first query head.
        stored_start: the sequence's first token in padded storage.
        Q_CHANNELS, DO_CHANNELS: rows of a head in the right operands.
    """
    STAGES: gl.constexpr = buffers.q8.shape[0]
    STAGES_STATS: gl.constexpr = buffers.row_stats.shape[0]
    RATIO_BYTES: gl.constexpr = 0 if buffers.ratios is None else BLOCK_Q * 4
    D: gl.constexpr = buffers.q8.shape[2]
    for head in range(GROUPS):
        for i in range(loop.begin, loop.end):
            n = head * (loop.end - loop.begin) + i - loop.begin
            if n >= 2:
                mbarrier.wait(released.index(n % 2), (n // 2 & 1) ^ 1)
            at = of_next_head(origin, head)
            row8 = stored_row + head * stored_tokens
            block = block_of(i, loop)
            stage = n % STAGES
            bar = q_full.index(stage)
            mbarrier.expect(bar, BLOCK_Q * D * 5 + ROW_STATS * 4 + D * 8 + RATIO_BYTES)
            tma_load(inputs.q8, [row8 + block * BLOCK_Q, 0], bar, buffers.q8.index(stage))
            load_tokens(inputs.do, at, block * BLOCK_Q, bar, buffers.do.index(stage))
            index = row8 // BLOCK_Q + block
            stats = buffers.row_stats.index(n % STAGES_STATS)
            tma_load(inputs.row_stats, [index * ROW_STATS], bar, stats)
            if buffers.ratios is not None:
                first = row8 + block * BLOCK_Q
                tma_load(inputs.ratios, [first], bar, buffers.ratios.index(stage))
            query = stored_start + block * BLOCK_Q
            row = (first_head + head) * DO_CHANNELS
            tma_load(inputs.do_right, [row, query], bar, buffers.do_right.index(stage))
            scales = buffers.channel_scales.index(stage)
            tma_load(inputs.channel_scales, [index * (2 * D)], bar, scales)
            row = (first_head + head) * Q_CHANNELS
            tma_load(inputs.q_right, [row, query], bar, buffers.q_right.index(stage))


@gluon.jit
def _load_key_scales(scales, tile, buffer, KD: gl.constexpr, TOKENS: gl.constexpr):
    """Return the scale of each key, and store those of the right operand of dQ to buffer.

    scales: `KeyScales`. tile: `KeyTile`. buffer: float32 [BLOCKS, D] in shared memory. There may be
    no scale behind the sequence's last key.
    """
    D: gl.constexpr = buffer.shape[1]
    keys = gl.minimum(tile.first + gl.arange(0, TILE_K, ST_ROWS), tile.length - 1)
    rows = gl.load(scales.rows + (keys // TOKENS).to(gl.int64) * scales.row_stride)
    column = gl.arange(0, D, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    for i in gl.static_range(BLOCKS):
        block = gl.minimum(tile.first // BLOCK_K + i, (tile.length - 1) // BLOCK_K)
        ptr = scales.right + block.to(gl.int64) * scales.right_stride
        ptrs = ptr + column * scales.channel_stride
        buffer.index(i).store(gl.load(ptrs, mask=column < KD, other=1.0))
    barrier()
    return rows


@gluon.jit
def start_s(k8, q8, KD: gl.constexpr):
    """Start the product S, transposed. It may be read only after a wait."""
    return start_product(k8, q8, gl.int32, ST_INT32, KD)


@gluon.jit
def start_dp(v, do, VD: gl.constexpr):
    """Start the product dP, transposed. It may be read only after a wait."""
    return start_product(v, do, gl.float32, ST_FLOAT32, VD)


@gluon.jit
def compute_p(
    MASKED: gl.constexpr, s, k_scale, q_factor, minus_lse2, keys, i, tile, TOKENS: gl.constexpr
):
    """Return P transposed from the integer sums of S, as `operands.apply_k_scale` scales them.

    q_factor: with the power of two of that function.
    """
    x = gl.convert_layout(s.to(gl.float32), ST_FLOAT32)
    if TOKENS == 1:
        x = x * (k_scale * 0.0009765625)[:, None]
        factors = q_factor[None, :].broadcast_to(x.shape)
    else:
        factors = q_factor[None, :] * k_scale[:, None]
    x = gl.fma(x, factors, minus_lse2[None, :].broadcast_to(x.shape))
    if MASKED:
        queries = i * BLOCK_Q + gl.arange(0, BLOCK_Q, ST_COLUMNS)
        visible = attends_between(queries[None, :], keys[:, None], tile.offset, tile.lowest)
        x = gl.where(visible, x, -float("inf"))
    return gl.exp2(x)


@gluon.jit
def joined(left, right):
    """Return two chunks of channels as one tensor [TILE_K, channels]."""
    return gl.join(left, right).permute([0, 2, 1]).reshape([TILE_K, 2 * CHUNK])


@gluon.jit
def start_keys(scales, tile, buffer, outputs, KD: gl.constexpr, TOKENS: gl.constexpr):
    """Return the index of each key (2^30 if no query attends to it), its scale, and sums of 0.

    buffer: gets the scales of the right operand of dQ, see `_load_key_scales`.
    """
    first = tile.first + gl.arange(0, TILE_K, ST_ROWS)
    keys = gl.where(are_live(first, tile, outputs.key_mask), first, 2**30)
    k_scale = _load_key_scales(scales, tile, buffer, KD, TOKENS)
    return keys, k_scale, gl.zeros((TILE_K, CHUNK), gl.float32, ST_INT32)


@gluon.jit
def _compute_p_and_ds(
    MASKED: gl.constexpr, k8, v, queries, stage, stats, maps, slot, k_scale, keys, i, tile,
    KD: gl.constexpr, VD: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Return P, its largest magnitude of each key, and the same of dS; all transposed.

    If scales belong to keys, P is a left operand, and its scales take the place of the magnitudes.
    """
    s = start_s(k8, queries.q8.index(stage), KD)
    q_factor = stats.index(0).load(ST_COLUMNS)
    minus_lse2 = stats.index(1).load(ST_COLUMNS)
    s = warpgroup_mma_wait(0, deps=[s])
    # dP starts when S has been read. Both at once would need too many registers.
    dp = start_dp(v, queries.do.index(stage), VD)
    p = compute_p(MASKED, s, k_scale, q_factor, minus_lse2, keys, i, tile, TOKENS)
    p_largest = row_maxima(p, maps.p_maxima, slot)
    if maps.p_maxima is None:
        p_left, p_scale = left_codes(p, p_largest, None, slot)
    else:
        p_left, p_scale = p, p_largest
    delta = stats.index(2).load(ST_COLUMNS)
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = compute_ds(MASKED, p, dp, delta, None, keys, i, tile)
    return p_left, p_scale, ds, row_maxima(ds, maps.ds_maxima, slot)


@gluon.jit
def compute_dk_dv_dq(
    key_tile, queries, maps, dq_s, barriers, scales, outputs, loop, tile, GROUPS: gl.constexpr,
    KD: gl.constexpr, VD: gl.constexpr, TOKENS: gl.constexpr, BY_CHANNEL: gl.constexpr,
):  # fmt: skip
    """Compute dK, dV and the parts of dQ, of 128 channels. Eight warps.

    The arguments are those of `compute_dk_dv` and `compute_dq`.
    """
    STAGES: gl.constexpr = queries.q8.shape[0]
    D: gl.constexpr = queries.q8.shape[2]
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 32])
    keys, k_scale, dk0 = start_keys(scales, tile, key_tile.right_scales, outputs, KD, TOKENS)
    dv0, dk1, dv1 = dk0, dk0, dk0
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
                mbarrier.wait(barriers.q_full.index(stage), (n // STAGES) & 1)
                stats = row_stats_of(queries, stage)
                p, p_scale, ds, ds_largest = _compute_p_and_ds(
                    PART != 1, key_tile.k8.index(zero), key_tile.v.index(zero), queries, stage,
                    stats, maps, zero, k_scale, keys, i, tile, KD, VD, TOKENS,
                )  # fmt: skip
                maps.ds.index(0).store(ds)
                barrier()  # All warps have stored dS and their maxima.
                if maps.p_maxima is not None:
                    p, p_scale = left_codes(p, p_scale, maps.p_maxima, zero)
                do_right, q_right = queries.do_right.index(stage), queries.q_right.index(stage)
                channel_scales = queries.channel_scales.index(stage)
                ds, ds_scale = left_codes(ds, ds_largest, maps.ds_maxima, zero)
                store_query_codes(maps.ds.index(0).load(query_rows(WARPS)), maps, zero)
                # Wait until the store warp has read the parts of dQ of the step before. It could
                # wait where it stores the next ones, but ptxas would spill more registers.
                mbarrier.wait(barriers.dq_empty.index(0), (n & 1) ^ 1)
                fence_async_shared()
                barrier()  # All warps have stored their codes of dS.
                # One product at a time: the sums of two would need too many registers.
                sums = warpgroup_mma_wait(0, deps=[start_sums(p, do_right, 0)])
                dv0 = add_sums(dv0, sums, p_scale, channel_scales, 0, BY_CHANNEL)
                sums = warpgroup_mma_wait(0, deps=[start_sums(p, do_right, 1)])
                dv1 = add_sums(dv1, sums, p_scale, channel_scales, CHUNK, BY_CHANNEL)
                sums = warpgroup_mma_wait(0, deps=[start_sums(ds, q_right, 0)])
                dk0 = add_sums(dk0, sums, ds_scale, channel_scales, D, BY_CHANNEL)
                sums = warpgroup_mma_wait(0, deps=[start_sums(ds, q_right, 1)])
                dk1 = add_sums(dk1, sums, ds_scale, channel_scales, D + CHUNK, BY_CHANNEL)
                inverse = stats.index(3).load(gl.SliceLayout(1, DQ))
                units = dq_units(maps, key_tile, inverse, DQ)
                dq_s.index(0).store(to_tma_order(units))
                fence_async_shared()
                barrier()  # All warps have finished with the block of queries.
                mbarrier.arrive(barriers.dq_full.index(n % 2), count=1)
    buffer = key_tile.v.index(0)
    store_keys(outputs.dv, outputs, tile, joined(dv0, dv1), buffer, VD)
    store_keys(outputs.dk, outputs, tile, joined(dk0, dk1) * outputs.scale, buffer, KD)


@gluon.jit
def compute_dk_dv(
    key_tile, queries, maps, barriers, scales, outputs, loop, tile, GROUPS: gl.constexpr,
    KD: gl.constexpr, VD: gl.constexpr, TOKENS: gl.constexpr, BY_CHANNEL: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV, of 64 channels, and pass dS to the warps that compute dQ. Eight warps.

    key_tile: `CodeKeys`. queries: `CodeBuffers`. maps: `CodeMaps`. barriers: `CodeBarriers`.
    scales: `KeyScales`. outputs: `KeyOutputs`. loop: `QueryLoop`. tile: `KeyTile`. KD, VD: channels
    of K and V. TOKENS: keys that share a scale of K. BY_CHANNEL: whether channels of a block of dO
    or Q have scales of their own in dV or dK.
    """
    STAGES: gl.constexpr = queries.q8.shape[0]
    STAGES_STATS: gl.constexpr = queries.row_stats.shape[0]
    SLOTS: gl.constexpr = maps.ds.shape[0]
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
                # dS and its maxima that were in this slot before have been loaded.
                mbarrier.wait(barriers.ds_empty.index(slot), ((n // SLOTS) & 1) ^ 1)
                p, p_scale, ds, ds_largest = _compute_p_and_ds(
                    PART != 1, key_tile.k8.index(0), key_tile.v.index(0), queries, stage,
                    row_stats_of(queries, n % STAGES_STATS), maps, slot, k_scale, keys, i, tile,
                    KD, VD, TOKENS,
                )  # fmt: skip
                maps.ds.index(slot).store(ds)
                # After this barrier, all warps have stored dS and their maxima, and have finished
                # the products of the step before.
                barrier()
                mbarrier.arrive(barriers.ds_full.index(slot), count=1)
                if maps.p_maxima is not None:
                    p, p_scale = left_codes(p, p_scale, maps.p_maxima, slot)
                sums0 = start_sums(p, queries.do_right.index(stage), 0)
                ds, ds_scale = left_codes(ds, ds_largest, maps.ds_maxima, slot)
                sums1 = start_sums(ds, queries.q_right.index(stage), 0)
                channel_scales = queries.channel_scales.index(stage)
                sums0 = warpgroup_mma_wait(1, deps=[sums0])
                dv = add_sums(dv, sums0, p_scale, channel_scales, 0, BY_CHANNEL)
                sums1 = warpgroup_mma_wait(0, deps=[sums1])
                dk = add_sums(dk, sums1, ds_scale, channel_scales, D, BY_CHANNEL)
    buffer = key_tile.v.index(0)
    store_keys(outputs.dv, outputs, tile, dv, buffer, VD)
    store_keys(outputs.dk, outputs, tile, dk * outputs.scale, buffer, KD)


@gluon.jit
def compute_dq(key_tile, queries, maps, dq_s, barriers, loop, GROUPS: gl.constexpr):
    """Compute parts of dQ from dS. Four warps.

    key_tile: `CodeKeys`. queries: `CodeBuffers`. maps: `CodeMaps`. dq_s: int32 parts of dQ in
    shared memory. barriers: `CodeBarriers`. loop: `QueryLoop`.
    """
    SLOTS: gl.constexpr = maps.ds.shape[0]
    STAGES_STATS: gl.constexpr = queries.row_stats.shape[0]
    D: gl.constexpr = queries.q8.shape[2]
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    mbarrier.wait(barriers.kv_full, 0)
    mbarrier.wait(barriers.scales_full, 0)
    for n in range(GROUPS * (loop.end - loop.begin)):
        slot = n % SLOTS
        mbarrier.wait(barriers.ds_full.index(slot), (n // SLOTS) & 1)
        store_query_codes(maps.ds.index(slot).load(query_rows(4)), maps, slot)
        inverse = row_stats_of(queries, n % STAGES_STATS).index(3).load(gl.SliceLayout(1, DQ))
        fence_async_shared()
        barrier()  # All warps have loaded dS and stored their codes.
        mbarrier.arrive(barriers.ds_empty.index(slot), count=1)
        units = dq_units(maps, key_tile, inverse, DQ)
        mbarrier.wait(barriers.dq_empty.index(slot), ((n // SLOTS) & 1) ^ 1)
        dq_s.index(slot).store(to_tma_order(units))
        fence_async_shared()
        barrier()  # All warps have stored their parts, and have read the codes of dS.
        mbarrier.arrive(barriers.dq_full.index(slot), count=1)
