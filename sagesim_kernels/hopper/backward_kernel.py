"""The backward kernel for Hopper: dK, dV and the parts of dQ of tiles of 128 keys.

Each tile takes one pass over Q. A program computes one or several tiles, see `backward_tiles`.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sagesim_kernels.gluon_compat import barrier
from sagesim_kernels.hopper.backward_blocks import PARTS, compute_dq_and_dk
from sagesim_kernels.hopper.backward_loads import (
    ROW_STATS,
    STATS_LAYOUT,
    load_k16,
    load_kv,
    produce,
)
from sagesim_kernels.hopper.backward_stores import store_dq_of_tiles
from sagesim_kernels.hopper.backward_structures import (
    Barriers,
    KeyBuffers,
    KeyInputs,
    KeyScheduler,
    QueryBuffers,
    QueryInputs,
)
from sagesim_kernels.hopper.backward_tiles import find_tile, place_tile
from sagesim_kernels.hopper.backward_warps import compute_keys
from sagesim_kernels.hopper.dealt_tiles import allocate_tiles, share_tile
from sagesim_kernels.hopper.dq_parts import BLOCK_Q, TILE_K, DqStore
from sagesim_kernels.hopper.token_loads import key_origin
from sagesim_kernels.launching import wait_for_earlier_kernels
from sagesim_kernels.operands import Copied, Lengths, summed_channels

BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


class Config(NamedTuple):
    """The constants of a kernel."""

    groups: int
    """Query heads of a program. They have the same K and V."""
    splits: int
    """Programs for each tile of K and V. Each computes a part of dK and dV."""
    d: int
    """Channels of Q and K."""
    d_v: int
    """Channels of V and O."""
    has_dq_warps: bool
    """Whether other warps than those of dV compute dQ and dK; see `backward_blocks`."""
    is_joint: bool
    """Whether eight warps compute all gradients in step; see `backward_joint`. Otherwise, without
    has_dq_warps, see `backward_halves`."""
    copied: Copied
    """Which 16-bit tensors lie in padded storage."""
    is_dealt: bool
    """Whether a program computes several tiles of keys."""


# TMA descriptors are parameters of their own: the launcher of Triton 3.6 finds them only outside
# tuples.
@gluon.jit
def hopper_backward(
    q8, k8, q16, k16, v, do, row_stats, shifts, deltas, k_scale, k_mean, cap2, ds_sums, dk, dv, dq,
    dq_units, mask, n_q, n_k, left, right, tiles, heads, packed_tiles, all_heads, heads_per_group,
    programs, waves, tokens_q, tokens_k, scale, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute tiles of keys, each for the query heads of a group or for a part of them.

    Args:
        shifts: TMA descriptor of the shift of each query, see `capped_rows`; or None.
        deltas: TMA descriptor of `delta_words`, if CONFIG.has_dq_warps; or None.
        k_scale: float32, a scale for each 64 keys in padded storage.
        k_mean: the mean to subtract from k16, float32 [sequences * heads, CONFIG.d], or None.
        dq: TMA descriptor of the sums of dQ, or of dQ; see `DqStore`.
        dq_units: float32 [heads, tokens_q], the units of dQ; None with the descriptor of dQ.
        mask: `Lengths` without n_q, n_k, left and right.
        tiles, ..., tokens_k: see `KeyScheduler`.
        cap2: `base2` of `Softcap`.
        ds_sums: `DsSums`; None, unless the mean of K contributes to dQ under a softcap.
        dk, dv: `Strided` of [sequences, heads * CONFIG.splits, keys, channels].
        scale: the scale of the logits.
        CONFIG: `Config`.
    """
    D: gl.constexpr = q8.block_shape[1]
    GROUPS: gl.constexpr = CONFIG.groups
    SPLITS: gl.constexpr = CONFIG.splits
    Q_COPIED: gl.constexpr = CONFIG.copied.queries
    K_COPIED: gl.constexpr = CONFIG.copied.keys
    KD: gl.constexpr = CONFIG.d
    VD: gl.constexpr = CONFIG.d_v
    HAS_DQ_WARPS: gl.constexpr = CONFIG.has_dq_warps
    IS_JOINT: gl.constexpr = CONFIG.is_joint
    HAS_HALVES: gl.constexpr = not HAS_DQ_WARPS and not IS_JOINT
    SLOTS: gl.constexpr = 2 if HAS_DQ_WARPS else 1
    DS_SLOTS: gl.constexpr = 1 if IS_JOINT else 2
    STAGES: gl.constexpr = SLOTS + 1
    STAGES16: gl.constexpr = 5 if HAS_DQ_WARPS else (3 if IS_JOINT else 2)
    STAGES_STATS: gl.constexpr = 5 if HAS_DQ_WARPS else STAGES
    lengths = Lengths(
        mask.cu_q,
        mask.cu_k,
        n_q,
        n_k,
        mask.IS_CAUSAL,
        mask.LOWER_RIGHT,
        left,
        right,
        mask.seqused_k,
        mask.key_mask,
        None,
        None,
    )
    if not CONFIG.is_dealt:
        waves = 1
    # At 128 channels, programs took 1 to 2 % longer with shared tiles.
    IS_SHARED: gl.constexpr = CONFIG.is_dealt and HAS_DQ_WARPS
    found_s = None
    tile_full = None
    tile_empty = None
    if IS_SHARED:
        found_s = allocate_tiles(5)
        tile_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
        tile_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    scheduler = KeyScheduler(
        tiles, heads, packed_tiles, all_heads, heads_per_group, programs, waves, tokens_q, tokens_k,
        found_s, tile_full, tile_empty,
    )  # fmt: skip
    dt: gl.constexpr = v.dtype
    V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_K, D], dt)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_K, BLOCK_Q], dt)
    k8_s = gl.allocate_shared_memory(gl.int8, [1, TILE_K, D], k8.layout)
    k16_s = gl.allocate_shared_memory(dt, [1, TILE_K, D], V)
    v_s = gl.allocate_shared_memory(dt, [1, TILE_K, D], V)
    q8_s = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_Q, D], q8.layout)
    q16_s = gl.allocate_shared_memory(dt, [STAGES16, BLOCK_Q, D], V)
    do_s = gl.allocate_shared_memory(dt, [STAGES, BLOCK_Q, D], V)
    ds_s = gl.allocate_shared_memory(dt, [DS_SLOTS, TILE_K, BLOCK_Q], DS)
    if dq_units is not None:
        dq_s = gl.allocate_shared_memory(gl.int32, [SLOTS, BLOCK_Q * D // 32, 32], dq.layout)
    else:
        dq_s = gl.allocate_shared_memory(dq.dtype, [SLOTS, BLOCK_Q, D], V)
    # With buffers of their own, V of the next tile is loaded while dV and dK are stored.
    dv_s = v_s
    dk_s = v_s
    deltas_s = None
    if HAS_DQ_WARPS:
        dv_s = gl.allocate_shared_memory(dt, [1, TILE_K, D], V)
        dk_s = gl.allocate_shared_memory(dt, [1, TILE_K, D], V)
        deltas_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_Q, PARTS], deltas.layout)
    row_stats_s = gl.allocate_shared_memory(gl.float32, [STAGES_STATS, ROW_STATS], STATS_LAYOUT)
    shifts_s = None
    if shifts is not None:
        shifts_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], STATS_LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ds_full = None
    if not IS_JOINT:
        ds_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    dq_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    dq_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    of_keys = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    kv_full, kv_empty, k16_full = of_keys.index(0), of_keys.index(1), of_keys.index(2)
    BLOCKS: gl.constexpr = 1 if IS_JOINT else 2  # parts of a tile with warps of their own
    q_empty = None
    if HAS_HALVES:
        q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k16_empty = None
    if not HAS_DQ_WARPS:
        k16_empty = of_keys.index(3)
        mbarrier.init(k16_empty, BLOCKS)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), 1)
        if not IS_JOINT:
            mbarrier.init(ds_full.index(i), BLOCKS)
        if HAS_HALVES:
            mbarrier.init(q_empty.index(i), BLOCKS)
    for i in gl.static_range(2):
        mbarrier.init(dq_full.index(i), BLOCKS if HAS_HALVES else 1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(dq_empty.index(i), 1)
    mbarrier.init(kv_full, 1)
    mbarrier.init(kv_empty, BLOCKS)
    mbarrier.init(k16_full, 1)
    if IS_SHARED:
        for i in gl.static_range(2):
            mbarrier.init(tile_full.index(i), 1)
            mbarrier.init(tile_empty.index(i), BLOCKS + 2)
    fence_async_shared()

    found = find_tile(0, scheduler, lengths, SPLITS)  # reads lengths, which no kernel writes
    wait_for_earlier_kernels()
    if found.first < 0:  # a sequence is shorter than others, so no tiles are dealt
        return
    tile = place_tile(found, scheduler, lengths, GROUPS)
    if IS_SHARED:
        share_tile(found_s, 0, found)
        barrier()  # all warps see the barriers and the tile
        mbarrier.arrive(tile_full.index(0), count=1)
    key_inputs = KeyInputs(k8, k16, v)
    inputs = QueryInputs(q8, q16, do, row_stats, shifts, deltas)
    queries = QueryBuffers(q8_s, q16_s, do_s, row_stats_s, shifts_s, deltas_s)
    key_buffers = KeyBuffers(k8_s, v_s, k16_s, dv_s, dk_s)
    barriers = Barriers(
        ds_full, dq_full, dq_empty, kv_full, kv_empty, k16_full, k16_empty, q_full, q_empty
    )  # fmt: skip
    origin = key_origin(
        v, K_COPIED, lengths.cu_k, tile.b, tile.head, tile.start_k, tile.keys.n_live
    )  # fmt: skip
    load_k16(k16, origin, tile.keys.first, k16_s, k16_full)
    load_kv(key_inputs, tile.row_k, origin, tile.keys.first, key_buffers, kv_full)
    dq_store = DqStore(dq, dq_s, None, dq_full, dq_empty)
    # Tuples of arguments are not assigned to variables: their constants would become numbers.
    if HAS_DQ_WARPS:
        gl.warp_specialize(
            [
                (compute_keys, (
                    key_buffers, k_mean, queries, ds_s, dq_s, barriers, scheduler, lengths, k_scale,
                    dk, dv, dq_units, cap2, ds_sums, scale, GROUPS, SPLITS, 0, KD, VD,
                )),
                (compute_keys, (
                    key_buffers, k_mean, queries, ds_s, dq_s, barriers, scheduler, lengths, k_scale,
                    dk, dv, dq_units, cap2, ds_sums, scale, GROUPS, SPLITS, 1, KD, VD,
                )),
                (compute_dq_and_dk, (
                    k16, key_buffers, k_mean, queries, ds_s, dq_s, barriers, scheduler, lengths, dk,
                    scale, K_COPIED, GROUPS, SPLITS, KD,
                )),
                (produce, (
                    key_inputs, inputs, key_buffers, queries, barriers, scheduler, lengths,
                    Q_COPIED, K_COPIED, GROUPS, SPLITS,
                )),
                (store_dq_of_tiles, (
                    dq_store, scheduler, lengths, Q_COPIED, GROUPS, SPLITS, summed_channels(KD, D),
                )),
            ],
            [4, 4, 1, 1],
            [168, 144, 24, 24],
        )  # fmt: skip
    elif HAS_HALVES:
        gl.warp_specialize(
            [
                (compute_keys, (
                    key_buffers, k_mean, queries, ds_s, dq_s, barriers, scheduler, lengths, k_scale,
                    dk, dv, dq_units, cap2, ds_sums, scale, GROUPS, SPLITS, 0, KD, VD,
                )),
                (compute_keys, (
                    key_buffers, k_mean, queries, ds_s, dq_s, barriers, scheduler, lengths, k_scale,
                    dk, dv, dq_units, cap2, ds_sums, scale, GROUPS, SPLITS, 1, KD, VD,
                )),
                (produce, (
                    key_inputs, inputs, key_buffers, queries, barriers, scheduler, lengths,
                    Q_COPIED, K_COPIED, GROUPS, SPLITS,
                )),
                (store_dq_of_tiles, (
                    dq_store, scheduler, lengths, Q_COPIED, GROUPS, SPLITS, summed_channels(KD, D),
                )),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (compute_keys, (
                    key_buffers, k_mean, queries, ds_s, dq_s, barriers, scheduler, lengths, k_scale,
                    dk, dv, dq_units, cap2, ds_sums, scale, GROUPS, SPLITS, 0, KD, VD,
                )),
                (produce, (
                    key_inputs, inputs, key_buffers, queries, barriers, scheduler, lengths,
                    Q_COPIED, K_COPIED, GROUPS, SPLITS,
                )),
                (store_dq_of_tiles, (
                    dq_store, scheduler, lengths, Q_COPIED, GROUPS, SPLITS, summed_channels(KD, D),
                )),
            ],
            [1, 1],
            [24, 24],
        )  # fmt: skip
