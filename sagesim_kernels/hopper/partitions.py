"""What the warps of a program of `one_pass` do.

Eight warps compute dK and dV, one loads, and two send dQ. For head size 64 four other warps compute
dQ, so that dS and dQ have two slots each in shared memory; for 128 there is no room for that, and
the eight warps compute dQ too. `split_*` are what the warps of the one kernel do, `joint_*` those
of the other.

Barriers: `full` of a stage of loads; `filled` of a part of dQ in shared memory, and for head size
64 `ready` of dS, of which there is one for even steps and one for odd; `free` of a slot of dQ; `kv`
of the tile of keys, and for head size 128 `full_k` of that tile in 16 bit. Loads, and all that
follows from them, are counted on from one query head of the group to the next.
"""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from sagesim_kernels.hopper.compat import barrier, load, viewed
from sagesim_kernels.hopper.turns import BK, BQ, in_order_of_registers
from sagesim_kernels.layout import start_of

WARPS = gl.constexpr(8)
"""That compute dK and dV."""

NUMBERS = gl.constexpr(4 * 64)
"""Of a block of queries: 64 each of Q's scale times that of the logits, of lse2 and of delta, and
64 that mean nothing, as there is no load of three times as many."""

MMA8 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 32]))
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))
KEYS = gl.constexpr(gl.SliceLayout(1, MMA.value))
QUERIES = gl.constexpr(gl.SliceLayout(0, MMA.value))
ROW = gl.constexpr(gl.NVMMASharedLayout(0, 32, 1))
"""Layouts of S in int32, of S and dP in float32, of their rows and columns, and of numbers in
shared memory."""


@constexpr_function
def _whole_rows(channels, warps):
    """Threads next to each other have what is next to each other in a row, eight numbers each."""
    return gl.BlockedLayout([1, 8], [32 // (channels // 8), channels // 8], [warps, 1], [1, 0])


@gluon.jit
def load_tokens(x, at, first, bar, buffer):
    """Tokens of a tensor of four dimensions. at: its sequence, its head and the row of token 0."""
    sequence, head, row = at
    rows: gl.constexpr = buffer.shape[0]
    d: gl.constexpr = buffer.shape[1]
    shared = viewed(buffer, x.dtype, [1, 1, rows, d], x.layout)
    load(x, [sequence, head, row + first, 0], bar, shared)


@gluon.jit
def _begin_scores(k8, v, q8, do):
    """S and dP, transposed, which are not to be read before a wait."""
    s = warpgroup_mma(
        k8, q8.permute((1, 0)), gl.zeros((BK, BQ), gl.int32, MMA8), use_acc=False, is_async=True
    )
    dp = warpgroup_mma(
        v, do.permute((1, 0)), gl.zeros((BK, BQ), gl.float32, MMA), use_acc=False, is_async=True
    )
    return s, dp


@gluon.jit
def _wait_for_keys(k16, bar, mean, D: gl.constexpr, BY: gl.constexpr):
    """Wait for the tile of keys in 16 bit, and take out the mean, if there is one, where it lies.

    Rows behind the last token are zeros, and become the mean's negative: their dS is 0. BY: warps
    that do this.
    """
    if mean is None:
        mbarrier.wait(bar, 0)
    else:
        ROWS: gl.constexpr = _whole_rows(D, BY)
        mean = gl.load(mean + gl.arange(0, D, gl.SliceLayout(0, ROWS)))
        mbarrier.wait(bar, 0)
        k = k16.load(ROWS).to(gl.float32) - mean[None, :]
        k16.store(k.to(k16.dtype))
        fence_async_shared()
        barrier()


@gluon.jit
def _begin_dq(ds, k16, D: gl.constexpr, ACC: gl.constexpr):
    dq = gl.zeros((BQ, D), gl.float32, ACC)
    return warpgroup_mma(ds.permute((1, 0)), k16, dq, use_acc=False, is_async=True)


@gluon.jit
def _begin_keys(k_scale, tile, D: gl.constexpr, ACC: gl.constexpr):
    """The keys of a program, 2^30 for those that no query attends to, their scales, and zeros for
    dK and dV."""
    first, stored, n_k, _ = tile
    own = gl.arange(0, BK, KEYS)
    # Keys have a scale for 64 of them. Behind the sequence's last there is none.
    other = gl.load(k_scale + gl.minimum(stored - 1 - first, 64) // 64)
    scales = gl.where(own < 64, gl.load(k_scale), other)
    dk = warpgroup_mma_init(gl.zeros((BK, D), gl.float32, ACC))
    dv = warpgroup_mma_init(gl.zeros((BK, D), gl.float32, ACC))
    keys = gl.where(first + own < n_k, first + own, 2**30)
    return keys, scales, dk, dv


@gluon.jit
def _visible(keys, i, tile):
    """As `sees`, of keys as `_begin_keys` gives them, and so in one comparison."""
    _, _, _, offset = tile
    queries = i * BQ + gl.arange(0, BQ, QUERIES)
    return keys[:, None] <= (queries + offset)[None, :]


@gluon.jit
def _probabilities(MASKED: gl.constexpr, s, k_scale, factor, lse2, keys, i, tile):
    """P, transposed, of the integer sums of S."""
    x = gl.convert_layout(s.to(gl.float32), MMA)
    x = x * (factor[None, :] * k_scale[:, None]) - lse2[None, :]
    if MASKED:
        x = gl.where(_visible(keys, i, tile), x, -float("inf"))
    return gl.exp2(x)


@gluon.jit
def _score_gradients(MASKED: gl.constexpr, p, dp, delta, keys, i, tile):
    """dS, transposed."""
    ds = dp - delta[None, :]
    if MASKED:  # of which P is 0: and 0 it shall be, whatever dP is
        ds = gl.where(_visible(keys, i, tile), ds, 0.0)
    return p * ds


@gluon.jit
def _store(x, cu, b, head, tile, value, buffer, D: gl.constexpr):
    """Store the keys of a program as their sequence's, zeros for those that no query attends to.

    Through shared memory, if that has room for the format: threads next to each other then store
    what is next to each other. buffer: in place of what no warp reads any more.
    """
    first, stored, n_k, _ = tile
    FORMAT: gl.constexpr = x.ptr.dtype.element_ty
    THROUGH: gl.constexpr = x.ptr.dtype.element_ty.primitive_bitwidth == 16
    OUT: gl.constexpr = _whole_rows(D, WARPS) if THROUGH else value.type.layout
    value = value.to(FORMAT)
    if THROUGH:
        shared = viewed(buffer, FORMAT, [BK, D], buffer.layout)
        barrier()
        shared.store(value)
        barrier()
        value = shared.load(OUT)
    row = first + gl.arange(0, BK, gl.SliceLayout(1, OUT))
    value = gl.where((row < n_k)[:, None], value, gl.zeros((BK, D), FORMAT, OUT))
    column = gl.arange(0, D, gl.SliceLayout(0, OUT)).to(gl.int64)
    base = x.ptr + b.to(gl.int64) * x.stride_b + head.to(gl.int64) * x.stride_h
    ptrs = base + (start_of(cu, b) + row.to(gl.int64)) * x.stride_n
    gl.store(ptrs[:, None] + column[None, :] * x.stride_d, value, mask=(row < stored)[:, None])


@gluon.jit
def _store_gradients(dk, dv, outputs, tile, buffer, scale, D: gl.constexpr):
    dk_out, dv_out, cu, b, head = outputs
    dk_r, dv_r = warpgroup_mma_wait(0, deps=[dk, dv])
    _store(dv_out, cu, b, head, tile, dv_r, buffer, D)
    _store(dk_out, cu, b, head, tile, dk_r * scale, buffer, D)


@gluon.jit
def load_queries(
    q, q_s, full, done, blocks, at, row8, tokens, GROUPS: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, STAGES16: gl.constexpr,
):  # fmt: skip
    """Load Q, its codes, dO and the numbers of each step, in the place of what no warp reads any
    more when the step two before is `done`: `ready` says so where four warps compute dQ, else
    `filled`.

    at: the sequence, its first head and the row of its first token; row8: of that head's first
    token in storage of codes. STAGES16: of Q in 16 bit, which is read last.
    """
    q8, q16, do, numbers = q
    q8_s, q16_s, do_s, numbers_s = q_s
    begin, _, end = blocks
    sequence, first_head, row = at
    for head in range(GROUPS):
        for i in range(begin, end):
            n = head * (end - begin) + i - begin
            if n >= 2:
                mbarrier.wait(done.index(n % 2), (n // 2 & 1) ^ 1)
            own = (sequence, first_head + head, row)
            own8 = row8 + head * tokens
            stage = n % STAGES
            bar = full.index(stage)
            stage16 = n % STAGES16
            mbarrier.expect(bar, BQ * D * 5 + NUMBERS * 4)
            load(q8, [own8 + i * BQ, 0], bar, q8_s.index(stage))
            load_tokens(do, own, i * BQ, bar, do_s.index(stage))
            load(numbers, [(own8 // BQ + i) * NUMBERS], bar, numbers_s.index(stage))
            load_tokens(q16, own, i * BQ, bar, q16_s.index(stage16))


@gluon.jit
def split_keys(
    k8_s, v_s, q_s, ds_s, full, ready, filled, kv, k_scale, outputs, blocks, tile, scale,
    GROUPS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """dK and dV, and dS for the warps that compute dQ."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    begin, seeing, end = blocks
    q8_s, q16_s, do_s, numbers_s = q_s
    keys, k_scale, dk, dv = _begin_keys(k_scale, tile, D, ACC)
    mbarrier.wait(kv, 0)
    k8 = k8_s.index(0).load(gl.DotOperandLayout(0, MMA8, 4))
    v = v_s.index(0).load(gl.DotOperandLayout(0, MMA, 2))
    for head in range(GROUPS):
        for MASKED in gl.static_range(1, -1, -1):
            for i in range(begin if MASKED else seeing, seeing if MASKED else end):
                n = head * (end - begin) + i - begin
                stage = n % STAGES
                slot = n % SLOTS
                mbarrier.wait(full.index(stage), (n // STAGES) & 1)
                do = do_s.index(stage)
                s, dp = _begin_scores(k8, v, q8_s.index(stage), do)
                s = warpgroup_mma_wait(1, deps=[s])
                rows = viewed(numbers_s.index(stage), gl.float32, [4, BQ], ROW)
                factor = rows.index(0).load(QUERIES)
                lse2 = rows.index(1).load(QUERIES)
                p = _probabilities(MASKED, s, k_scale, factor, lse2, keys, i, tile)
                p16 = gl.convert_layout(p.to(do_s.dtype), A)
                dp = warpgroup_mma_wait(0, deps=[dp])
                delta = rows.index(2).load(QUERIES)
                dv = warpgroup_mma(p16, do, dv, is_async=True)
                ds = _score_gradients(MASKED, p, dp, delta, keys, i, tile)
                ds16 = ds.to(q16_s.dtype)
                # dQ of the dS that was in this slot before is there
                mbarrier.wait(filled.index(slot), ((n // SLOTS) & 1) ^ 1)
                ds_s.index(slot).store(ds16)
                fence_async_shared()
                barrier()  # also: these warps are done with the products of the step before
                mbarrier.arrive(ready.index(slot), count=1)
                # of dS in shared memory, as in registers there would be too many of them
                dk = warpgroup_mma(ds_s.index(slot), q16_s.index(stage), dk, is_async=True)
    _store_gradients(dk, dv, outputs, tile, v_s.index(0), scale, D)


@gluon.jit
def split_queries(
    k16_s, k_mean, ds_s, dq_s, ready, filled, free, kv, blocks, tile, GROUPS: gl.constexpr,
    D: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Parts of dQ out of dS. Four warps."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    begin, _, end = blocks
    _wait_for_keys(k16_s.index(0), kv, k_mean, D, 4)
    for n in range(GROUPS * (end - begin)):
        slot = n % SLOTS
        mbarrier.wait(ready.index(slot), (n // SLOTS) & 1)
        dq_t = _begin_dq(ds_s.index(slot), k16_s.index(0), D, ACC)
        dq = warpgroup_mma_wait(0, deps=[dq_t])
        mbarrier.wait(free.index(slot), ((n // SLOTS) & 1) ^ 1)
        dq_s.index(slot).store(in_order_of_registers(dq, D, 1))
        fence_async_shared()
        barrier()
        mbarrier.arrive(filled.index(slot), count=1)


@gluon.jit
def joint_compute(
    k8_s, v_s, k16_s, k_mean, q_s, ds_s, dq_s, full, filled, free, kv, full_k, k_scale, outputs,
    blocks, tile, scale, GROUPS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    STAGES16: gl.constexpr,
):  # fmt: skip
    """dK, dV and the parts of dQ."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    ACCQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    begin, seeing, end = blocks
    q8_s, q16_s, do_s, numbers_s = q_s
    keys, k_scale, dk, dv = _begin_keys(k_scale, tile, D, ACC)
    _wait_for_keys(k16_s.index(0), full_k, k_mean, D, WARPS)
    mbarrier.wait(kv, 0)
    n = 0  # counted: what it could be computed from takes a register too many
    for _ in range(GROUPS):
        for MASKED in gl.static_range(1, -1, -1):
            for i in range(begin if MASKED else seeing, seeing if MASKED else end):
                stage = n % STAGES
                # Unknown to the compiler, which would otherwise compute all descriptors before the
                # loop and run out of registers.
                zero = n >> 30
                do = do_s.index(stage)
                mbarrier.wait(full.index(stage), (n // STAGES) & 1)
                s, dp = _begin_scores(k8_s.index(zero), v_s.index(zero), q8_s.index(stage), do)
                rows = viewed(numbers_s.index(stage), gl.float32, [4, BQ], ROW)
                factor = rows.index(0).load(QUERIES)
                lse2 = rows.index(1).load(QUERIES)
                s = warpgroup_mma_wait(1, deps=[s])
                p = _probabilities(MASKED, s, k_scale, factor, lse2, keys, i, tile)
                delta = rows.index(2).load(QUERIES)
                p16 = gl.convert_layout(p.to(do_s.dtype), A)
                dp = warpgroup_mma_wait(0, deps=[dp])
                dv = warpgroup_mma(p16, do, dv, is_async=True)
                ds = _score_gradients(MASKED, p, dp, delta, keys, i, tile)
                # Over those of the step before, which the product with Q reads for this warp alone.
                ds_s.index(zero).store(ds.to(q16_s.dtype))
                fence_async_shared()
                barrier()
                dq_t = _begin_dq(ds_s.index(zero), k16_s.index(zero), D, ACCQ)
                # of dS in shared memory, as in registers there would be too many of them
                dk = warpgroup_mma(ds_s.index(zero), q16_s.index(n % STAGES16), dk, is_async=True)
                mbarrier.wait(free.index(0), (n & 1) ^ 1)
                dq = warpgroup_mma_wait(1, deps=[dq_t])
                dq_s.index(0).store(in_order_of_registers(dq, D, 2))
                fence_async_shared()
                barrier()  # also: all warps are done with dO, and with Q of the step before
                mbarrier.arrive(filled.index(n % 2), count=1)
                n += 1
    _store_gradients(dk, dv, outputs, tile, v_s.index(0), scale, D)
