"""The warps of a backward program with dV, dK and dQ in FP8.

Eight warps compute the gradients, one producer warp loads, and one store warp adds dQ to its sums.

P and dS are rounded with scales that are known before the loop, see `operands.row_bounds`. Their
codes are left operands of dV and dK in registers. The right operands, dO and Q, lie in memory in
the order in which threads hold the queries of P, see `operands.in_register_order`. dS passes
through shared memory to dQ: a thread holds keys r and r + 8 of each 16, and stores their codes as
one number of 16 bits, so that keys are in pairs there. K has the same order.

Tensor cores do not add FP8 products in full float32. So a sum of dV or dK ends with the block of
queries that shares a scale of dO or Q, see docs/numerics.md, and its parts are added in float32.
Registers do not suffice for a second sum. Each thread keeps its part of it in global memory, which
no other thread reads or writes.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from sagesim_kernels.gluon_compat import barrier, reinterpret, tma_load
from sagesim_kernels.hopper.backward_masks import are_live, part_of
from sagesim_kernels.hopper.backward_structures import TokenOrigin
from sagesim_kernels.hopper.backward_warps import (
    ST_COLUMNS,
    ST_FLOAT32,
    ST_INT32,
    ST_ROWS,
    WARPS,
    attends_transposed,
    load_tokens,
    store_keys,
)
from sagesim_kernels.hopper.dq_parts import BLOCK_Q, TILE_K, block_of, to_tma_order, to_units

ROW_STATS = gl.constexpr(5)
"""Statistics of a row of S, of which each block of queries has 64 in a row.

Q's scale times the scale of the logits; log2 of the top code of P, less the row maximum; a factor
of dP in codes of dS; this factor times -delta; and the scale of dS over the unit of dQ.
"""

_TO_E4M3 = gl.constexpr(
    "{.reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f32 x, $2, $1; "
    "cvt.rn.satfinite.e4m3x2.f32 y, $4, $3; mov.b32 $0, {x, y};}"
)
_TO_E4M3_BEFORE = gl.constexpr(
    "{.reg .b16 x, y; .reg .pred p; cvt.rn.satfinite.e4m3x2.f32 x, $2, $1; "
    "cvt.rn.satfinite.e4m3x2.f32 y, $4, $3; mov.b32 $0, {x, y}; "
    "setp.lt.s32 p, $0, 0; @p prefetch.global.L2 [$5];}"
)
_IN_PAIRS = gl.constexpr("prmt.b32 $0, $2, $3, 0x5140; prmt.b32 $1, $2, $3, 0x7362;")
_ADD = gl.constexpr("red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11}; mov.b32 $0, 0;")


@gluon.jit
def _to_codes(x):
    """Round x to FP8 codes, ties to even. Numbers beyond the largest code become that code."""
    return gl.inline_asm_elementwise(_TO_E4M3, "=r,r,r,r,r", [x], gl.int8, True, 4)


@gluon.jit
def _to_codes_before_wait(x, address):
    """Return `_to_codes` of x, and keep ptxas from computing it after a wait that follows.

    ptxas moves a wait for a product upwards, but not over a possible access to memory. So this
    prefetches `address` if codes have their sign bit set, which codes of P never have; see
    `forward_warps`. address: any valid address in global memory.
    """
    address = gl.full(x.shape, address.to(gl.int64), gl.int64, x.type.layout)
    return gl.inline_asm_elementwise(
        _TO_E4M3_BEFORE, "=&r,f,f,f,f,l,l,l,l", [x, address], gl.int8, False, 4
    )


@gluon.jit
def _as_left_operand(codes, OPERAND: gl.constexpr):
    """Return codes [keys, queries] as a left operand, with queries in register order."""
    M: gl.constexpr = codes.shape[0]
    N: gl.constexpr = codes.shape[1]
    codes = codes.reshape([M, N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([M, N])
    return gl.convert_layout(codes, OPERAND).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _in_pairs(codes):
    """Return codes [keys, queries] as int16 [queries, keys / 2], two keys in a number."""
    M: gl.constexpr = codes.shape[0]
    N: gl.constexpr = codes.shape[1]
    low, high = gl.split(codes.reshape([M // 16, 2, 8, N]).permute((0, 2, 3, 1)))
    pairs = gl.inline_asm_elementwise(_IN_PAIRS, "=r,=r,r,r", [low, high], gl.int16, True, 4)
    return pairs.reshape([M // 2, N]).permute((1, 0))


@gluon.jit
def _start_s(k8, q8):
    """Start S transposed. It may be read only after a wait."""
    zeros = gl.zeros((TILE_K, BLOCK_Q), gl.int32, ST_INT32)
    return warpgroup_mma(k8, q8.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_dp(v, do):
    """Start dP transposed. It may be read only after a wait."""
    zeros = gl.zeros((TILE_K, BLOCK_Q), gl.float32, ST_FLOAT32)
    return warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _like(x, of_columns):
    """Return numbers of columns for each element of x [keys, queries]."""
    return of_columns[None, :].broadcast_to(x.shape)


@gluon.jit
def load_columns(x, head, column, bar, buffer):
    """Load tokens from `column` of codes [heads, channels, tokens] by TMA."""
    D: gl.constexpr = buffer.shape[0]
    TOKENS: gl.constexpr = buffer.shape[1]
    shared = reinterpret(buffer, x.dtype, [1, D, TOKENS], x.layout)
    tma_load(x, [head, 0, column], bar, shared)


@gluon.jit
def produce_fp8(
    inputs, buffers, q_full, released, loop, origin, first_head, start, stored_tokens,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Load the block of queries of each step by TMA, into buffers that are released. One warp.

    After the last step it loads one block of Q and dO more, because each step starts S and dP of
    the next one.

    Args:
        released: barriers [2], for even and odd steps. Before this warp loads step n, it waits for
            the barrier of step n - 2, after which no warp reads data of that step.
        loop: `QueryLoop`.
        origin: `TokenOrigin` of the first query head.
        first_head: the first query head.
        start: first token of the sequence in padded storage.
        stored_tokens: tokens of a head in padded storage.
    """
    STAGES: gl.constexpr = buffers.q8.shape[0]
    D: gl.constexpr = buffers.q8.shape[2]
    steps = loop.end - loop.begin
    for head in range(GROUPS):
        for i in range(loop.begin, loop.end):
            n = head * steps + i - loop.begin
            if n >= STAGES:
                mbarrier.wait(released.index(n % 2), (n // 2 & 1) ^ 1)
            at = TokenOrigin(origin.b, origin.h + head, origin.row)
            block = block_of(i, loop)
            column = start + block * BLOCK_Q
            row = (first_head + head) * stored_tokens + column
            stage = n % STAGES
            bar = q_full.index(stage)
            mbarrier.expect(bar, BLOCK_Q * (D * 5 + ROW_STATS * 4))
            tma_load(inputs.q8, [row, 0], bar, buffers.q8.index(stage))
            load_tokens(inputs.do, at, block * BLOCK_Q, bar, buffers.do.index(stage))
            for k in gl.static_range(ROW_STATS):
                stats = buffers.row_stats.index(stage * ROW_STATS + k)
                tma_load(inputs.row_stats, [row * ROW_STATS + k * BLOCK_Q], bar, stats)
            load_columns(inputs.do_t, first_head + head, column, bar, buffers.do_t.index(stage))
            load_columns(inputs.q_t, first_head + head, column, bar, buffers.q_t.index(stage))
    n = GROUPS * steps
    if n >= STAGES:
        mbarrier.wait(released.index(n % 2), (n // 2 & 1) ^ 1)
    bar = q_full.index(n % STAGES)
    mbarrier.expect(bar, BLOCK_Q * D * 3)
    row = first_head * stored_tokens + start
    load_tokens(inputs.do, origin, 0, bar, buffers.do.index(n % STAGES))
    tma_load(inputs.q8, [row, 0], bar, buffers.q8.index(n % STAGES))


@gluon.jit
def _in_thread_order(sums):
    """Return sums [TILE_K, D] as [TILE_K * D], in the order that registers hold them."""
    D: gl.constexpr = sums.shape[1]
    sums = sums.reshape([TILE_K // 16, 2, 8, D // 8, 4, 2])
    return sums.permute((3, 0, 2, 4, 1, 5)).reshape([TILE_K * D])


@gluon.jit
def _add_to_memory(sums, ptr, is_first):
    """Add sums to those in memory, or store them there if they are the first.

    Each thread adds to numbers that no other thread reads or writes, in the order of its program.
    """
    sums = _in_thread_order(sums)
    ptrs = ptr + gl.arange(0, sums.shape[0], sums.type.layout)
    if is_first:
        gl.store(ptrs, sums)
    else:
        addresses = ptrs.to(gl.int64)
        gl.inline_asm_elementwise(
            _ADD, "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [addresses, sums], gl.int32, False, 4
        )


@gluon.jit
def _add_from_memory(sums, ptr):
    """Return sums [TILE_K, D] plus those that `_add_to_memory` has stored."""
    D: gl.constexpr = sums.shape[1]
    order = _in_thread_order(sums)
    ptrs = ptr + gl.arange(0, order.shape[0], order.type.layout)
    known = gl.load(ptrs, cache_modifier=".cg")
    total = (order + known).reshape([D // 8, TILE_K // 16, 8, 4, 2, 2])
    total = total.permute((1, 4, 2, 0, 3, 5)).reshape([TILE_K, D])
    return gl.convert_layout(total, sums.type.layout)


@gluon.jit
def compute_gradients(
    key_tile, queries, ds_s, dq_s, barriers, k_scale, k_right_scale, right_scales, sums, outputs,
    loop, tile, GROUPS: gl.constexpr, KD: gl.constexpr, VD: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Compute dK, dV and the parts of dQ. Eight warps.

    S and dP of a step are started in the step before, so that the tensor cores have work while dQ
    is on its way.

    key_tile: `CodedKeyBuffers`. queries: `CodedQueryBuffers`. ds_s: int16 [1, BLOCK_Q, TILE_K / 2]
    in shared memory. k_scale: pointer to the scale of the tile's first key. k_right_scale: pointer
    to the tile's scale in dQ. right_scales: `RightScales`. sums: float32 [2 * TILE_K * D], memory
    of the program. outputs: `KeyOutputs`. loop: `QueryLoop`. tile: `KeyTile`. KD, VD: channels of K
    and V. PART: blocks of queries that share a scale of dO or Q.
    """
    STAGES: gl.constexpr = queries.q8.shape[0]
    D: gl.constexpr = queries.q8.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 32])
    DQ_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    FEW: gl.constexpr = D == 64
    local = gl.arange(0, TILE_K, ST_ROWS)
    last = gl.minimum(local, tile.length - 1 - tile.first)
    address = k_scale
    k_scale = gl.load(k_scale + last)
    k_right_scale = gl.load(k_right_scale)
    is_live = are_live(tile.first + local, tile, outputs.key_mask)
    keys = gl.where(is_live, tile.first + local, 2**30)
    mbarrier.wait(barriers.kv_full, 0)
    mbarrier.wait(barriers.q_full.index(0), 0)
    s_t = _start_s(key_tile.k8.index(0), queries.q8.index(0))
    dp = _start_dp(key_tile.v.index(0), queries.do.index(0))
    s = warpgroup_mma_wait(1, deps=[s_t]).to(gl.float32)
    dk = warpgroup_mma_init(gl.zeros((TILE_K, D), gl.float32, ACC))
    dv = warpgroup_mma_init(gl.zeros((TILE_K, D), gl.float32, ACC))
    n = 0
    part = 0
    for head in range(GROUPS):
        first = loop.begin
        while first < loop.end:
            block = block_of(first, loop)
            stop = first + gl.minimum((block // PART + 1) * PART, loop.end) - block
            if loop.end <= PART:  # the loop goes on with the first block, which has the same scale
                stop = loop.end
            do_scale = gl.load(right_scales.do + head * right_scales.stride + block // PART)
            q_scale = gl.load(right_scales.q + head * right_scales.stride + block // PART)
            dk = warpgroup_mma_init(gl.zeros((TILE_K, D), gl.float32, ACC))
            dv = warpgroup_mma_init(gl.zeros((TILE_K, D), gl.float32, ACC))
            for RANGE in gl.static_range(2 if loop.unmasked_end is None else 3):
                begin, end = part_of(loop, RANGE)
                for i in range(gl.maximum(first, begin), gl.minimum(stop, end)):
                    stage = n % STAGES
                    after = (n + 1) % STAGES
                    # This 0 is opaque to the compiler. With a constant, it computes the descriptors
                    # of all operands before the loop and runs out of registers.
                    zero = n >> 30
                    stats = stage * ROW_STATS
                    factor = queries.row_stats.index(stats).load(ST_COLUMNS)
                    shift = queries.row_stats.index(stats + 1).load(ST_COLUMNS)
                    x = gl.convert_layout(s, ST_FLOAT32)
                    x = gl.fma(x, factor[None, :] * k_scale[:, None], _like(x, shift))
                    if RANGE != 1:
                        visible = attends_transposed(keys, i, tile)
                        x = gl.where(visible, x, -float("inf"))
                    p = gl.exp2(x)
                    p8 = _as_left_operand(_to_codes_before_wait(p, address), OPERAND)
                    dp = warpgroup_mma_wait(0, deps=[dp])
                    do_t = queries.do_t.index(stage).permute((1, 0))
                    dv = warpgroup_mma(p8, do_t, dv, is_async=True)
                    ds_factor = queries.row_stats.index(stats + 2).load(ST_COLUMNS)
                    ds_shift = queries.row_stats.index(stats + 3).load(ST_COLUMNS)
                    ds = gl.fma(dp, _like(dp, ds_factor), _like(dp, ds_shift))
                    if RANGE != 1:  # P is 0 there, but 0 times an infinite or NaN dP would be NaN
                        ds = gl.where(visible, ds, 0.0)
                    codes = _to_codes(p * ds)
                    ds8 = _as_left_operand(codes, OPERAND)
                    ds_s.index(zero).store(_in_pairs(codes))
                    fence_async_shared()
                    barrier()
                    left = reinterpret(ds_s.index(zero), gl.float8e4nv, [BLOCK_Q, TILE_K], CODES)
                    k_t = key_tile.k_t.index(zero).permute((1, 0))
                    dq_zeros = gl.zeros((BLOCK_Q, D), gl.float32, DQ_ACC)
                    dq_t = warpgroup_mma(left, k_t, dq_zeros, use_acc=False, is_async=True)
                    q_t = queries.q_t.index(stage).permute((1, 0))
                    dk = warpgroup_mma(ds8, q_t, dk, is_async=True)
                    mbarrier.wait(barriers.q_full.index(after), ((n + 1) // STAGES) & 1)
                    s_t = _start_s(key_tile.k8.index(zero), queries.q8.index(after))
                    if FEW:
                        dp_t = _start_dp(key_tile.v.index(zero), queries.do.index(after))
                    scale = queries.row_stats.index(stats + 4).load(gl.SliceLayout(1, DQ_ACC))
                    scale = scale * k_right_scale
                    mbarrier.wait(barriers.dq_empty.index(0), (n & 1) ^ 1)
                    dq = warpgroup_mma_wait(3 if FEW else 2, deps=[dq_t])
                    dq_s.index(0).store(to_tma_order(to_units(dq, scale)))
                    fence_async_shared()
                    if not FEW:
                        dp_t = _start_dp(key_tile.v.index(zero), queries.do.index(after))
                    dp = dp_t
                    s, dk, dv = warpgroup_mma_wait(1, deps=[s_t, dk, dv])
                    s = s.to(gl.float32)
                    # After this barrier, all warps have finished with this step's operands.
                    barrier()
                    mbarrier.arrive(barriers.dq_full.index(n % 2), count=1)
                    dk, dv = warpgroup_mma_init(dk), warpgroup_mma_init(dv)
                    n += 1
            dk, dv = warpgroup_mma_wait(1, deps=[dk, dv])
            dk, dv = dk * q_scale, dv * do_scale
            first = stop
            if (first < loop.end) | (head < GROUPS - 1):
                _add_to_memory(dv, sums, part == 0)
                _add_to_memory(dk, sums + TILE_K * D, part == 0)
                part += 1
            dk, dv = warpgroup_mma_init(dk), warpgroup_mma_init(dv)
    dp = warpgroup_mma_wait(0, deps=[dp])
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    if part > 0:
        dv = _add_from_memory(dv, sums)
        dk = _add_from_memory(dk, sums + TILE_K * D)
    store_keys(outputs.dv, outputs, tile, dv, key_tile.v.index(0), VD)
    store_keys(outputs.dk, outputs, tile, dk * outputs.scale, key_tile.v.index(0), KD)
