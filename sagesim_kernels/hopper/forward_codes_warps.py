"""The consumers of a forward program in which P is rounded to codes.

The barriers and the producer are those of `forward_loads`. The sums of P V over a block of keys are
new in each step, because their scales are.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from sagesim_kernels.hopper.channel_products import products_of
from sagesim_kernels.hopper.codes_softmax import (
    SUM_ROWS,
    SUMS,
    add_sums,
    codes_step,
    joined,
    rescaled,
)
from sagesim_kernels.hopper.codes_sums import CHUNK, start_sums
from sagesim_kernels.hopper.forward_loads import (
    first_row,
    release,
    skip_loads,
    wait_for_load,
    wait_for_tile,
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
    waves,
)
from sagesim_kernels.hopper.forward_warps import (
    load_query_factors,
    start_qk,
    store_o,
)
from sagesim_kernels.operands import CODE_UNIT, causal_offset, length_of, live_keys, row_base
from sagesim_kernels.partial_sums import partial_sums


@gluon.jit
def _multiply(codes, weight, totals, q, buffers, stage, QD: gl.constexpr):
    """Return totals plus P V of a block of keys, and S of the next block; see `apply_key_scales`.

    The stage has V of the one and K of the other.

    codes: of P. weight: of each query, times the scale of V if channels share one. totals: one for
    each chunk of channels. QD: channels of Q and K.
    """
    CHUNKS: gl.constexpr = len(totals)
    D: gl.constexpr = q.shape[1]
    QK_PRODUCTS: gl.constexpr = products_of(QD, D, 8)
    sums = ()
    for c in gl.static_range(CHUNKS):
        sums += (start_sums(codes, buffers.v.index(stage), c),)
    s = start_qk(q, buffers.k.index(stage), QD)
    added = ()
    for c in gl.static_range(CHUNKS):
        chunk = warpgroup_mma_wait(CHUNKS - 1 - c + QK_PRODUCTS, deps=[sums[c]])
        added += (add_sums(totals[c], chunk, weight, buffers.v_scale, stage, c),)
    s = warpgroup_mma_wait(0, deps=[s])
    return added, apply_key_scales(s, buffers, stage)


@gluon.jit
def consume(
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, QD: gl.constexpr,
    DV: gl.constexpr, scales, buffers, barriers, o_out, lse2, scale, lengths, scheduler,
    Q_TOKENS: gl.constexpr,
):  # fmt: skip
    """Compute O and the logsumexp of 64 query rows of each tile. One warpgroup, number CONSUMER.

    As in `forward_warps.consume`, the key blocks that need a mask come first, and a consumer whose
    rows are all past the end of the sequence takes one step and stores nothing. Behind the last
    block, S is computed of a K that was not loaded, and is not used.

    D: channels of a tile. QD: of Q and K. DV: of V and O. o_out, lse2: `Strided` and `Rows` to
    fill. scale: the scale of the logits times log2(e). Q_TOKENS: queries that share a scale.
    """
    BY_TOKEN: gl.constexpr = buffers.k_scale is not None
    BY_CHANNEL: gl.constexpr = buffers.v_scale is not None
    CHUNKS: gl.constexpr = D // CHUNK
    full, empty = barriers.full, barriers.empty
    STAGES: gl.constexpr = barriers.full.shape[0]
    ROWS: gl.constexpr = CONSUMERS * BLOCK
    load_count = 0
    for wave in range(waves(scheduler)):
        tile, slot = wait_for_tile(CONSUMER, barriers, buffers, wave)
        if tile.first >= 0:
            b, h = tile.b, tile.h
            tile_blocks = key_blocks(tile.first, ROWS, lengths, b)
            first = tile.first + CONSUMER * BLOCK
            n_q = length_of(lengths.cu_q, lengths.n_q, b)
            blocks = consumer_blocks(first, n_q, tile_blocks, lengths, b)
            unmasked = blocks.whole_end
            queries = first + gl.arange(0, BLOCK, S_ROWS)
            mask = Mask(queries, live_keys(lengths, b), causal_offset(lengths, b), None, None)
            q_factor = load_query_factors(
                scales.q, lengths, b, h, queries, n_q, scale, Q_TOKENS, BY_TOKEN
            )
            load_count = skip_loads(full, empty, load_count, tile_blocks.end - blocks.end)
            k_head = tile.k_head
            k_row = first_row(scales.k, lengths.cu_k, lengths.n_k, b, k_head)
            v_row = first_row(scales.v, lengths.cu_k, lengths.n_k, b, k_head)
            k_ptr, v_ptr = scales.k.ptr + k_row // BLOCK, scales.v.ptr + v_row // BLOCK
            q = buffers.q.index(slot)
            level = gl.full((BLOCK,), float("inf"), gl.float32, S_ROWS)
            part = partial_sums(gl.zeros((BLOCK, BLOCK), gl.float32, S_FLOAT32))
            PART_ROWS: gl.constexpr = gl.SliceLayout(1, part.type.layout)
            totals = ()
            for _ in gl.static_range(CHUNKS):
                totals += (gl.zeros((BLOCK, CHUNK), gl.float32, SUMS),)
            wait_for_load(full, load_count)
            stage = load_count % STAGES
            s = warpgroup_mma_wait(0, deps=[start_qk(q, buffers.k.index(stage), QD)])
            s = apply_key_scales(s, buffers, stage)
            release(buffers, empty, stage)
            load_count += 1
            k_next = load_block_scale(k_ptr, blocks.end - 1, BY_TOKEN)
            v_next = load_block_scale(v_ptr, blocks.end - 1, BY_CHANNEL)
            for MASKED in gl.static_range(1, -1, -1):
                begin = unmasked if MASKED else blocks.begin
                end = blocks.end if MASKED else unmasked
                for i in range(end - begin):
                    block = end - 1 - i
                    factor, v_scale = q_factor * k_next, v_next
                    next_block = gl.maximum(block - 1, 0)
                    k_next = load_block_scale(k_ptr, next_block, BY_TOKEN)
                    v_next = load_block_scale(v_ptr, next_block, BY_CHANNEL)
                    keys = None
                    if MASKED:
                        keys = key_indices(block, mask)
                    codes, sums, weight, level, shrink = codes_step(
                        MASKED, s, factor, level, keys, mask
                    )
                    part = part * gl.convert_layout(shrink, PART_ROWS)[:, None]
                    row_weight = gl.convert_layout(weight, PART_ROWS)[:, None]
                    part = gl.fma(sums, row_weight.broadcast_to(part.shape), part)
                    weight = gl.convert_layout(weight * v_scale, SUM_ROWS)
                    totals = rescaled(totals, gl.convert_layout(shrink, SUM_ROWS))
                    wait_for_load(full, load_count)
                    stage = load_count % STAGES
                    totals, s = _multiply(codes, weight, totals, q, buffers, stage, QD)
                    release(buffers, empty, stage)
                    load_count += 1
            mbarrier.arrive(barriers.q_empty.index(slot), count=1)
            row_sum = gl.convert_layout(gl.sum(part, 1), S_ROWS)
            row_lse2 = lse2_of(row_sum, -level)
            gl.store(row_base(lse2, lengths.cu_q, b, h) + queries, row_lse2, mask=queries < n_q)
            o = totals[0]
            if CHUNKS > 1:
                o = joined(totals[0], totals[1])
            row_sum = gl.convert_layout(row_sum, gl.SliceLayout(1, o.type.layout))[:, None]
            o = gl.where(row_sum == 0.0, 0.0, o * (CODE_UNIT / row_sum))
            store_o(o_out, lengths.cu_q, tile, first, n_q, o, DV)
        else:
            mbarrier.arrive(barriers.q_empty.index(slot), count=1)
