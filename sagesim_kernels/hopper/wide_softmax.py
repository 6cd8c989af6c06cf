"""The consumers of a program that computes O of heads with more than 128 channels."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sagesim_kernels.hopper.channel_parts import BLOCK, buffer_at
from sagesim_kernels.hopper.channel_products import start_sum
from sagesim_kernels.hopper.forward_masks import (
    logits_of,
    lse2_of,
    softmax_step,
    unmasked_softmax_step,
)
from sagesim_kernels.hopper.forward_tiles import masks_every_block
from sagesim_kernels.hopper.forward_warps import compute_before_wait
from sagesim_kernels.hopper.wide_structures import BlockMask, Walk
from sagesim_kernels.hopper.wide_warps import (
    OWNED,
    S_FLOAT32,
    S_INT32,
    attends_in_block,
    blocks_before,
    skip_blocks,
    store_part,
    walk_of,
)
from sagesim_kernels.operands import (
    FAILED,
    add_sink_of_rows,
    causal_offset,
    fits_reference,
    key_mask_of,
    length_of,
    live_keys,
    load_shift,
    lowest_diagonal,
    row_base,
)
from sagesim_kernels.partial_sums import partial_sums


@gluon.jit
def at_least_one(walk, lengths):
    """Return the `Walk` with at least one block, whose first block is masked.

    So a tile whose queries attend to no key needs no code of its own: its block is all mask.

    The loop has three parts: masked blocks, blocks without a mask, masked blocks. The first part
    takes longer for each block than the last. With a limit on the left or a key mask, both may have
    blocks. If no block is without a mask, the first part gets one block, and the last part all
    others. The same holds if `masks_every_block` says so.
    """
    first, masked = gl.maximum(walk.first, 0), gl.maximum(walk.masked_at_begin, 1)
    tail, count = walk.masked_at_end, gl.maximum(walk.count, 1)
    if lengths.left is not None or lengths.key_mask is not None:
        unmasked = count - masked - tail
        is_short = unmasked <= 0
        if lengths.key_mask is not None:
            is_short = is_short | masks_every_block(masked, unmasked, count)
        masked = gl.where(is_short, 1, masked)
        tail = gl.where(is_short, count - 1, tail)
    return Walk(first, masked, tail, count)


@gluon.jit
def _s_of_load(q, buffers, barriers, n):
    """Return S of load n, and release its codes."""
    stage = n % barriers.full.shape[0]
    mbarrier.wait(barriers.full.index(stage), (n // barriers.full.shape[0]) & 1)
    s = start_sum(q, buffer_at(buffers.codes, stage), gl.int32, S_INT32)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(barriers.empty.index(stage), count=1)
    return s


@gluon.jit
def _wait_for_v(barriers, n):
    STAGES: gl.constexpr = barriers.right_full.shape[0]
    mbarrier.wait(barriers.right_full.index(n % STAGES), (n // STAGES) & 1)


@gluon.jit
def _rescaled(x, factor):
    """Return x with its rows multiplied by a factor each."""
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def _where_rows(condition, x):
    """Return x with zeros in the rows where the condition does not hold."""
    condition = gl.convert_layout(condition, gl.SliceLayout(1, x.type.layout))
    return gl.where(condition[:, None], x, 0.0)


@gluon.jit
def _as_operand_of(p, acc):
    """Return a left operand as one of a product that is added to acc. It moves no number."""
    return gl.convert_layout(p, gl.DotOperandLayout(0, acc.type.layout, 2))


@gluon.jit
def _operand(p, acc, DTYPE: gl.constexpr):
    """Return P as the left operand of a product that is added to acc."""
    return gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, acc.type.layout, 2))


@gluon.jit
def compute_o(
    CONSUMER: gl.constexpr, own_buffers, buffers, barriers, q_scale, k_scale, scale, out, lse2,
    sink2, softcap, lengths, b, h, tile_first, tile_walk, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute O and the logsumexp of 64 queries. One warpgroup, number CONSUMER.

    Blocks are visited from the last key to the first. Masked blocks are at both ends. From the last
    masked block at the beginning on, the product P V of a step overlaps with Q K^T of the next.

    q_scale: pointer to the scale of the tile's first query. k_scale: pointer to the scale of the
    first key of the head. scale: the scale of the logits, times log2(e) or divided by the softcap.
    out, lse2: `Strided` and `Rows`. sink2: pointer to the sinks in base 2, with the strides of
    lse2; or None. softcap: `Softcap`. b, h: sequence and head in both. tile_first: first query of
    the tile. tile_walk: `Walk` of the tile.
    """
    HAS_TAIL: gl.constexpr = lengths.left is not None or lengths.key_mask is not None
    STAGES: gl.constexpr = CONFIG.stages
    RIGHT_STAGES: gl.constexpr = CONFIG.right_stages
    FIRST: gl.constexpr = buffers.right[0].shape[2]
    REST: gl.constexpr = buffers.right[1].shape[2]
    FIRST_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FIRST, 16])
    REST_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
    dt: gl.constexpr = buffers.right[0].dtype
    first = tile_first + CONSUMER * BLOCK
    offset = causal_offset(lengths, b)
    n_keys = live_keys(lengths, b)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    walk = at_least_one(walk_of(first, BLOCK, lengths, b, True), lengths)
    lowest = lowest_diagonal(lengths, b) if lengths.left is not None else None
    key_mask = None
    if lengths.key_mask is not None:
        key_mask = key_mask_of(lengths, b)
    mask = BlockMask(first, n_keys, offset, lowest, key_mask, None)
    rows = first + gl.arange(0, BLOCK, OWNED)
    local = CONSUMER * BLOCK + gl.arange(0, BLOCK, OWNED)
    q_factor = gl.load(q_scale + local, mask=rows < n_q, other=0.0) * scale
    row_shift = None
    if softcap.shift is not None:
        row_shift = load_shift(softcap, lengths.cu_q, b, h, rows, n_q)
    row_max = gl.full((BLOCK,), -float("inf"), gl.float32, OWNED)
    part = partial_sums(gl.zeros((BLOCK, BLOCK), gl.float32, S_FLOAT32))
    o = gl.zeros((BLOCK, FIRST), gl.float32, FIRST_ACC)
    o_rest = gl.zeros((BLOCK, REST), gl.float32, REST_ACC)
    q = buffer_at(own_buffers.codes, CONSUMER)
    skipped = blocks_before(walk, tile_walk, HAS_TAIL, True)
    first_block = walk.first
    if HAS_TAIL:  # of queries that attend to no key, a block that is loaded
        first_block = tile_walk.first - skipped
    n = skip_blocks(0, skipped, barriers)
    mbarrier.wait(barriers.own_full, 0)
    for j in range(walk.masked_at_begin - 1):
        block = first_block - j
        factor = q_factor * gl.load(k_scale + block)
        s = _s_of_load(q, buffers, barriers, n)
        attended = attends_in_block(block, mask, True)
        x = logits_of(s, factor, row_shift, softcap.base2)
        p, row_max, rescale = softmax_step(x, row_max, attended)
        part = _rescaled(part, rescale) + partial_sums(p)
        _wait_for_v(barriers, n)
        v = buffer_at(buffers.right, n % RIGHT_STAGES)
        o = _rescaled(o, rescale)
        o_rest = _rescaled(o_rest, rescale)
        o_t = warpgroup_mma(_operand(p, o, dt), v[0], o, is_async=True)
        rest_t = warpgroup_mma(_operand(p, o_rest, dt), v[1], o_rest, is_async=True)
        o, o_rest = warpgroup_mma_wait(0, deps=[o_t, rest_t])
        mbarrier.arrive(barriers.right_empty.index(n % RIGHT_STAGES), count=1)
        n += 1
    block = first_block - walk.masked_at_begin + 1
    factor = q_factor * gl.load(k_scale + block)
    k_next = gl.load(k_scale + gl.maximum(block - 1, 0))
    s = _s_of_load(q, buffers, barriers, n)
    attended = attends_in_block(block, mask, True)
    x = logits_of(s, factor, row_shift, softcap.base2)
    p, row_max, rescale = softmax_step(x, row_max, attended)
    part = _rescaled(part, rescale) + partial_sums(p)
    o = _rescaled(o, rescale)
    o_rest = _rescaled(o_rest, rescale)
    p16 = _operand(p, o, dt)
    _wait_for_v(barriers, n)
    for MASKED in gl.static_range(1 + HAS_TAIL):
        steps = block
        if MASKED:
            steps = walk.masked_at_end
        elif HAS_TAIL:
            steps = walk.count - walk.masked_at_begin - walk.masked_at_end
        for i in range(steps):
            key_scale = k_next
            k_next = gl.load(k_scale + gl.maximum(block - 2 - i, 0))
            n += 1
            stage = n % STAGES
            mbarrier.wait(barriers.full.index(stage), (n // STAGES) & 1)
            s = start_sum(q, buffer_at(buffers.codes, stage), gl.int32, S_INT32)
            v = buffer_at(buffers.right, (n - 1) % RIGHT_STAGES)
            o_t = warpgroup_mma(p16, v[0], o, is_async=True)
            rest_t = warpgroup_mma(_as_operand_of(p16, o_rest), v[1], o_rest, is_async=True)
            if MASKED:
                attended = attends_in_block(block - 1 - i, mask, True)
            s = warpgroup_mma_wait(2, deps=[s])
            mbarrier.arrive(barriers.empty.index(stage), count=1)
            factor = q_factor * key_scale
            if MASKED:
                x = logits_of(s, factor, row_shift, softcap.base2)
                p, row_max, rescale = softmax_step(x, row_max, attended)
            else:
                p, row_max, rescale = unmasked_softmax_step(
                    s, factor, row_max, row_shift, softcap.base2, CONFIG.is_fixed
                )
            if MASKED or not CONFIG.is_fixed:
                part = _rescaled(part, rescale)
            part += partial_sums(p)
            part = compute_before_wait(part, q_scale)
            # This wait contains a branch. ptxas moves the wait for the products P V, which
            # follows, upwards as far as the last branch before it.
            _wait_for_v(barriers, n)
            o, o_rest = warpgroup_mma_wait(0, deps=[o_t, rest_t])
            mbarrier.arrive(barriers.right_empty.index((n - 1) % RIGHT_STAGES), count=1)
            if MASKED or not CONFIG.is_fixed:
                o = _rescaled(o, rescale)
                o_rest = _rescaled(o_rest, rescale)
            p16 = _operand(p, o, dt)
        block -= steps
    v = buffer_at(buffers.right, n % RIGHT_STAGES)
    o_t = warpgroup_mma(p16, v[0], o, is_async=True)
    rest_t = warpgroup_mma(_as_operand_of(p16, o_rest), v[1], o_rest, is_async=True)
    row_sum = gl.convert_layout(gl.sum(part, 1), OWNED)
    o, o_rest = warpgroup_mma_wait(0, deps=[o_t, rest_t])
    if HAS_TAIL:
        mbarrier.arrive(barriers.right_empty.index(n % RIGHT_STAGES), count=1)
        skip_blocks(n + 1, tile_walk.count - skipped - walk.count, barriers)
    if CONFIG.is_fixed:
        size = gl.convert_layout(gl.sum(gl.abs(o), 1), OWNED)
        size += gl.convert_layout(gl.sum(gl.abs(o_rest), 1), OWNED)
        fails = ~fits_reference(row_sum, size)
    if sink2 is not None:
        row_sum, row_max, sqrt_rescale = add_sink_of_rows(
            sink2, lse2, lengths.cu_q, b, h, rows, n_q, row_sum, row_max
        )
    row_lse2 = lse2_of(row_sum, row_max)
    if CONFIG.is_fixed:
        row_lse2 = gl.where(fails, FAILED, row_lse2)
    gl.store(row_base(lse2, lengths.cu_q, b, h) + rows, row_lse2, mask=rows < n_q)
    # o * (1 / row_sum) has the bits of o / row_sum, see `forward_warps`. In rows without a key, V
    # may have added 0 * NaN to o.
    inverse = 1.0 / row_sum
    is_live = row_sum != 0.0
    if sink2 is not None:
        inverse = inverse * sqrt_rescale
        o = _rescaled(o, sqrt_rescale)
        o_rest = _rescaled(o_rest, sqrt_rescale)
    o = _where_rows(is_live, _rescaled(o, inverse))
    store_part(out, lengths.cu_q, b, h, first, n_q, n_q, o, 0, CONFIG.channels)
    o_rest = _where_rows(is_live, _rescaled(o_rest, inverse))
    store_part(out, lengths.cu_q, b, h, first, n_q, n_q, o_rest, FIRST, CONFIG.channels)
