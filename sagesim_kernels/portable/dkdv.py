"""dK and dV, in one program for each tile of keys."""

from __future__ import annotations

import triton
import triton.language as tl

from sagesim_kernels.operands import (
    HeadIndex,
    apply_k_scale,
    attends,
    causal_offset,
    head_pointers,
    key_bias,
    length_of,
    live_keys,
    live_queries,
    load_block,
    load_block_scales,
    load_channel_scales,
    load_q_mean,
    load_rows,
    load_token_scales,
    load_tokens,
    program_coordinates,
    query_loop_bounds,
    store_tokens,
    tokens_by_tokens,
)
from sagesim_kernels.portable.p_and_ds import MapTile, add_product


@triton.jit
def dkdv_kernel(
    grid,
    q,
    k,
    do,
    v,
    q_right,
    do_right,
    subtracted,
    lse2,
    delta,
    dk,
    dv,
    p_trace,
    ds_trace,
    lengths,
    p_product,
    ds_product,
    scale,
    sizes,
):
    """Compute dK and dV of a tile of keys, summed over the query heads of its group.

    If dk or dv is None, compute only the other one. Maps are transposed: their rows are keys.

    q, k, do, v: `Operand` of qk_recompute and dp. q_right, do_right: Q and dO as the right operands
    of dK and dV. subtracted: `SubtractedMeans`. p_trace, ds_trace: `MapTrace`, or None. p_product,
    ds_product: `MapProduct`. scale: `LogitScale`.
    """
    tile, k_head, b = program_coordinates(grid)
    first = tile * sizes.TILE
    n_stored = length_of(lengths.cu_k, lengths.n_k, b)
    if first >= n_stored:
        return
    first_live, n_q = live_queries(lengths, b)
    n_k = live_keys(lengths, b)
    offset = causal_offset(lengths, b)
    keys = (first + tl.arange(0, sizes.TILE))[:, None]

    k_base, k_scales = head_pointers(k, lengths.cu_k, lengths.n_k, b, k_head)
    v_base, v_scales = head_pointers(v, lengths.cu_k, lengths.n_k, b, k_head)
    k_tile = load_tokens(k, k_base, first, sizes.TILE, n_k, sizes.D_PAD)
    k_scale = load_token_scales(k, k_scales, first, sizes.TILE, n_k)[:, None]
    v_tile = load_tokens(v, v_base, first, sizes.TILE, n_k, sizes.DV_PAD)
    v_scale = load_token_scales(v, v_scales, first, sizes.TILE, n_k)[:, None]

    dk_total = tl.zeros((sizes.TILE, sizes.D_PAD), tl.float32)
    dv_total = tl.zeros((sizes.TILE, sizes.DV_PAD), tl.float32)
    begin, unmasked_begin = query_loop_bounds(
        first, sizes.TILE, sizes.BLOCK_Q, n_k, offset, first_live, n_q
    )
    for index in range(k_head * sizes.GROUPS, (k_head + 1) * sizes.GROUPS):
        h = tl.cast(index, tl.int32)
        z = b * (grid.heads * sizes.GROUPS) + h
        q_base, q_scales = head_pointers(q, lengths.cu_q, lengths.n_q, b, h)
        do_base, do_scales = head_pointers(do, lengths.cu_q, lengths.n_q, b, h)
        qr_base, qr_scales = head_pointers(q_right, lengths.cu_q, lengths.n_q, b, h)
        dor_base, dor_scales = head_pointers(do_right, lengths.cu_q, lengths.n_q, b, h)
        for MASKED in tl.static_range(1, -1, -1):  # pyright: ignore[reportGeneralTypeIssues]
            for query in range(
                begin if MASKED else unmasked_begin,
                unmasked_begin if MASKED else n_q,
                sizes.BLOCK_Q,
            ):
                row = query + tl.arange(0, sizes.BLOCK_Q)
                queries = row[None, :]
                q_tile = load_block(
                    q, q_base, query, sizes.BLOCK_Q, n_q, sizes.D_PAD, False, first_live
                )
                q_scale = load_block_scales(q, q_scales, query, sizes.BLOCK_Q)
                factor = (q_scale * scale.base2)[None, :]
                s, factor = apply_k_scale(
                    tokens_by_tokens(k_tile, q_tile), factor, k, k_scale, sizes.BLOCK_K
                )
                row_lse2 = load_rows(lse2, lengths.cu_q, b, h, row, n_q, float("inf"))[None, :]
                if subtracted.q_mean is not None:
                    block = query // sizes.BLOCK_Q
                    head = HeadIndex(b, h, k_head)
                    bias = key_bias(subtracted, lengths, head, block, first, sizes.TILE, n_k, sizes)
                    s = s * factor + bias[:, None] * scale.base2 - row_lse2
                else:
                    s = s * factor - row_lse2
                if MASKED:
                    visible = attends(queries, keys, n_k, offset)
                    s = tl.where(visible, s, -float("inf"))
                p = tl.exp2(s)
                do_tile = load_block(
                    do, do_base, query, sizes.BLOCK_Q, n_q, sizes.DV_PAD, False, first_live
                )
                do_scale = load_block_scales(do, do_scales, query, sizes.BLOCK_Q)[None, :]
                if dv is not None:
                    dv_total = add_product(
                        dv_total,
                        p,
                        do_tile
                        if p_product.SAME_RIGHT
                        else load_block(
                            do_right,
                            dor_base,
                            query,
                            sizes.BLOCK_Q,
                            n_q,
                            sizes.DV_PAD,
                            False,
                            first_live,
                        ),
                        load_channel_scales(do_right, dor_scales, query, sizes.DV, sizes.DV_PAD),
                        p_product,
                        p_trace,
                        MapTile(z, queries, keys, lengths.n_q, lengths.n_k),
                    )
                if dk is not None:
                    dp = tokens_by_tokens(v_tile, do_tile) * (do_scale * v_scale)
                    row_delta = load_rows(delta, lengths.cu_q, b, h, row, n_q, 0.0)
                    ds = p * (dp - row_delta[None, :])
                    if MASKED:
                        ds = tl.where(visible, ds, 0.0)  # dP and delta may be NaN where P is 0
                    dk_total = add_product(
                        dk_total,
                        ds,
                        q_tile
                        if ds_product.SAME_RIGHT
                        else load_block(
                            q_right,
                            qr_base,
                            query,
                            sizes.BLOCK_Q,
                            n_q,
                            sizes.D_PAD,
                            False,
                            first_live,
                        ),
                        load_channel_scales(q_right, qr_scales, query, sizes.D, sizes.D_PAD),
                        ds_product,
                        ds_trace,
                        MapTile(z, queries, keys, lengths.n_q, lengths.n_k),
                    )
                    if subtracted.q_mean is not None:
                        # dK is dS^T Q before smoothing: add dS^T 1 times the mean of Q.
                        block = query // sizes.BLOCK_Q
                        mean = load_q_mean(subtracted, b, h, block, sizes)
                        dk_total += tl.sum(ds, 1)[:, None] * mean

    if dk is not None:
        dk_value = dk_total * scale.natural
        store_tokens(dk, lengths.cu_k, b, k_head, first, n_stored, dk_value, sizes.D)
    if dv is not None:
        store_tokens(dv, lengths.cu_k, b, k_head, first, n_stored, dv_total, sizes.DV)
