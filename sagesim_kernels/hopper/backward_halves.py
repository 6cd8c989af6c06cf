"""The warps of a backward program that compute, for tiles of 128 channels and many steps.

Two warpgroups compute dK and dV of a block of 64 keys each, and 64 channels of dQ each. They meet
no common barrier, so that one can multiply while the other one computes exponentials. A part of dQ
sums over the keys of both. So a warpgroup computes dQ of a step when it has passed on dS of the
next step, and after the last step of a tile. dS has two slots.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

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

from sagesim_kernels.gluon_compat import barrier
from sagesim_kernels.hopper.backward_loads import row_stats_of, wait_for_k16
from sagesim_kernels.hopper.backward_maps import (
    BLOCK_COLUMNS,
    BLOCK_FLOAT32,
    BLOCK_INT32,
    BLOCK_K,
    compute_ds,
    compute_p,
    start_keys,
)
from sagesim_kernels.hopper.backward_masks import part_of
from sagesim_kernels.hopper.backward_stores import release, store_dk_dv
from sagesim_kernels.hopper.backward_structures import KeyTile
from sagesim_kernels.hopper.channel_products import products_of, start_product
from sagesim_kernels.hopper.dq_parts import (
    BLOCK_Q,
    mark_overflow,
    pass_to_store,
    start_dq,
)

_ROWS = gl.constexpr(gl.SliceLayout(1, BLOCK_FLOAT32.value))
"""Layout of one number for each row of dQ, a query."""


@gluon.jit
def compute_half(
    key_buffers, k_mean, z, queries, ds_s, dq_s, barriers, k_scale, outputs, loop, tile, dq_blocks,
    scale, done, wave, GROUPS: gl.constexpr, BLOCK: gl.constexpr, KD: gl.constexpr,
    VD: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of a block of keys, and half of the channels of the tile's parts of dQ.

    z: the head of K, over all sequences. The others: see `backward_blocks.compute_block` and
    `backward_warps.compute_keys`.
    """
    STAGES: gl.constexpr = queries.q8.shape[0]
    gl.static_assert(STAGES == 2, "dS has a slot for each stage, and dq_full as many barriers")
    gl.static_assert(queries.shifts is None, "a softcap's backward is `backward_joint`")
    D: gl.constexpr = queries.q8.shape[2]
    FIRST: gl.constexpr = BLOCK * BLOCK_K
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    keys, scales = start_keys(k_scale, outputs.key_mask, tile, FIRST)
    tile = KeyTile(tile.first + FIRST, tile.length, tile.n_live, tile.offset, tile.lowest)
    dk = warpgroup_mma_init(gl.zeros((BLOCK_K, D), gl.float32, ACC))
    dv = warpgroup_mma_init(gl.zeros((BLOCK_K, D), gl.float32, ACC))
    # Of the step before. There is no step before the first one.
    inverse = gl.zeros((BLOCK_Q,), gl.float32, _ROWS)
    minus_lse2_rows = inverse
    wait_for_k16(
        _half_of(key_buffers.k16.index(0), BLOCK), barriers.k16_full, wave, k_mean, z, 4, KD,
        BLOCK * D // 2,
    )  # fmt: skip
    mbarrier.wait(barriers.kv_full, wave & 1)
    for head in range(GROUPS):
        for PART in gl.static_range(2 if loop.unmasked_end is None else 3):
            begin, end = part_of(loop, PART)
            for i in range(begin, end):
                n = done + head * (loop.end - loop.begin) + i - loop.begin
                stage = n % STAGES
                # This 0 is opaque to the compiler. With a constant, it computes the descriptors of
                # all operands before the loop and runs out of registers.
                zero = i >> 30
                do = queries.do.index(stage)
                mbarrier.wait(barriers.q_full.index(stage), (n // STAGES) & 1)
                k8 = key_buffers.k8.index(zero).slice(FIRST, BLOCK_K)
                v = key_buffers.v.index(zero).slice(FIRST, BLOCK_K)
                s = start_product(k8, queries.q8.index(stage), gl.int32, BLOCK_INT32, KD)
                dp = start_product(v, do, gl.float32, BLOCK_FLOAT32, VD)
                stats = row_stats_of(queries, stage)
                factor = stats.index(0).load(BLOCK_COLUMNS)
                minus_lse2 = stats.index(1).load(BLOCK_COLUMNS)
                s = warpgroup_mma_wait(products_of(VD, D, 16), deps=[s])
                p, weight = compute_p(
                    PART != 1, s, scales, factor, minus_lse2, None, None, keys, i, tile
                )
                delta = stats.index(2).load(BLOCK_COLUMNS)
                p16 = gl.convert_layout(p.to(do.dtype), OPERAND)
                dp = warpgroup_mma_wait(0, deps=[dp])
                dv = warpgroup_mma(p16, do, dv, is_async=True)
                ds = compute_ds(PART != 1, weight, dp, delta, None, keys, i, tile)
                ds16 = ds.to(queries.q16.dtype)
                if dq_blocks.units is not None:
                    mark_overflow(dq_blocks, ds16, head, i)
                own_ds = ds_s.index(stage).slice(FIRST, BLOCK_K)
                ds_operand = gl.convert_layout(ds16, OPERAND)
                # Both warpgroups have read the dS that was in this slot before.
                mbarrier.wait(barriers.dq_full.index(stage), ((n // STAGES) & 1) ^ 1)
                own_ds.store(ds16)
                fence_async_shared()
                barrier()
                mbarrier.arrive(barriers.ds_full.index(stage), count=1)
                dk = warpgroup_mma(ds_operand, queries.q16.index(stage), dk, is_async=True)
                if n > done:
                    _compute_dq(
                        n - 1, inverse, minus_lse2_rows, key_buffers.k16.index(zero), ds_s, dq_s,
                        barriers, scale, BLOCK,
                    )  # fmt: skip
                dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
                dk = warpgroup_mma_init(dk)
                dv = warpgroup_mma_init(dv)
                inverse = stats.index(3).load(_ROWS)
                if dq_s.dtype != gl.int32:
                    minus_lse2_rows = stats.index(1).load(_ROWS)
                fence_async_shared()
                barrier()
                if n > done:
                    mbarrier.arrive(barriers.dq_full.index((n - 1) % STAGES), count=1)
                mbarrier.arrive(barriers.q_empty.index(stage), count=1)
    steps = GROUPS * (loop.end - loop.begin)
    if steps > 0:
        last = done + steps - 1
        _compute_dq(
            last, inverse, minus_lse2_rows, key_buffers.k16.index(0), ds_s, dq_s, barriers, scale,
            BLOCK,
        )  # fmt: skip
        fence_async_shared()
        barrier()
        mbarrier.arrive(barriers.dq_full.index(last % STAGES), count=1)
    release(barriers.k16_empty)
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    buffer = key_buffers.dv.index(0).slice(FIRST, BLOCK_K)
    store_dk_dv(dk, dv, outputs, tile, buffer, barriers, KD, VD)


@gluon.jit
def _half_of(k16, BLOCK: gl.constexpr):
    """Return the channels of a tile of K [TILE_K, D] for which a warpgroup computes dQ."""
    CHANNELS: gl.constexpr = k16.shape[1] // 2
    return k16.slice(BLOCK * CHANNELS, CHANNELS, 1)


@gluon.jit
def _compute_dq(n, inverse, minus_lse2, k16, ds_s, dq_s, barriers, scale, BLOCK: gl.constexpr):
    """Compute half of the channels of dQ of step n, and store them to shared memory.

    inverse: 1 / unit of the queries. minus_lse2: see `pass_to_store`. k16: a tile of K in 16 bit.
    """
    CHANNELS: gl.constexpr = k16.shape[1] // 2
    SLOTS: gl.constexpr = ds_s.shape[0]
    mbarrier.wait(barriers.ds_full.index(n % SLOTS), (n // SLOTS) & 1)
    dq = start_dq(ds_s.index(n % SLOTS), _half_of(k16, BLOCK), BLOCK_FLOAT32)
    mbarrier.wait(barriers.dq_empty.index(0), (n & 1) ^ 1)
    dq = warpgroup_mma_wait(0, deps=[dq])
    if dq_s.dtype == gl.int32:  # in the order of `to_tma_order`, channels come first
        ROWS: gl.constexpr = dq_s.shape[1] // 2
        buffer = dq_s.index(0).slice(BLOCK * ROWS, ROWS)
    else:
        buffer = dq_s.index(0).slice(BLOCK * CHANNELS, CHANNELS, 1)
    pass_to_store(dq, inverse, minus_lse2, buffer, scale)
