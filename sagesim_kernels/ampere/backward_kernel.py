"""The backward kernel for mma.sync: the gradients of a tile of keys, in one pass over the queries.

S, P, dP and dS are transposed [keys, queries], so that P and dS are left operands of dV and dK. If
a warp owns keys, its P and dS stay in registers, and dS alone passes through shared memory, where
warps exchange it for dQ. If two warps share keys, each computes the maps of half of the queries and
the sums of half of the channels. P passes through shared memory then, too. If they are codes, each
warp holds its K and V in registers, and P and dS take their shared memory.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false, reportConstantRedefinition=false, reportIndexIssue=false

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from sagesim_kernels.ampere.device import (
    BLOCK,
    CHUNK,
    VECTOR,
    chunk_size,
    copy_channels,
    copy_scales,
    copy_tokens,
    in_pair_order,
    left_tokens,
    registers_product,
    rows_layout,
    rows_of_blocks,
    scaled_sum,
    shared_product,
    split_by_block,
    store_chunk,
)
from sagesim_kernels.ampere.gradient_sums import add_to_dq, add_to_sums, dq_chunk_size
from sagesim_kernels.ampere.map_codes import (
    exchange_layout,
    left_operand,
    load_left_pairs,
    maxima,
    maximum_buffer,
    rounded,
    shared_codes_buffers,
    store_codes,
    store_maxima,
    store_pairs,
)
from sagesim_kernels.ampere.parts import (
    PARTS,
    query_limits,
    query_parts,
    visible_queries,
)
from sagesim_kernels.ampere.query_buffers import (
    STATS,
    QueryBuffers,
    copy_queries,
    right_buffer,
    scale_buffer,
)
from sagesim_kernels.gluon_compat import barrier, reinterpret
from sagesim_kernels.launching import wait_for_earlier_kernels
from sagesim_kernels.operands import (
    causal_offset,
    first_live_key,
    head_pointers,
    length_of,
    live_keys,
    live_queries,
    part_of,
    program_coordinates,
    stored_start_of,
)

_BYTES = gl.constexpr(128)
"""Bytes of a row that a product loads at a time; see `shared_product`."""


class Config(NamedTuple):
    """The constants of a kernel."""

    keys: int  #: that a program owns: one or two blocks of the spec
    queries: int  #: of a step: a block of the spec, or half of one
    across: int  #: warps that share keys: each computes maps of some queries, sums of some channels
    stages: int  #: buffers for the queries of a step, 1 or 2
    channels: int  #: of a tile in shared memory, 64 or 128
    q_right: int  #: bits of the numbers of dK's right operand; 0 if it is q
    do_right: int  #: the same for dV's right operand and do
    k_right: int  #: the same for dQ's right operand and k
    splits: int  #: programs for each tile of keys; each has some of the query heads


@gluon.jit
def _row_stats(buffers, stage, INDEX: gl.constexpr, LAYOUT: gl.constexpr):
    """Return one of the numbers of each query of a step."""
    return buffers.row_stats.index(stage * STATS + INDEX).load(LAYOUT)


@gluon.jit
def ampere_backward(
    grid, q, k, do, v, q_right, do_right, k_right, row_stats, dq_sums, dk, dv, lengths, p_product,
    dq_product, dk_product, scale, sizes, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of a tile of keys, and add its parts of dQ to the sums of the queries.

    Args:
        grid: `Grid` of the heads of dk and dv.
        q, k, do, v: `Operand` of qk_recompute and dp.
        q_right, do_right, k_right: the right operands of dK, dV and dQ.
        row_stats: float32 [blocks of all heads, STATS, 64], in padded storage.
        dq_sums: `DqSums`.
        dk, dv: `Strided` of [sequences, heads * CONFIG.splits, keys, channels].
        p_product, dq_product, dk_product: `MapProduct`.
        scale: a factor of dK.
        sizes: `KernelSizes`.
        CONFIG: `Config`.
    """
    wait_for_earlier_kernels()
    KEYS: gl.constexpr = CONFIG.keys
    QUERIES: gl.constexpr = CONFIG.queries
    STAGES: gl.constexpr = CONFIG.stages
    CHANNELS: gl.constexpr = CONFIG.channels
    CHUNKS: gl.constexpr = CONFIG.channels // CHUNK
    LAST_OF_K: gl.constexpr = chunk_size(sizes.D, CHUNKS - 1)
    LAST_OF_V: gl.constexpr = chunk_size(sizes.DV, CHUNKS - 1)
    BLOCKS: gl.constexpr = CONFIG.keys // BLOCK
    GROUPS: gl.constexpr = sizes.GROUPS // CONFIG.splits
    QT: gl.constexpr = q.ptr.dtype.element_ty
    DT: gl.constexpr = do.ptr.dtype.element_ty
    BITS: gl.constexpr = q.ptr.dtype.element_ty.primitive_bitwidth
    WARPS: gl.constexpr = gl.num_warps()
    ACROSS: gl.constexpr = CONFIG.across
    ST: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS // ACROSS, ACROSS], [16, 8])
    ROWS: gl.constexpr = gl.SliceLayout(1, ST)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, ST)

    tile, out_head, b = program_coordinates(grid)
    k_head = out_head // CONFIG.splits
    first = tile * KEYS
    n_stored = length_of(lengths.cu_k, lengths.n_k, b)
    if first >= n_stored:
        return
    first_live, n_q = live_queries(lengths, b)
    n_k, first_key = live_keys(lengths, b), first_live_key(lengths, b)
    offset = causal_offset(lengths, b)
    SHARES_DS: gl.constexpr = dq_product.PER_TILE and dk_product.PER_TILE
    # Each warp that loads dS in float32 rounds it: fewer of them load the same queries then.
    EXCHANGES_FLOATS: gl.constexpr = CONFIG.k_right == 8 and not SHARES_DS
    LAST_OF_DQ: gl.constexpr = dq_chunk_size(sizes.D, CHUNKS - 1, QUERIES, WARPS)
    MOST_ROWS_OF_DQ: gl.constexpr = QUERIES * LAST_OF_DQ // (8 * WARPS)
    ROWS_OF_DQ: gl.constexpr = 16 if EXCHANGES_FLOATS else min(16 * ACROSS, MOST_ROWS_OF_DQ)
    DQ: gl.constexpr = gl.NVMMADistributedLayout(
        [2, 0], [QUERIES // ROWS_OF_DQ, WARPS * ROWS_OF_DQ // QUERIES], [16, 8]
    )
    SHARES_CODES: gl.constexpr = ACROSS > 1 and CONFIG.do_right == 8
    IN_PAIRS: gl.constexpr = CONFIG.k_right == 8
    local = gl.arange(0, KEYS, ROWS)
    if IN_PAIRS:
        local = in_pair_order(local)
    keys = first + local
    first_query, last_query = query_limits(lengths, b, keys, n_k, offset)
    last_block = (n_stored - 1) // BLOCK * BLOCK
    second = gl.minimum(first + BLOCK, last_block)  # the second block of keys

    k_base, k_scales = head_pointers(k, lengths.cu_k, lengths.n_k, b, k_head)
    v_base, _v_scales = head_pointers(v, lengths.cu_k, lengths.n_k, b, k_head)
    kr_base, kr_scales = head_pointers(k_right, lengths.cu_k, lengths.n_k, b, k_head)
    k_s = gl.allocate_shared_memory(QT, [KEYS, CHANNELS], rows_layout(CHANNELS, BITS))
    v_s = gl.allocate_shared_memory(DT, [KEYS, CHANNELS], rows_layout(CHANNELS, 16))
    copy_tokens(k, k_base, first, first_key, n_k, k_s, IN_PAIRS)
    copy_tokens(v, v_base, first, first_key, n_k, v_s, IN_PAIRS)
    kr_scales_s = scale_buffer(k_right, k_s, BLOCKS, CHANNELS)
    if CONFIG.k_right == 8:
        if SHARES_DS:
            DS: gl.constexpr = rows_layout(BLOCK, 16)
            DS_TILE: gl.constexpr = rows_layout(BLOCK, 16)
        else:
            DS: gl.constexpr = exchange_layout(BLOCK, False)
            DS_TILE: gl.constexpr = exchange_layout(KEYS, True)
        if SHARES_CODES:
            p_s, ds_of_dk, ds_s = shared_codes_buffers(k_s, v_s, SHARES_DS, DS_TILE)
        elif SHARES_DS:
            ds_s = gl.allocate_shared_memory(gl.int16, [KEYS // 2, BLOCK], DS_TILE)
        else:
            ds_s = gl.allocate_shared_memory(gl.float32, [KEYS, BLOCK], DS_TILE)
        kr_s = gl.allocate_shared_memory(gl.int8, [BLOCKS, CHANNELS, BLOCK], rows_layout(BLOCK, 8))
        for i in gl.static_range(BLOCKS):
            at_key = second if i else first
            copy_channels(k_right, kr_base, at_key, kr_s.index(i))
            copy_scales(k_right, kr_scales, at_key, kr_scales_s, i, sizes.D)
    else:
        KT: gl.constexpr = k_right.ptr.dtype.element_ty
        K_TILE: gl.constexpr = rows_layout(CHANNELS, 16)
        DS: gl.constexpr = rows_layout(QUERIES, 16)
        DS_TILE: gl.constexpr = rows_layout(QUERIES, 16)
        ds_s = gl.allocate_shared_memory(KT, [KEYS, QUERIES], DS_TILE)
        if CONFIG.k_right == 16:
            kr_s = gl.allocate_shared_memory(KT, [BLOCKS, BLOCK, CHANNELS], K_TILE)
            tile = reinterpret(kr_s, KT, [KEYS, CHANNELS], K_TILE)
            copy_tokens(k_right, kr_base, first, first_key, n_k, tile)
        else:
            kr_s = reinterpret(k_s, KT, [BLOCKS, BLOCK, CHANNELS], K_TILE)
        if ACROSS > 1:
            p_s = gl.allocate_shared_memory(do_right.ptr.dtype.element_ty, [KEYS, QUERIES], DS_TILE)
    p_maxima = maximum_buffer(p_product, ds_s, KEYS, ACROSS if SHARES_CODES else 1)
    ds_maxima = maximum_buffer(dk_product, ds_s, KEYS, ACROSS if SHARES_CODES else 1)
    if k.scale is not None:
        # Behind the sequence's last key there may be no scale.
        if k.TOKENS == BLOCK:
            BY_BLOCK: gl.constexpr = split_by_block(gl.to_linear_layout(ST, [KEYS, QUERIES]))
            row = BLOCK * gl.arange(0, BLOCKS, gl.SliceLayout(1, gl.SliceLayout(1, BY_BLOCK)))
        else:
            row = local
        row = gl.minimum(first + row, n_stored - 1)
        k_scale = gl.load(k_scales + (row // k.TOKENS).to(gl.int64) * k.scale_stride_n)

    q_s = gl.allocate_shared_memory(QT, [STAGES, QUERIES, CHANNELS], rows_layout(CHANNELS, BITS))
    do_s = gl.allocate_shared_memory(DT, [STAGES, QUERIES, CHANNELS], rows_layout(CHANNELS, 16))
    buffers = QueryBuffers(
        q_s,
        do_s,
        right_buffer(q_right, q_s, CONFIG.q_right),
        right_buffer(do_right, do_s, CONFIG.do_right),
        scale_buffer(q_right, q_s, STAGES, CHANNELS),
        scale_buffer(do_right, do_s, STAGES, CHANNELS),
        gl.allocate_shared_memory(gl.float32, [STAGES * STATS, QUERIES], VECTOR),
    )

    parts = query_parts(lengths, b, first, KEYS, QUERIES, n_k, offset, first_live, n_q)
    begin, end = parts.begin, parts.end
    first_head = out_head * GROUPS
    start_q = stored_start_of(lengths.cu_q, lengths.n_q, b)
    if begin < end:
        copy_queries(
            q, do, q_right, do_right, row_stats, dq_sums, lengths, buffers, b, first_head, begin, 0,
            sizes, CONFIG,
        )  # fmt: skip
    if SHARES_CODES:
        async_copy.commit_group()  # of the keys, if no query was copied
        async_copy.wait_group(0)
        barrier()  # All warps see the keys that were copied.
        k_left = left_tokens(k_s, sizes.D, ST)
        v_left = left_tokens(v_s, sizes.DV, ST)
    # The sums of both chunks of channels, or of one. In another order, ptxas spills more registers.
    dk0 = gl.zeros([KEYS, CHUNK], gl.float32, ST)
    dv0 = gl.zeros([KEYS, CHUNK], gl.float32, ST)
    dk1 = gl.zeros([KEYS, LAST_OF_K], gl.float32, ST)
    dv1 = gl.zeros([KEYS, LAST_OF_V], gl.float32, ST)
    n = 0
    for index in range(GROUPS):
        h = first_head + index
        # Without a limit on the left, no query after those that attend to all keys needs a mask.
        for PART in gl.static_range(PARTS if lengths.left is not None else PARTS - 1):
            part_begin, part_end = part_of(parts, PART)
            for block in range(part_begin, part_end):
                stage = n % STAGES
                _dor_base, dor_scales = head_pointers(do_right, lengths.cu_q, lengths.n_q, b, h)
                _qr_base, qr_scales = head_pointers(q_right, lengths.cu_q, lengths.n_q, b, h)
                n += 1
                # The last step copies queries that no step uses.
                wraps = block + 1 == end
                next_head = h
                if GROUPS > 1:
                    next_head = gl.minimum(h + wraps.to(gl.int32), first_head + GROUPS - 1)
                next_block = gl.where(wraps, begin, block + 1)
                async_copy.wait_group(0)
                barrier()  # All warps have finished the step before, and see what was copied.
                if STAGES == 2:
                    copy_queries(
                        q, do, q_right, do_right, row_stats, dq_sums, lengths, buffers, b,
                        next_head, next_block, n % STAGES, sizes, CONFIG,
                    )  # fmt: skip
                query = block * QUERIES
                queries = query + gl.arange(0, QUERIES, COLUMNS)

                if SHARES_CODES:
                    s = registers_product(k_left, buffers.q.index(stage), sizes.D, ST)
                else:
                    s = shared_product(k_s, buffers.q.index(stage), sizes.D, ST, _BYTES)
                if k.scale is None:
                    factor = _row_stats(buffers, stage, 0, COLUMNS)[None, :]
                elif k.TOKENS == BLOCK:  # as `operands.apply_k_scale` does
                    IN_BLOCK: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, BY_BLOCK))
                    factor = _row_stats(buffers, stage, 0, IN_BLOCK)[None, :]
                    factor = rows_of_blocks(factor * k_scale[:, None], ST)
                else:
                    # 1 / 1024 here and 1024 in the factor: see `operands.apply_k_scale`.
                    s = s * (k_scale * 0.0009765625)[:, None]
                    factor = _row_stats(buffers, stage, 0, COLUMNS)[None, :]
                s = scaled_sum(s, factor, _row_stats(buffers, stage, 1, COLUMNS)[None, :])
                if PART != 1:
                    visible = visible_queries(lengths, queries, first_query, last_query)
                    s = gl.where(visible, s, -float("inf"))
                p = gl.exp2(s)
                if ACROSS == 1:
                    largest = maxima(p, p_product, buffers.do_right, p_maxima)
                    if p_product.PER_TILE:
                        barrier()  # All warps have stored their maximum of P.
                    map, row_scale = rounded(p, largest, p_product, buffers.do_right, p_maxima)
                    dv0, dv1 = add_to_sums(
                        dv0, dv1, left_operand(map), row_scale, do_right, dor_scales, query,
                        buffers.do_right, buffers.do_scales, stage, CHUNKS,
                    )  # fmt: skip
                if SHARES_CODES:
                    dp = registers_product(v_left, buffers.do.index(stage), sizes.DV, ST)
                else:
                    dp = shared_product(v_s, buffers.do.index(stage), sizes.DV, ST, _BYTES)
                ds = p * (dp - _row_stats(buffers, stage, 2, COLUMNS)[None, :])
                if PART != 1:
                    ds = gl.where(visible, ds, 0.0)  # dP and delta may be NaN where P is 0
                if ACROSS == 1:
                    largest = maxima(ds, dk_product, buffers.q_right, ds_maxima)
                    if dk_product.PER_TILE:
                        barrier()  # All warps have stored their maximum of dS.
                    map, row_scale = rounded(ds, largest, dk_product, buffers.q_right, ds_maxima)
                    if SHARES_DS:
                        store_pairs(map, ds_s)
                    else:
                        ds_s.store(ds.to(ds_s.dtype))
                    dk0, dk1 = add_to_sums(
                        dk0, dk1, left_operand(map), row_scale, q_right, qr_scales, query,
                        buffers.q_right, buffers.q_scales, stage, CHUNKS,
                    )  # fmt: skip
                elif SHARES_CODES:
                    store_maxima(p, p_product, p_maxima, ACROSS)
                    store_maxima(ds, dk_product, ds_maxima, ACROSS)
                    if not SHARES_DS:
                        ds_s.store(ds)
                    barrier()  # All warps have stored their maxima.
                    p_scale = store_codes(p, p_product, p_maxima, p_s, ACROSS)
                    ds_scale = store_codes(ds, dk_product, ds_maxima, ds_of_dk, ACROSS)
                else:
                    p_s.store(p.to(p_s.dtype))
                    ds_s.store(ds.to(ds_s.dtype))
                inverse = _row_stats(buffers, stage, 3, gl.SliceLayout(1, DQ))[:, None]
                at = h.to(gl.int64) * dq_sums.tokens + start_q + query
                # All warps have stored dS, and, if none shares keys, need no copied queries.
                barrier()
                if ACROSS > 1:
                    if SHARES_CODES:
                        p_left = load_left_pairs(p_s, ST, ACROSS)
                        ds_left = load_left_pairs(ds_of_dk, ST, ACROSS)
                    else:
                        p_left = p_s.load(gl.DotOperandLayout(0, ST, 2))
                        ds_left = ds_s.load(gl.DotOperandLayout(0, ST, 2))
                        p_scale = 1.0
                        ds_scale = 1.0
                    dv0, dv1 = add_to_sums(
                        dv0, dv1, p_left, p_scale, do_right, dor_scales, query, buffers.do_right,
                        buffers.do_scales, stage, CHUNKS,
                    )  # fmt: skip
                    dk0, dk1 = add_to_sums(
                        dk0, dk1, ds_left, ds_scale, q_right, qr_scales, query, buffers.q_right,
                        buffers.q_scales, stage, CHUNKS,
                    )  # fmt: skip
                    if STAGES == 1:
                        barrier()  # All warps need no copied queries any more.
                if STAGES == 1:
                    copy_queries(
                        q, do, q_right, do_right, row_stats, dq_sums, lengths, buffers, b,
                        next_head, next_block, 0, sizes, CONFIG,
                    )  # fmt: skip
                add_to_dq(
                    ds_s, ds_maxima, inverse, k_right, kr_scales, first, second, kr_s, kr_scales_s,
                    dq_product, dq_sums, at, sizes.D, DS, CONFIG, DQ,
                )  # fmt: skip

    for c in gl.static_range(CHUNKS):
        dk_value = (dk1 if c else dk0) * scale
        dv_value = dv1 if c else dv0
        store_chunk(dk, lengths.cu_k, b, out_head, keys, n_stored, dk_value, c, sizes.D)
        store_chunk(dv, lengths.cu_k, b, out_head, keys, n_stored, dv_value, c, sizes.DV)
