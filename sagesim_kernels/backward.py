"""The backward: dK and dV in a program for each tile of keys, dQ in one for each tile of queries.

S and dP are computed in both, and once more where delta comes from P: then nothing is added by
atomics, sums are in a fixed order, and a scale along the rows of P or dS stays within a warp.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim.spec import Delta, Granularity
from sagesim_kernels.delta import delta_from_o, load_rows, store_delta
from sagesim_kernels.layout import (
    Grid,
    Rows,
    Strided,
    causal_offset,
    length_of,
    live_keys,
    live_queries,
    place_in,
    sees,
    token_ptrs,
)
from sagesim_kernels.maps import UNTRACED, MapTraces, add_product
from sagesim_kernels.operands import (
    base_of,
    load_block,
    load_block_scales,
    load_channel_scales,
    load_token_scales,
    load_tokens,
    tokens_by_tokens,
)
from sagesim_kernels.primitives import LAUNCH, LOG2_E, Rounding
from sagesim_kernels.problem import Problem, padded
from sagesim_kernels.quantize import Operands
from sagesim_kernels.smoothing import key_bias, mean_of
from sagesim_kernels.tiles import launch, most_rows, tiles


@triton.jit
def _query_tiles(
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
    tile, h, b = place_in(grid)
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

    q_base, q_scales = base_of(q, lengths.cu_q, lengths.n_q, b, h, BLOCK_Q)
    do_base, do_scales = base_of(do, lengths.cu_q, lengths.n_q, b, h, BLOCK_Q)
    k_base, k_scales = base_of(k, lengths.cu_k, lengths.n_k, b, k_head, BLOCK_K)
    v_base, v_scales = base_of(v, lengths.cu_k, lengths.n_k, b, k_head, BLOCK_K)
    q_tile = load_tokens(q, q_base, first, TILE, n_q, D_PAD, first_live)
    q_factor = load_token_scales(q, q_scales, first, TILE, n_q)[:, None] * scale_log2
    do_tile = load_tokens(do, do_base, first, TILE, n_q, DV_PAD, first_live)
    do_scale = load_token_scales(do, do_scales, first, TILE, n_q)[:, None]
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, queries, n_q, float("inf"))
    if dq is not None:
        row_delta = load_rows(delta, lengths.cu_q, b, h, queries, n_q, 0.0)[:, None]
        right_base, right_scales = base_of(k_right, lengths.cu_k, lengths.n_k, b, k_head, BLOCK_K)
        total = tl.zeros((TILE, D_PAD), tl.float32)
    else:
        total = tl.zeros((TILE,), tl.float32)
    end = n_k
    if lengths.IS_CAUSAL:
        end = tl.minimum(n_k, first + TILE + offset)
    for key in range(0, end, BLOCK_K):
        keys = key + tl.arange(0, BLOCK_K)
        k_tile = load_block(k, k_base, key, BLOCK_K, n_k, D_PAD)
        k_scale = load_block_scales(k, k_scales, key, BLOCK_K)[None, :]
        s = tokens_by_tokens(q_tile, k_tile, k_scale)
        if q_mean is not None:
            block = first // BLOCK_Q
            bias = key_bias(
                q_mean, k_mean, raw_k, lengths, b, h, k_head, block, key, BLOCK_K, n_k, D, D_PAD
            )
            s = s * q_factor + bias[None, :] * scale_log2 - row_lse2[:, None]
        else:
            s = tl.fma(s, q_factor, -row_lse2[:, None])
        if not sees(first, key + BLOCK_K - 1, n_k, offset, lengths.IS_CAUSAL):
            seen = sees(queries[:, None], keys[None, :], n_k, offset, lengths.IS_CAUSAL)
            s = tl.where(seen, s, -float("inf"))
        p = tl.exp2(s)
        v_tile = load_block(v, v_base, key, BLOCK_K, n_k, DV_PAD)
        v_scale = load_block_scales(v, v_scales, key, BLOCK_K)[None, :]
        dp = tokens_by_tokens(do_tile, v_tile, do_scale) * v_scale
        if dq is not None:
            right = load_block(k_right, right_base, key, BLOCK_K, n_k, D_PAD)
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
        column = tl.arange(0, D_PAD)
        ptrs = token_ptrs(dq, lengths.cu_q, b, h, first, TILE, column)
        mask = (queries < n_q)[:, None] & (column < D)[None, :]
        tl.store(ptrs, (total * scale).to(dq.ptr.dtype.element_ty), mask=mask)
    else:
        store_delta(delta, d_lse, lengths, b, h, queries, n_q, total, row_lse2)


@triton.jit
def _key_tiles(
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
    """dK and dV of a tile of keys, added over the query heads of its group. Maps are transposed."""
    tile, k_head, b = place_in(grid)
    first = tile * TILE
    n_stored = length_of(lengths.cu_k, lengths.n_k, b)
    if first >= n_stored:
        return
    first_live, n_q = live_queries(lengths, b)
    n_k = live_keys(lengths, b)
    offset = causal_offset(lengths, b)
    keys = (first + tl.arange(0, TILE))[:, None]

    k_base, k_scales = base_of(k, lengths.cu_k, lengths.n_k, b, k_head, BLOCK_K)
    v_base, v_scales = base_of(v, lengths.cu_k, lengths.n_k, b, k_head, BLOCK_K)
    k_tile = load_tokens(k, k_base, first, TILE, n_k, D_PAD)
    k_scale = load_token_scales(k, k_scales, first, TILE, n_k)[:, None]
    v_tile = load_tokens(v, v_base, first, TILE, n_k, DV_PAD)
    v_scale = load_token_scales(v, v_scales, first, TILE, n_k)[:, None]

    dk_total = tl.zeros((TILE, D_PAD), tl.float32)
    dv_total = tl.zeros((TILE, DV_PAD), tl.float32)
    begin = first_live // BLOCK_Q * BLOCK_Q
    if lengths.IS_CAUSAL:
        begin = tl.maximum(begin, (first - offset) // BLOCK_Q * BLOCK_Q)
    for head in range(k_head * GROUPS, (k_head + 1) * GROUPS):
        h = tl.cast(head, tl.int32)
        z = b * (grid.heads * GROUPS) + h
        q_base, q_scales = base_of(q, lengths.cu_q, lengths.n_q, b, h, BLOCK_Q)
        do_base, do_scales = base_of(do, lengths.cu_q, lengths.n_q, b, h, BLOCK_Q)
        qr_base, qr_scales = base_of(q_right, lengths.cu_q, lengths.n_q, b, h, BLOCK_Q)
        dor_base, dor_scales = base_of(do_right, lengths.cu_q, lengths.n_q, b, h, BLOCK_Q)
        for query in range(begin, n_q, BLOCK_Q):
            row = query + tl.arange(0, BLOCK_Q)
            queries = row[None, :]
            q_tile = load_block(q, q_base, query, BLOCK_Q, n_q, D_PAD, first_live)
            q_scale = load_block_scales(q, q_scales, query, BLOCK_Q)
            q_factor = (q_scale * scale_log2)[None, :]
            s = tokens_by_tokens(k_tile, q_tile, k_scale)
            row_lse2 = load_rows(lse2, lengths.cu_q, b, h, row, n_q, float("inf"))[None, :]
            if q_mean is not None:
                block = query // BLOCK_Q
                bias = key_bias(
                    q_mean, k_mean, raw_k, lengths, b, h, k_head, block, first, TILE, n_k, D, D_PAD
                )
                s = s * q_factor + bias[:, None] * scale_log2 - row_lse2
            else:
                s = tl.fma(s, q_factor, -row_lse2)
            if not sees(query, first + TILE - 1, n_k, offset, lengths.IS_CAUSAL):
                seen = sees(queries, keys, n_k, offset, lengths.IS_CAUSAL)
                s = tl.where(seen, s, -float("inf"))
            p = tl.exp2(s)
            dv_total = add_product(
                dv_total,
                p,
                load_block(do_right, dor_base, query, BLOCK_Q, n_q, DV_PAD, first_live),
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
            do_tile = load_block(do, do_base, query, BLOCK_Q, n_q, DV_PAD, first_live)
            do_scale = load_block_scales(do, do_scales, query, BLOCK_Q)[None, :]
            dp = tokens_by_tokens(v_tile, do_tile, do_scale) * v_scale
            ds = p * (dp - load_rows(delta, lengths.cu_q, b, h, row, n_q, 0.0)[None, :])
            dk_total = add_product(
                dk_total,
                ds,
                load_block(q_right, qr_base, query, BLOCK_Q, n_q, D_PAD, first_live),
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

    column = tl.arange(0, D_PAD)
    ptrs = token_ptrs(dk, lengths.cu_k, b, k_head, first, TILE, column)
    mask = (keys < n_stored) & (column < D)[None, :]
    tl.store(ptrs, (dk_total * scale).to(dk.ptr.dtype.element_ty), mask=mask)
    column = tl.arange(0, DV_PAD)
    ptrs = token_ptrs(dv, lengths.cu_k, b, k_head, first, TILE, column)
    mask = (keys < n_stored) & (column < DV)[None, :]
    tl.store(ptrs, dv_total.to(dv.ptr.dtype.element_ty), mask=mask)


class Gradients(NamedTuple):
    """dq, dk, dv, shaped as q, k and v, to be filled."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def backward(
    problem: Problem,
    do: Tensor,
    d_lse: Tensor | None,
    o: Tensor | None,
    lse2: Tensor,
    grads: Gradients,
    traces: MapTraces = UNTRACED,
) -> Tensor:
    """Fill the gradients of every head, and return delta, float32 [sequences, heads, n_q].

    Args:
        do: as o, any strides.
        d_lse: the gradient of the logsumexp, shaped as lse2.
        o: the forward's; None where delta does not need it.
        lse2: the forward's.
    """
    delta = torch.zeros_like(lse2)
    if problem.is_empty:
        for grad in grads:
            grad.zero_()
        return delta
    spec, operands, lengths = problem.spec, Operands(problem, do), problem.lengths
    d, d_v = problem.q.shape[3], problem.v.shape[3]
    d_pad, d_v_pad = padded(d), padded(d_v)
    heads = problem.q.shape[1]
    scales = (problem.scale, problem.scale * LOG2_E)
    shape = (problem.groups, d, d_v, d_pad, d_v_pad, spec.block_q, spec.block_k)
    s_operands = (operands.at("qk_recompute", "q"), operands.at("qk_recompute", "k"))
    dp_operands = (operands.at("dp", "do"), operands.at("dp", "v"))
    statistics = (*operands.smoothing, Rows.of(lse2), Rows.of(delta))
    d_lse_rows = None if d_lse is None else Rows.of(d_lse.contiguous())
    one_block = {
        site: spec.site(site).lhs is Granularity.PerTile and spec.site(site).precision.is_scaled
        for site in ("dv", "dq", "dk")
    }

    def query_tiles(tile, of_delta):
        grid = Grid(-(-problem.longest_q // tile.rows), heads, problem.sequences)
        _query_tiles[grid.programs](
            grid,
            *s_operands,
            *dp_operands,
            None if of_delta else operands.at("dq", "k"),
            *statistics,
            d_lse_rows,
            None if of_delta else Strided.of(grads.dq),
            None if of_delta else traces.dq_ds,
            lengths,
            Rounding.of(spec, "ds"),
            *scales,
            one_block["dq"],
            *shape,
            tile.rows,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **LAUNCH,
        )

    def key_tiles(tile):
        grid = Grid(-(-problem.longest_k // tile.rows), problem.k.shape[1], problem.sequences)
        _key_tiles[grid.programs](
            grid,
            *s_operands,
            *dp_operands,
            operands.at("dk", "q"),
            operands.at("dv", "do"),
            *statistics,
            Strided.of(grads.dk),
            Strided.of(grads.dv),
            traces.dv_p,
            traces.dk_ds,
            lengths,
            Rounding.of(spec, "p"),
            Rounding.of(spec, "ds"),
            *scales,
            one_block["dv"],
            one_block["dk"],
            *shape,
            tile.rows,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **LAUNCH,
        )

    at = f"at head size {max(d, d_v)}, block_q={spec.block_q} and block_k={spec.block_k}"
    within = spec.block_q if spec.smoothing.q else None
    if spec.delta is Delta.FROM_P:
        of_delta = tiles(64, d_pad, within=within)
        launch(of_delta, lambda t: query_tiles(t, True), f"delta {at}")
    else:
        assert o is not None
        delta_from_o(problem, o, do, lse2, d_lse_rows, delta)
    of_dq = tiles(64, d_pad, within=within, exactly=spec.block_q if one_block["dq"] else None)
    launch(of_dq, lambda t: query_tiles(t, False), f"dQ {at}")
    shared = one_block["dv"] or one_block["dk"]
    rows = most_rows(d_pad, d_v_pad)
    of_dk_dv = tiles(rows, d_pad + d_v_pad, exactly=spec.block_k if shared else None)
    launch(of_dk_dv, key_tiles, f"dK and dV {at}")
    return delta
