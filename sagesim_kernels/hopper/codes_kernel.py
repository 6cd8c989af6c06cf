"""The backward kernel for Hopper in which P and dS are codes: dK, dV and the parts of dQ."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sagesim_kernels.gluon_compat import tma_load
from sagesim_kernels.hopper.backward_kernel import BARRIER
from sagesim_kernels.hopper.backward_loads import ROW_STATS, STATS_LAYOUT
from sagesim_kernels.hopper.backward_structures import KeyOutputs, KeyTile, QueryLoop
from sagesim_kernels.hopper.backward_tiles import locate
from sagesim_kernels.hopper.codes_maps import BLOCK_K, BLOCKS, EXCHANGE, MAXIMA
from sagesim_kernels.hopper.codes_structures import (
    CodeBarriers,
    CodeBuffers,
    CodeInputs,
    CodeKeys,
    CodeMaps,
    KeyScales,
)
from sagesim_kernels.hopper.codes_warps import compute_dk_dv, compute_dk_dv_dq, compute_dq, produce
from sagesim_kernels.hopper.dq_parts import BLOCK_Q, TILE_K, DqBlocks, DqStore, store_dq
from sagesim_kernels.hopper.fp8_warps import (
    PAIRS,
    compute_fp8_dk_dv,
    compute_fp8_dk_dv_dq,
    compute_fp8_dq,
)
from sagesim_kernels.hopper.program_places import place_of
from sagesim_kernels.hopper.token_loads import key_origin, load_tokens, origin_of
from sagesim_kernels.launching import wait_for_earlier_kernels
from sagesim_kernels.operands import INT8, Copied, Lengths, head_pointers, summed_channels

_NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""Layout of float32 numbers in shared memory that TMA does not load."""


class CodesConfig(NamedTuple):
    """The constants of a kernel."""

    groups: int
    """Query heads of a program. They have the same K and V."""
    splits: int
    """Programs for each tile of K and V. Each computes a part of dK and dV."""
    d: int
    """Channels of Q and K."""
    d_v: int
    """Channels of V and O."""
    q_channels: int
    """Rows of a head in the right operands of dK and dQ."""
    do_channels: int
    """Rows of a head in the right operand of dV."""
    has_dq_warps: bool
    """Whether other warps than those of dK and dV compute dQ."""
    copied: Copied
    """Which 16-bit tensors lie in padded storage."""
    keys_per_scale: int
    """Keys that share a scale of K in qk_recompute."""
    by_channel: bool
    """Whether channels of a block of dO or Q have scales of their own in dv or dk."""
    per_tile: bool
    """Whether a tile of P or dS has one scale."""
    format: int
    """The format of P and dS, see `operands.formats`. In FP8, their scales follow from bounds."""


@gluon.jit
def hopper_codes_backward(
    q8, k8, v, do, q_right, do_right, k_right, row_stats, channel_scales, ratios, k, kr, dk, dv,
    dq_sums, mask, n_q, n_k, left, right, tiles, heads, packed_tiles, heads_per_group, tokens_q,
    tokens_k, scale, CONFIG: gl.constexpr,
):  # fmt: skip
    """One program computes one tile of keys, for the query heads of a group or for a part of them.

    Args:
        q8, k8, v, do: TMA descriptors of the operands of qk_recompute and dp.
        q_right, do_right, k_right: TMA descriptors of the right operands of dK, dV and dQ.
        row_stats, channel_scales: TMA descriptors, see `preparation.compute_query_rows`.
        ratios: TMA descriptor, see `fp8_rows`; None in INT8.
        k, kr: `Operand` of K of qk_recompute and dq, for their scales.
        dk, dv: `Strided` of [sequences, heads * CONFIG.splits, keys, channels].
        dq_sums: TMA descriptor of the sums of dQ, see `DqStore`.
        mask: `Lengths` with zeros for n_q and n_k, and without left and right.
        tiles, packed_tiles: see `place_of`.
        heads: heads of K and V.
        heads_per_group: see `choose_backward_heads`.
        tokens_q, tokens_k: tokens of a head in padded storage.
        scale: the scale of the logits.
        CONFIG: `CodesConfig`.
    """
    wait_for_earlier_kernels()
    D: gl.constexpr = q8.block_shape[1]
    GROUPS: gl.constexpr = CONFIG.groups
    SPLITS: gl.constexpr = CONFIG.splits
    HAS_DQ_WARPS: gl.constexpr = CONFIG.has_dq_warps
    SLOTS: gl.constexpr = 2 if HAS_DQ_WARPS else 1
    STAGES: gl.constexpr = SLOTS + 1
    STAGES_STATS: gl.constexpr = 4 if HAS_DQ_WARPS else STAGES
    KD: gl.constexpr = CONFIG.d
    VD: gl.constexpr = CONFIG.d_v
    Q_CHANNELS: gl.constexpr = CONFIG.q_channels
    DO_CHANNELS: gl.constexpr = CONFIG.do_channels
    TOKENS: gl.constexpr = CONFIG.keys_per_scale
    BY_CHANNEL: gl.constexpr = CONFIG.by_channel
    FORMAT: gl.constexpr = CONFIG.format
    IS_FP8: gl.constexpr = CONFIG.format != INT8
    index, _z, b, head, out_head = place_of(
        gl.program_id(0), tiles, heads, gl.num_programs(0) // tiles, heads_per_group,
        packed_tiles, SPLITS,
    )  # fmt: skip
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
    zero = gl.program_id(1)
    q_origin = origin_of(CONFIG.copied.queries, mask.cu_q, b, first_q_head, start_q)
    k_origin = key_origin(v, CONFIG.copied.keys, mask.cu_k, b, head, start_k, keys.n_live)

    dt: gl.constexpr = v.dtype
    V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_K, D], dt)
    CODES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCKS * BLOCK_Q, BLOCK_K], gl.int8)
    k8_s = gl.allocate_shared_memory(gl.int8, [1, TILE_K, D], k8.layout)
    v_s = gl.allocate_shared_memory(dt, [1, TILE_K, D], V)
    kr_s = gl.allocate_shared_memory(gl.int8, [BLOCKS, D, BLOCK_K], k_right.layout)
    right_scales = gl.allocate_shared_memory(gl.float32, [BLOCKS, D], _NUMBERS)
    ratios_s = None
    if IS_FP8:
        ratios_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], STATS_LAYOUT)
    queries = CodeBuffers(
        gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_Q, D], q8.layout),
        gl.allocate_shared_memory(dt, [STAGES, BLOCK_Q, D], V),
        gl.allocate_shared_memory(gl.int8, [STAGES, D, BLOCK_Q], q_right.layout),
        gl.allocate_shared_memory(gl.int8, [STAGES, D, BLOCK_Q], do_right.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES_STATS, ROW_STATS], STATS_LAYOUT),
        gl.allocate_shared_memory(gl.float32, [STAGES, 2 * D], STATS_LAYOUT),
        ratios_s,
    )
    p_maxima = None
    ds_maxima = None
    if CONFIG.per_tile:
        p_maxima = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCKS, 4], MAXIMA)
        ds_maxima = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCKS, 4], MAXIMA)
    if IS_FP8:
        maps = gl.allocate_shared_memory(gl.int16, [SLOTS, BLOCKS * BLOCK_Q, BLOCK_K // 2], PAIRS)
    else:
        maps = CodeMaps(
            gl.allocate_shared_memory(gl.float32, [SLOTS, TILE_K, BLOCK_Q], EXCHANGE),
            gl.allocate_shared_memory(gl.int8, [BLOCKS * BLOCK_Q, BLOCK_K], CODES),
            gl.allocate_shared_memory(gl.float32, [BLOCKS * BLOCK_Q], _NUMBERS),
            p_maxima,
            ds_maxima,
        )
    dq_s = gl.allocate_shared_memory(gl.int32, [SLOTS, BLOCK_Q * D // 32, 32], dq_sums.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    dq_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    dq_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    ds_full = None
    ds_empty = None
    scales_full = None
    if HAS_DQ_WARPS:
        ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
        ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
        scales_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        mbarrier.init(scales_full, 1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), 1)
    for i in gl.static_range(2):
        mbarrier.init(dq_full.index(i), 1)
        if HAS_DQ_WARPS:
            mbarrier.init(ds_full.index(i), 1)
            mbarrier.init(ds_empty.index(i), 1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(dq_empty.index(i), 1)
    mbarrier.init(kv_full, 1)
    fence_async_shared()
    mbarrier.expect(kv_full, TILE_K * D * 4)
    tma_load(k8, [row_k, 0], kv_full, k8_s.index(0))
    load_tokens(v, k_origin, tile.first, kv_full, v_s.index(0))
    for i in gl.static_range(BLOCKS):
        at = [head * Q_CHANNELS, start_k + tile.first + i * BLOCK_K]
        tma_load(k_right, at, kv_full, kr_s.index(i))

    inputs = CodeInputs(q8, do, q_right, do_right, row_stats, channel_scales, ratios)
    key_tile = CodeKeys(k8_s, v_s, kr_s, right_scales)
    barriers = CodeBarriers(q_full, ds_full, ds_empty, dq_full, dq_empty, kv_full, scales_full)
    _, k_scales = head_pointers(k, mask.cu_k, n_k, b, head)
    _, kr_scales = head_pointers(kr, mask.cu_k, n_k, b, head)
    channel_stride = zero + (1 if kr.BY_CHANNEL else 0)
    scales = KeyScales(k_scales, k.scale_stride_n, kr_scales, kr.scale_stride_n, channel_stride)
    key_mask = None
    if mask.key_mask is not None:
        key_mask = mask.key_mask + b.to(gl.int64) * n_k
    outputs = KeyOutputs(dk, dv, mask.cu_k, b, out_head, scale, key_mask)
    dq = DqStore(dq_sums, dq_s, q_origin, dq_full, dq_empty)
    dq_blocks = DqBlocks(
        loop.begin, loop.end, loop.shift, row_q // BLOCK_Q, tokens_q // BLOCK_Q, None
    )
    if HAS_DQ_WARPS and IS_FP8:
        gl.warp_specialize(
            [
                (compute_fp8_dk_dv, (
                    key_tile, queries, maps, barriers, scales, outputs, loop, tile, GROUPS, KD, VD,
                    TOKENS, BY_CHANNEL, FORMAT,
                )),
                (compute_fp8_dq, (
                    key_tile, queries, maps, dq_s, barriers, loop, tile, GROUPS, FORMAT,
                )),
                (produce, (
                    inputs, queries, q_full, ds_full, loop, q_origin, row_q, tokens_q,
                    first_q_head, start_q, GROUPS, Q_CHANNELS, DO_CHANNELS,
                )),
                (store_dq, (dq, dq_blocks, GROUPS, summed_channels(KD, D))),
            ],
            [4, 1, 1],
            [88, 24, 24],
        )  # fmt: skip
    elif IS_FP8:
        gl.warp_specialize(
            [
                (compute_fp8_dk_dv_dq, (
                    key_tile, queries, maps, dq_s, barriers, scales, outputs, loop, tile, GROUPS,
                    KD, VD, TOKENS, BY_CHANNEL, FORMAT,
                )),
                (produce, (
                    inputs, queries, q_full, dq_full, loop, q_origin, row_q, tokens_q,
                    first_q_head, start_q, GROUPS, Q_CHANNELS, DO_CHANNELS,
                )),
                (store_dq, (dq, dq_blocks, GROUPS, summed_channels(KD, D))),
            ],
            [1, 1],
            [24, 24],
        )  # fmt: skip
    elif HAS_DQ_WARPS:
        gl.warp_specialize(
            [
                (compute_dk_dv, (
                    key_tile, queries, maps, barriers, scales, outputs, loop, tile, GROUPS, KD, VD,
                    TOKENS, BY_CHANNEL,
                )),
                (compute_dq, (key_tile, queries, maps, dq_s, barriers, loop, GROUPS)),
                (produce, (
                    inputs, queries, q_full, ds_full, loop, q_origin, row_q, tokens_q,
                    first_q_head, start_q, GROUPS, Q_CHANNELS, DO_CHANNELS,
                )),
                (store_dq, (dq, dq_blocks, GROUPS, summed_channels(KD, D))),
            ],
            [4, 1, 1],
            [104, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (compute_dk_dv_dq, (
                    key_tile, queries, maps, dq_s, barriers, scales, outputs, loop, tile, GROUPS,
                    KD, VD, TOKENS, BY_CHANNEL,
                )),
                (produce, (
                    inputs, queries, q_full, dq_full, loop, q_origin, row_q, tokens_q,
                    first_q_head, start_q, GROUPS, Q_CHANNELS, DO_CHANNELS,
                )),
                (store_dq, (dq, dq_blocks, GROUPS, summed_channels(KD, D))),
            ],
            [1, 1],
            [24, 24],
        )  # fmt: skip
