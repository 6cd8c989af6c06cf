"""The tiles of keys that the computing warps of a backward program go through.

One producer warp loads, and one store warp adds dQ to its sums. Two warpgroups call `compute_keys`.
With tiles of 64 channels they compute a block of 64 keys each, and a third one dQ and dK, see
`backward_blocks`. With tiles of 128 channels they compute all gradients: each those of a block, see
`backward_halves`, or both those of the tile, see `backward_joint`.

Barriers, all in shared memory, are the fields of `Barriers`. Each warp counts its tiles of keys and
its steps in all of them. Its stages, slots and phases follow from these counts.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagesim_kernels.hopper.backward_blocks import compute_block
from sagesim_kernels.hopper.backward_halves import compute_half
from sagesim_kernels.hopper.backward_joint import compute_joint
from sagesim_kernels.hopper.backward_structures import KeyOutputs, KeyTile, QueryLoop
from sagesim_kernels.hopper.backward_tiles import place_tile, wait_for_tile
from sagesim_kernels.hopper.dq_parts import BLOCK_Q, DqBlocks
from sagesim_kernels.operands import key_mask_of


@gluon.jit
def compute_keys(
    key_buffers, k_mean, queries, ds_s, dq_s, barriers, scheduler, lengths, k_scale, dk, dv,
    dq_units, cap2, ds_sums, scale, GROUPS: gl.constexpr, SPLITS: gl.constexpr,
    BLOCK: gl.constexpr, KD: gl.constexpr, VD: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of tiles of keys, or of a block of each. Eight warps, or four.

    key_buffers: `KeyBuffers`. k_mean: pointer to the means that are subtracted from K, or None.
    queries: `QueryBuffers`. ds_s: 16 bit [slots, TILE_K, BLOCK_Q] in shared memory. dq_s: see
    `DqStore.buffer`. scheduler: `KeyScheduler`. k_scale: a scale for each 64 keys in padded
    storage. dk, dv: `Strided`. dq_units: the units of dQ, or None. cap2: `base2` of `Softcap`.
    ds_sums: `DsSums`, or None. scale: the scale of the logits. BLOCK: the block, 0 or 1; 0 if
    these warps compute both.
    KD, VD: channels of K and V.
    """
    done = 0
    for wave in range(scheduler.waves):
        found = wait_for_tile(scheduler, wave, lengths, SPLITS)
        if found.first >= 0:
            placed = place_tile(found, scheduler, lengths, GROUPS)
            # A function cannot return a structure with a None.
            key_mask = None
            if lengths.key_mask is not None:
                key_mask = key_mask_of(lengths, placed.b)
            dk_scale = scale if SPLITS == 1 else 1.0  # the sum of the parts is multiplied
            outputs = KeyOutputs(
                dk, dv, lengths.cu_k, placed.b, placed.out_head, dk_scale, key_mask
            )
            lowest = placed.keys.lowest if lengths.left is not None else None
            tile = KeyTile(
                placed.keys.first,
                placed.keys.length,
                placed.keys.n_live,
                placed.keys.offset,
                lowest,
            )
            unmasked_end = placed.loop.unmasked_end if lengths.left is not None else None
            loop = QueryLoop(
                placed.loop.begin, placed.loop.unmasked, unmasked_end, placed.loop.end,
                placed.loop.shift,
            )  # fmt: skip
            units = dq_units if queries.do.dtype == gl.float16 else None
            dq_blocks = DqBlocks(
                loop.begin, loop.end, loop.shift, placed.row_q // BLOCK_Q,
                scheduler.tokens_q // BLOCK_Q, units,
            )  # fmt: skip
            scales = k_scale + placed.row_k // BLOCK_Q
            if barriers.k16_empty is None:
                compute_block(
                    key_buffers, queries, ds_s, barriers, scales, outputs, loop, tile, dq_blocks,
                    cap2, ds_sums, done, wave, GROUPS, BLOCK, VD,
                )  # fmt: skip
            elif barriers.q_empty is not None:
                compute_half(
                    key_buffers, k_mean, placed.z, queries, ds_s, dq_s, barriers, scales, outputs,
                    loop, tile, dq_blocks, scale, done, wave, GROUPS, BLOCK, KD, VD,
                )  # fmt: skip
            else:
                compute_joint(
                    key_buffers, k_mean, placed.z, queries, ds_s, dq_s, barriers, scales, outputs,
                    loop, tile, dq_blocks, cap2, ds_sums, scale, done, wave, GROUPS, KD, VD,
                )  # fmt: skip
            done += GROUPS * (loop.end - loop.begin)
