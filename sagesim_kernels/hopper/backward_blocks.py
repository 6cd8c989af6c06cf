"""The warps of a backward program that compute, for tiles of 64 channels.

A tile of 128 keys is two blocks. Two warpgroups have a block each, of which they compute P, dS and
dV. They meet no common barrier, so that one can multiply while the other one computes exponentials.
One is at most two steps ahead: the queries of step n + 3 are loaded when both have passed on dS of
step n. A third warpgroup computes dQ and dK of both blocks, from dS in shared memory. dS and dQ
have two slots each.

The difference dP - delta is one sum on the tensor cores: delta comes as `delta_words`, and their
product with ones is added to dP. If every warp loaded delta to registers, this would take more of
the bandwidth of shared memory.
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

from sagesim_kernels.gluon_compat import barrier
from sagesim_kernels.hopper.backward_loads import load_k16, row_stats_of, wait_for_k16
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
from sagesim_kernels.hopper.backward_stores import release, store_keys
from sagesim_kernels.hopper.backward_structures import KeyOutputs, KeyTile
from sagesim_kernels.hopper.backward_tiles import place_tile, wait_for_tile
from sagesim_kernels.hopper.capped_logits import add_ds_sums
from sagesim_kernels.hopper.channel_products import start_product
from sagesim_kernels.hopper.dq_parts import (
    TILE_K,
    first_row_of,
    mark_overflow,
    pass_to_store,
    start_dq,
)
from sagesim_kernels.hopper.token_loads import key_origin
from sagesim_kernels.operands import key_mask_of

PARTS = gl.constexpr(16)
"""Columns of the parts of delta: three parts and zeros, as many as an instruction sums over."""

_DK = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
"""Layout of dK transposed [channels, keys]."""


@gluon.jit
def compute_block(
    key_buffers, queries, ds_s, barriers, k_scale, outputs, loop, tile, dq_blocks, cap2, ds_sums,
    done, wave, GROUPS: gl.constexpr, BLOCK: gl.constexpr, VD: gl.constexpr,
):  # fmt: skip
    """Compute dV of a block of keys, and pass its dS to the warps that compute dQ and dK.

    k_scale: pointer to the scale of the tile's first key. outputs: `KeyOutputs`. loop: `QueryLoop`.
    tile: `KeyTile`. dq_blocks: `DqBlocks`. done, wave: steps and tiles of the program before this
    tile. BLOCK: 0 or 1, the block. The others: see `backward_warps.compute_keys`.
    """
    STAGES: gl.constexpr = queries.q8.shape[0]
    STAGES_STATS: gl.constexpr = queries.row_stats.shape[0]
    SLOTS: gl.constexpr = ds_s.shape[0]
    D: gl.constexpr = queries.q8.shape[2]
    FIRST: gl.constexpr = BLOCK * BLOCK_K
    keys, scales = start_keys(k_scale, outputs.key_mask, tile, FIRST)
    tile = KeyTile(tile.first + FIRST, tile.length, tile.n_live, tile.offset, tile.lowest)
    dv = warpgroup_mma_init(gl.zeros((BLOCK_K, D), gl.float32, BLOCK_FLOAT32))
    ones = gl.full((BLOCK_K, PARTS), 1.0, gl.bfloat16, gl.DotOperandLayout(0, BLOCK_FLOAT32, 2))
    mbarrier.wait(barriers.kv_full, wave & 1)
    k8 = key_buffers.k8.index(0).slice(FIRST, BLOCK_K).load(gl.DotOperandLayout(0, BLOCK_INT32, 4))
    v = key_buffers.v.index(0).slice(FIRST, BLOCK_K).load(gl.DotOperandLayout(0, BLOCK_FLOAT32, 2))
    release(barriers.kv_empty)
    for head in range(GROUPS):
        for PART in gl.static_range(2 if loop.unmasked_end is None else 3):
            begin, end = part_of(loop, PART)
            for i in range(begin, end):
                n = done + head * (loop.end - loop.begin) + i - loop.begin
                stage = n % STAGES
                slot = n % SLOTS
                mbarrier.wait(barriers.q_full.index(stage), (n // STAGES) & 1)
                do = queries.do.index(stage)
                # K and V are in registers, which cannot be divided: all channels are multiplied.
                s = start_product(k8, queries.q8.index(stage), gl.int32, BLOCK_INT32, D)
                dp = start_product(v, do, gl.float32, BLOCK_FLOAT32, D)
                deltas = queries.deltas.index(stage).permute((1, 0))
                dp = warpgroup_mma(ones, deltas, dp, is_async=True)
                s = warpgroup_mma_wait(2, deps=[s])
                stats = row_stats_of(queries, n % STAGES_STATS)
                factor = stats.index(0).load(BLOCK_COLUMNS)
                minus_lse2 = stats.index(1).load(BLOCK_COLUMNS)
                shift = None
                if queries.shifts is not None:
                    shift = queries.shifts.index(stage).load(BLOCK_COLUMNS)
                p, weight = compute_p(
                    PART != 1, s, scales, factor, minus_lse2, shift, cap2, keys, i, tile
                )
                p16 = gl.convert_layout(p.to(do.dtype), gl.DotOperandLayout(0, BLOCK_FLOAT32, 2))
                dp = warpgroup_mma_wait(0, deps=[dp])
                dv = warpgroup_mma(p16, do, dv, is_async=True)
                ds = compute_ds(PART != 1, weight, dp, None, cap2, keys, i, tile)
                if ds_sums is not None:
                    add_ds_sums(ds_sums, first_row_of(head, i, dq_blocks), ds)
                ds16 = ds.to(queries.q16.dtype)
                if dq_blocks.units is not None:
                    mark_overflow(dq_blocks, ds16, head, i)
                # dQ and dK have been computed from the dS that was in this slot before.
                mbarrier.wait(barriers.dq_full.index(slot), ((n // SLOTS) & 1) ^ 1)
                ds_s.index(slot).slice(FIRST, BLOCK_K).store(ds16)
                # With P in registers at the end of a step, ptxas lets each product wait for the
                # one before it, in a function that is not the kernel's first.
                dv = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[dv]))
                fence_async_shared()
                barrier()
                mbarrier.arrive(barriers.ds_full.index(stage), count=1)
    dv = warpgroup_mma_wait(0, deps=[dv])
    store_keys(outputs.dv, outputs, tile, dv, key_buffers.dv.index(0).slice(FIRST, BLOCK_K), VD)


@gluon.jit
def compute_dq_and_dk(
    k16, key_buffers, k_mean, queries, ds_s, dq_s, barriers, scheduler, lengths, dk_out, scale,
    K_COPIED: gl.constexpr, GROUPS: gl.constexpr, SPLITS: gl.constexpr, KD: gl.constexpr,
):  # fmt: skip
    """Load K in 16 bit, and compute dK and parts of dQ from dS. Four warps.

    k16: TMA descriptor. key_buffers: `KeyBuffers`. ds_s: dS in shared memory. dq_s: see
    `DqStore.buffer`. queries: `QueryBuffers`. k_mean: pointer to the means that are subtracted from
    K, or None. scheduler: `KeyScheduler`. dk_out: `Strided`. scale: the scale of the logits.
    """
    SLOTS: gl.constexpr = ds_s.shape[0]
    STAGES: gl.constexpr = queries.q8.shape[0]
    STAGES16: gl.constexpr = queries.q16.shape[0]
    STAGES_STATS: gl.constexpr = queries.row_stats.shape[0]
    D: gl.constexpr = queries.q16.shape[2]
    k16_s = key_buffers.k16.index(0)
    done = 0
    for wave in range(scheduler.waves):
        found = wait_for_tile(scheduler, wave, lengths, SPLITS)
        if found.first >= 0:
            placed = place_tile(found, scheduler, lengths, GROUPS)
            if wave > 0:
                barrier()  # All four warps have seen K of the tile before, and multiplied with it.
                origin = key_origin(
                    k16, K_COPIED, lengths.cu_k, placed.b, placed.head, placed.start_k,
                    placed.keys.n_live,
                )  # fmt: skip
                first = placed.keys.first
                load_k16(k16, origin, first, key_buffers.k16, barriers.k16_full)
            wait_for_k16(k16_s, barriers.k16_full, wave, k_mean, placed.z, 4, KD)
            dk = warpgroup_mma_init(gl.zeros((D, TILE_K), gl.float32, _DK))
            steps = GROUPS * (placed.loop.end - placed.loop.begin)
            for i in range(steps):  # Triton 3.6 would begin `range(done, ...)` at 0
                n = done + i
                slot = n % SLOTS
                stage = n % STAGES
                mbarrier.wait(barriers.ds_full.index(stage), (n // STAGES) & 1)
                dq_t = start_dq(ds_s.index(slot), k16_s, BLOCK_FLOAT32)
                q16 = queries.q16.index(n % STAGES16).permute((1, 0))
                dk = warpgroup_mma(q16, ds_s.index(slot).permute((1, 0)), dk, is_async=True)
                stats = row_stats_of(queries, n % STAGES_STATS)
                inverse = stats.index(3).load(gl.SliceLayout(1, BLOCK_FLOAT32))
                dq = warpgroup_mma_wait(1, deps=[dq_t])
                mbarrier.wait(barriers.dq_empty.index(slot), ((n // SLOTS) & 1) ^ 1)
                minus_lse2 = stats.index(1).load(gl.SliceLayout(1, BLOCK_FLOAT32))
                pass_to_store(dq, inverse, minus_lse2, dq_s.index(slot), scale)
                dk = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[dk]))
                fence_async_shared()
                barrier()
                mbarrier.arrive(barriers.dq_full.index(slot), count=1)
            done += steps
            # A function cannot return a structure with a None.
            key_mask = None
            if lengths.key_mask is not None:
                key_mask = key_mask_of(lengths, placed.b)
            lowest = placed.keys.lowest if lengths.left is not None else None
            keys = placed.keys
            tile = KeyTile(keys.first, keys.length, keys.n_live, keys.offset, lowest)
            # If several programs share a group's heads, the sum of their parts is multiplied.
            dk_scale = scale if SPLITS == 1 else 1.0
            outputs = KeyOutputs(
                dk_out, None, lengths.cu_k, placed.b, placed.out_head, dk_scale, key_mask
            )
            dk = warpgroup_mma_wait(0, deps=[dk]).permute((1, 0)) * dk_scale
            store_keys(dk_out, outputs, tile, dk, key_buffers.dk.index(0), KD)
