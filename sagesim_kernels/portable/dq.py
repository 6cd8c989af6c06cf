"""dQ, or delta from P, in one program for each tile of queries."""

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
    key_loop_bounds,
    length_of,
    live_keys,
    live_queries,
    load_block,
    load_block_scales,
    load_channel_scales,
    load_k_mean,
    load_rows,
    load_token_scales,
    load_tokens,
    program_coordinates,
    store_rows,
    store_tokens,
    subtract_lse_gradient,
    tokens_by_tokens,
)
from sagesim_kernels.portable.p_and_ds import MapTile, add_product


@triton.jit
def dq_kernel(
    grid,
    q,
    k,
    do,
    v,
    k_right,
    subtracted,
    lse2,
    delta,
    d_lse,
    dq,
    trace,
    lengths,
    ds_product,
    scale,
    sizes,
):
    """Compute dQ of a tile of queries; if dq is None, compute delta = rowsum(P o dP) instead.

    q, k, do, v: `Operand` of qk_recompute and dp. k_right: K as the right operand of dQ.
    subtracted: `SubtractedMeans`. trace: the `MapTrace` of dS, or None. ds_product: `MapProduct`.
    scale: `LogitScale`.
    """
    tile, h, b = program_coordinates(grid, lengths.IS_CAUSAL)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = tile * sizes.TILE
    if first >= n_q:
        return
    k_head = h // sizes.GROUPS
    z = b * grid.heads + h
    first_live, _ = live_queries(lengths, b)
    n_k = live_keys(lengths, b)
    offset = causal_offset(lengths, b)
    queries = first + tl.arange(0, sizes.TILE)

    q_base, q_scales = head_pointers(q, lengths.cu_q, lengths.n_q, b, h)
    do_base, do_scales = head_pointers(do, lengths.cu_q, lengths.n_q, b, h)
    k_base, k_scales = head_pointers(k, lengths.cu_k, lengths.n_k, b, k_head)
    v_base, v_scales = head_pointers(v, lengths.cu_k, lengths.n_k, b, k_head)
    q_tile = load_tokens(q, q_base, first, sizes.TILE, n_q, sizes.D_PAD, first_live)
    q_factor = load_token_scales(q, q_scales, first, sizes.TILE, n_q)[:, None] * scale.base2
    do_tile = load_tokens(do, do_base, first, sizes.TILE, n_q, sizes.DV_PAD, first_live)
    do_scale = load_token_scales(do, do_scales, first, sizes.TILE, n_q)[:, None]
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, queries, n_q, float("inf"))
    if dq is not None:
        row_delta = load_rows(delta, lengths.cu_q, b, h, queries, n_q, 0.0)[:, None]
        right_base, right_scales = head_pointers(k_right, lengths.cu_k, lengths.n_k, b, k_head)
        total = tl.zeros((sizes.TILE, sizes.D_PAD), tl.float32)
    else:
        total = tl.zeros((sizes.TILE,), tl.float32)
    unmasked_end, end = key_loop_bounds(first, sizes.TILE, sizes.BLOCK_K, n_k, offset)
    for MASKED in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
        for key in range(
            unmasked_end if MASKED else 0, end if MASKED else unmasked_end, sizes.BLOCK_K
        ):
            keys = key + tl.arange(0, sizes.BLOCK_K)
            k_tile = load_block(k, k_base, key, sizes.BLOCK_K, n_k, sizes.D_PAD, not MASKED)
            k_scale = load_block_scales(k, k_scales, key, sizes.BLOCK_K)[None, :]
            s, factor = apply_k_scale(
                tokens_by_tokens(q_tile, k_tile), q_factor, k, k_scale, sizes.BLOCK_K
            )
            if subtracted.q_mean is not None:
                block = first // sizes.BLOCK_Q
                head = HeadIndex(b, h, k_head)
                bias = key_bias(subtracted, lengths, head, block, key, sizes.BLOCK_K, n_k, sizes)
                s = s * factor + bias[None, :] * scale.base2 - row_lse2[:, None]
            else:
                s = s * factor - row_lse2[:, None]
            if MASKED:
                visible = attends(queries[:, None], keys[None, :], n_k, offset)
                s = tl.where(visible, s, -float("inf"))
            p = tl.exp2(s)
            v_tile = load_block(v, v_base, key, sizes.BLOCK_K, n_k, sizes.DV_PAD, not MASKED)
            v_scale = load_block_scales(v, v_scales, key, sizes.BLOCK_K)[None, :]
            dp = tokens_by_tokens(do_tile, v_tile) * (do_scale * v_scale)
            ds = p * (dp - row_delta) if dq is not None else p * dp
            if MASKED:
                ds = tl.where(visible, ds, 0.0)  # dP and delta may be NaN where P is 0
            if dq is not None:
                right = load_block(
                    k_right, right_base, key, sizes.BLOCK_K, n_k, sizes.D_PAD, not MASKED
                )
                total = add_product(
                    total,
                    ds,
                    right,
                    load_channel_scales(k_right, right_scales, key, sizes.D, sizes.D_PAD),
                    ds_product,
                    trace,
                    MapTile(z, queries[:, None], keys[None, :], lengths.n_q, lengths.n_k),
                )
            else:
                total += tl.sum(ds, 1)
    if dq is not None:
        if d_lse is not None and subtracted.k_mean is not None:
            # A row of dS then sums to the gradient of its logsumexp and not to 0, so the mean that
            # was subtracted from K contributes to dQ.
            gain = load_rows(d_lse, lengths.cu_q, b, h, queries, n_q, 0.0)[:, None]
            mean = load_k_mean(subtracted, b, k_head, sizes)
            total += tl.where((row_lse2 < float("inf"))[:, None], gain * mean, 0.0)
        store_tokens(dq, lengths.cu_q, b, h, first, n_q, total * scale.natural, sizes.D)
    else:
        total = subtract_lse_gradient(total, d_lse, lengths, b, h, queries, n_q, row_lse2)
        store_rows(delta, lengths.cu_q, b, h, queries, n_q, total)
