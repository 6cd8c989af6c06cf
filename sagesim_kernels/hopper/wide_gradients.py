"""The consumers of a program that computes dQ, dK or dV of heads with more than 128 channels.

In each step a consumer computes S and dP of its 64 tokens and of a block. From these it computes P
or dS, which stays in registers as the left operand of the gradient.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportOptionalSubscript=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sagesim_kernels.gluon_compat import reinterpret
from sagesim_kernels.hopper.backward_masks import part_of
from sagesim_kernels.hopper.backward_structures import QueryLoop
from sagesim_kernels.hopper.capped_logits import logits_plus, slope_of, tanh_of_sums
from sagesim_kernels.hopper.channel_parts import BLOCK, buffer_at
from sagesim_kernels.hopper.channel_products import start_sum
from sagesim_kernels.hopper.wide_structures import BlockMask
from sagesim_kernels.hopper.wide_warps import (
    OWNED,
    ROW_STATS,
    S_FLOAT32,
    S_INT32,
    STATS_LAYOUT,
    STREAMED,
    attends_in_block,
    blocks_before,
    part_of_tile,
    skip_blocks,
    store_part,
    walk_of,
)
from sagesim_kernels.operands import (
    causal_offset,
    is_live_key,
    key_mask_of,
    length_of,
    live_keys,
    load_rows,
    lowest_diagonal,
)


@gluon.jit
def _row_stats(buffers, stage):
    """Return the row statistics of a stage, [4, BLOCK]."""
    return reinterpret(buffers.index(stage), gl.float32, [4, BLOCK], STATS_LAYOUT)


@gluon.jit
def _sums_of_threads(x):
    """Return the sums of those columns of each row that a thread holds, [rows, 4]."""
    return gl.sum(gl.sum(x.reshape([BLOCK, 8, 4, 2]), 3), 1)


@gluon.jit
def _plus_mean(grad, ds_sum, mean, column, CHANNELS: gl.constexpr):
    """Return the channels from `column` of dQ plus the sum of each row of dS times the mean of K.

    ds_sum: these sums. mean: pointer to the mean.
    """
    channel = column + gl.arange(0, grad.shape[1], gl.SliceLayout(0, grad.type.layout))
    mean = gl.load(mean + channel, mask=channel < CHANNELS, other=0.0)
    ds_sum = gl.convert_layout(ds_sum, gl.SliceLayout(1, grad.type.layout))
    return grad + ds_sum[:, None] * mean[None, :]


@gluon.jit
def _finished(grad, is_live, scale):
    """Return scale times the gradient, and 0 for tokens that are not live.

    These may share a block with a NaN. is_live: None if all are, or those that are not come last.
    """
    if is_live is not None:
        is_live = gl.convert_layout(is_live, gl.SliceLayout(1, grad.type.layout))
        grad = gl.where(is_live[:, None], grad, 0.0)
    return grad * scale


@gluon.jit
def compute_gradient(
    CONSUMER: gl.constexpr, own_buffers, buffers, barriers, row_stats, k_scale,
    cap2, ds_sums, k_mean, out, lengths, b, h, tile_first, tile_walk, scale, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute the gradient of 64 owned tokens. One warpgroup, number CONSUMER.

    row_stats: pointer to those of the tile's first query, if it owns queries. k_scale: pointer to
    the scale of the first owned key, or of the first key of the streamed head. cap2: `base2` of
    `Softcap`. ds_sums: the sum of each row of dS, `Rows`. With a softcap it is None, and computed
    here. k_mean: pointer to the mean of the head of K; None, unless it contributes to dQ. out:
    `Strided` of the gradient. b, h: sequence and head in out. tile_first: first token of the tile.
    tile_walk: `Walk` of the tile. scale: a factor of the gradient.
    """
    STAGES: gl.constexpr = CONFIG.stages
    RIGHT_STAGES: gl.constexpr = CONFIG.right_stages
    OWNS_QUERIES: gl.constexpr = CONFIG.owns_queries
    HAS_DP: gl.constexpr = CONFIG.has_dp
    FIRST: gl.constexpr = buffers.right[0].shape[2]
    REST: gl.constexpr = buffers.right[1].shape[2]
    FIRST_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FIRST, 16])
    REST_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
    HAS_TAIL: gl.constexpr = lengths.left is not None or (
        OWNS_QUERIES and lengths.key_mask is not None
    )
    dt: gl.constexpr = buffers.right[0].dtype
    first = tile_first + CONSUMER * BLOCK
    offset = causal_offset(lengths, b)
    n_keys = live_keys(lengths, b)
    walk = walk_of(first, BLOCK, lengths, b, OWNS_QUERIES)
    if not OWNS_QUERIES and lengths.key_mask is not None:
        walk = part_of_tile(walk, tile_walk)
    skipped = blocks_before(walk, tile_walk, HAS_TAIL, OWNS_QUERIES)
    unmasked_end = walk.count - walk.masked_at_end if HAS_TAIL else None
    loop = QueryLoop(0, walk.masked_at_begin, unmasked_end, walk.count, 0)
    lowest = lowest_diagonal(lengths, b) if lengths.left is not None else None
    key_mask, keys = None, None
    if lengths.key_mask is not None:
        if OWNS_QUERIES:
            key_mask = key_mask_of(lengths, b)
        else:
            keys = first + gl.arange(0, BLOCK, OWNED)
            keys = gl.where(is_live_key(lengths, b, keys), keys, 2**30)
    mask = BlockMask(first, n_keys, offset, lowest, key_mask, keys)
    if OWNS_QUERIES:
        local = gl.arange(0, BLOCK, OWNED)
        row_stats += CONSUMER * ROW_STATS
        own_factor = gl.load(row_stats + local)
        own_lse2 = gl.load(row_stats + BLOCK + local)
        own_delta = gl.load(row_stats + 2 * BLOCK + local)
        if cap2 is not None:
            own_shift = gl.load(row_stats + 3 * BLOCK + local)
    else:
        own_lse2 = None
        key_scale = gl.load(k_scale + CONSUMER)
    grad = gl.zeros((BLOCK, FIRST), gl.float32, FIRST_ACC)
    grad_rest = gl.zeros((BLOCK, REST), gl.float32, REST_ACC)
    SUMS_DS: gl.constexpr = k_mean is not None and cap2 is not None
    if SUMS_DS:
        ds_parts = _sums_of_threads(gl.zeros((BLOCK, BLOCK), gl.float32, S_FLOAT32))
    mbarrier.wait(barriers.own_full, 0)
    n = 0
    for _ in range(1 if OWNS_QUERIES else CONFIG.groups):
        n = skip_blocks(n, skipped, barriers)
        for PART in gl.static_range(3 if HAS_TAIL else 2):
            begin, end = part_of(loop, PART)
            for j in range(begin, end):
                block = walk.first - j if OWNS_QUERIES else walk.first + j
                stage = n % STAGES
                if OWNS_QUERIES:
                    key_scale = gl.load(k_scale + block)
                mbarrier.wait(barriers.full.index(stage), (n // STAGES) & 1)
                # This number is opaque to the compiler. With a constant, it computes the
                # descriptors of all operands before the loop and runs out of registers.
                mine = CONSUMER + (n >> 30)
                codes = buffer_at(own_buffers.codes, mine)
                s = start_sum(codes, buffer_at(buffers.codes, stage), gl.int32, S_INT32)
                if HAS_DP:
                    numbers = buffer_at(own_buffers.numbers, mine)
                    other = buffer_at(buffers.numbers, stage)
                    dp = start_sum(numbers, other, gl.float32, S_FLOAT32)
                s = warpgroup_mma_wait(2 if HAS_DP else 0, deps=[s])
                if OWNS_QUERIES:
                    factor = (own_factor * key_scale)[:, None]
                    lse2 = own_lse2[:, None]
                else:
                    stats = _row_stats(buffers.stats, stage)
                    factor = (stats.index(0).load(STREAMED) * key_scale)[None, :]
                    lse2 = stats.index(1).load(STREAMED)[None, :]
                if cap2 is not None:
                    if OWNS_QUERIES:
                        shift = own_shift[:, None]
                    else:
                        shift = stats.index(3).load(STREAMED)[None, :]
                    t = tanh_of_sums(s, factor, shift, S_FLOAT32)
                    x = logits_plus(t, cap2, -lse2)
                else:
                    x = gl.convert_layout(s.to(gl.float32), S_FLOAT32)
                    x = gl.fma(x, factor.broadcast_to(x.shape), -lse2.broadcast_to(x.shape))
                if PART != 1:
                    attended = attends_in_block(block, mask, OWNS_QUERIES)
                    x = gl.where(attended, x, -float("inf"))
                left = gl.exp2(x)
                if HAS_DP:
                    if cap2 is not None:  # before dP is there: afterwards t would take registers
                        left = left * slope_of(t)
                    if OWNS_QUERIES:
                        delta = own_delta[:, None]
                    else:
                        delta = stats.index(2).load(STREAMED)[None, :]
                    dp = warpgroup_mma_wait(0, deps=[dp])
                    ds = dp - delta
                    # P is 0 there, but 0 times an infinite or NaN dP or slope would be NaN.
                    if PART != 1 and cap2 is None:
                        ds = gl.where(attended, ds, 0.0)
                    left = left * ds
                    if PART != 1 and cap2 is not None:
                        left = gl.where(attended, left, 0.0)
                    if SUMS_DS:
                        ds_parts += _sums_of_threads(left)
                left = left.to(dt)
                if not OWNS_QUERIES:
                    # Row statistics may still be on their way to a thread's registers when all
                    # warps have passed the barrier before the arrival. The fence waits for them.
                    fence_async_shared()
                mbarrier.arrive(barriers.empty.index(stage), count=1)
                stage = n % RIGHT_STAGES
                mbarrier.wait(barriers.right_full.index(stage), (n // RIGHT_STAGES) & 1)
                right = buffer_at(buffers.right, stage)
                operand = gl.convert_layout(left, gl.DotOperandLayout(0, FIRST_ACC, 2))
                grad_t = warpgroup_mma(operand, right[0], grad, is_async=True)
                operand = gl.convert_layout(left, gl.DotOperandLayout(0, REST_ACC, 2))
                rest_t = warpgroup_mma(operand, right[1], grad_rest, is_async=True)
                grad, grad_rest = warpgroup_mma_wait(0, deps=[grad_t, rest_t])
                mbarrier.arrive(barriers.right_empty.index(stage), count=1)
                n += 1
        if HAS_TAIL:
            n = skip_blocks(n, tile_walk.count - skipped - walk.count, barriers)
    if OWNS_QUERIES:
        length = length_of(lengths.cu_q, lengths.n_q, b)
        live = length
        cu = lengths.cu_q
    else:
        length = length_of(lengths.cu_k, lengths.n_k, b)
        live = n_keys
        cu = lengths.cu_k
    is_live = None
    if OWNS_QUERIES:
        is_live = own_lse2 != float("inf")  # NaN is not infinity
    elif lengths.left is not None or lengths.key_mask is not None:
        is_live = is_live_key(lengths, b, first + gl.arange(0, BLOCK, OWNED))
    if k_mean is not None:
        if SUMS_DS:
            ds_sum = gl.convert_layout(gl.sum(ds_parts, 1), OWNED)
        else:
            ds_sum = load_rows(ds_sums, lengths.cu_q, b, h, first + local, length, 0.0)
        grad = _plus_mean(grad, ds_sum, k_mean, 0, CONFIG.channels)
        grad_rest = _plus_mean(grad_rest, ds_sum, k_mean, FIRST, CONFIG.channels)
    grad = _finished(grad, is_live, scale)
    grad_rest = _finished(grad_rest, is_live, scale)
    store_part(out, cu, b, h, first, live, length, grad, 0, CONFIG.channels)
    store_part(out, cu, b, h, first, live, length, grad_rest, FIRST, CONFIG.channels)
