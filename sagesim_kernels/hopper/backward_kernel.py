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
from sagesim_kernels.hopper.backward_structures import (
    Barriers,
    KeyBuffers,
    KeyOutputs,
    KeyTile,
    QueryBuffers,
    QueryInputs,
    QueryLoop,
    TokenOrigin,
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
from sagesim_kernels.hopper.dq_order import (
    BLOCK_Q,
    TILE_K,
    DqBlocks,
    DqPosition,
    DqStore,
    store_dq,
)
from sagesim_kernels.operands import (
    Lengths,
    causal_offset,
    length_of,
    live_keys,
    live_queries,
    query_loop_bounds,
    stored_start_of,
)

BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


class Config(NamedTuple):
    """The constants of a kernel."""

    groups: int
    """Query heads for each head of K and V."""
    interleaved_heads: int
    """Heads of K and V whose programs alternate. Programs that run at the same time then belong to
    more heads, and wait less for each other's parts of dQ."""
    has_dq_warps: bool
    """Whether other warps than those of dK and dV compute dQ."""
    is_copied: bool
    """Whether the 16-bit tensors lie in padded storage."""


@gluon.jit
def _locate(lengths, b, first):
    """Return four facts about the keys from `first` of sequence b.

    These are their `KeyTile`, their `QueryLoop`, and the first query and the first key of the
    sequence in padded storage.
    """
    first_live, n_q = live_queries(lengths, b)
    n_live = live_keys(lengths, b)
    offset = causal_offset(lengths, b)
    begin, unmasked = query_loop_bounds(first, TILE_K, BLOCK_Q, n_live, offset, first_live, n_q)
    end = (n_q + BLOCK_Q - 1) // BLOCK_Q
    # The program id is a 0 that is opaque to the compiler. If the loop over masked blocks is known
    # to be empty, ptxas makes each product of the other loop wait for the product before it.
    unmasked = (unmasked + BLOCK_Q - 1) // BLOCK_Q + gl.program_id(1)
    start_q = stored_start_of(lengths.cu_q, lengths.n_q, b).to(gl.int32)
    start_k = stored_start_of(lengths.cu_k, lengths.n_k, b).to(gl.int32)
    loop = QueryLoop(gl.minimum(begin // BLOCK_Q, end), unmasked, end)
    length = length_of(lengths.cu_k, lengths.n_k, b)
    return KeyTile(first, length, n_live, offset), loop, start_q, start_k


# TMA descriptors and the integers of do_not_specialize are parameters of their own. The launcher of
# Triton 3.6 finds descriptors only outside tuples, and do_not_specialize does not apply to integers
# in a tuple.
@gluon.jit(do_not_specialize=["n_q", "n_k", "tiles", "heads", "tokens_q", "tokens_k"])
def hopper_backward(
    q8, k8, q16, k16, v, do, row_stats, k_scale, k_mean, dk, dv, dq_accum, dq_semaphore, mask, n_q,
    n_k, tiles, heads, tokens_q, tokens_k, scale, CONFIG: gl.constexpr,
):  # fmt: skip
    """One program computes one tile of keys.

    Args:
        k_scale: float32, a scale for each 64 keys in padded storage.
        k_mean: the mean to subtract from k16, float32 [sequences * heads, D], or None.
        dq_accum: TMA descriptor of the sum of dQ, see `DqStore`.
        mask: `Lengths` with zeros for n_q and n_k.
        tiles: tiles of keys of a head.
        heads: heads of K and V.
        tokens_q, tokens_k: tokens of a head in padded storage.
        scale: the scale of the logits.
        CONFIG: `Config`.
    """
    D: gl.constexpr = q8.block_shape[1]
    GROUPS: gl.constexpr = CONFIG.groups
    INTERLEAVED: gl.constexpr = CONFIG.interleaved_heads
    HAS_DQ_WARPS: gl.constexpr = CONFIG.has_dq_warps
    SLOTS: gl.constexpr = 2 if HAS_DQ_WARPS else 1
    STAGES: gl.constexpr = SLOTS + 1
    STAGES16: gl.constexpr = 3
    program = gl.program_id(0)
    index = (program % (tiles * INTERLEAVED)) // INTERLEAVED
    z = program // (tiles * INTERLEAVED) * INTERLEAVED + program % INTERLEAVED
    if mask.IS_CAUSAL:
        index = tiles - 1 - index
    b = z // heads
    head = z % heads
    tile, loop, start_q, start_k = _locate(
        # Not assigned to a variable, because IS_CAUSAL would stop being a constexpr.
        Lengths(
            mask.cu_q,
            mask.cu_k,
            n_q,
            n_k,
            mask.IS_CAUSAL,
            mask.LOWER_RIGHT,
            None,
            None,
            None,
            None,
            None,
        ),
        b,
        index * TILE_K,
    )
    if tile.first >= tile.length:
        return
    row_q = head * GROUPS * tokens_q + start_q
    row_k = head * tokens_k + start_k + tile.first
    zero = gl.program_id(1)
    if CONFIG.is_copied:
        q_origin = TokenOrigin(zero, head * GROUPS, start_q)
        k_origin = TokenOrigin(zero, head, start_k)
    else:
        q_origin = TokenOrigin(b, head * GROUPS, zero)
        k_origin = TokenOrigin(b, head, zero)

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
    dq_s = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_Q * D // 32, 32], dq_accum.layout)
    row_stats_s = gl.allocate_shared_memory(gl.float32, [STAGES, ROW_STATS], STATS_LAYOUT)
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

    inputs = QueryInputs(q8, q16, do, row_stats)
    queries = QueryBuffers(q8_s, q16_s, do_s, row_stats_s)
    key_tile = KeyBuffers(k8_s, v_s, k16_s)
    barriers = Barriers(ds_full, dq_full, dq_empty, kv_full, k16_full, q_full)
    k_scales = k_scale + row_k // BLOCK_Q
    if k_mean is not None:
        k_mean += z.to(gl.int64) * D
    outputs = KeyOutputs(dk, dv, mask.cu_k, b, head, scale)
    dq = DqStore(dq_accum, dq_s, dq_full, dq_empty, dq_semaphore)
    dq_blocks = DqBlocks(loop.begin, loop.end, row_q // BLOCK_Q, tokens_q // BLOCK_Q)
    dq_position = DqPosition(index, tile.n_live, tile.offset)
    CAUSAL: gl.constexpr = mask.IS_CAUSAL
    if HAS_DQ_WARPS:
        gl.warp_specialize(
            [
                (compute_dk_dv, (
                    key_tile, queries, ds_s, barriers, k_scales, outputs, loop, tile, GROUPS,
                )),
                (compute_dq, (k16_s, k_mean, ds_s, dq_s, barriers, loop, GROUPS)),
                (produce, (
                    inputs, queries, q_full, ds_full, loop, q_origin, row_q, tokens_q, GROUPS,
                )),
                (store_dq, (0, dq, dq_blocks, dq_position, GROUPS, CAUSAL)),
                (store_dq, (1, dq, dq_blocks, dq_position, GROUPS, CAUSAL)),
            ],
            [4, 1, 1, 1],
            [72, 24, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (compute_dk_dv_dq, (
                    key_tile, k_mean, queries, ds_s, dq_s, barriers, k_scales, outputs, loop, tile,
                    GROUPS,
                )),
                (produce, (
                    inputs, queries, q_full, dq_full, loop, q_origin, row_q, tokens_q, GROUPS,
                )),
                (store_dq, (0, dq, dq_blocks, dq_position, GROUPS, CAUSAL)),
                (store_dq, (1, dq, dq_blocks, dq_position, GROUPS, CAUSAL)),
            ],
            [1, 1, 1],
            [24, 24, 24],
        )  # fmt: skip
