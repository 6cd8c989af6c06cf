"""dK and dV, in a program for each tile of keys."""

from __future__ import annotations

import triton
import triton.language as tl

from sagesim_kernels.delta import load_rows
from sagesim_kernels.layout import (
    causal_offset,
    length_of,
    live_keys,
    live_queries,
    place_in,
    queries_seeing,
    sees,
    store_tokens,
)
from sagesim_kernels.maps import add_product
from sagesim_kernels.operands import (
    base_of,
    load_block,
    load_block_scales,
    load_channel_scales,
    load_token_scales,
    load_tokens,
    tokens_by_tokens,
    with_k_scale,
)
from sagesim_kernels.smoothing import key_bias, mean_of


@triton.jit
def key_tiles(
    grid,
    q,
    k,
    do,
    v,
    q_right,
    do_right,
    q_mean,
    k_mean,
    raw_k,
    lse2,
    delta,
    dk,
    dv,
    p_trace,
    ds_trace,
    lengths,
    p_rounding,
    ds_rounding,
    scale,
    scale_log2,
    SAME_Q: tl.constexpr,
    SAME_DO: tl.constexpr,
    P_PER_TILE: tl.constexpr,
    DS_PER_TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
):
    """dK and dV of a tile of keys, added over the query heads of its group; where either is None,
    the other. Maps are transposed.

    SAME_Q, SAME_DO: q_right is q, do_right is do, and they are loaded once.
    """
    tile, k_head, b = place_in(grid)
    first = tile * TILE
    n_stored = length_of(lengths.cu_k, lengths.n_k, b)
    if first >= n_stored:
        return
    first_live, n_q = live_queries(lengths, b)
    n_k = live_keys(lengths, b)
    offset = causal_offset(lengths, b)
    keys = (first + tl.arange(0, TILE))[:, None]

    k_base, k_scales = base_of(k, lengths.cu_k, lengths.n_k, b, k_head)
    v_base, v_scales = base_of(v, lengths.cu_k, lengths.n_k, b, k_head)
    k_tile = load_tokens(k, k_base, first, TILE, n_k, D_PAD)
    k_scale = load_token_scales(k, k_scales, first, TILE, n_k)[:, None]
    v_tile = load_tokens(v, v_base, first, TILE, n_k, DV_PAD)
    v_scale = load_token_scales(v, v_scales, first, TILE, n_k)[:, None]

    dk_total = tl.zeros((TILE, D_PAD), tl.float32)
    dv_total = tl.zeros((TILE, DV_PAD), tl.float32)
    begin, seeing = queries_seeing(first, TILE, BLOCK_Q, n_k, offset, first_live, n_q)
    for head in range(k_head * GROUPS, (k_head + 1) * GROUPS):
        h = tl.cast(head, tl.int32)
        z = b * (grid.heads * GROUPS) + h
        q_base, q_scales = base_of(q, lengths.cu_q, lengths.n_q, b, h)
        do_base, do_scales = base_of(do, lengths.cu_q, lengths.n_q, b, h)
        qr_base, qr_scales = base_of(q_right, lengths.cu_q, lengths.n_q, b, h)
        dor_base, dor_scales = base_of(do_right, lengths.cu_q, lengths.n_q, b, h)
        for MASKED in tl.static_range(1, -1, -1):  # pyright: ignore[reportGeneralTypeIssues]
            for query in range(begin if MASKED else seeing, seeing if MASKED else n_q, BLOCK_Q):
                row = query + tl.arange(0, BLOCK_Q)
                queries = row[None, :]
                q_tile = load_block(q, q_base, query, BLOCK_Q, n_q, D_PAD, False, first_live)
                q_scale = load_block_scales(q, q_scales, query, BLOCK_Q)
                factor = (q_scale * scale_log2)[None, :]
                s, factor = with_k_scale(
                    tokens_by_tokens(k_tile, q_tile), factor, k, k_scale, BLOCK_K
                )
                row_lse2 = load_rows(lse2, lengths.cu_q, b, h, row, n_q, float("inf"))[None, :]
                if q_mean is not None:
                    block = query // BLOCK_Q
                    bias = key_bias(
                        q_mean,
                        k_mean,
                        raw_k,
                        lengths,
                        b,
                        h,
                        k_head,
                        block,
                        first,
                        TILE,
                        n_k,
                        D,
                        D_PAD,
                    )
                    s = s * factor + bias[:, None] * scale_log2 - row_lse2
                else:
                    s = s * factor - row_lse2
                if MASKED:
                    visible = sees(queries, keys, n_k, offset)
                    s = tl.where(visible, s, -float("inf"))
                p = tl.exp2(s)
                do_tile = load_block(do, do_base, query, BLOCK_Q, n_q, DV_PAD, False, first_live)
                do_scale = load_block_scales(do, do_scales, query, BLOCK_Q)[None, :]
                if dv is not None:
                    dv_total = add_product(
                        dv_total,
                        p,
                        do_tile
                        if SAME_DO
                        else load_block(
                            do_right, dor_base, query, BLOCK_Q, n_q, DV_PAD, False, first_live
                        ),
                        load_channel_scales(do_right, dor_scales, query, DV, DV_PAD),
                        p_rounding,
                        P_PER_TILE,
                        p_trace,
                        z,
                        queries,
                        keys,
                        lengths.n_q,
                        lengths.n_k,
                    )
                if dk is not None:
                    dp = tokens_by_tokens(v_tile, do_tile) * do_scale * v_scale
                    ds = p * (dp - load_rows(delta, lengths.cu_q, b, h, row, n_q, 0.0)[None, :])
                    dk_total = add_product(
                        dk_total,
                        ds,
                        q_tile
                        if SAME_Q
                        else load_block(
                            q_right, qr_base, query, BLOCK_Q, n_q, D_PAD, False, first_live
                        ),
                        load_channel_scales(q_right, qr_scales, query, D, D_PAD),
                        ds_rounding,
                        DS_PER_TILE,
                        ds_trace,
                        z,
                        queries,
                        keys,
                        lengths.n_q,
                        lengths.n_k,
                    )
                    if q_mean is not None:
                        # What subtracting the mean left out of Q: dS^T 1 times the mean.
                        mean = mean_of(q_mean, b, h, query // BLOCK_Q, D, D_PAD)
                        dk_total += tl.sum(ds, 1)[:, None] * mean

    if dk is not None:
        store_tokens(dk, lengths.cu_k, b, k_head, first, n_stored, dk_total * scale, D)
    if dv is not None:
        store_tokens(dv, lengths.cu_k, b, k_head, first, n_stored, dv_total, DV)
