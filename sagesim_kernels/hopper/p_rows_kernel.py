"""Sums over rows of P for Hopper, delta from P, and the largest P of each row."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sagesim_kernels.hopper.backward_kernel import BARRIER
from sagesim_kernels.hopper.p_rows_warps import (
    BLOCK,
    CONSUMERS,
    STAGES,
    TILE,
    RowBuffers,
    RowInputs,
    RowMask,
    RowPointers,
    RowTile,
    compute_rows,
    load_queries_and_keys,
)
from sagesim_kernels.hopper.token_loads import key_origin, origin_of
from sagesim_kernels.launching import wait_for_earlier_kernels
from sagesim_kernels.operands import (
    causal_offset,
    head_pointers,
    key_loops_without_padding,
    key_mask_of,
    length_of,
    live_keys,
    lowest_diagonal,
    program_coordinates,
    row_base,
    stored_start_of,
)


@gluon.jit
def _tile_of(lengths, b, first, ROWS: gl.constexpr, mask, last):
    """Return the `RowTile` of queries first..first + ROWS of sequence b.

    mask: `RowMask`. last: no block from there on is part of it; None: no limit.
    """
    begin, whole, whole_end, end = key_loops_without_padding(
        lengths, b, first, ROWS, BLOCK, mask.n_k, mask.offset
    )
    begin = begin // BLOCK
    end = gl.maximum(end + BLOCK - 1, 0) // BLOCK  # queries may attend to no key
    if last is not None:
        begin = gl.minimum(begin, last)
        end = gl.minimum(end, last)
    end = gl.where(first < mask.n_q, gl.maximum(end, begin), begin)
    whole = gl.maximum(gl.minimum(whole // BLOCK, end), begin)
    whole_end = gl.maximum(gl.minimum(whole_end // BLOCK, end), whole)
    return RowTile(first, begin, whole, whole_end, end)


@gluon.jit
def hopper_p_rows(
    grid, q8, do, k8, v, key_scales, q, k, lse2, delta, p_sums, p_bound, d_lse, lengths, tokens_q,
    tokens_k, scale_log2, KD: gl.constexpr, VD: gl.constexpr, GROUPS: gl.constexpr,
    COPIED: gl.constexpr,
):  # fmt: skip
    """Compute rowsum(P), rowsum(P o dP) as delta, and the largest P of a tile of queries.

    What has no memory is not computed. Delta needs the sums of P.

    Args:
        q8, do, k8, v, key_scales: TMA descriptors, see `RowInputs`. do and v are None without
            delta.
        q, k: `Operand` of qk_recompute, for their scales.
        lse2, delta, p_sums, p_bound, d_lse: `Rows`; all but lse2 may be None.
        tokens_q, tokens_k: tokens of a head in padded storage.
        KD, VD: channels of K and V.
        COPIED: `Copied`.
    """
    wait_for_earlier_kernels()
    D: gl.constexpr = q8.block_shape[1]
    Q_TOKENS: gl.constexpr = q.TOKENS
    tile, h, b = program_coordinates(grid, lengths.IS_CAUSAL)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = tile * TILE
    if first >= n_q:
        return
    k_head = h // GROUPS
    lowest = None
    key_mask = None
    if lengths.left is not None:
        lowest = lowest_diagonal(lengths, b)
    if lengths.key_mask is not None:
        key_mask = key_mask_of(lengths, b)
    mask = RowMask(n_q, live_keys(lengths, b), causal_offset(lengths, b), lowest, key_mask)
    start_q = stored_start_of(lengths.cu_q, lengths.n_q, b).to(gl.int32)
    start_k = stored_start_of(lengths.cu_k, lengths.n_k, b).to(gl.int32)
    q_origin = origin_of(COPIED.queries, lengths.cu_q, b, h, start_q)
    k_origin = q_origin
    if delta is not None:
        k_origin = key_origin(v, COPIED.keys, lengths.cu_k, b, k_head, start_k, mask.n_k)
    do_s = None
    v_s = None
    if delta is not None:
        dt: gl.constexpr = v.dtype
        TOKENS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, D], dt)
        do_s = gl.allocate_shared_memory(dt, [CONSUMERS, BLOCK, D], TOKENS)
        v_s = gl.allocate_shared_memory(dt, [STAGES, BLOCK, D], TOKENS)
    k_scale_s = None
    if key_scales is not None:
        k_scale_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], key_scales.layout)
    buffers = RowBuffers(
        gl.allocate_shared_memory(gl.int8, [CONSUMERS, BLOCK, D], q8.layout),
        do_s,
        gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK, D], k8.layout),
        v_s,
        k_scale_s,
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    mbarrier.init(buffers.q_full, 1)
    for i in gl.static_range(STAGES):
        mbarrier.init(buffers.full.index(i), 1)
        mbarrier.init(buffers.empty.index(i), CONSUMERS)
    fence_async_shared()
    mbarrier.expect(buffers.q_full, TILE * D * (1 if delta is None else 3))
    inputs = RowInputs(q8, do, k8, v, key_scales)
    _, q_scales = head_pointers(q, lengths.cu_q, lengths.n_q, b, h)
    _, block_scales = head_pointers(k, lengths.cu_k, lengths.n_k, b, k_head)
    row_delta = None
    row_sums = None
    row_bound = None
    row_d_lse = None
    if delta is not None:
        row_delta = row_base(delta, lengths.cu_q, b, h)
    if p_sums is not None:
        row_sums = row_base(p_sums, lengths.cu_q, b, h)
    if p_bound is not None:
        row_bound = row_base(p_bound, lengths.cu_q, b, h)
    if d_lse is not None:
        row_d_lse = row_base(d_lse, lengths.cu_q, b, h)
    row_lse2 = row_base(lse2, lengths.cu_q, b, h)
    rows = RowPointers(row_lse2, row_delta, row_sums, row_bound, row_d_lse, q_scales)
    blocks = _tile_of(lengths, b, first, TILE, mask, None)
    gl.warp_specialize(
        [  # Gluon's comprehensions iterate over tuples, not over ranges
            (
                compute_rows,
                (
                    i, buffers, block_scales, k.scale_stride_n, rows, blocks,
                    _tile_of(lengths, b, first + i * BLOCK, BLOCK, mask, blocks.end), mask,
                    scale_log2, KD, VD, Q_TOKENS, k.TOKENS,
                ),
            )
            if i < CONSUMERS
            else (
                load_queries_and_keys,
                (
                    inputs, buffers, q_origin, k_origin, h * tokens_q + start_q,
                    k_head * tokens_k + start_k, blocks,
                ),
            )
            for i in (0, 1, 2, 3, 4)
        ],
        [4, 4, 4, 1],
        [112, 112, 112, 24],
    )  # fmt: skip
