"""The backward kernel for Hopper: dK, dV and the parts of dQ of 128 keys, in one pass over Q."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sagesim_kernels.gluon_compat import tma_load
from sagesim_kernels.hopper.backward_maps import ST_ROWS
from sagesim_kernels.hopper.backward_structures import (
    Barriers,
    KeyBuffers,
    KeyOutputs,
    KeyTile,
    QueryBuffers,
    QueryInputs,
    QueryLoop,
)
from sagesim_kernels.hopper.backward_warps import (
    ROW_STATS,
    STATS_LAYOUT,
    compute_dk_dv,
    compute_dk_dv_dq,
    compute_dq,
    load_tokens,
    produce,
)
from sagesim_kernels.hopper.dq_parts import BLOCK_Q, TILE_K, DqBlocks, DqStore, store_dq
from sagesim_kernels.hopper.program_places import origin_of, place_of_program
from sagesim_kernels.operands import (
    Lengths,
    causal_offset,
    is_live_key,
    length_of,
    live_keys,
    live_queries,
    lowest_diagonal,
    query_loops,
    stored_start_of,
    summed_channels,
)

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
    """Whether other warps than those of dK and dV compute dQ."""
    is_copied: bool
    """Whether the 16-bit tensors lie in padded storage."""


@gluon.jit
def locate(lengths, b, first):
    """Return four facts about the keys from `first` of sequence b.

    These are their `KeyTile`, their `QueryLoop`, and the first query and the first key of the
    sequence in padded storage. No field is None, because a function cannot return it.
    """
    first_live, n_q = live_queries(lengths, b)
    n_live = live_keys(lengths, b)
    offset = causal_offset(lengths, b)
    begin, unmasked, unmasked_end, end = query_loops(
        lengths, b, first, TILE_K, BLOCK_Q, n_live, offset, first_live, n_q
    )
    end = (end + BLOCK_Q - 1) // BLOCK_Q
    if lengths.key_mask is not None:
        live = is_live_key(lengths, b, first + gl.arange(0, TILE_K, ST_ROWS)).to(gl.int32)
        if gl.min(live, 0) == 0:
            unmasked = n_q
        end = gl.where(gl.max(live, 0) == 0, 0, end)
    # The program id is a 0 that is opaque to the compiler. If the loop over masked blocks is known
    # to be empty, ptxas makes each product of the other loop wait for the product before it.
    unmasked = (unmasked + BLOCK_Q - 1) // BLOCK_Q + gl.program_id(1)
    start_q = stored_start_of(lengths.cu_q, lengths.n_q, b).to(gl.int32)
    start_k = stored_start_of(lengths.cu_k, lengths.n_k, b).to(gl.int32)
    shift = 0
    if lengths.left is not None or lengths.seqused_k is not None or lengths.key_mask is not None:
        unmasked = gl.minimum(unmasked, end)
    if lengths.left is not None:
        unmasked_end = gl.maximum(gl.minimum(unmasked_end // BLOCK_Q, end), unmasked)
    else:
        unmasked_end = end
        if not lengths.IS_CAUSAL:  # a tile starts where its keys are, as far as there are queries
            shift = first // BLOCK_Q % gl.maximum(end, 1)
    loop = QueryLoop(gl.minimum(begin // BLOCK_Q, end), unmasked, unmasked_end, end, shift)
    length = length_of(lengths.cu_k, lengths.n_k, b)
    tile = KeyTile(first, length, n_live, offset, lowest_diagonal(lengths, b))
    return tile, loop, start_q, start_k


# TMA descriptors and the integers of do_not_specialize are parameters of their own. The launcher of
# Triton 3.6 finds descriptors only outside tuples, and do_not_specialize does not apply to integers
# in a tuple.
@gluon.jit(
    do_not_specialize=[
        "n_q", "n_k", "left", "right", "tiles", "heads", "heads_per_group", "tokens_q", "tokens_k",
    ]
)  # fmt: skip
def hopper_backward(
    q8, k8, q16, k16, v, do, row_stats, shifts, k_scale, k_mean, cap2, ds_sums, dk, dv, dq,
    dq_units, mask, n_q, n_k, left, right, tiles, heads, heads_per_group, tokens_q, tokens_k, scale,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """One program computes one tile of keys, for the query heads of a group or for a part of them.

    Args:
        shifts: TMA descriptor of the shift of each query, see `capped_rows`; or None.
        k_scale: float32, a scale for each 64 keys in padded storage.
        k_mean: the mean to subtract from k16, float32 [sequences * heads, CONFIG.d], or None.
        dq: TMA descriptor of the sums of dQ, or of dQ; see `DqStore`.
        dq_units: float32 [heads, tokens_q], the units of dQ; None with the descriptor of dQ.
        mask: `Lengths` with zeros for n_q and n_k, and without left and right.
        tiles: tiles of keys of a head.
        cap2: `base2` of `Softcap`.
        ds_sums: `DsSums`; None, unless the mean of K contributes to dQ under a softcap.
        dk, dv: `Strided` of [sequences, heads * CONFIG.splits, keys, channels].
        heads: heads of K and V.
        heads_per_group: see `choose_backward_heads`.
        tokens_q, tokens_k: tokens of a head in padded storage.
        scale: the scale of the logits.
        CONFIG: `Config`.
    """
    D: gl.constexpr = q8.block_shape[1]
    GROUPS: gl.constexpr = CONFIG.groups
    SPLITS: gl.constexpr = CONFIG.splits
    KD: gl.constexpr = CONFIG.d
    VD: gl.constexpr = CONFIG.d_v
    HAS_DQ_WARPS: gl.constexpr = CONFIG.has_dq_warps
    SLOTS: gl.constexpr = 2 if HAS_DQ_WARPS else 1
    STAGES: gl.constexpr = SLOTS + 1
    STAGES16: gl.constexpr = 3
    STAGES_STATS: gl.constexpr = 4 if HAS_DQ_WARPS else STAGES
    index, z, b, head, out_head = place_of_program(tiles, heads, heads_per_group, SPLITS)
    keys, blocks, start_q, start_k = locate(
        # Not assigned to a variable, because IS_CAUSAL would stop being a constexpr.
        Lengths(
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
        ),
        b,
        index * TILE_K,
    )
    if keys.first >= keys.length:
        return
    lowest = keys.lowest if left is not None else None
    unmasked_end = blocks.unmasked_end if left is not None else None
    tile = KeyTile(keys.first, keys.length, keys.n_live, keys.offset, lowest)
    loop = QueryLoop(blocks.begin, blocks.unmasked, unmasked_end, blocks.end, blocks.shift)
    first_q_head = out_head * GROUPS
    row_q = first_q_head * tokens_q + start_q
    row_k = head * tokens_k + start_k + tile.first
    q_origin = origin_of(CONFIG.is_copied, b, first_q_head, start_q)
    k_origin = origin_of(CONFIG.is_copied, b, head, start_k)

    dt: gl.constexpr = v.dtype
    V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_K, D], dt)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_K, BLOCK_Q], dt)
    k8_s = gl.allocate_shared_memory(gl.int8, [1, TILE_K, D], k8.layout)
    k16_s = gl.allocate_shared_memory(dt, [1, TILE_K, D], V)
    v_s = gl.allocate_shared_memory(dt, [1, TILE_K, D], V)
    q8_s = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_Q, D], q8.layout)
    q16_s = gl.allocate_shared_memory(dt, [STAGES16, BLOCK_Q, D], V)
    do_s = gl.allocate_shared_memory(dt, [STAGES, BLOCK_Q, D], V)
    ds_s = gl.allocate_shared_memory(dt, [SLOTS, TILE_K, BLOCK_Q], DS)
    if dq_units is not None:
        dq_s = gl.allocate_shared_memory(gl.int32, [SLOTS, BLOCK_Q * D // 32, 32], dq.layout)
    else:
        dq_s = gl.allocate_shared_memory(dq.dtype, [SLOTS, BLOCK_Q, D], V)
    row_stats_s = gl.allocate_shared_memory(gl.float32, [STAGES_STATS, ROW_STATS], STATS_LAYOUT)
    shifts_s = None
    if shifts is not None:
        shifts_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], STATS_LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    if HAS_DQ_WARPS:
        ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    else:
        ds_full = None
        k16_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    dq_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    dq_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    if HAS_DQ_WARPS:
        k16_full = kv_full
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), 1)
    for i in gl.static_range(2):
        if HAS_DQ_WARPS:
            mbarrier.init(ds_full.index(i), 1)
        mbarrier.init(dq_full.index(i), 1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(dq_empty.index(i), 1)
    mbarrier.init(kv_full, 1)
    if not HAS_DQ_WARPS:
        mbarrier.init(k16_full, 1)
    fence_async_shared()
    if not HAS_DQ_WARPS:
        mbarrier.expect(k16_full, TILE_K * D * 2)
        load_tokens(k16, k_origin, tile.first, k16_full, k16_s.index(0))
    mbarrier.expect(kv_full, TILE_K * D * (5 if HAS_DQ_WARPS else 3))
    tma_load(k8, [row_k, 0], kv_full, k8_s.index(0))
    load_tokens(v, k_origin, tile.first, kv_full, v_s.index(0))
    if HAS_DQ_WARPS:
        load_tokens(k16, k_origin, tile.first, kv_full, k16_s.index(0))

    inputs = QueryInputs(q8, q16, do, row_stats, shifts)
    queries = QueryBuffers(q8_s, q16_s, do_s, row_stats_s, shifts_s)
    key_tile = KeyBuffers(k8_s, v_s, k16_s)
    barriers = Barriers(ds_full, dq_full, dq_empty, kv_full, k16_full, q_full)
    k_scales = k_scale + row_k // BLOCK_Q
    if k_mean is not None:
        k_mean += z.to(gl.int64) * KD
    key_mask = None
    if mask.key_mask is not None:
        key_mask = mask.key_mask + b.to(gl.int64) * n_k
    dk_scale = scale if SPLITS == 1 else 1.0  # the sum of the parts is multiplied
    outputs = KeyOutputs(dk, dv, mask.cu_k, b, out_head, dk_scale, key_mask)
    dq_store = DqStore(dq, dq_s, q_origin, dq_full, dq_empty)
    units = dq_units if dt == gl.float16 else None
    dq_blocks = DqBlocks(
        loop.begin, loop.end, loop.shift, row_q // BLOCK_Q, tokens_q // BLOCK_Q, units
    )
    if HAS_DQ_WARPS:
        gl.warp_specialize(
            [
                (compute_dk_dv, (
                    key_tile, queries, ds_s, barriers, k_scales, outputs, loop, tile, dq_blocks,
                    cap2, ds_sums, GROUPS, KD, VD,
                )),
                (compute_dq, (
                    k16_s, k_mean, queries, ds_s, dq_s, barriers, loop, scale, GROUPS, KD,
                )),
                (produce, (
                    inputs, queries, q_full, ds_full, loop, q_origin, row_q, tokens_q, GROUPS,
                )),
                (store_dq, (dq_store, dq_blocks, GROUPS, summed_channels(KD, D))),
            ],
            [4, 1, 1],
            [72, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (compute_dk_dv_dq, (
                    key_tile, k_mean, queries, ds_s, dq_s, barriers, k_scales, outputs, loop, tile,
                    dq_blocks, cap2, ds_sums, scale, GROUPS, KD, VD,
                )),
                (produce, (
                    inputs, queries, q_full, dq_full, loop, q_origin, row_q, tokens_q, GROUPS,
                )),
                (store_dq, (dq_store, dq_blocks, GROUPS, summed_channels(KD, D))),
            ],
            [1, 1],
            [24, 24],
        )  # fmt: skip
