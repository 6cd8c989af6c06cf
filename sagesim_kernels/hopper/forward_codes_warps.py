"""The consumers of a forward program in which P is rounded to codes.

The barriers and the producer are those of `forward_warps`. The sums of P V over a block of keys are
new in each step, because their scales are.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from sagesim_kernels.hopper.codes_softmax import (
    CHUNK,
    CODE_UNIT,
    SUM_ROWS,
    add_sums,
    codes_step,
    rescaled,
    start_sums,
)
from sagesim_kernels.hopper.forward_masks import (
    S_FLOAT32,
    S_ROWS,
    apply_key_scales,
    key_indices,
    load_block_scale,
    lse2_of,
)
from sagesim_kernels.hopper.forward_structures import Mask
from sagesim_kernels.hopper.forward_tiles import (
    BLOCK,
    consumer_blocks,
    key_blocks,
    tile_of,
    waves,
)
from sagesim_kernels.hopper.forward_warps import (
    S_INT32,
    first_row,
    partial_sums,
    start_qk,
    store_o,
    wait_for_load,
)
from sagesim_kernels.operands import causal_offset, length_of, live_keys, row_base


@gluon.jit
def _joined(left, right):
    """Return two chunks of channels as one tensor [BLOCK, channels]."""
    return gl.join(left, right).permute([0, 2, 1]).reshape([BLOCK, 2 * CHUNK])


@gluon.jit
def consume(
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, scales,
    buffers, barriers, o_out, lse2, scale, lengths, scheduler, Q_TOKENS: gl.constexpr,
    TRIAL: gl.constexpr,
):  # fmt: skip
    """Compute O and the logsumexp of 64 query rows of each tile. One warpgroup, number CONSUMER.

    As in `forward_warps.consume`, the key blocks that need a mask come first, and a consumer whose
    rows are all past the end of the sequence takes one step and stores nothing. The product P V of
    a step starts together with Q K^T of the next step, whose load has both V and K.

    D: channels of a tile. DV: channels of V and O. o_out, lse2: `Strided` and `Rows` to fill.
    scale: the scale of the logits times log2(e). Q_TOKENS: queries that share a scale.
    """
    BY_TOKEN: gl.constexpr = buffers.k_scale is not None
    BY_CHANNEL: gl.constexpr = buffers.v_scale is not None
    CHUNKS: gl.constexpr = D // CHUNK
    full, empty = barriers.full, barriers.empty
    STAGES: gl.constexpr = barriers.full.shape[0]
    ROWS: gl.constexpr = CONSUMERS * BLOCK
    load_count = 0
    tile_count = 0  # valid tiles only
    for wave in range(waves(scheduler)):
        tile = tile_of(wave, lengths, scheduler, ROWS)
        if tile.is_valid:
            b, h = tile.b, tile.h
            tile_blocks = key_blocks(tile.first, ROWS, lengths, b)
            first = tile.first + CONSUMER * BLOCK
            n_q = length_of(lengths.cu_q, lengths.n_q, b)
            blocks = consumer_blocks(first, n_q, tile_blocks, lengths, b)
            unmasked = blocks.whole_end
            queries = first + gl.arange(0, BLOCK, S_ROWS)
            mask = Mask(queries, live_keys(lengths, b), causal_offset(lengths, b), None, None)
            q_row = first_row(scales.q, lengths.cu_q, lengths.n_q, b, h) // Q_TOKENS
            q_ptrs = scales.q.ptr + q_row + queries // Q_TOKENS
            q_factor = gl.load(q_ptrs, mask=queries < n_q, other=0.0)
            q_factor = q_factor * scale
            if BY_TOKEN:
                q_factor = q_factor * 2.0**10
            for _ in range(tile_blocks.end - blocks.end):  # keys for later rows of the tile only
                wait_for_load(full, load_count)
                mbarrier.arrive(empty.index(load_count % STAGES), count=1)
                load_count += 1
            k_head = h // scheduler.groups
            k_ptr = scales.k.ptr
            k_ptr += first_row(scales.k, lengths.cu_k, lengths.n_k, b, k_head) // BLOCK
            v_ptr = scales.v.ptr
            v_ptr += first_row(scales.v, lengths.cu_k, lengths.n_k, b, k_head) // BLOCK
            slot = CONSUMER * 2 + tile_count % 2
            mbarrier.wait(barriers.q_full.index(slot), (tile_count // 2) & 1)
            tile_count += 1
            q = buffers.q.index(slot)
            level = gl.full((BLOCK,), float("inf"), gl.float32, S_ROWS)
            part = partial_sums(gl.zeros((BLOCK, BLOCK), gl.float32, S_FLOAT32))
            PART_ROWS: gl.constexpr = gl.SliceLayout(1, part.type.layout)
            total0 = gl.zeros((BLOCK, CHUNK), gl.float32, S_INT32)
            total1 = total0
            # S of the first block
            wait_for_load(full, load_count)
            stage = load_count % STAGES
            s = warpgroup_mma_wait(0, deps=[start_qk(q, buffers.k.index(stage))])
            s = apply_key_scales(s, buffers, stage)
            mbarrier.arrive(empty.index(stage), count=1)
            load_count += 1
            k_scale = load_block_scale(k_ptr, blocks.end - 1, BY_TOKEN)
            v_scale = load_block_scale(v_ptr, blocks.end - 1, BY_CHANNEL)
            for MASKED in gl.static_range(1, -1, -1):
                begin = unmasked if MASKED else blocks.begin
                end = blocks.end if MASKED else unmasked
                for i in range(end - begin):
                    block = end - 1 - i
                    keys = None
                    if MASKED:
                        keys = key_indices(block, mask)
                    factor = q_factor * k_scale
                    codes, sums_p, weight, level, shrink = codes_step(
                        MASKED, s, factor, level, keys, mask
                    )
                    row_weight = gl.convert_layout(weight, PART_ROWS)[:, None].broadcast_to(part.shape)
                    part = part * gl.convert_layout(shrink, PART_ROWS)[:, None]
                    part = gl.fma(sums_p, row_weight, part)
                    weight = gl.convert_layout(weight * v_scale, SUM_ROWS)
                    shrink = gl.convert_layout(shrink, SUM_ROWS)
                    next_block = gl.maximum(block - 1, 0)
                    k_scale = load_block_scale(k_ptr, next_block, BY_TOKEN)
                    v_scale = load_block_scale(v_ptr, next_block, BY_CHANNEL)
                    wait_for_load(full, load_count)
                    stage = load_count % STAGES
                    v = buffers.v.index(stage)
                    sums0 = start_sums(codes, v, 0)
                    if TRIAL % 2 == 1:
                        s_next = start_qk(q, buffers.k.index(stage))
                        if TRIAL // 2 == 0:
                            total0 = rescaled(total0, shrink)
                        sums0 = warpgroup_mma_wait(1, deps=[sums0])
                    else:
                        if TRIAL // 2 == 0:
                            total0 = rescaled(total0, shrink)
                        sums0 = warpgroup_mma_wait(0, deps=[sums0])
                    if TRIAL // 2 == 1:
                        total0 = total0 * shrink[:, None]
                    total0 = add_sums(total0, sums0, weight, buffers.v_scale, stage, 0)
                    if CHUNKS > 1:
                        sums1 = start_sums(codes, v, 1)
                        if TRIAL // 2 == 0:
                            total1 = rescaled(total1, shrink)
                        else:
                            total1 = total1 * shrink[:, None]
                        sums1 = warpgroup_mma_wait(0, deps=[sums1])
                        total1 = add_sums(total1, sums1, weight, buffers.v_scale, stage, 1)
                    if TRIAL % 2 == 0:
                        s_next = start_qk(q, buffers.k.index(stage))
                    s = warpgroup_mma_wait(0, deps=[s_next])
                    s = apply_key_scales(s, buffers, stage)
                    mbarrier.arrive(empty.index(stage), count=1)
                    load_count += 1
            mbarrier.arrive(barriers.q_empty.index(slot), count=1)
            total = total0
            if CHUNKS > 1:
                total = _joined(total0, total1)
            O_ROWS: gl.constexpr = gl.SliceLayout(1, total.type.layout)
            row_sum = gl.convert_layout(gl.sum(part, 1), S_ROWS)
            row_lse2 = lse2_of(row_sum, -level)
            gl.store(row_base(lse2, lengths.cu_q, b, h) + queries, row_lse2, mask=queries < n_q)
            row_sum = gl.convert_layout(row_sum, O_ROWS)[:, None]
            o = gl.where(row_sum == 0.0, 0.0, total * (CODE_UNIT / row_sum))
            store_o(o_out, lengths.cu_q, tile, first, n_q, o, DV)
