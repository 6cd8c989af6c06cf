"""The forward: S = Q K^T and O = P V, a program for each tile of queries, with online softmax.

Where `hopper` has a kernel of its own for a problem, that one runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels import hopper
from sagesim_kernels.layout import (
    Grid,
    Rows,
    Strided,
    causal_offset,
    keys_seen,
    length_of,
    live_keys,
    live_queries,
    place_in,
    row_base,
    sees,
    store_tokens,
)
from sagesim_kernels.maps import MapTrace, store_codes
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
from sagesim_kernels.primitives import LAUNCH, LOG2_127, LOG2_E, Rounding, to_codes
from sagesim_kernels.problem import Problem, padded
from sagesim_kernels.quantize import Operands
from sagesim_kernels.smoothing import key_bias
from sagesim_kernels.tiles import launch, tiles

_LOG2_127 = tl.constexpr(LOG2_127)


@triton.jit
def _finite(x):
    """x with 0 for -inf, the maximum of rows without any entry, so that exponentials become 0."""
    return tl.where(x == -float("inf"), 0.0, x)


@triton.jit
def _forward(
    grid,
    q,
    k,
    v,
    q_mean,
    k_mean,
    raw_k,
    o,
    lse2,
    trace,
    lengths,
    rounding,
    scale_log2,
    IS_NEGATIVE: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
):
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
    k_base, k_scales = base_of(k, lengths.cu_k, lengths.n_k, b, k_head)
    v_base, v_scales = base_of(v, lengths.cu_k, lengths.n_k, b, k_head)
    q_tile = load_tokens(q, q_base, first, TILE, n_q, D_PAD, first_live)
    q_factor = load_token_scales(q, q_scales, first, TILE, n_q) * scale_log2
    row_max = tl.full((TILE,), -float("inf"), tl.float32)
    row_sum = tl.zeros((TILE,), tl.float32)
    total = tl.zeros((TILE, DV_PAD), tl.float32)
    seen, end = keys_seen(first, TILE, BLOCK_K, n_k, offset)
    for MASKED in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
        for key in range(seen if MASKED else 0, end if MASKED else seen, BLOCK_K):
            keys = key + tl.arange(0, BLOCK_K)
            k_tile = load_block(k, k_base, key, BLOCK_K, n_k, D_PAD, not MASKED)
            k_scale = load_block_scales(k, k_scales, key, BLOCK_K)
            s, factor = with_k_scale(
                tokens_by_tokens(q_tile, k_tile), q_factor, k, k_scale, BLOCK_K
            )
            if q_mean is not None:
                block = first // BLOCK_Q
                bias = key_bias(
                    q_mean, k_mean, raw_k, lengths, b, h, k_head, block, key, BLOCK_K, n_k, D, D_PAD
                )
                s = s * factor[:, None] + bias[None, :] * scale_log2
                factor = tl.full((TILE,), 1.0, tl.float32)
            else:
                # What a row of s has still to be multiplied by: not negative, so that its maximum
                # may go first.
                if IS_NEGATIVE:
                    s = -s
                factor = tl.abs(factor)
            if MASKED:
                # Multiplied before: of -inf, a factor of 0 or NaN makes NaN.
                visible = sees(queries[:, None], keys[None, :], n_k, offset)
                s = tl.where(visible, s * factor[:, None], -float("inf"))
                factor = tl.full((TILE,), 1.0, tl.float32)

            tile_max = tl.max(s, 1) * factor
            new_max = tl.maximum(row_max, tile_max)
            shrink = tl.exp2(row_max - _finite(new_max))
            v_tile = load_block(v, v_base, key, BLOCK_K, n_k, DV_PAD, not MASKED)
            if v.scale is not None:
                # 127 P against the tile's own maximum: codes depend on the tile alone.
                p = 127.0 * tl.exp2(s * factor[:, None] - _finite(tile_max)[:, None])
                codes = to_codes(p, queries[:, None], keys[None, :], rounding)
                store_codes(
                    trace, codes, 1.0, z, queries[:, None], keys[None, :], lengths.n_q, lengths.n_k
                )
                weight = tl.exp2(tile_max - _finite(new_max))
                v_scale = load_channel_scales(v, v_scales, key, DV, DV_PAD)[None, :]
                sums = tl.dot(codes, v_tile, out_dtype=tl.int32).to(tl.float32)
                total = tl.fma(sums, weight[:, None] * v_scale, total * shrink[:, None])
                row_sum = row_sum * shrink + tl.sum(p, 1) * weight
            else:
                p = tl.exp2(s * factor[:, None] - _finite(new_max)[:, None])
                total = tl.dot(p.to(v_tile.dtype), v_tile, total * shrink[:, None])
                row_sum = row_sum * shrink + tl.sum(p, 1)
            row_max = new_max

    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # of NaN, not 0, where a logit is none
    row_lse2 = row_max + tl.log2(row_sum)
    if v.scale is not None:
        row_lse2 -= _LOG2_127
    row_lse2 = tl.where(row_max == -float("inf"), float("inf"), row_lse2)
    tl.store(row_base(lse2, lengths.cu_q, b, h) + queries, row_lse2, mask=queries < n_q)

    store_tokens(o, lengths.cu_q, b, h, first, n_q, total / row_sum[:, None], DV)


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """What `forward` gives beside o, for the backward."""

    lse2: Tensor
    """The logsumexp in base 2 of the smoothed logits, float32 [sequences, heads, n_q], from which P
    is rebuilt; +inf where a row attends to nothing, so that P is 0."""
    k_mean: Tensor | None
    """What was taken out of K, float32 [sequences, kv heads, 1, d]; None where nothing was."""


def forward(problem: Problem, o: Tensor, trace: MapTrace | None = None) -> ForwardResult:
    """Attention of every head into o [sequences, heads, n_q, d_v].

    trace: for the codes of P, where pv is INT8; its scales are left as they are.
    """
    rows = problem.q.shape[:3]
    if problem.is_empty:
        o.zero_()
        b, heads, d = problem.sequences, problem.k.shape[1], problem.k.shape[3]
        return ForwardResult(
            o.new_full(rows, torch.inf, dtype=torch.float32),
            o.new_zeros((b, heads, 1, d), dtype=torch.float32)
            if problem.spec.smoothing.k
            else None,
        )
    lse2 = torch.empty(rows, dtype=torch.float32, device=o.device)
    on_hopper = hopper.serves(problem)
    stored = on_hopper and hopper.has_to_copy(problem, queries=False)
    operands = Operands(problem, stored=stored)
    k_mean = None if operands.k_mean is None else operands.k_mean.ptr
    if on_hopper:
        from sagesim_kernels.hopper import forward as gluon  # experimental: not if not needed

        gluon.forward(problem, operands, o, lse2)
        return ForwardResult(lse2, k_mean)
    spec = problem.spec
    d, d_v = problem.q.shape[3], problem.v.shape[3]
    d_pad, d_v_pad = padded(d), padded(d_v)
    q, k, v = operands.at("qk", "q"), operands.at("qk", "k"), operands.at("pv", "v")
    smoothing = operands.smoothing

    def run(tile):
        grid = Grid(-(-problem.longest_q // tile.rows), rows[1], problem.sequences)
        _forward[grid.programs](
            grid,
            q,
            k,
            v,
            *smoothing,
            Strided.of(o),
            Rows.of(lse2),
            trace,
            problem.lengths,
            Rounding.of(spec, "p"),
            problem.scale * LOG2_E,
            problem.scale < 0,
            problem.groups,
            d,
            d_v,
            d_pad,
            d_v_pad,
            spec.block_q,
            spec.block_k,
            tile.rows,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **LAUNCH,
        )

    within = spec.block_q if spec.smoothing.q else None
    launch(
        tiles(64, d_v_pad, within=within),
        run,
        f"the forward at head size {d} and block_k={spec.block_k}",
    )
    return ForwardResult(lse2, k_mean)
