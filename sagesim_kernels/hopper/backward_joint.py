"""The warps of a backward program that compute, for tiles of 128 channels and few steps.

Eight warps compute dK, dV and dQ of a tile. Each waits twice in a step for all others. So they need
only one slot of dS, and dQ of a step is complete at its end. The warps of `backward_halves` take
less time for a step, but more for a tile. Their shared memory has no space for the shifts of a
softcap.
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
    ST_COLUMNS,
    ST_FLOAT32,
    ST_INT32,
    ST_ROWS,
    compute_ds,
    compute_p,
)
from sagesim_kernels.hopper.backward_masks import are_live, part_of
from sagesim_kernels.hopper.backward_stores import WARPS, release, store_dk_dv
from sagesim_kernels.hopper.capped_logits import add_ds_sums
from sagesim_kernels.hopper.channel_products import products_of, start_product
from sagesim_kernels.hopper.dq_parts import (
    TILE_K,
    first_row_of,
    mark_overflow,
    pass_to_store,
    start_dq,
)


@gluon.jit
def _start_s_and_dp(k8, v, q8, do, KD: gl.constexpr, VD: gl.constexpr):
    """Start the products S and dP, both transposed. They may be read only after a wait."""
    s = start_product(k8, q8, gl.int32, ST_INT32, KD)
    dp = start_product(v, do, gl.float32, ST_FLOAT32, VD)
    return s, dp


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
def compute_joint(
    key_buffers, k_mean, z, queries, ds_s, dq_s, barriers, k_scale, outputs, loop, tile, dq_blocks,
    cap2, ds_sums, scale, done, wave, GROUPS: gl.constexpr, KD: gl.constexpr, VD: gl.constexpr,
):  # fmt: skip
    """Compute dK, dV and the parts of dQ of a tile.

    z: the head of K, over all sequences. The others: see `backward_blocks.compute_block` and
    `backward_warps.compute_keys`.
    """
    STAGES: gl.constexpr = queries.q8.shape[0]
    STAGES16: gl.constexpr = queries.q16.shape[0]
    D: gl.constexpr = queries.q8.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    DQ_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    keys, key_scales, dk, dv = _start_keys(k_scale, outputs.key_mask, tile, D, ACC)
    k16 = key_buffers.k16.index(0)
    wait_for_k16(k16, barriers.k16_full, wave, k_mean, z, WARPS, KD)
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
                k8, v = key_buffers.k8.index(zero), key_buffers.v.index(zero)
                s, dp = _start_s_and_dp(k8, v, queries.q8.index(stage), do, KD, VD)
                stats = row_stats_of(queries, stage)
                factor = stats.index(0).load(ST_COLUMNS)
                minus_lse2 = stats.index(1).load(ST_COLUMNS)
                s = warpgroup_mma_wait(products_of(VD, D, 16), deps=[s])
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
                # This overwrites dS of the step before. Other warps may still multiply that dS with
                # Q, but each of them reads only its own rows of dS for this product.
                ds16 = ds.to(queries.q16.dtype)
                ds_s.index(zero).store(ds16)
                if dq_blocks.units is not None:
                    mark_overflow(dq_blocks, ds16, head, i)
                fence_async_shared()
                barrier()
                dq_t = start_dq(ds_s.index(zero), key_buffers.k16.index(zero), DQ_ACC)
                # dS is read from shared memory: there are too few registers to hold it there.
                q16 = queries.q16.index(n % STAGES16)
                dk = warpgroup_mma(ds_s.index(zero), q16, dk, is_async=True)
                inverse = stats.index(3).load(gl.SliceLayout(1, DQ_ACC))
                mbarrier.wait(barriers.dq_empty.index(0), (n & 1) ^ 1)
                dq = warpgroup_mma_wait(1, deps=[dq_t])
                minus_lse2_rows = stats.index(1).load(gl.SliceLayout(1, DQ_ACC))
                pass_to_store(dq, inverse, minus_lse2_rows, dq_s.index(0), scale)
                fence_async_shared()
                # After this barrier, all warps have also finished with dO, and with Q of the step
                # before.
                barrier()
                mbarrier.arrive(barriers.dq_full.index(n % 2), count=1)
    release(barriers.k16_empty)
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    store_dk_dv(dk, dv, outputs, tile, key_buffers.dv.index(0), barriers, KD, VD)
