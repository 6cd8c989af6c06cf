"""Sums over rows of P for mma.sync: delta from P, and the sums of P."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from sagesim_kernels.ampere.device import (
    BLOCK,
    apply_k_scale,
    block_scale,
    copy_token_scales,
    copy_tokens,
    left_tokens,
    query_factors,
    registers_product,
    rows_layout,
    scaled_difference,
    token_scale_buffer,
)
from sagesim_kernels.ampere.parts import PARTS, key_parts, visible_keys
from sagesim_kernels.gluon_compat import barrier
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
    row_base,
    upper_lse2,
)
from sagesim_kernels.partial_sums import add_partial_products, partial_sums


@gluon.jit
def _copy_keys(
    k, v, k_base, v_base, k_scales, key, lowest, n_k, k_s, v_s, k_scales_s, stage
):  # fmt: skip
    """Start to copy a block of keys and values to a stage; see `copy_tokens`."""
    copy_tokens(k, k_base, key, lowest, n_k, k_s.index(stage))
    copy_token_scales(k, k_scales, key, n_k, k_scales_s, stage)
    copy_tokens(v, v_base, key, lowest, n_k, v_s.index(stage))
    async_copy.commit_group()


@gluon.jit
def ampere_p_rows(
    grid, q, k, do, v, lse2, delta, p_sums, d_lse, lengths, scale_log2, sizes, CONFIG: gl.constexpr
):
    """Compute rowsum(P) of a tile of queries unless p_sums is None, and delta unless it is None.

    The arguments are those of `portable.p_rows.p_rows_kernel`. do and v are in 16 bit.
    CONFIG: `RowConfig`.
    """
    wait_for_earlier_kernels()
    TILE: gl.constexpr = CONFIG.queries
    STAGES: gl.constexpr = CONFIG.stages
    CHANNELS: gl.constexpr = CONFIG.channels
    BITS: gl.constexpr = q.ptr.dtype.element_ty.primitive_bitwidth
    QT: gl.constexpr = q.ptr.dtype.element_ty
    VT: gl.constexpr = v.ptr.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    ROWS: gl.constexpr = gl.SliceLayout(1, ACC)

    tile, h, b = program_coordinates(grid, lengths.IS_CAUSAL)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = tile * TILE
    if first >= n_q:
        return
    k_head = h // sizes.GROUPS
    first_live, _unused = live_queries(lengths, b)
    n_k, first_key = live_keys(lengths, b), first_live_key(lengths, b)
    offset = causal_offset(lengths, b)
    queries = first + gl.arange(0, TILE, ROWS)
    end_of_keys = gl.minimum(queries + offset + 1, n_k)  # that a query attends to

    q_base, q_scales = head_pointers(q, lengths.cu_q, lengths.n_q, b, h)
    do_base, _do_scales = head_pointers(do, lengths.cu_q, lengths.n_q, b, h)
    k_base, k_scales = head_pointers(k, lengths.cu_k, lengths.n_k, b, k_head)
    v_base, _v_scales = head_pointers(v, lengths.cu_k, lengths.n_k, b, k_head)
    q_s = gl.allocate_shared_memory(QT, [TILE, CHANNELS], rows_layout(CHANNELS, BITS))
    do_s = gl.allocate_shared_memory(VT, [TILE, CHANNELS], rows_layout(CHANNELS, 16))
    k_s = gl.allocate_shared_memory(QT, [STAGES, BLOCK, CHANNELS], rows_layout(CHANNELS, BITS))
    k_scales_s = token_scale_buffer(k, k_s)
    v_s = gl.allocate_shared_memory(VT, [STAGES, BLOCK, CHANNELS], rows_layout(CHANNELS, 16))

    parts = key_parts(lengths, b, first, TILE, n_k, offset)
    begin = parts.begin + parts.whole_end * 0  # opaque to the compiler, see `key_loop_bounds`
    end = parts.end
    copy_tokens(q, q_base, first, first_live, n_q, q_s)
    copy_tokens(do, do_base, first, first_live, n_q, do_s)
    async_copy.commit_group()
    if begin < end:
        _copy_keys(k, v, k_base, v_base, k_scales, begin, first_key, n_k, k_s, v_s, k_scales_s, 0)
    factor = query_factors(q, q_scales, queries, n_q, scale_log2)
    is_query = queries < n_q
    lse2_ptrs = row_base(lse2, lengths.cu_q, b, h) + queries
    row_lse2 = upper_lse2(gl.load(lse2_ptrs, mask=is_query, other=float("inf")))

    p_sum = partial_sums(gl.zeros([TILE, BLOCK], gl.float32, ACC))
    delta_sum = p_sum
    k_scale = block_scale(k, k_scales, begin, begin < end)
    async_copy.wait_group(0)
    barrier()  # All warps see the queries that were copied.
    q_left = left_tokens(q_s, sizes.D, ACC)
    do_left = left_tokens(do_s, sizes.DV, ACC)
    n = 0
    # Without a limit on the left and a key mask, there are no masked keys before the second part.
    FIRST_PART: gl.constexpr = 1 if lengths.left is None and lengths.key_mask is None else 0
    for PART in gl.static_range(FIRST_PART, PARTS):
        part_begin, part_end = part_of(parts, PART)
        for key in range(part_begin, part_end, BLOCK):
            stage = n % STAGES
            n += 1
            # The last step copies keys that no step uses.
            next_key = gl.where(key + BLOCK < end, key + BLOCK, key)
            async_copy.wait_group(0)
            barrier()  # All warps have finished the step before, and see what was copied.
            _copy_keys(
                k, v, k_base, v_base, k_scales, next_key, first_key, n_k, k_s, v_s, k_scales_s,
                n % STAGES,
            )  # fmt: skip
            this_scale = k_scale
            k_scale = block_scale(k, k_scales, next_key, True)
            s = registers_product(q_left, k_s.index(stage), sizes.D, ACC)
            s, tile_factor = apply_k_scale(s, factor, k, this_scale, k_scales_s.index(stage))
            s = scaled_difference(s, tile_factor[:, None], row_lse2[:, None])
            if PART != 1:
                keys = key + gl.arange(0, BLOCK, gl.SliceLayout(0, ACC))
                visible = visible_keys(lengths, b, queries, end_of_keys, keys, n_k)
                s = gl.where(visible, s, -float("inf"))
            p = gl.exp2(s)
            if p_sums is not None:
                p_sum += partial_sums(p)
            if delta is not None:
                dp = registers_product(do_left, v_s.index(stage), sizes.DV, ACC)
                if PART != 1:
                    dp = gl.where(visible, dp, 0.0)  # it may be NaN where P is 0
                delta_sum = add_partial_products(delta_sum, p, dp)

    if p_sums is not None:
        sums = gl.convert_layout(gl.sum(p_sum, 1), ROWS)
        gl.store(row_base(p_sums, lengths.cu_q, b, h) + queries, sums, mask=is_query)
    if delta is not None:
        row_delta = gl.convert_layout(gl.sum(delta_sum, 1), ROWS)
        if d_lse is not None:
            gain = row_base(d_lse, lengths.cu_q, b, h) + queries
            row_delta -= gl.load(gain, mask=is_query, other=0.0)
        row_delta = gl.where(row_lse2 == float("inf"), 0.0, row_delta)
        gl.store(row_base(delta, lengths.cu_q, b, h) + queries, row_delta, mask=is_query)
