"""Prototypes in Gluon, for Hopper, of the three kernels of FACTORED_QK: what is to be gained there.

    python benchmarks/hopper_prototypes.py --out docs/data/speed_log/prototypes.json

Needs a Hopper GPU and Triton 3.6. TMA loads, products that run while the threads do something else,
and no producer warp. No part of the package: they take whole blocks, contiguous tensors, one query
head for each of k and v, and operands that are already quantized, with one scale for 64 tokens of
K. Each tile is checked against float32 before any is timed; times are medians, without
quantization, delta and the statistics that they are given.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.testing import do_bench

LOG2_E = 1.4426950408889634
BLOCK = 64
SHAPES = [(d, is_causal) for d in (64, 128) for is_causal in (True, False)]
"""Head sizes and masks."""

TILES = ((64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 8, 2), (128, 8, 3))
"""Rows of a program, its warps, and stages of loads."""


@gluon.jit
def _load_queries(
    q8,
    q16,
    do,
    lse,
    delta,
    qs,
    q8_s,
    q16_s,
    do_s,
    st_s,
    bars,
    stage,
    row8,
    row16,
    D: gl.constexpr,
    BQ: gl.constexpr,
):
    bar = bars.index(stage)
    mbarrier.expect(bar, BQ * D * 5 + BQ * 12)
    tma.async_copy_global_to_shared(q8, [row8, 0], bar, q8_s.index(stage))
    tma.async_copy_global_to_shared(do, [row16, 0], bar, do_s.index(stage))
    tma.async_copy_global_to_shared(q16, [row16, 0], bar, q16_s.index(stage))
    tma.async_copy_global_to_shared(qs, [row8], bar, st_s.index(3 * stage))
    tma.async_copy_global_to_shared(lse, [row16], bar, st_s.index(3 * stage + 1))
    tma.async_copy_global_to_shared(delta, [row16], bar, st_s.index(3 * stage + 2))


@gluon.jit
def _key_step(
    MASKED: gl.constexpr,
    k_s,
    v_s,
    q8_s,
    q16_s,
    do_s,
    st_s,
    stage,
    k_scale,
    dk,
    dv,
    query,
    keys,
    D: gl.constexpr,
    BQ: gl.constexpr,
    BK: gl.constexpr,
    MMA: gl.constexpr,
    MMA8: gl.constexpr,
    ACC: gl.constexpr,
    dt: gl.constexpr,
):
    s = warpgroup_mma(
        k_s,
        q8_s.index(stage).permute((1, 0)),
        gl.zeros((BK, BQ), gl.int32, MMA8),
        use_acc=False,
        is_async=True,
    )
    dp = warpgroup_mma(
        v_s,
        do_s.index(stage).permute((1, 0)),
        gl.zeros((BK, BQ), gl.float32, MMA),
        use_acc=False,
        is_async=True,
    )
    col: gl.constexpr = gl.SliceLayout(0, MMA)
    qs = st_s.index(3 * stage).load(col)
    lse = st_s.index(3 * stage + 1).load(col)
    s = warpgroup_mma_wait(1, deps=[s])
    x = gl.convert_layout(s.to(gl.float32), MMA)
    f = k_scale[:, None] * qs[None, :]
    x = x * f - lse[None, :]
    if MASKED:
        queries = query + gl.arange(0, BQ, col)
        x = gl.where(keys[:, None] <= queries[None, :], x, -float("inf"))
    p = gl.exp2(x)
    delta = st_s.index(3 * stage + 2).load(col)
    a: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    p16 = gl.convert_layout(p.to(dt), a)
    dp = warpgroup_mma_wait(0, deps=[dp])
    dv = warpgroup_mma(p16, do_s.index(stage), dv, is_async=True)
    ds = p * (dp - delta[None, :])
    ds16 = gl.convert_layout(ds.to(dt), a)
    dk = warpgroup_mma(ds16, q16_s.index(stage), dk, is_async=True)
    return dk, dv


@gluon.jit
def key_tiles(
    q8,
    k8,
    q16,
    v,
    do,
    lse,
    delta,
    qs,
    ks_ptr,
    dk_ptr,
    dv_ptr,
    N,
    H,
    Bt,
    scale,
    CAUSAL: gl.constexpr,
    D: gl.constexpr,
    BQ: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    MMA8: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BQ, 32])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BQ, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, D, 16])
    dt: gl.constexpr = do.dtype
    tiles = N // BK
    pid = gl.program_id(0)
    tile = pid % tiles
    z = pid // tiles  # b * H + h
    b = z // H
    h = z % H
    first = tile * BK
    base16 = z * N
    base8 = h * (Bt * N) + b * N
    k_s = gl.allocate_shared_memory(gl.int8, [BK, D], k8.layout)
    v_s = gl.allocate_shared_memory(dt, [BK, D], v.layout)
    q8_s = gl.allocate_shared_memory(gl.int8, [STAGES, BQ, D], q8.layout)
    q16_s = gl.allocate_shared_memory(dt, [STAGES, BQ, D], q16.layout)
    do_s = gl.allocate_shared_memory(dt, [STAGES, BQ, D], do.layout)
    st_s = gl.allocate_shared_memory(gl.float32, [3 * STAGES, BQ], lse.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(bars.index(i), 1)
    fence_async_shared()
    kv = bars.index(STAGES)
    mbarrier.expect(kv, BK * D * 3)
    tma.async_copy_global_to_shared(k8, [base8 + first, 0], kv, k_s)
    tma.async_copy_global_to_shared(v, [base16 + first, 0], kv, v_s)
    begin = 0
    seeing = 0
    if CAUSAL:
        begin = first // BQ
        seeing = (first + BK) // BQ
    end = N // BQ
    for i in gl.static_range(STAGES - 1):
        if begin + i < end:
            _load_queries(
                q8,
                q16,
                do,
                lse,
                delta,
                qs,
                q8_s,
                q16_s,
                do_s,
                st_s,
                bars,
                i,
                base8 + (begin + i) * BQ,
                base16 + (begin + i) * BQ,
                D,
                BQ,
            )
    rows: gl.constexpr = gl.SliceLayout(1, MMA)
    keys = first + gl.arange(0, BK, rows)
    k_scale = (
        gl.load(ks_ptr + (base8 + first) // BK + gl.zeros([BK], gl.int32, rows))
        if BK == 64
        else gl.load(ks_ptr + (base8 + keys) // 64)
    )
    dk = warpgroup_mma_init(gl.zeros((BK, D), gl.float32, ACC))
    dv = warpgroup_mma_init(gl.zeros((BK, D), gl.float32, ACC))
    mbarrier.wait(kv, 0)
    for MASKED in gl.static_range(1, -1, -1):
        for i in range(begin if MASKED else seeing, seeing if MASKED else end):
            n = i - begin
            stage = n % STAGES
            mbarrier.wait(bars.index(stage), (n // STAGES) & 1)
            dk, dv = _key_step(
                MASKED,
                k_s,
                v_s,
                q8_s,
                q16_s,
                do_s,
                st_s,
                stage,
                k_scale,
                dk,
                dv,
                i * BQ,
                keys,
                D,
                BQ,
                BK,
                MMA,
                MMA8,
                ACC,
                dt,
            )
            ahead = i + STAGES - 1
            if ahead < end:
                gl.thread_barrier()  # all warps are done with the step before, whose stage this is
                _load_queries(
                    q8,
                    q16,
                    do,
                    lse,
                    delta,
                    qs,
                    q8_s,
                    q16_s,
                    do_s,
                    st_s,
                    bars,
                    (ahead - begin) % STAGES,
                    base8 + ahead * BQ,
                    base16 + ahead * BQ,
                    D,
                    BQ,
                )
    dk_r, dv_r = warpgroup_mma_wait(0, deps=[dk, dv])
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [num_warps, 1], [1, 0])
    r = first + gl.arange(0, BK, gl.SliceLayout(1, OUT))
    c = gl.arange(0, D, gl.SliceLayout(0, OUT))
    at = (base16 + r)[:, None] * D + c[None, :]
    gl.store(dk_ptr + at, gl.convert_layout((dk_r * scale).to(dt), OUT))
    gl.store(dv_ptr + at, gl.convert_layout(dv_r.to(dt), OUT))


@gluon.jit
def _softmax(
    MASKED: gl.constexpr,
    s,
    row_max,
    row_sum,
    q_factor,
    k_scale,
    key,
    queries,
    BK: gl.constexpr,
    MMA: gl.constexpr,
):
    x = gl.convert_layout(s.to(gl.float32), MMA)
    factor = q_factor * k_scale
    if MASKED:
        keys = key + gl.arange(0, BK, gl.SliceLayout(0, MMA))
        x = gl.where(keys[None, :] <= queries[:, None], x, -float("inf"))
    new_max = gl.maximum(row_max, gl.max(x, 1) * factor)
    shrink = gl.exp2(row_max - new_max)
    p = gl.exp2(x * factor[:, None] - new_max[:, None])
    return p, new_max, row_sum * shrink + gl.sum(p, 1), shrink


@gluon.jit
def forward(
    q8,
    k8,
    v,
    qs_ptr,
    ks_ptr,
    o_ptr,
    lse_ptr,
    N,
    H,
    Bt,
    scale_log2,
    CAUSAL: gl.constexpr,
    D: gl.constexpr,
    BQ: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    MMA8: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BK, 32])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BK, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, D, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    R: gl.constexpr = gl.SliceLayout(1, MMA)
    dt: gl.constexpr = v.dtype
    tiles = N // BQ
    pid = gl.program_id(0)
    tile = pid % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    z = pid // tiles
    b = z // H
    h = z % H
    first = tile * BQ
    base16 = z * N
    base8 = h * (Bt * N) + b * N
    q_s = gl.allocate_shared_memory(gl.int8, [BQ, D], q8.layout)
    k_s = gl.allocate_shared_memory(gl.int8, [STAGES, BK, D], k8.layout)
    v_s = gl.allocate_shared_memory(dt, [STAGES, BK, D], v.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * STAGES + 1):
        mbarrier.init(bars.index(i), 1)
    fence_async_shared()
    qb = bars.index(2 * STAGES)
    mbarrier.expect(qb, BQ * D)
    tma.async_copy_global_to_shared(q8, [base8 + first, 0], qb, q_s)
    end = N // BK
    seen = N // BK
    if CAUSAL:
        seen = first // BK
        end = (first + BQ) // BK
    for i in gl.static_range(STAGES):
        if i < end:
            mbarrier.expect(bars.index(i), BK * D)
            tma.async_copy_global_to_shared(k8, [base8 + i * BK, 0], bars.index(i), k_s.index(i))
            mbarrier.expect(bars.index(STAGES + i), BK * D * 2)
            tma.async_copy_global_to_shared(
                v, [base16 + i * BK, 0], bars.index(STAGES + i), v_s.index(i)
            )
    queries = first + gl.arange(0, BQ, R)
    q_factor = gl.load(qs_ptr + base8 + queries) * scale_log2
    row_max = gl.full([BQ], -float("inf"), gl.float32, R)
    row_sum = gl.full([BQ], 0.0, gl.float32, R)
    mbarrier.wait(qb, 0)
    mbarrier.wait(bars.index(0), 0)
    s = warpgroup_mma(
        q_s,
        k_s.index(0).permute((1, 0)),
        gl.zeros((BQ, BK), gl.int32, MMA8),
        use_acc=False,
        is_async=True,
    )
    k_ptr = ks_ptr + base8 // 64
    s = warpgroup_mma_wait(0, deps=[s])
    p, row_max, row_sum, shrink = _softmax(
        CAUSAL, s, row_max, row_sum, q_factor, gl.load(k_ptr), 0, queries, BK, MMA
    )
    p16 = gl.convert_layout(p.to(dt), A)
    o = gl.zeros((BQ, D), gl.float32, ACC)
    k_next = gl.load(k_ptr + 1, mask=end > 1, other=1.0)
    if end > STAGES:
        gl.thread_barrier()
        mbarrier.expect(bars.index(0), BK * D)
        tma.async_copy_global_to_shared(k8, [base8 + STAGES * BK, 0], bars.index(0), k_s.index(0))
    for MASKED in gl.static_range(2):
        for i in range(max(seen, 1) if MASKED else 1, end if MASKED else seen):
            stage = i % STAGES
            last = (i - 1) % STAGES
            k_scale = k_next
            k_next = gl.load(k_ptr + i + 1, mask=i + 1 < end, other=1.0)
            mbarrier.wait(bars.index(stage), (i // STAGES) & 1)
            s = warpgroup_mma(
                q_s,
                k_s.index(stage).permute((1, 0)),
                gl.zeros((BQ, BK), gl.int32, MMA8),
                use_acc=False,
                is_async=True,
            )
            mbarrier.wait(bars.index(STAGES + last), ((i - 1) // STAGES) & 1)
            o_t = warpgroup_mma(p16, v_s.index(last), o, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            p, row_max, row_sum, shrink = _softmax(
                MASKED, s, row_max, row_sum, q_factor, k_scale, i * BK, queries, BK, MMA
            )
            o = warpgroup_mma_wait(0, deps=[o_t])
            o = o * gl.convert_layout(shrink, gl.SliceLayout(1, ACC))[:, None]
            p16 = gl.convert_layout(p.to(dt), A)
            gl.thread_barrier()  # all warps are done with this K and the last V
            ka = i + STAGES
            va = i - 1 + STAGES
            if ka < end:
                mbarrier.expect(bars.index(stage), BK * D)
                tma.async_copy_global_to_shared(
                    k8, [base8 + ka * BK, 0], bars.index(stage), k_s.index(stage)
                )
            if va < end:
                vb = STAGES + last
                mbarrier.expect(bars.index(vb), BK * D * 2)
                tma.async_copy_global_to_shared(
                    v, [base16 + va * BK, 0], bars.index(vb), v_s.index(last)
                )
    mbarrier.wait(bars.index(STAGES + (end - 1) % STAGES), ((end - 1) // STAGES) & 1)
    o = warpgroup_mma(p16, v_s.index((end - 1) % STAGES), o)
    o = o / gl.convert_layout(row_sum, gl.SliceLayout(1, ACC))[:, None]
    gl.store(lse_ptr + base16 + queries, row_max + gl.log2(row_sum))
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [num_warps, 1], [1, 0])
    r = first + gl.arange(0, BQ, gl.SliceLayout(1, OUT))
    c = gl.arange(0, D, gl.SliceLayout(0, OUT))
    gl.store(o_ptr + (base16 + r)[:, None] * D + c[None, :], gl.convert_layout(o.to(dt), OUT))


@gluon.jit
def _load_keys(
    k8, v, k16, k8_s, v_s, k16_s, bars, stage, row8, row16, D: gl.constexpr, BK: gl.constexpr
):
    bar = bars.index(stage)
    mbarrier.expect(bar, BK * D * 5)
    tma.async_copy_global_to_shared(k8, [row8, 0], bar, k8_s.index(stage))
    tma.async_copy_global_to_shared(v, [row16, 0], bar, v_s.index(stage))
    tma.async_copy_global_to_shared(k16, [row16, 0], bar, k16_s.index(stage))


@gluon.jit
def query_tiles(
    q8,
    k8,
    k16,
    v,
    do,
    qs_ptr,
    ks_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    N,
    H,
    Bt,
    scale,
    scale_log2,
    CAUSAL: gl.constexpr,
    D: gl.constexpr,
    BQ: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    MMA8: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BK, 32])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BK, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, D, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    R: gl.constexpr = gl.SliceLayout(1, MMA)
    dt: gl.constexpr = v.dtype
    tiles = N // BQ
    pid = gl.program_id(0)
    tile = pid % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    z = pid // tiles
    b = z // H
    h = z % H
    first = tile * BQ
    base16 = z * N
    base8 = h * (Bt * N) + b * N
    q_s = gl.allocate_shared_memory(gl.int8, [BQ, D], q8.layout)
    do_s = gl.allocate_shared_memory(dt, [BQ, D], do.layout)
    k8_s = gl.allocate_shared_memory(gl.int8, [STAGES, BK, D], k8.layout)
    v_s = gl.allocate_shared_memory(dt, [STAGES, BK, D], v.layout)
    k16_s = gl.allocate_shared_memory(dt, [STAGES, BK, D], k16.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(bars.index(i), 1)
    fence_async_shared()
    qb = bars.index(STAGES)
    mbarrier.expect(qb, BQ * D * 3)
    tma.async_copy_global_to_shared(q8, [base8 + first, 0], qb, q_s)
    tma.async_copy_global_to_shared(do, [base16 + first, 0], qb, do_s)
    end = N // BK
    seen = N // BK
    if CAUSAL:
        seen = first // BK
        end = (first + BQ) // BK
    for i in gl.static_range(STAGES - 1):
        if i < end:
            _load_keys(
                k8, v, k16, k8_s, v_s, k16_s, bars, i, base8 + i * BK, base16 + i * BK, D, BK
            )
    queries = first + gl.arange(0, BQ, R)
    q_factor = gl.load(qs_ptr + base8 + queries) * scale_log2
    lse = gl.load(lse_ptr + base16 + queries)
    delta = gl.load(delta_ptr + base16 + queries)
    dq = warpgroup_mma_init(gl.zeros((BQ, D), gl.float32, ACC))
    k_ptr = ks_ptr + base8 // 64
    k_next = gl.load(k_ptr)
    mbarrier.wait(qb, 0)
    for MASKED in gl.static_range(2):
        for i in range(seen if MASKED else 0, end if MASKED else seen):
            stage = i % STAGES
            mbarrier.wait(bars.index(stage), (i // STAGES) & 1)
            s = warpgroup_mma(
                q_s,
                k8_s.index(stage).permute((1, 0)),
                gl.zeros((BQ, BK), gl.int32, MMA8),
                use_acc=False,
                is_async=True,
            )
            dp = warpgroup_mma(
                do_s,
                v_s.index(stage).permute((1, 0)),
                gl.zeros((BQ, BK), gl.float32, MMA),
                use_acc=False,
                is_async=True,
            )
            factor = q_factor * k_next
            k_next = gl.load(k_ptr + i + 1, mask=i + 1 < end, other=1.0)
            s = warpgroup_mma_wait(1, deps=[s])
            x = gl.convert_layout(s.to(gl.float32), MMA)
            x = x * factor[:, None] - lse[:, None]
            if MASKED:
                keys = i * BK + gl.arange(0, BK, gl.SliceLayout(0, MMA))
                x = gl.where(keys[None, :] <= queries[:, None], x, -float("inf"))
            p = gl.exp2(x)
            dp = warpgroup_mma_wait(0, deps=[dp])
            ds = p * (dp - delta[:, None])
            dq = warpgroup_mma(
                gl.convert_layout(ds.to(dt), A), k16_s.index(stage), dq, is_async=True
            )
            ahead = i + STAGES - 1
            if ahead < end:
                gl.thread_barrier()
                _load_keys(
                    k8,
                    v,
                    k16,
                    k8_s,
                    v_s,
                    k16_s,
                    bars,
                    ahead % STAGES,
                    base8 + ahead * BK,
                    base16 + ahead * BK,
                    D,
                    BK,
                )
    dq_r = warpgroup_mma_wait(0, deps=[dq])
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [num_warps, 1], [1, 0])
    r = first + gl.arange(0, BQ, gl.SliceLayout(1, OUT))
    c = gl.arange(0, D, gl.SliceLayout(0, OUT))
    gl.store(
        dq_ptr + (base16 + r)[:, None] * D + c[None, :],
        gl.convert_layout((dq_r * scale).to(dt), OUT),
    )


def problem(batch: int, heads: int, tokens: int, d: int) -> dict[str, Tensor]:
    """Gaussian q, k, v, do [batch, heads, tokens, d], codes and scales [heads, batch, ...]."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, heads, tokens, d)
    q, k, v, do = (torch.randn(shape, device="cuda", generator=generator) for _ in range(4))
    k -= k.mean(2, keepdim=True)
    q_scale = q.abs().amax(-1, keepdim=True) / 127
    blocks = k.unflatten(2, (-1, BLOCK))
    k_scale = blocks.abs().amax((-1, -2), keepdim=True) / 127
    q8 = (q / q_scale).round().to(torch.int8)
    k8 = (blocks / k_scale).round().to(torch.int8).flatten(2, 3)
    k_rows = k_scale[..., 0].expand(-1, -1, -1, BLOCK).flatten(2)
    scales = {"q_scale": q_scale[..., 0], "k_scale": k_scale[..., 0, 0]}
    by_head = {"q8": q8, "k8": k8, **scales}
    found = {name: x.transpose(0, 1).contiguous() for name, x in by_head.items()}
    numbers = {name: x.bfloat16() for name, x in (("q", q), ("k", k), ("v", v), ("do", do))}
    decoded = {"q_hat": q8.float() * q_scale, "k_hat": k8.float() * k_rows[..., None]}
    return found | numbers | decoded


def exact(x: dict[str, Tensor], scale: float, is_causal: bool) -> dict[str, Tensor]:
    """What kernels are held against, in float32."""
    q, k, v, do = (x[name].float() for name in ("q", "k", "v", "do"))
    s = x["q_hat"] @ x["k_hat"].mT * scale
    if is_causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    lse = s.logsumexp(-1)
    p = (s - lse[..., None]).exp()
    o = p @ v
    delta = (o * do).sum(-1)
    ds = p * (do @ v.mT - delta[..., None])
    gradients = {"dq": ds @ k * scale, "dk": ds.mT @ q * scale, "dv": p.mT @ do}
    return {"o": o, "lse2": lse * LOG2_E, "delta": delta, **gradients}


def rows_of(x: Tensor, rows: int) -> TensorDescriptor:
    """Loads of so many tokens."""
    flat = x.reshape(-1, x.shape[-1])
    dtype = {torch.int8: gl.int8, torch.bfloat16: gl.bfloat16}[x.dtype]
    block = [rows, flat.shape[1]]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor.from_tensor(flat, block, layout)


def numbers_of(x: Tensor) -> TensorDescriptor:
    """Loads of a float32 for each token of a block."""
    return TensorDescriptor.from_tensor(x.reshape(-1), [BLOCK], gl.NVMMASharedLayout(0, 32, 1))


def kernels(
    x: dict[str, Tensor], out: dict[str, Tensor], tile: tuple[int, int, int], is_causal: bool
) -> dict[str, Any]:
    """The three launches of a tile, by name."""
    batch, heads, tokens, d = x["q"].shape
    rows, warps, stages = tile
    scale = d**-0.5
    grid = (batch * heads * tokens // rows,)
    sizes = (tokens, heads, batch)
    how = (is_causal, d)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    factor = (x["q_scale"] * (scale * LOG2_E)).contiguous()

    def run_forward() -> None:
        forward[grid](
            rows_of(x["q8"], rows), rows_of(x["k8"], BLOCK), rows_of(x["v"], BLOCK),
            x["q_scale"], x["k_scale"], out["o"], out["lse2"], *sizes, scale * LOG2_E,
            *how, rows, BLOCK, stages, **options,
        )  # fmt: skip

    def run_query_tiles() -> None:
        query_tiles[grid](
            rows_of(x["q8"], rows), rows_of(x["k8"], BLOCK), rows_of(x["k"], BLOCK),
            rows_of(x["v"], BLOCK), rows_of(x["do"], rows), x["q_scale"], x["k_scale"],
            x["lse2"], x["delta"], out["dq"], *sizes, scale, scale * LOG2_E,
            *how, rows, BLOCK, stages, **options,
        )  # fmt: skip

    def run_key_tiles() -> None:
        key_tiles[grid](
            rows_of(x["q8"], BLOCK), rows_of(x["k8"], rows), rows_of(x["q"], BLOCK),
            rows_of(x["v"], rows), rows_of(x["do"], BLOCK), numbers_of(x["lse2"]),
            numbers_of(x["delta"]), numbers_of(factor), x["k_scale"], out["dk"], out["dv"],
            *sizes, scale, *how, BLOCK, rows, stages, **options,
        )  # fmt: skip

    return {"forward": run_forward, "dq": run_query_tiles, "dk and dv": run_key_tiles}


OUTPUTS = {"forward": ("o",), "dq": ("dq",), "dk and dv": ("dk", "dv")}


def outputs(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Where kernels write."""
    found = {name: torch.empty_like(x["v"]) for name in ("o", "dq", "dk", "dv")}
    return found | {"lse2": torch.empty(x["q"].shape[:3], device="cuda")}


def check(d: int, is_causal: bool) -> None:
    """Raise where a tile is further from float32 than bfloat16 explains."""
    x = problem(2, 2, 512, d)
    true = exact(x, d**-0.5, is_causal)
    x |= {name: true[name].contiguous() for name in ("lse2", "delta")}
    for tile in TILES:
        out = outputs(x)
        for name, run in kernels(x, out, tile, is_causal).items():
            run()
            for tensor in OUTPUTS[name]:
                error = float((out[tensor].float() - true[tensor]).norm() / true[tensor].norm())
                assert error < 0.005, (d, is_causal, tile, tensor, error)


def times(d: int, is_causal: bool) -> list[dict[str, object]]:
    """Milliseconds of every kernel and tile, of 16384 tokens and 2048 channels."""
    x = problem(4, 2048 // d, 4096, d)
    x |= {name: torch.zeros(x["q"].shape[:3], device="cuda") for name in ("lse2", "delta")}
    found = []
    for tile in TILES:
        for name, run in kernels(x, outputs(x), tile, is_causal).items():
            ms = do_bench(run, warmup=5, rep=40, return_mode="median")
            row = {"head_size": d, "is_causal": is_causal, "kernel": name, "tile": tile}
            found.append(row | {"ms": round(ms, 3)})
            print(found[-1], flush=True)
    return found


def report(script: str, about: str, rows: Callable[[], list[dict[str, object]]]) -> None:
    """Print what a script of this folder measures, and write it where --out says."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    record = {
        "command": f"python benchmarks/{script}",
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"triton {triton.__version__}",
        "rows": rows(),
    }
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


def rows() -> list[dict[str, object]]:
    """All are checked before any is timed."""
    for shape in SHAPES:
        check(*shape)
    return [row for shape in SHAPES for row in times(*shape)]


if __name__ == "__main__":
    report("hopper_prototypes.py", str(__doc__), rows)
