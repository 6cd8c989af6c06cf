"""The backward kernel for Hopper with dV, dK and dQ in FP8, in one pass over Q."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sagesim_kernels.gluon_compat import tma_load
from sagesim_kernels.hopper.backward_kernel import BARRIER, locate
from sagesim_kernels.hopper.backward_structures import (
    KeyOutputs,
    KeyTile,
    QueryLoop,
    TokenOrigin,
)
from sagesim_kernels.hopper.backward_warps import STATS_LAYOUT, load_tokens
from sagesim_kernels.hopper.dq_parts import BLOCK_Q, TILE_K, DqBlocks
from sagesim_kernels.hopper.fp8_backward_structures import (
    CodedBarriers,
    CodedKeyBuffers,
    CodedQueryBuffers,
    CodedQueryInputs,
    RightScales,
)
from sagesim_kernels.hopper.fp8_backward_warps import (
    KEYS,
    ROW_STATS,
    compute_gradients,
    load_columns,
    produce_fp8,
    store_dq_half,
)
from sagesim_kernels.operands import Lengths, summed_channels

STAGES = gl.constexpr(2)
"""Blocks of queries in shared memory."""

SLOTS = gl.constexpr(4)
"""Steps whose dS is in shared memory."""

REGISTERS = gl.constexpr(240)
"""Of each thread of a consumer."""


class Fp8Config(NamedTuple):
    """The constants of a kernel."""

    groups: int
    """Query heads of a program. They have the same K and V."""
    splits: int
    """Programs for each tile of K and V. Each computes a part of dK and dV."""
    d: int
    """Channels of Q and K."""
    d_v: int
    """Channels of V and O."""
    blocks: int
    """Blocks of BLOCK_Q queries of a step."""
    part: int
    """Steps whose queries share a scale of dO or Q."""
    is_copied: bool
    """Whether the 16-bit tensors lie in padded storage."""


@gluon.jit
def _first_scale(cu, n, b, TOKENS: gl.constexpr):
    """Return the index of the first scale of sequence b; see `operands.operand.scale_start_of`."""
    if cu is None:
        return b * ((n + TOKENS - 1) // TOKENS)
    else:
        return gl.load(cu + b) // TOKENS + b


@gluon.jit(
    do_not_specialize=[
        "n_q", "n_k", "left", "right", "tiles", "heads", "heads_per_group", "tokens_q", "tokens_k",
        "scales_q",
    ]
)  # fmt: skip
def hopper_fp8_backward(
    q8, k8, v, do, q_t, k_t, do_t, row_stats, k_scale, q_right_scale, k_right_scale, do_right_scale,
    dk, dv, sums, dq_sums, mask, n_q, n_k, left, right, tiles, heads, heads_per_group, tokens_q,
    tokens_k, scales_q, scale, CONFIG: gl.constexpr,
):  # fmt: skip
    """One program computes one tile of keys, for the query heads of a group or for a part of them.

    The arguments are those of `hopper_backward`, and further:

    Args:
        q_t, k_t, do_t: TMA descriptors of the right operands of dK, dQ and dV.
        k_scale: float32, a scale for each key in padded storage.
        q_right_scale, do_right_scale: float32 [heads, scales_q], of q_t and do_t.
        k_right_scale: float32, a scale of k_t for each tile of keys.
        sums: float32, memory for 2 * TILE_K * D numbers of each program; see `compute_gradients`.
        CONFIG: `Fp8Config`.
    """
    D: gl.constexpr = q8.block_shape[1]
    GROUPS: gl.constexpr = CONFIG.groups
    SPLITS: gl.constexpr = CONFIG.splits
    KD: gl.constexpr = CONFIG.d
    VD: gl.constexpr = CONFIG.d_v
    BLOCKS: gl.constexpr = CONFIG.blocks
    PART: gl.constexpr = CONFIG.part
    program = gl.program_id(0)
    # Under a causal mask the first tile of keys is the longest.
    first_head = program // (tiles * heads_per_group) * heads_per_group
    program -= first_head * tiles
    group_heads = gl.minimum(heads_per_group, gl.num_programs(0) // tiles - first_head)
    index = program // group_heads
    split_head = first_head + program % group_heads
    z = split_head // SPLITS
    b = z // heads
    head = z % heads
    located, blocks, start_q, start_k = locate(
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
        BLOCKS * BLOCK_Q,
    )
    if located.first >= located.length:
        return
    lowest = located.lowest if left is not None else None
    unmasked_end = blocks.unmasked_end if left is not None else None
    tile = KeyTile(located.first, located.length, located.n_live, located.offset, lowest)
    loop = QueryLoop(blocks.begin, blocks.unmasked, unmasked_end, blocks.end, blocks.shift)
    first_q_head = (head * SPLITS + split_head % SPLITS) * GROUPS
    row_q = first_q_head * tokens_q + start_q
    row_k = head * tokens_k + start_k + tile.first
    zero = gl.program_id(1)
    if CONFIG.is_copied:
        q_origin = TokenOrigin(zero, first_q_head, start_q)
        k_origin = TokenOrigin(zero, head, start_k)
    else:
        q_origin = TokenOrigin(b, first_q_head, zero)
        k_origin = TokenOrigin(b, head, zero)

    dt: gl.constexpr = v.dtype
    V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], dt)
    COLUMNS: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    DS: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    fp8: gl.constexpr = gl.float8e4nv
    k8_s = gl.allocate_shared_memory(gl.int8, [2, KEYS, D], k8.layout)
    v_s = gl.allocate_shared_memory(dt, [2, KEYS, D], V)
    k_t_s = gl.allocate_shared_memory(fp8, [4, D // 2, KEYS], COLUMNS)
    q8_s = gl.allocate_shared_memory(gl.int8, [STAGES * BLOCKS, BLOCK_Q, D], q8.layout)
    do_s = gl.allocate_shared_memory(dt, [STAGES * BLOCKS, BLOCK_Q, D], V)
    q_t_s = gl.allocate_shared_memory(fp8, [STAGES * BLOCKS, D, BLOCK_Q], COLUMNS)
    do_t_s = gl.allocate_shared_memory(fp8, [STAGES * BLOCKS, D, BLOCK_Q], COLUMNS)
    ds_s = gl.allocate_shared_memory(gl.int16, [SLOTS * BLOCKS * 2, BLOCK_Q, KEYS // 2], DS)
    dq_s = gl.allocate_shared_memory(gl.int32, [2 * BLOCKS, BLOCK_Q * D // 64, 32], dq_sums.layout)
    stats_shape: gl.constexpr = [STAGES * BLOCKS * ROW_STATS, BLOCK_Q]
    row_stats_s = gl.allocate_shared_memory(gl.float32, stats_shape, STATS_LAYOUT)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    right_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    right_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    dq_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    dq_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mbarrier.init(kv_full, 1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), 1)
        mbarrier.init(right_full.index(i), 1)
        mbarrier.init(right_empty.index(i), 2)
    for i in gl.static_range(SLOTS):
        mbarrier.init(ds_full.index(i), 2)
    for i in gl.static_range(2):
        mbarrier.init(dq_full.index(i), 1)
        mbarrier.init(dq_empty.index(i), 1)
    fence_async_shared()
    mbarrier.expect(kv_full, TILE_K * D * 4)
    for i in gl.static_range(2):
        tma_load(k8, [row_k + i * KEYS, 0], kv_full, k8_s.index(i))
        load_tokens(v, k_origin, tile.first + i * KEYS, kv_full, v_s.index(i))
        for j in gl.static_range(2):
            column = start_k + tile.first + j * KEYS
            load_columns(k_t, head, i * (D // 2), column, kv_full, k_t_s.index(2 * i + j))

    inputs = CodedQueryInputs(q8, do, q_t, do_t, row_stats)
    queries = CodedQueryBuffers(q8_s, do_s, q_t_s, do_t_s, row_stats_s)
    key_tile = CodedKeyBuffers(k8_s, v_s, k_t_s)
    barriers = CodedBarriers(kv_full, q_full, right_full, right_empty, ds_full, dq_full, dq_empty)
    first_scale = first_q_head * scales_q + _first_scale(mask.cu_q, n_q, b, PART * BLOCKS * BLOCK_Q)
    right_scales = RightScales(do_right_scale + first_scale, q_right_scale + first_scale, scales_q)
    key_mask = None
    if mask.key_mask is not None:
        key_mask = mask.key_mask + b.to(gl.int64) * n_k
    split = head * SPLITS + split_head % SPLITS
    outputs = KeyOutputs(dk, dv, mask.cu_k, b, split, scale, key_mask)
    sums += gl.program_id(0).to(gl.int64) * (2 * TILE_K * D)
    dq_blocks = DqBlocks(
        loop.begin, loop.end, loop.shift, row_q // BLOCK_Q, tokens_q // BLOCK_Q, None
    )
    gl.warp_specialize(
        [  # Gluon's comprehensions iterate over tuples, not over ranges
            (
                compute_gradients,
                (
                    i, key_tile, queries, ds_s, dq_s, barriers, k_scale + row_k,
                    k_right_scale + row_k // TILE_K, right_scales, sums, outputs, loop, tile,
                    GROUPS, KD, VD, PART,
                ),
            )
            if i < 2
            else (
                (
                    produce_fp8,
                    (
                        inputs, queries, barriers, loop, q_origin, first_q_head, start_q, tokens_q,
                        GROUPS,
                    ),
                )
                if i == 2
                else (
                    store_dq_half,
                    (
                        dq_sums, dq_s, barriers, dq_blocks, i - 3, GROUPS,
                        summed_channels(KD, D),
                    ),
                )
            )
            for i in (0, 1, 2, 3, 4)
        ],
        [4, 1, 1, 1],
        [REGISTERS, 24, 24, 24],
    )  # fmt: skip
