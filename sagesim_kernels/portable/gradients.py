"""The gradients, in one program for each block of keys: dK, dV and its part of every row of dQ."""

from __future__ import annotations

import triton
import triton.language as tl

from sagesim_kernels.launching import wait_for_earlier_kernels
from sagesim_kernels.operands import (
    HeadIndex,
    add_part,
    apply_k_scale,
    attends_in,
    causal_offset,
    first_live_key,
    head_pointers,
    inverse_units,
    is_unmasked,
    key_bias,
    length_of,
    live_keys,
    live_queries,
    load_block,
    load_block_scales,
    load_channel_scales,
    load_k_mean,
    load_q_mean,
    load_rows,
    load_shift,
    load_token_scales,
    load_tokens,
    mark_nonfinite,
    program_coordinates,
    query_loops,
    store_tokens,
    stored_start_of,
    tanh,
    tokens_by_tokens,
    unmasked_keys,
)
from sagesim_kernels.portable.p_and_ds import (
    MapTile,
    QueryRows,
    add_bound_codes,
    add_product,
    bound_codes,
    load_row_scales,
    part_of_bound_codes,
    part_of_dq,
    store_bound_codes,
)


@triton.jit
def gradients_kernel(
    grid,
    q,
    k,
    do,
    v,
    q_right,
    do_right,
    k_right,
    subtracted,
    softcap,
    lse2,
    delta,
    dq_sums,
    row_scales,
    dk,
    dv,
    p_trace,
    dq_trace,
    dk_trace,
    lengths,
    p_product,
    dq_product,
    dk_product,
    scale,
    sizes,
    STEP: tl.constexpr,
    IS_SHORT: tl.constexpr,
):
    """Compute dK and dV of a block of keys, summed over the query heads of its group.

    Also add the block's part of dQ to the sums of every query that attends to it. A gradient whose
    argument is None is not computed. Maps are transposed: their rows are keys.

    q, k, do, v: `Operand` of qk_recompute and dp. q_right, do_right, k_right: the right operands of
    dK, dV and dQ. subtracted: `SubtractedMeans`. softcap: `Softcap`. dq_sums: `DqSums`, or
    None. row_scales: `RowScales`, or None. p_trace, dq_trace, dk_trace: `MapTrace`, or None.
    p_product, dq_product, dk_product: `MapProduct`. scale: `LogitScale`. STEP: queries of a step.
    IS_SHORT: whether a step is short to save shared memory.
    """
    wait_for_earlier_kernels()
    tile, k_head, b = program_coordinates(grid)
    first = tile * sizes.TILE
    n_stored = length_of(lengths.cu_k, lengths.n_k, b)
    if first >= n_stored:
        return
    first_live, n_q = live_queries(lengths, b)
    n_k, first_key = live_keys(lengths, b), first_live_key(lengths, b)
    offset = causal_offset(lengths, b)
    keys = (first + tl.arange(0, sizes.TILE))[:, None]
    live = None
    if lengths.key_mask is not None:
        live = is_unmasked(lengths, b, first + tl.arange(0, sizes.TILE), n_k)

    k_base, k_scales = head_pointers(k, lengths.cu_k, lengths.n_k, b, k_head)
    v_base, v_scales = head_pointers(v, lengths.cu_k, lengths.n_k, b, k_head)
    k_tile = load_tokens(k, k_base, first, sizes.TILE, n_k, sizes.D_PAD, first_key, live)
    k_scale = load_token_scales(k, k_scales, first, sizes.TILE, n_k)[:, None]
    v_tile = load_tokens(v, v_base, first, sizes.TILE, n_k, sizes.DV_PAD, first_key, live)
    v_scale = load_token_scales(v, v_scales, first, sizes.TILE, n_k)[:, None]
    if dq_sums is not None:
        right_base, scales = head_pointers(k_right, lengths.cu_k, lengths.n_k, b, k_head)
        if dq_product.SAME_RIGHT:
            k_right_tile = k_tile
        else:
            k_right_tile = load_tokens(
                k_right, right_base, first, sizes.TILE, n_k, sizes.D_PAD, first_key, live
            )
        k_right_scale = load_channel_scales(k_right, scales, first, sizes.D, sizes.D_PAD)

    dk_total = tl.zeros((sizes.TILE, sizes.D_PAD), tl.float32)
    dv_total = tl.zeros((sizes.TILE, sizes.DV_PAD), tl.float32)
    begin, whole, whole_end, end = query_loops(
        lengths, b, first, sizes.TILE, STEP, n_k, offset, first_live, n_q
    )
    if lengths.key_mask is not None:
        unmasked = unmasked_keys(lengths, b, first, tl.minimum(first + sizes.TILE, n_k))
        end = tl.where(unmasked > 0, end, begin)
        whole = end
        whole_end = end
    for index in range(k_head * sizes.GROUPS, (k_head + 1) * sizes.GROUPS):
        h = tl.cast(index, tl.int32)
        z = b * (grid.heads * sizes.GROUPS) + h
        stored = tl.cast(0, tl.int64)
        if dq_sums is not None:
            stored = h.to(tl.int64) * dq_sums.tokens
            stored += stored_start_of(lengths.cu_q, lengths.n_q, b)
        q_base, q_scales = head_pointers(q, lengths.cu_q, lengths.n_q, b, h)
        do_base, do_scales = head_pointers(do, lengths.cu_q, lengths.n_q, b, h)
        qr_base, qr_scales = head_pointers(q_right, lengths.cu_q, lengths.n_q, b, h)
        dor_base, dor_scales = head_pointers(do_right, lengths.cu_q, lengths.n_q, b, h)
        # Parts: 2, the last queries that attend to the block; 1, the first ones; 0, those that
        # attend to all of it, without a mask.
        for PART in tl.static_range(  # pyright: ignore[reportGeneralTypeIssues]
            1 if lengths.left is None else 2, -1 if lengths.key_mask is None else 0, -1
        ):
            for query in range(
                whole if PART == 0 else begin if PART == 1 else whole_end,
                whole_end if PART == 0 else whole if PART == 1 else end,
                STEP,
            ):
                row = query + tl.arange(0, STEP)
                queries = row[None, :]
                rows = QueryRows(lengths.cu_q, b, h, row, n_q)
                at = MapTile(z, queries, keys, lengths.n_q, lengths.n_k)
                row_lse2 = load_rows(lse2, lengths.cu_q, b, h, row, n_q, float("inf"))
                has_keys = None
                if lengths.key_mask is not None:
                    has_keys = row_lse2 != float("inf")
                q_tile = load_block(
                    q, q_base, query, STEP, n_q, sizes.D_PAD, False, first_live, has_keys
                )
                q_scale = load_block_scales(q, q_scales, query, STEP)
                factor = (q_scale * scale.base2)[None, :]
                s, factor = apply_k_scale(
                    tokens_by_tokens(k_tile, q_tile), factor, k, k_scale, sizes.BLOCK_K
                )
                if subtracted.q_mean is not None:
                    block = query // sizes.BLOCK_Q
                    head = HeadIndex(b, h, k_head)
                    bias = key_bias(subtracted, lengths, head, block, first, sizes.TILE, n_k, sizes)
                    s = s * factor + bias[:, None] * scale.base2
                    factor = tl.full((1, 1), 1.0, tl.float32)
                slope = None
                if softcap.base2 is not None:
                    shift = load_shift(softcap, lengths.cu_q, b, h, row, n_q)[None, :]
                    s = tanh(tl.fma(s, factor, shift))
                    slope = tl.fma(-s, s, 1.0)
                    s *= softcap.base2
                elif subtracted.q_mean is None:
                    s = s * factor
                s -= row_lse2[None, :]
                if PART > 0:
                    visible = attends_in(lengths, b, queries, keys, n_k, offset)
                    s = tl.where(visible, s, -float("inf"))
                p = tl.exp2(s)
                do_tile = load_block(
                    do, do_base, query, STEP, n_q, sizes.DV_PAD, False, first_live, has_keys
                )
                do_scale = load_block_scales(do, do_scales, query, STEP)[None, :]
                if dv is not None:
                    do_right_tile = do_tile
                    if not p_product.SAME_RIGHT:
                        do_right_tile = load_block(
                            do_right,
                            dor_base,
                            query,
                            STEP,
                            n_q,
                            sizes.DV_PAD,
                            False,
                            first_live,
                            has_keys,
                        )
                    do_right_scale = load_channel_scales(
                        do_right, dor_scales, query, sizes.DV, sizes.DV_PAD
                    )
                    if p_product.BY_BOUND:
                        p_inverse, p_scale = load_row_scales(
                            row_scales.p_inverse, row_scales.p_scale, row_scales, rows
                        )
                        codes = bound_codes(p, p_inverse, p_product, at)
                        store_bound_codes(p_trace, codes, p_inverse, p_scale, p_product, at)
                        dv_total = add_bound_codes(
                            dv_total, codes, do_right_tile, do_right_scale, p_product
                        )
                    else:
                        dv_total = add_product(
                            dv_total, p, do_right_tile, do_right_scale, p_product, p_trace, at
                        )
                if dk is not None or dq_sums is not None:
                    dp = tokens_by_tokens(v_tile, do_tile) * (do_scale * v_scale)
                    row_delta = load_rows(delta, lengths.cu_q, b, h, row, n_q, 0.0)
                    ds = p * (dp - row_delta[None, :])
                    if slope is not None:
                        ds *= slope
                    if PART > 0:
                        ds = tl.where(visible, ds, 0.0)  # dP and delta may be NaN where P is 0
                if dk is not None:
                    q_right_tile = q_tile
                    if not dk_product.SAME_RIGHT:
                        q_right_tile = load_block(
                            q_right,
                            qr_base,
                            query,
                            STEP,
                            n_q,
                            sizes.D_PAD,
                            False,
                            first_live,
                            has_keys,
                        )
                    q_right_scale = load_channel_scales(
                        q_right, qr_scales, query, sizes.D, sizes.D_PAD
                    )
                    if dk_product.BY_BOUND:
                        dk_inverse, dk_scale = load_row_scales(
                            row_scales.dk_inverse, row_scales.dk_scale, row_scales, rows
                        )
                        dk_codes = bound_codes(ds, dk_inverse, dk_product, at)
                        store_bound_codes(dk_trace, dk_codes, dk_inverse, dk_scale, dk_product, at)
                        dk_total = add_bound_codes(
                            dk_total, dk_codes, q_right_tile, q_right_scale, dk_product
                        )
                    else:
                        dk_total = add_product(
                            dk_total, ds, q_right_tile, q_right_scale, dk_product, dk_trace, at
                        )
                    if subtracted.q_mean is not None:
                        # dK is dS^T Q before smoothing: add dS^T 1 times the mean of Q.
                        block = query // sizes.BLOCK_Q
                        mean = load_q_mean(subtracted, b, h, block, sizes)
                        dk_total += tl.sum(ds, 1)[:, None] * mean
                if dq_sums is not None:
                    if IS_SHORT and not dq_product.SAME_RIGHT:
                        # A short step saves shared memory: K occupies none for the whole loop.
                        k_right_tile = load_tokens(
                            k_right,
                            right_base,
                            first,
                            sizes.TILE,
                            n_k,
                            sizes.D_PAD,
                            first_key,
                            live,
                        )
                    inverse_unit = inverse_units(dq_sums, stored + query, STEP)[:, None]
                    if dq_product.BY_BOUND:
                        dq_inverse, dq_scale = load_row_scales(
                            row_scales.dq_inverse, row_scales.dq_scale, row_scales, rows
                        )
                        if dq_product.SAME_CODES and dk is not None:
                            dq_codes = dk_codes
                        else:
                            dq_codes = bound_codes(ds, dq_inverse, dq_product, at)
                        store_bound_codes(dq_trace, dq_codes, dq_inverse, dq_scale, dq_product, at)
                        part = part_of_bound_codes(
                            dq_codes,
                            dq_scale,
                            k_right_tile,
                            inverse_unit,
                            k_right_scale,
                            dq_product,
                        )
                    else:
                        part = part_of_dq(
                            ds,
                            k_right_tile,
                            inverse_unit,
                            k_right_scale,
                            dq_product,
                            dq_trace,
                            at,
                        )
                    if softcap.base2 is not None and subtracted.k_mean is not None:
                        # Rows of dS do not sum to 0: add dS 1 times the mean of K.
                        inverse = inverse_units(dq_sums, stored + query, STEP)[:, None]
                        ds_sum = tl.sum(ds, 0)[:, None]
                        mean = load_k_mean(subtracted, b, k_head, sizes)
                        # As in `part_of_dq`: only for codes is a unit so large that dS / unit
                        # is finite, and only in 16 bit is dS times the mean.
                        if k_right.scale is not None:
                            part += ds_sum * inverse * mean
                        else:
                            part += ds_sum * mean * inverse
                    # In 16 bit, dS may overflow.
                    if k_right.scale is None and k_right_tile.dtype == tl.float16:
                        mark_nonfinite(dq_sums, stored + query, part)
                    add_part(dq_sums, stored + query, part)

    if dk is not None:
        dk_value = dk_total * scale.natural
        store_tokens(dk, lengths.cu_k, b, k_head, first, n_stored, dk_value, sizes.D)
    if dv is not None:
        store_tokens(dv, lengths.cu_k, b, k_head, first, n_stored, dv_total, sizes.DV)
