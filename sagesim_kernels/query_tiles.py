"""dQ, or delta from P, in a program for each tile of queries."""

from __future__ import annotations

import triton
import triton.language as tl

from sagesim_kernels.delta import less_gradient, load_rows, store_rows
from sagesim_kernels.layout import (
    causal_offset,
    keys_seen,
    length_of,
    live_keys,
    live_queries,
    place_in,
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
def query_tiles(
    grid,
    q,
    k,
    do,
    v,
    k_right,
    q_mean,
    k_mean,
    raw_k,
    lse2,
    delta,
    d_lse,
    dq,
    trace,
    lengths,
    rounding,
    scale,
    scale_log2,
    PER_TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
):
    """dQ of a tile of queries; or, where dq is None, delta = rowsum(P o dP) of them."""
    tile, h, b = place_in(grid, lengths.IS_CAUSAL)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = tile * TILE
    if first >= n_q:
        return
    k_head = h // GROUPS
    z = b * grid.heads + h
    first_live, _ = live_queries(lengths, b)
    n_k = live_keys(lengths, b)
    offset = causal_offset(lengths, b)
    queries = first + tl.arange(0, TILE)

    q_base, q_scales = base_of(q, lengths.cu_q, lengths.n_q, b, h)
    do_base, do_scales = base_of(do, lengths.cu_q, lengths.n_q, b, h)
    k_base, k_scales = base_of(k, lengths.cu_k, lengths.n_k, b, k_head)
    v_base, v_scales = base_of(v, lengths.cu_k, lengths.n_k, b, k_head)
    q_tile = load_tokens(q, q_base, first, TILE, n_q, D_PAD, first_live)
    q_factor = load_token_scales(q, q_scales, first, TILE, n_q)[:, None] * scale_log2
    do_tile = load_tokens(do, do_base, first, TILE, n_q, DV_PAD, first_live)
    do_scale = load_token_scales(do, do_scales, first, TILE, n_q)[:, None]
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, queries, n_q, float("inf"))
    if dq is not None:
        row_delta = load_rows(delta, lengths.cu_q, b, h, queries, n_q, 0.0)[:, None]
        right_base, right_scales = base_of(k_right, lengths.cu_k, lengths.n_k, b, k_head)
        total = tl.zeros((TILE, D_PAD), tl.float32)
    else:
        total = tl.zeros((TILE,), tl.float32)
    seen, end = keys_seen(first, TILE, BLOCK_K, n_k, offset)
    for MASKED in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
        for key in range(seen if MASKED else 0, end if MASKED else seen, BLOCK_K):
            keys = key + tl.arange(0, BLOCK_K)
            k_tile = load_block(k, k_base, key, BLOCK_K, n_k, D_PAD, not MASKED)
            k_scale = load_block_scales(k, k_scales, key, BLOCK_K)[None, :]
            s, factor = with_k_scale(
                tokens_by_tokens(q_tile, k_tile), q_factor, k, k_scale, BLOCK_K
            )
            if q_mean is not None:
                block = first // BLOCK_Q
                bias = key_bias(
                    q_mean, k_mean, raw_k, lengths, b, h, k_head, block, key, BLOCK_K, n_k, D, D_PAD
                )
                s = s * factor + bias[None, :] * scale_log2 - row_lse2[:, None]
            else:
                s = s * factor - row_lse2[:, None]
            if MASKED:
                visible = sees(queries[:, None], keys[None, :], n_k, offset)
                s = tl.where(visible, s, -float("inf"))
            p = tl.exp2(s)
            v_tile = load_block(v, v_base, key, BLOCK_K, n_k, DV_PAD, not MASKED)
            v_scale = load_block_scales(v, v_scales, key, BLOCK_K)[None, :]
            dp = tokens_by_tokens(do_tile, v_tile) * do_scale * v_scale
            if dq is not None:
                right = load_block(k_right, right_base, key, BLOCK_K, n_k, D_PAD, not MASKED)
                total = add_product(
                    total,
                    p * (dp - row_delta),
                    right,
                    load_channel_scales(k_right, right_scales, key, D, D_PAD),
                    rounding,
                    PER_TILE,
                    trace,
                    z,
                    queries[:, None],
                    keys[None, :],
                    lengths.n_q,
                    lengths.n_k,
                )
            else:
                total += tl.sum(p * dp, 1)
    if dq is not None:
        if d_lse is not None and k_mean is not None:
            # Rows of dS then sum to the logsumexp's gradient, and the mean of K counts.
            gain = load_rows(d_lse, lengths.cu_q, b, h, queries, n_q, 0.0)[:, None]
            mean = mean_of(k_mean, b, k_head, 0, D, D_PAD)
            total += tl.where((row_lse2 < float("inf"))[:, None], gain * mean, 0.0)
        store_tokens(dq, lengths.cu_q, b, h, first, n_q, total * scale, D)
    else:
        total = less_gradient(total, d_lse, lengths, b, h, queries, n_q, row_lse2)
        store_rows(delta, lengths.cu_q, b, h, queries, n_q, total)
