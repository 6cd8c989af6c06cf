"""The kernel for heads with more than 128 channels. It computes O, dQ, dK or dV of 128 tokens.

A result of 128 tokens with 256 channels fills half of the registers of a multiprocessor. So dQ, dK
and dV have a program each, which computes S and, but for dV, dP again. That takes 6.5 products
where one program for all three takes 4.5, with INT8 counted as half. But that program could own no
more than 64 keys, and would move more bytes for each product than the L2 cache delivers.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalMemberAccess=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sagesim_kernels.hopper.channel_parts import BLOCK, allocate
from sagesim_kernels.hopper.token_loads import from_token, key_origin, origin_of
from sagesim_kernels.hopper.wide_gradients import compute_gradient
from sagesim_kernels.hopper.wide_softmax import at_least_one, compute_o
from sagesim_kernels.hopper.wide_structures import Barriers, Place, Tokens
from sagesim_kernels.hopper.wide_warps import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    ROW_STATS,
    STATS_LAYOUT,
    TILE,
    produce,
    walk_of,
    without_padding,
)
from sagesim_kernels.launching import wait_for_earlier_kernels
from sagesim_kernels.operands import (
    Lengths,
    Softcap,
    length_of,
    live_keys,
    packed_tile,
    stored_start_of,
    tile_and_head,
)

BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


# TMA descriptors are parameters of their own: the launcher of Triton 3.6 finds them only outside
# tuples.
@gluon.jit
def hopper_wide(
    own_codes, own_codes_rest, own_numbers, own_numbers_rest, codes, codes_rest, numbers,
    numbers_rest, right_numbers, right_numbers_rest, stats, row_stats, q_scale, k_scale, sink2,
    inverse_cap, cap2, shift, ds_sums, k_mean, out, lse2, mask, n_q, n_k, left, right, tiles, heads,
    packed_tiles, heads_per_group, tokens_q, tokens_k, scale, CONFIG: gl.constexpr,
):  # fmt: skip
    """One program computes the result of one tile of tokens.

    Args:
        own_codes, own_numbers: TMA descriptors of the owned tokens, codes and 16 bit; see `Tokens`.
            `_rest`: those of the second part.
        codes, numbers, right_numbers: those of the streamed tokens.
        stats: TMA descriptor of row statistics, see `ROW_STATS`; None if queries are owned.
        row_stats: their pointer, for dQ.
        q_scale: float32, a scale for each query in padded storage, for O.
        k_scale: float32, a scale for each 64 keys in padded storage.
        sink2: the sinks in base 2, with the strides of lse2, for O; or None.
        inverse_cap, cap2, shift: of a `Softcap`. Only O needs the shift, which has the strides of
            lse2; the row statistics contain it, too.
        ds_sums: `Rows` of the sum of each row of dS, for dQ; None if they do not contribute, or if
            the kernel computes them because of a softcap.
        k_mean: the mean of K, float32 [sequences, heads, CONFIG.channels], for dQ; None if it does
            not contribute.
        out: `Strided` of the result, [sequences, heads * CONFIG.splits, tokens, channels].
        lse2: `Rows` of the logsumexp in base 2, a result of the forward.
        mask: `Lengths` with zeros for n_q and n_k, and without left and right.
        tiles: tiles of tokens of a head.
        heads: heads that own tokens.
        heads_per_group: see `choose_backward_heads`.
        tokens_q, tokens_k: tokens of a head in padded storage.
        scale: a factor of the gradient; for O the scale of the logits, times log2(e) or divided by
            the softcap.
        CONFIG: `Config`.
    """
    wait_for_earlier_kernels()
    OWNS_QUERIES: gl.constexpr = CONFIG.owns_queries
    HAS_DP: gl.constexpr = CONFIG.has_dp
    STAGES: gl.constexpr = CONFIG.stages
    RIGHT_STAGES: gl.constexpr = CONFIG.right_stages
    SPLITS: gl.constexpr = CONFIG.splits
    all_heads = gl.num_programs(0) // tiles
    index, split_head = tile_and_head(gl.program_id(0), tiles, all_heads, heads_per_group)
    z = split_head // SPLITS
    head = z % heads
    if packed_tiles is None:
        b = z // heads
        if OWNS_QUERIES:  # Under a causal mask the longest tiles come first.
            index = tiles - 1 - index
    else:
        index, b = packed_tile(packed_tiles, index)
    lengths = Lengths(
        mask.cu_q, mask.cu_k, n_q, n_k, mask.IS_CAUSAL, mask.LOWER_RIGHT, left, right,
        mask.seqused_k, mask.key_mask, None, mask.key_runs,
    )  # fmt: skip
    first = index * TILE
    length = length_of(mask.cu_q, n_q, b) if OWNS_QUERIES else length_of(mask.cu_k, n_k, b)
    if first >= length:
        return
    start_q = stored_start_of(mask.cu_q, n_q, b).to(gl.int32)
    start_k = stored_start_of(mask.cu_k, n_k, b).to(gl.int32)
    if OWNS_QUERIES:
        k_head = head // CONFIG.groups
        own_origin = origin_of(CONFIG.copied.queries, mask.cu_q, b, head, start_q)
        own_place = Place(from_token(own_origin, first), head * tokens_q + start_q + first, 0)
        origin = key_origin(
            right_numbers, CONFIG.copied.keys, mask.cu_k, b, k_head, start_k, live_keys(lengths, b)
        )
        place = Place(origin, k_head * tokens_k + start_k, 0)
        k_scale += place.stored_row // BLOCK
        if CONFIG.is_forward:
            q_scale += own_place.stored_row
        else:
            if k_mean is not None:
                k_mean += (b * (heads // CONFIG.groups) + k_head).to(gl.int64) * CONFIG.channels
            row_stats += (own_place.stored_row // BLOCK).to(gl.int64) * ROW_STATS
    else:
        q_head = (head * SPLITS + split_head % SPLITS) * CONFIG.groups
        own_origin = key_origin(
            own_numbers, CONFIG.copied.keys, mask.cu_k, b, head, start_k, live_keys(lengths, b)
        )
        own_place = Place(from_token(own_origin, first), head * tokens_k + start_k + first, 0)
        origin = origin_of(CONFIG.copied.queries, mask.cu_q, b, q_head, start_q)
        place = Place(origin, q_head * tokens_q + start_q, tokens_q)
        k_scale += own_place.stored_row // BLOCK

    own = Tokens((own_codes, own_codes_rest), (own_numbers, own_numbers_rest), None, None)
    streamed = Tokens(
        (codes, codes_rest), (numbers, numbers_rest), (right_numbers, right_numbers_rest), stats
    )
    own_numbers_s = None
    numbers_s = None
    if HAS_DP:
        own_numbers_s = allocate(own.numbers, CONSUMERS)
        numbers_s = allocate(streamed.numbers, STAGES)
    own_buffers = Tokens(allocate(own.codes, CONSUMERS), own_numbers_s, None, None)
    right_s = allocate(streamed.right, RIGHT_STAGES)
    stats_s = None
    if not OWNS_QUERIES:
        stats_s = gl.allocate_shared_memory(gl.float32, [STAGES, ROW_STATS], STATS_LAYOUT)
    buffers = Tokens(allocate(streamed.codes, STAGES), numbers_s, right_s, stats_s)
    own_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    right_full = gl.allocate_shared_memory(gl.int64, [RIGHT_STAGES, 1], BARRIER)
    right_empty = gl.allocate_shared_memory(gl.int64, [RIGHT_STAGES, 1], BARRIER)
    mbarrier.init(own_full, 1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), CONSUMERS)
    for i in gl.static_range(RIGHT_STAGES):
        mbarrier.init(right_full.index(i), 1)
        mbarrier.init(right_empty.index(i), CONSUMERS)
    fence_async_shared()
    barriers = Barriers(own_full, full, empty, right_full, right_empty)
    walk = walk_of(first, TILE, lengths, b, OWNS_QUERIES)
    if not OWNS_QUERIES and mask.key_mask is not None:
        walk = without_padding(walk, first, lengths, b)
    if CONFIG.is_forward:
        walk = at_least_one(walk, lengths)
        softcap = Softcap(inverse_cap, cap2, shift, lse2.stride_b, lse2.stride_h)
        gl.warp_specialize(
            [  # Gluon's comprehensions iterate over tuples, not over ranges
                (compute_o, (
                    i, own_buffers, buffers, barriers, q_scale, k_scale, scale, out, lse2, sink2,
                    softcap, lengths, b, head, first, walk, CONFIG,
                ))
                if i < CONSUMERS
                else (produce, (
                    own, streamed, own_buffers, buffers, barriers, own_place, place, walk, CONFIG,
                ))
                for i in (0, 1, 2)
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        out_head = head * SPLITS + split_head % SPLITS
        gl.warp_specialize(
            [
                (compute_gradient, (
                    i, own_buffers, buffers, barriers, row_stats, k_scale, cap2, ds_sums, k_mean,
                    out, lengths, b, out_head, first, walk, scale, CONFIG,
                ))
                if i < CONSUMERS
                else (produce, (
                    own, streamed, own_buffers, buffers, barriers, own_place, place, walk, CONFIG,
                ))
                for i in (0, 1, 2)
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
