"""The consumers of a forward program, each a warpgroup that computes 64 query rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sagesim_kernels.hopper.channel_products import start_product
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
    masked_softmax_step,
    unmasked_softmax_step,
)
from sagesim_kernels.hopper.forward_structures import Mask
from sagesim_kernels.hopper.forward_tiles import (
    BLOCK,
    consumer_blocks,
    key_blocks,
    waves,
)
from sagesim_kernels.operands import (
    FAILED,
    add_sink_of_rows,
    causal_offset,
    fits_reference,
    head_ptr,
    key_mask_of,
    length_of,
    live_keys,
    load_shift,
    lowest_diagonal,
    row_base,
    row_stride,
)
from sagesim_kernels.partial_sums import partial_sums

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

S_INT32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
"""Layout of S [queries, keys] as the INT8 product leaves it."""

_COMPUTE_BEFORE = gl.constexpr("""{
.reg .pred p;
.reg .b32 t;
or.b32 t, $4, $5;
or.b32 t, t, $6;
or.b32 t, t, $7;
setp.lt.s32 p, t, 0;
@p prefetch.global.L2 [$8];
mov.b32 $0, $4;
mov.b32 $1, $5;
mov.b32 $2, $6;
mov.b32 $3, $7;
}""")


@gluon.jit
def compute_before_wait(x, address):
    """Return x, and keep ptxas from computing it after a wait that follows.

    Without this, ptxas moves the wait for a product above the exponentials that are meant to
    overlap with the product. ptxas does not move the wait over a possible access to memory if a
    wait for a barrier, which contains a branch, lies in between. This function therefore contains
    such an access: it prefetches `address` if a number of x has its sign bit set. x are
    exponentials or sums of them, so only a NaN has its sign bit set. A prefetch does not change the
    result.

    address: any valid address in global memory.
    """
    address = gl.full(x.shape, address.to(gl.int64), gl.int64, x.type.layout)
    return gl.inline_asm_elementwise(
        _COMPUTE_BEFORE,
        "=&f,=&f,=&f,=&f,f,f,f,f,l,l,l,l",
        [x, address],
        gl.float32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def load_query_factors(
    scales, lengths, b, h, queries, n_q, scale, TOKENS: gl.constexpr, BY_TOKEN: gl.constexpr
):
    """Return the scale of each query times that of the logits; 0 behind the last query.

    scales: `StoredScales`, one for TOKENS queries. BY_TOKEN: whether keys have scales of their own,
    which `apply_key_scales` divides by a power of two.
    """
    row = first_row(scales, lengths.cu_q, lengths.n_q, b, h) // TOKENS
    ptrs = scales.ptr + row + queries // TOKENS
    factor = gl.load(ptrs, mask=queries < n_q, other=0.0) * scale
    if BY_TOKEN:
        factor = factor * 2.0**10
    return factor


@gluon.jit
def start_qk(q, k, QD: gl.constexpr):
    """Start the product of two blocks of codes. QD: channels of a head."""
    return start_product(q, k, gl.int32, S_INT32, QD)


@gluon.jit
def _compute_s(q, buffers, barriers, load_count, QD: gl.constexpr):
    """Return S of a load, and release its stage: V of the step before has been read already."""
    stage = load_count % barriers.full.shape[0]
    wait_for_load(barriers.full, load_count)
    s = warpgroup_mma_wait(0, deps=[start_qk(q, buffers.k.index(stage), QD)])
    s = apply_key_scales(s, buffers, stage)
    release(buffers, barriers.empty, stage)
    return s


@gluon.jit
def _add_block(
    MASKED: gl.constexpr, o, part, row_max, q, factor, buffers, barriers, load_count, block, mask,
    row_shift, softcap, FIXED: gl.constexpr, QD: gl.constexpr,
):  # fmt: skip
    """Add P V of a block of keys to o, its row sums to part, and return them and the row maximum.

    All products have ended. V of the block, in the next load, is not released.

    MASKED: whether a query may not attend to some keys of the block. The others: see `consume`.
    """
    PART_ROWS: gl.constexpr = gl.SliceLayout(1, part.type.layout)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    s = _compute_s(q, buffers, barriers, load_count, QD)
    if MASKED:
        keys = key_indices(block, mask)
        p, row_max, rescale = masked_softmax_step(
            s, factor, row_max, keys, mask, row_shift, softcap.base2
        )
    else:
        p, row_max, rescale = unmasked_softmax_step(
            s, factor, row_max, row_shift, softcap.base2, FIXED
        )
    if MASKED or not FIXED:
        part = part * gl.convert_layout(rescale, PART_ROWS)[:, None]
        o = o * gl.convert_layout(rescale, O_ROWS)[:, None]
    part += partial_sums(p)
    wait_for_load(barriers.full, load_count + 1)
    v = buffers.v.index((load_count + 1) % barriers.full.shape[0])
    p16 = gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(0, o.type.layout, 2))
    return warpgroup_mma_wait(0, deps=[warpgroup_mma(p16, v, o, is_async=True)]), part, row_max


@gluon.jit
def store_o(o, cu, tile, first, last, value, DV: gl.constexpr):
    """Store value as the rows from `first` of the tile's head.

    Rows from `last` on and channels from DV on are not stored.

    This is `operands.store_tokens` with a layout of its own. Threads of a warp first exchange their
    rows, so that each stores eight adjacent columns at once and fills whole sectors of memory.
    """
    WIDE: gl.constexpr = gl.BlockedLayout([2, 8], [8, 4], [4, 1], [1, 0])
    value = gl.convert_layout(value.to(o.ptr.dtype.element_ty), WIDE)
    ROW: gl.constexpr = gl.SliceLayout(1, value.type.layout)
    COLUMN: gl.constexpr = gl.SliceLayout(0, value.type.layout)
    row = first + gl.arange(0, value.shape[0], ROW)
    column = gl.arange(0, value.shape[1], COLUMN).to(gl.int64)
    row_ptrs = head_ptr(o, cu, tile.b, tile.h) + row.to(gl.int64) * row_stride(o)
    ptrs = row_ptrs[:, None] + (column * o.stride_d)[None, :]
    mask = (row < last)[:, None]
    if value.shape[1] > DV:
        mask = mask & (column < DV)[None, :]
    gl.store(ptrs, value, mask=mask)


@gluon.jit
def consume(
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, QD: gl.constexpr,
    DV: gl.constexpr, scales, buffers, barriers, o_out, lse2, sink2, softcap, scale, lengths,
    scheduler, FIXED: gl.constexpr, IN_TURN: gl.constexpr,
):  # fmt: skip
    """Compute O and the logsumexp of 64 query rows of each tile. One warpgroup, number CONSUMER.

    A consumer whose rows are all past the end of the sequence takes one step and stores nothing.

    The key blocks at the end that need a mask come first. There are at most two, but under a key
    mask as many as there are blocks without one. From the last of them on, the product P V of a
    step overlaps with Q K^T of the next step. Blocks at the beginning that need a mask, because of
    a window or before the first run under a key mask, come last.

    D: channels of a tile. QD: of Q and K. DV: of V and O. o_out, lse2: `Strided` and `Rows` to
    fill. sink2: pointer to the sinks in base 2, with the strides of lse2; or None. softcap:
    `Softcap`. scale: the scale of the logits, times log2(e) or divided by the softcap. FIXED:
    whether blocks without a mask have a fixed reference, the largest logit of the masked blocks
    before them; see `operands.fixed_reference`. IN_TURN: whether a step ends before the next one
    starts, which takes fewer registers. There is no window, key mask or softcap then.
    """
    BY_TOKEN: gl.constexpr = buffers.k_scale is not None
    HAS_BEGIN: gl.constexpr = lengths.key_mask is not None or lengths.left is not None
    full, empty = barriers.full, barriers.empty
    STAGES: gl.constexpr = barriers.full.shape[0]
    ROWS: gl.constexpr = CONSUMERS * BLOCK
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    dt: gl.constexpr = buffers.v.dtype
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
            lowest = lowest_diagonal(lengths, b) if lengths.left is not None else None
            key_mask = None
            if lengths.key_mask is not None:
                key_mask = key_mask_of(lengths, b)
            n_k = live_keys(lengths, b)
            mask = Mask(queries, n_k, causal_offset(lengths, b), lowest, key_mask)
            q_factor = load_query_factors(scales.q, lengths, b, h, queries, n_q, scale, 1, BY_TOKEN)
            row_shift = None
            if softcap.shift is not None:
                row_shift = load_shift(softcap, lengths.cu_q, b, h, queries, n_q)
            # keys for later rows of the tile only
            load_count = skip_loads(full, empty, load_count, tile_blocks.end - blocks.end)
            k_row = first_row(scales.k, lengths.cu_k, lengths.n_k, b, tile.k_head)
            k_ptr = scales.k.ptr + k_row // BLOCK
            k_next = load_block_scale(k_ptr, blocks.end - 1, BY_TOKEN)
            q = buffers.q.index(slot)
            row_max = gl.full((BLOCK,), -float("inf"), gl.float32, S_ROWS)
            part = partial_sums(gl.zeros((BLOCK, BLOCK), gl.float32, S_FLOAT32))
            PART_ROWS: gl.constexpr = gl.SliceLayout(1, part.type.layout)
            o = gl.zeros((BLOCK, D), gl.float32, ACC)
            for i in range(blocks.end - unmasked - (0 if IN_TURN else 1)):
                block = blocks.end - 1 - i
                factor = q_factor * k_next
                k_next = load_block_scale(k_ptr, gl.maximum(block - 1, 0), BY_TOKEN)
                o, part, row_max = _add_block(
                    True, o, part, row_max, q, factor, buffers, barriers, load_count, block, mask,
                    row_shift, softcap, FIXED, QD,
                )  # fmt: skip
                load_count += 1
            if IN_TURN:
                # ptxas 12.8 builds Q's descriptor before the loop above, where it skips this if
                # the loop has no iteration, and would use it here. load_count >> 30 is 0, but ptxas
                # does not know.
                q = buffers.q.index(slot + (load_count >> 30))
                for i in range(unmasked - blocks.begin):
                    block = unmasked - 1 - i
                    factor = q_factor * k_next
                    k_next = load_block_scale(k_ptr, gl.maximum(block - 1, 0), BY_TOKEN)
                    o, part, row_max = _add_block(
                        False, o, part, row_max, q, factor, buffers, barriers, load_count, block,
                        mask, row_shift, softcap, FIXED, QD,
                    )  # fmt: skip
                    load_count += 1
            else:
                factor = q_factor * k_next
                s = _compute_s(q, buffers, barriers, load_count, QD)
                load_count += 1
                keys = key_indices(unmasked, mask)
                p, row_max, rescale = masked_softmax_step(
                    s, factor, row_max, keys, mask, row_shift, softcap.base2
                )
                part = part * gl.convert_layout(rescale, PART_ROWS)[:, None] + partial_sums(p)
                o = o * gl.convert_layout(rescale, O_ROWS)[:, None]
                p16 = gl.convert_layout(p.to(dt), P_OPERAND)
                wait_for_load(full, load_count)
                k_next = load_block_scale(k_ptr, gl.maximum(unmasked - 1, 0), BY_TOKEN)
                for MASKED in gl.static_range(1 + HAS_BEGIN):
                    last = blocks.whole if MASKED else unmasked
                    for i in range(last - (blocks.begin if MASKED else blocks.whole)):
                        stage = load_count % STAGES
                        k_scale = k_next
                        k_next = load_block_scale(k_ptr, gl.maximum(last - 2 - i, 0), BY_TOKEN)
                        s = start_qk(q, buffers.k.index(stage), QD)
                        v = buffers.v.index(stage)
                        o_t = warpgroup_mma(p16, v, o, is_async=True)
                        if MASKED:
                            keys = key_indices(last - 1 - i, mask)
                        s = warpgroup_mma_wait(1, deps=[s])
                        s = apply_key_scales(s, buffers, stage)
                        factor = q_factor * k_scale
                        if MASKED:
                            p, row_max, rescale = masked_softmax_step(
                                s, factor, row_max, keys, mask, row_shift, softcap.base2
                            )
                        else:
                            p, row_max, rescale = unmasked_softmax_step(
                                s, factor, row_max, row_shift, softcap.base2, FIXED
                            )
                        if MASKED or not FIXED:
                            part = part * gl.convert_layout(rescale, PART_ROWS)[:, None]
                        part += partial_sums(p)
                        part = compute_before_wait(part, scales.q.ptr)
                        # The wait for the next step's load is here, and not at the top of the
                        # loop, because it contains a branch. ptxas moves the wait for the product
                        # P V, which follows, upwards as far as the last branch before it.
                        load_count += 1
                        wait_for_load(full, load_count)
                        o = warpgroup_mma_wait(0, deps=[o_t])
                        # The consumer's warps synchronise before they arrive, so all of them have
                        # read this K, and V of the step before.
                        release(buffers, empty, stage)
                        if MASKED or not FIXED:
                            o = o * gl.convert_layout(rescale, O_ROWS)[:, None]
                        p16 = gl.convert_layout(p.to(dt), P_OPERAND)
            mbarrier.arrive(barriers.q_empty.index(slot), count=1)
            stage = load_count % STAGES
            if IN_TURN:
                row_sum = gl.convert_layout(gl.sum(part, 1), S_ROWS)
            else:
                o_t = warpgroup_mma(p16, buffers.v.index(stage), o, is_async=True)
                row_sum = gl.convert_layout(gl.sum(part, 1), S_ROWS)
                o = warpgroup_mma_wait(0, deps=[o_t])
            mbarrier.arrive(empty.index(stage), count=1)
            load_count += 1
            if HAS_BEGIN:
                # keys for earlier rows only
                load_count = skip_loads(full, empty, load_count, blocks.begin - tile_blocks.begin)
            rows = first + gl.arange(0, BLOCK, S_ROWS)
            if FIXED:
                size = gl.convert_layout(gl.sum(gl.abs(o), 1), S_ROWS)
                fails = ~fits_reference(row_sum, size)
            if sink2 is not None:
                row_sum, row_max, sqrt_rescale = add_sink_of_rows(
                    sink2, lse2, lengths.cu_q, b, h, rows, n_q, row_sum, row_max
                )
            row_lse2 = lse2_of(row_sum, row_max)
            if FIXED:
                row_lse2 = gl.where(fails, FAILED, row_lse2)
            gl.store(row_base(lse2, lengths.cu_q, b, h) + rows, row_lse2, mask=rows < n_q)
            row_sum = gl.convert_layout(row_sum, O_ROWS)[:, None]
            # o * (1 / row_sum) has the bits of o / row_sum. The division compiles to the same
            # product, with extra scaling for sums that do not occur with ordinary logits: the
            # greatest exponential of a row, or that of its sink, is nearly 1, or more with a fixed
            # reference. In rows without a key, V may have added 0 * NaN to o.
            inverse = 1.0 / row_sum
            if sink2 is not None:
                sqrt_rescale = gl.convert_layout(sqrt_rescale, O_ROWS)[:, None]
                o = o * sqrt_rescale
                inverse = inverse * sqrt_rescale
            o = gl.where(row_sum == 0.0, 0.0, o * inverse)
            store_o(o_out, lengths.cu_q, tile, first, n_q, o, DV)
        else:
            mbarrier.arrive(barriers.q_empty.index(slot), count=1)
