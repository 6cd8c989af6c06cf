"""Prototype in Gluon, for Hopper, of the forward of FACTORED_QK with warps that only load.

    python benchmarks/hopper_forward.py [--out FILE]

Needs a Hopper GPU and Triton 3.6. One program stays on each multiprocessor and goes from tile to
tile: its producer, a single warp, loads by TMA, and each of its consumers, warpgroups, computes 64
query rows of the tile. No part of the package: it takes whole blocks of 64 tokens, contiguous
tensors of finite numbers, one query head for each of k and v, and operands that are already
quantized, with one scale for a row of Q and one for 64 tokens of K. All output is checked against
float32, and two runs against each other to the bit, before anything is timed; times are medians,
without quantization.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from hopper_prototypes import LOG2_E, SHAPES, exact, problem, report, rows_of
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.testing import do_bench


class Tile(NamedTuple):
    """How a program works; a step is always of 64 keys."""

    consumers: int
    """Warpgroups of 64 query rows each, 3 or 4."""
    stages: int
    """Loads of K and V in flight."""
    group: int
    """Heads whose tiles of the same rows come one after the other."""
    registers: int
    """Of a consumer's thread."""


TILES = {64: Tile(4, 6, 1, 112), 128: Tile(3, 6, 16, 160)}
"""By head size."""

_PIN = gl.constexpr("""{
.reg .pred p;
.reg .b32 t;
or.b32 t, $4, $5;
or.b32 t, t, $6;
or.b32 t, t, $7;
setp.lt.s32 p, t, 0;
@p st.volatile.shared.b32 [t], t;
mov.b32 $0, $4;
mov.b32 $1, $5;
mov.b32 $2, $6;
mov.b32 $3, $7;
}""")


@gluon.jit
def _pin(x):
    """x, computed before anything that follows.

    ptxas would move the wait for a product above the exponentials that are to run meanwhile, but
    moves no wait over a store that may happen. This one happens where a number has its sign bit
    set. Sums of exponentials never have. A NaN may, and would be stored at whatever address its
    bits are: the inputs have to be finite.
    """
    return gl.inline_asm_elementwise(
        _PIN, "=&f,=&f,=&f,=&f,f,f,f,f", [x], dtype=gl.float32, is_pure=False, pack=4
    )


@gluon.jit
def _tile_of(turn, programs):
    """Number of the tile of a program's turn, in snake order: there, and back in the next turn.

    Under a mask later tiles of a group of heads are shorter, so that a program with a long tile has
    a short one next.
    """
    pid = gl.program_id(0)
    back = turn % 2
    return turn * programs + (pid + back * (programs - 1 - 2 * pid))


@gluon.jit
def _locate(index, N, H, Bt, CAUSAL: gl.constexpr, CONSUMERS: gl.constexpr, GROUP: gl.constexpr):
    """Of a tile: first rows of its head in 8 and in 16 bit, place in the head, blocks of keys."""
    tiles = (N + CONSUMERS * 64 - 1) // (CONSUMERS * 64)
    tile = (index % (tiles * GROUP)) // GROUP
    z = index // (tiles * GROUP) * GROUP + index % GROUP  # b * H + h
    blocks = N // 64
    if CAUSAL:  # longest first
        tile = tiles - 1 - tile
        blocks = gl.minimum((tile + 1) * CONSUMERS, N // 64)
    base8 = (z % H) * (Bt * N) + (z // H) * N
    return base8, z * N, tile, blocks


@gluon.jit
def _first_query(tile, consumer: gl.constexpr, N, CONSUMERS: gl.constexpr):
    """Of a consumer. Surplus ones, past the end, repeat the last 64 rows and store the same."""
    return gl.minimum((tile * CONSUMERS + consumer) * 64, N - 64)


@gluon.jit
def _wait(full, load, STAGES: gl.constexpr):
    """For a load, by its number since the program began."""
    mbarrier.wait(full.index(load % STAGES), (load // STAGES) & 1)


@gluon.jit
def _produce(
    CAUSAL: gl.constexpr, D: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, inputs, buffers, barriers, sizes,
):  # fmt: skip
    """Load j of a tile is of K of step j and V of step j - 1.

    The consumers multiply with both at once, so one barrier says that both are there, and one that
    both are done with. Keys go from the diagonal down, so that the one block that a mask cuts is
    the first, before the loop over the others.
    """
    q8, k8, v = inputs
    q_s, k_s, v_s = buffers
    full, empty, q_full, q_empty = barriers
    N, H, Bt, total, programs = sizes
    load = 0
    for turn in range((total + programs - 1) // programs):
        index = _tile_of(turn, programs)
        if index < total:
            base8, base16, tile, blocks = _locate(index, N, H, Bt, CAUSAL, CONSUMERS, GROUP)
            for i in gl.static_range(CONSUMERS):
                first = _first_query(tile, i, N, CONSUMERS)
                slot = i * 2 + turn % 2
                mbarrier.wait(q_empty.index(slot), ((turn // 2) & 1) ^ 1)
                bar = q_full.index(slot)
                mbarrier.expect(bar, 64 * D)
                tma.async_copy_global_to_shared(q8, [base8 + first, 0], bar, q_s.index(slot))
            for j in range(blocks + 1):
                stage = load % STAGES
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), ((load // STAGES) & 1) ^ 1)
                key = (blocks - 1 - j) * 64
                mbarrier.expect(bar, 192 * D, pred=(j > 0) & (j < blocks))
                mbarrier.expect(bar, 64 * D, pred=j == 0)
                mbarrier.expect(bar, 128 * D, pred=j == blocks)
                tma.async_copy_global_to_shared(
                    k8, [base8 + key, 0], bar, k_s.index(stage), pred=j < blocks
                )
                tma.async_copy_global_to_shared(
                    v, [base16 + key + 64, 0], bar, v_s.index(stage), pred=j > 0
                )
                load += 1


@gluon.jit
def _start_qk(q, k, MMA8: gl.constexpr):
    zeros = gl.zeros((64, 64), gl.int32, MMA8)
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _highest(MASKED: gl.constexpr, s, key, queries, MMA: gl.constexpr):
    """Of each row: of the int32 sums, as an instruction compares three of them but two floats."""
    s = gl.convert_layout(s, MMA)
    if MASKED:
        keys = key + gl.arange(0, 64, gl.SliceLayout(0, MMA))
        s = gl.where(keys[None, :] <= queries[:, None], s, -4194304)  # below -128 * 127 * 127
    return gl.max(s, 1).to(gl.float32)


@gluon.jit
def _exponentials(MASKED: gl.constexpr, s, factor, row_max, key, queries, MMA: gl.constexpr):
    x = gl.convert_layout(s.to(gl.float32), MMA)
    x = x * factor[:, None] - row_max[:, None]
    if MASKED:
        keys = key + gl.arange(0, 64, gl.SliceLayout(0, MMA))
        x = gl.where(keys[None, :] <= queries[:, None], x, -float("inf"))
    return gl.exp2(x)


@gluon.jit
def _sum(p):
    """Over columns 8 apart, which one thread has; the sums are added up at the end of the tile."""
    return gl.sum(p.reshape([64, 8, 8]), 1)


@gluon.jit
def _consume(
    consumer: gl.constexpr, CAUSAL: gl.constexpr, D: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, buffers, barriers, numbers, sizes,
):  # fmt: skip
    q_s, k_s, v_s = buffers
    full, empty, q_full, q_empty = barriers
    qs_ptr, ks_ptr, o_ptr, lse_ptr, scale_log2 = numbers
    N, H, Bt, total, programs = sizes
    MMA8: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    R: gl.constexpr = gl.SliceLayout(1, MMA)
    OUT: gl.constexpr = gl.SliceLayout(1, ACC)
    dt: gl.constexpr = o_ptr.dtype.element_ty
    load = 0
    for turn in range((total + programs - 1) // programs):
        index = _tile_of(turn, programs)
        if index < total:
            base8, base16, tile, blocks = _locate(index, N, H, Bt, CAUSAL, CONSUMERS, GROUP)
            first = _first_query(tile, consumer, N, CONSUMERS)
            queries = first + gl.arange(0, 64, R)
            q_factor = gl.load(qs_ptr + base8 + queries) * scale_log2
            block = blocks - 1
            if CAUSAL:
                block = first // 64
            for _ in range(blocks - 1 - block):  # keys that only later rows of the tile see
                _wait(full, load, STAGES)
                mbarrier.arrive(empty.index(load % STAGES), count=1)
                load += 1
            k_ptr = ks_ptr + base8 // 64
            k_scale = gl.load(k_ptr + block)
            slot = consumer * 2 + turn % 2
            mbarrier.wait(q_full.index(slot), (turn // 2) & 1)
            q = q_s.index(slot)
            stage = load % STAGES
            _wait(full, load, STAGES)
            s = _start_qk(q, k_s.index(stage), MMA8)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(empty.index(stage), count=1)
            load += 1
            factor = q_factor * k_scale
            row_max = _highest(CAUSAL, s, block * 64, queries, MMA) * factor
            p = _exponentials(CAUSAL, s, factor, row_max, block * 64, queries, MMA)
            part = _sum(p)
            PART: gl.constexpr = gl.SliceLayout(1, part.type.layout)
            p16 = gl.convert_layout(p.to(dt), A)
            o = gl.zeros((64, D), gl.float32, ACC)
            _wait(full, load, STAGES)
            k_next = gl.load(k_ptr + gl.maximum(block - 1, 0))
            for i in range(block):
                stage = load % STAGES
                k_scale = k_next
                k_next = gl.load(k_ptr + gl.maximum(block - 2 - i, 0))
                s = _start_qk(q, k_s.index(stage), MMA8)
                o_t = warpgroup_mma(p16, v_s.index(stage), o, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s])
                factor = q_factor * k_scale
                new_max = gl.maximum(row_max, _highest(False, s, 0, queries, MMA) * factor)
                shrink = gl.exp2(row_max - new_max)
                row_max = new_max
                p = _exponentials(False, s, factor, row_max, 0, queries, MMA)
                part = _pin(part * gl.convert_layout(shrink, PART)[:, None] + _sum(p))
                # For the next step, but here: ptxas moves the wait for the product, below, up to
                # the last branch, and this is one.
                load += 1
                _wait(full, load, STAGES)
                o = warpgroup_mma_wait(0, deps=[o_t])
                # All warps meet in it first: they are done with this K, and V of the step before.
                mbarrier.arrive(empty.index(stage), count=1)
                o = o * gl.convert_layout(shrink, OUT)[:, None]
                p16 = gl.convert_layout(p.to(dt), A)
            mbarrier.arrive(q_empty.index(slot), count=1)
            stage = load % STAGES
            o_t = warpgroup_mma(p16, v_s.index(stage), o, is_async=True)
            row_sum = gl.convert_layout(gl.sum(part, 1), R)
            o = warpgroup_mma_wait(0, deps=[o_t])
            mbarrier.arrive(empty.index(stage), count=1)
            load += 1
            o = o * (1.0 / gl.convert_layout(row_sum, OUT))[:, None]
            gl.store(lse_ptr + base16 + queries, row_max + gl.log2(row_sum))
            r = base16 + first + gl.arange(0, 64, OUT)
            c = gl.arange(0, D, gl.SliceLayout(0, ACC))
            gl.store(o_ptr + r[:, None] * D + c[None, :], o.to(dt))


@gluon.jit(do_not_specialize=["N", "H", "Bt", "total", "programs"])
def forward(
    q8, k8, v, qs_ptr, ks_ptr, o_ptr, lse_ptr, N, H, Bt, scale_log2, total, programs,
    CAUSAL: gl.constexpr, D: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    dt: gl.constexpr = v.dtype
    # Q is read until a tile's last step: there are two, so that the next tile's is loaded meanwhile
    q_s = gl.allocate_shared_memory(gl.int8, [CONSUMERS * 2, 64, D], q8.layout)
    k_s = gl.allocate_shared_memory(gl.int8, [STAGES, 64, D], k8.layout)
    v_s = gl.allocate_shared_memory(dt, [STAGES, 64, D], v.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS * 2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS * 2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), CONSUMERS)
    for i in gl.static_range(CONSUMERS * 2):
        mbarrier.init(q_full.index(i), 1)
        mbarrier.init(q_empty.index(i), 1)
    fence_async_shared()
    inputs = (q8, k8, v)
    buffers = (q_s, k_s, v_s)
    barriers = (full, empty, q_full, q_empty)
    numbers = (qs_ptr, ks_ptr, o_ptr, lse_ptr, scale_log2)
    sizes = (N, H, Bt, total, programs)
    gl.warp_specialize(
        [  # Gluon's comprehensions go over tuples, not over ranges
            (_consume, (i, CAUSAL, D, CONSUMERS, STAGES, GROUP, buffers, barriers, numbers, sizes))
            if i < CONSUMERS
            else (_produce, (CAUSAL, D, CONSUMERS, STAGES, GROUP, inputs, buffers, barriers, sizes))
            for i in (0, 1, 2, 3, 4)[: CONSUMERS + 1]
        ],
        [4] * (CONSUMERS - 1) + [1],
        [REGISTERS] * (CONSUMERS - 1) + [24],
    )


def arguments(
    x: dict[str, Tensor], out: dict[str, Tensor], is_causal: bool, processors: int
) -> tuple[list[Any], dict[str, Any], tuple[int]]:
    """Of the kernel, its options, and its grid."""
    batch, heads, tokens, d = x["v"].shape
    tile = TILES[d]
    total = batch * heads * triton.cdiv(tokens, tile.consumers * 64)
    programs = min(total, processors)
    group = math.gcd(tile.group, batch * heads)
    args = [*(rows_of(x[name], 64) for name in ("q8", "k8", "v")), x["q_scale"], x["k_scale"]]
    args += [out["o"], out["lse2"], tokens, heads, batch, d**-0.5 * LOG2_E, total, programs]
    args += [is_causal, d, tile.consumers, tile.stages, group, tile.registers]
    return args, {"num_warps": 4, "enable_fp_fusion": False}, (programs,)


def prepare(
    x: dict[str, Tensor], is_causal: bool, processors: int
) -> tuple[Callable[[], Any], dict[str, Tensor]]:
    """A launch, and where it writes: not a number where it does not."""
    out = {"o": torch.full_like(x["v"], torch.nan)}
    out["lse2"] = torch.full(x["v"].shape[:3], torch.nan, device="cuda")
    args, options, grid = arguments(x, out, is_causal, processors)
    return lambda: forward[grid](*args, **options), out


def check(x: dict[str, Tensor], is_causal: bool, processors: int) -> None:
    """Raise where output is further from float32 than bfloat16 explains, or runs differ."""
    run, found = prepare(x, is_causal, processors)
    run_again, again = prepare(x, is_causal, processors)
    run()
    run_again()
    where = tuple(x["v"].shape), is_causal
    for i in range(len(x["v"])):  # scores of one sequence at a time fit into memory
        one = {name: x[name][i : i + 1] for name in ("q", "k", "v", "do", "q_hat", "k_hat")}
        true = exact(one, x["v"].shape[-1] ** -0.5, is_causal)
        o, lse2 = (found[name][i : i + 1].float() - true[name] for name in ("o", "lse2"))
        errors = float(o.norm() / true["o"].norm()), float(lse2.abs().max())
        assert errors[0] < 0.005 and errors[1] < 0.001, (where, errors)
    assert all(torch.equal(found[name], again[name]) for name in found), where


def measure(d: int, is_causal: bool) -> dict[str, object]:
    """Milliseconds, of 16384 tokens and 2048 channels, after the checks."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    check(problem(2, 2, 512, d), is_causal, 5)  # few, so that programs go on to further tiles
    x = problem(4, 2048 // d, 4096, d)
    check(x, is_causal, processors)
    run, _ = prepare(x, is_causal, processors)
    ms = do_bench(run, warmup=5, rep=40, return_mode="median")
    row: dict[str, object] = {"head_size": d, "is_causal": is_causal, "kernel": "forward"}
    row |= {"tile": TILES[d]._asdict(), "ms": round(ms, 3)}
    print(row, flush=True)
    return row


def rows() -> list[dict[str, object]]:
    """Each is checked before it is timed."""
    return [measure(*shape) for shape in SHAPES]


if __name__ == "__main__":
    report("hopper_forward.py", str(__doc__), rows)
