"""Sums over rows of P for Hopper: delta from P, and the sums of P.

A program owns 256 queries. Four consumer warpgroups compute 64 of them each, and a producer warp
loads keys and values. Consumers wait for the same blocks of keys, but not for each other.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sagesim_kernels.gluon_compat import tma_load
from sagesim_kernels.hopper.backward_kernel import BARRIER
from sagesim_kernels.hopper.backward_warps import load_tokens
from sagesim_kernels.hopper.program_places import origin_of
from sagesim_kernels.operands import (
    causal_offset,
    head_pointers,
    key_loop_bounds,
    length_of,
    live_keys,
    program_coordinates,
    row_base,
    stored_start_of,
    upper_lse2,
)

BLOCK = gl.constexpr(64)
"""Queries of a consumer, and keys of a step."""

CONSUMERS = gl.constexpr(4)
"""Warpgroups that compute."""

TILE = gl.constexpr(BLOCK.value * CONSUMERS.value)
"""Queries of a program."""

_STAGES = gl.constexpr(3)
"""Blocks of keys in shared memory."""

_S_INT32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
"""Layout of S [queries, keys] as the INT8 product leaves it."""

_S_FLOAT32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
"""Layout of S, P and dP [queries, keys] in float32."""

_ROWS = gl.constexpr(gl.SliceLayout(1, _S_FLOAT32.value))


class RowBuffers(NamedTuple):
    """Shared memory, and its barriers."""

    q8: Any  #: int8 [CONSUMERS, BLOCK, D]
    do: Any  #: 16 bit [CONSUMERS, BLOCK, D]
    k8: Any  #: int8 [stages, BLOCK, D]
    v: Any  #: 16 bit [stages, BLOCK, D]
    q_full: Any  #: the queries have arrived
    full: Any  #: [stages], a block of keys has arrived
    empty: Any  #: [stages], all consumers have read it


class RowInputs(NamedTuple):
    """TMA descriptors of what the producer loads."""

    q8: Any  #: int8 [tokens of all heads, D]
    do: Any  #: 16 bit [sequences, heads, tokens, D]
    k8: Any  #: as q8
    v: Any  #: as do


class RowPointers(NamedTuple):
    """Pointers to a number of the head's first query."""

    lse2: Any
    delta: Any  #: None if delta comes from O
    p_sums: Any
    d_lse: Any  #: the gradient of the logsumexp; None if it is 0
    q_scales: Any  #: of Q


class RowTile(NamedTuple):
    """The queries of a program, and the keys that they attend to."""

    first: Any  #: first query
    n_q: Any
    n_k: Any
    offset: Any  #: query i attends to no key after i + offset
    blocks: Any  #: blocks of keys


@gluon.jit
def _produce(inputs, buffers, q_origin, k_origin, row_q, row_k, first, blocks):
    """Load the tile of queries, and all blocks of keys. One warp."""
    D: gl.constexpr = buffers.q8.shape[2]
    for i in gl.static_range(CONSUMERS):
        at = first + i * BLOCK
        tma_load(inputs.q8, [row_q + at, 0], buffers.q_full, buffers.q8.index(i))
        load_tokens(inputs.do, q_origin, at, buffers.q_full, buffers.do.index(i))
    for n in range(blocks):
        stage = n % _STAGES
        mbarrier.wait(buffers.empty.index(stage), ((n // _STAGES) & 1) ^ 1)
        bar = buffers.full.index(stage)
        key = n * BLOCK
        mbarrier.expect(bar, BLOCK * D * 3)
        tma_load(inputs.k8, [row_k + key, 0], bar, buffers.k8.index(stage))
        load_tokens(inputs.v, k_origin, key, bar, buffers.v.index(stage))


@gluon.jit
def _partial_sums(x):
    """Sum columns that are 8 apart, which one thread holds."""
    return gl.sum(x.reshape([BLOCK, 8, 8]), 1)


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, buffers, k_scales, scale_stride, rows, tile, scale_log2,
    Q_TOKENS: gl.constexpr, K_TOKENS: gl.constexpr,
):  # fmt: skip
    """Compute the sums of 64 rows. One warpgroup, number CONSUMER.

    Args:
        k_scales: pointer to the scales of keys.
        scale_stride: from one of them to the next.
        rows: `RowPointers`.
        tile: `RowTile`.
        Q_TOKENS, K_TOKENS: queries and keys that share a scale.
    """
    delta, n_q, blocks = rows.delta, tile.n_q, tile.blocks
    first = tile.first + CONSUMER * BLOCK
    queries = first + gl.arange(0, BLOCK, _ROWS)
    is_query = queries < n_q
    row_lse2 = upper_lse2(gl.load(rows.lse2 + queries, mask=is_query, other=float("inf")))
    ptrs = rows.q_scales + (queries // Q_TOKENS).to(gl.int64)
    factor = gl.load(ptrs, mask=is_query, other=1.0) * scale_log2
    if K_TOKENS == 1:
        factor = factor * 1024.0  # see `operands.apply_k_scale`
    unmasked, end = key_loop_bounds(first, BLOCK, BLOCK, tile.n_k, tile.offset)
    unmasked = gl.minimum(unmasked // BLOCK, blocks)
    end = gl.minimum(gl.maximum(end + BLOCK - 1, 0) // BLOCK, blocks)
    if first >= n_q:
        end = unmasked * 0
    unmasked = gl.minimum(unmasked, end)
    last_key = gl.minimum(queries + tile.offset, tile.n_k - 1)[:, None]
    p_sum = _partial_sums(gl.zeros((BLOCK, BLOCK), gl.float32, _S_FLOAT32))
    delta_sum = p_sum
    mbarrier.wait(buffers.q_full, 0)
    q8, do = buffers.q8.index(CONSUMER), buffers.do.index(CONSUMER)
    for MASKED in gl.static_range(2):
        for n in range(unmasked if MASKED else 0, end if MASKED else unmasked):
            stage = n % _STAGES
            if K_TOKENS == 1:
                at = n * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, _S_FLOAT32))
                column = gl.load(k_scales + at)
            else:
                tile_factor = factor * gl.load(k_scales + n * (BLOCK // K_TOKENS) * scale_stride)
            mbarrier.wait(buffers.full.index(stage), (n // _STAGES) & 1)
            zeros = gl.zeros((BLOCK, BLOCK), gl.int32, _S_INT32)
            k8, v = buffers.k8.index(stage).permute((1, 0)), buffers.v.index(stage).permute((1, 0))
            s = warpgroup_mma(q8, k8, zeros, use_acc=False, is_async=True)
            if delta is not None:
                zeros = gl.zeros((BLOCK, BLOCK), gl.float32, _S_FLOAT32)
                dp = warpgroup_mma(do, v, zeros, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s])
            else:
                s = warpgroup_mma_wait(0, deps=[s])
            x = gl.convert_layout(s.to(gl.float32), _S_FLOAT32)
            if K_TOKENS == 1:
                x = x * (column * 0.0009765625)[None, :]
                factors = factor[:, None].broadcast_to(x.shape)
            else:
                factors = tile_factor[:, None].broadcast_to(x.shape)
            x = gl.fma(x, factors, -row_lse2[:, None].broadcast_to(x.shape))
            if MASKED:
                keys = n * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, _S_FLOAT32))
                visible = keys[None, :] <= last_key
                x = gl.where(visible, x, -float("inf"))
            p = gl.exp2(x)
            p_sum += _partial_sums(p)
            if delta is not None:
                dp = warpgroup_mma_wait(0, deps=[dp])
                p_dp = p * dp
                if MASKED:
                    p_dp = gl.where(visible, p_dp, 0.0)  # dP may be NaN where P is 0
                delta_sum += _partial_sums(p_dp)
            mbarrier.arrive(buffers.empty.index(stage), count=1)
    for n in range(end, blocks):  # keys for other rows of the tile only
        mbarrier.wait(buffers.full.index(n % _STAGES), (n // _STAGES) & 1)
        mbarrier.arrive(buffers.empty.index(n % _STAGES), count=1)
    gl.store(rows.p_sums + queries, gl.convert_layout(gl.sum(p_sum, 1), _ROWS), mask=is_query)
    if delta is not None:
        row_delta = gl.convert_layout(gl.sum(delta_sum, 1), _ROWS)
        if rows.d_lse is not None:
            row_delta -= gl.load(rows.d_lse + queries, mask=is_query, other=0.0)
        row_delta = gl.where(row_lse2 == float("inf"), 0.0, row_delta)
        gl.store(delta + queries, row_delta, mask=is_query)


@gluon.jit(do_not_specialize=["tokens_q", "tokens_k"])
def hopper_p_rows(
    grid, q8, do, k8, v, q, k, lse2, delta, p_sums, d_lse, lengths, tokens_q, tokens_k,
    scale_log2, GROUPS: gl.constexpr, IS_COPIED: gl.constexpr,
):  # fmt: skip
    """Compute rowsum(P) of a tile of queries, and delta = rowsum(P o dP) unless delta is None.

    Args:
        q8, do, k8, v: TMA descriptors, see `RowInputs`.
        q, k: `Operand` of qk_recompute, for their scales.
        lse2, delta, p_sums, d_lse: `Rows`.
        tokens_q, tokens_k: tokens of a head in padded storage.
        IS_COPIED: whether the 16-bit tensors lie in padded storage.
    """
    D: gl.constexpr = q8.block_shape[1]
    K_TOKENS: gl.constexpr = k.TOKENS
    Q_TOKENS: gl.constexpr = q.TOKENS
    dt: gl.constexpr = v.dtype
    tile, h, b = program_coordinates(grid, lengths.IS_CAUSAL)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = tile * TILE
    if first >= n_q:
        return
    k_head = h // GROUPS
    n_k = live_keys(lengths, b)
    offset = causal_offset(lengths, b)
    _unmasked, end = key_loop_bounds(first, TILE, BLOCK, n_k, offset)
    blocks = gl.maximum(end + BLOCK - 1, 0) // BLOCK  # queries may attend to no key
    start_q = stored_start_of(lengths.cu_q, lengths.n_q, b).to(gl.int32)
    start_k = stored_start_of(lengths.cu_k, lengths.n_k, b).to(gl.int32)
    q_origin = origin_of(IS_COPIED, b, h, start_q)
    k_origin = origin_of(IS_COPIED, b, k_head, start_k)
    buffers = RowBuffers(
        gl.allocate_shared_memory(gl.int8, [CONSUMERS, BLOCK, D], q8.layout),
        gl.allocate_shared_memory(
            dt, [CONSUMERS, BLOCK, D], gl.NVMMASharedLayout.get_default_for([BLOCK, D], dt)
        ),
        gl.allocate_shared_memory(gl.int8, [_STAGES, BLOCK, D], k8.layout),
        gl.allocate_shared_memory(
            dt, [_STAGES, BLOCK, D], gl.NVMMASharedLayout.get_default_for([BLOCK, D], dt)
        ),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER),
    )
    mbarrier.init(buffers.q_full, 1)
    for i in gl.static_range(_STAGES):
        mbarrier.init(buffers.full.index(i), 1)
        mbarrier.init(buffers.empty.index(i), CONSUMERS)
    fence_async_shared()
    mbarrier.expect(buffers.q_full, TILE * D * 3)
    inputs = RowInputs(q8, do, k8, v)
    _, q_scales = head_pointers(q, lengths.cu_q, lengths.n_q, b, h)
    _, block_scales = head_pointers(k, lengths.cu_k, lengths.n_k, b, k_head)
    row_delta = None
    row_d_lse = None
    if delta is not None:
        row_delta = row_base(delta, lengths.cu_q, b, h)
    if d_lse is not None:
        row_d_lse = row_base(d_lse, lengths.cu_q, b, h)
    row_lse2 = row_base(lse2, lengths.cu_q, b, h)
    row_sums = row_base(p_sums, lengths.cu_q, b, h)
    rows = RowPointers(row_lse2, row_delta, row_sums, row_d_lse, q_scales)
    bounds = RowTile(first, n_q, n_k, offset, blocks)
    gl.warp_specialize(
        [  # Gluon's comprehensions iterate over tuples, not over ranges
            (
                _consume,
                (
                    i, buffers, block_scales, k.scale_stride_n, rows, bounds, scale_log2, Q_TOKENS,
                    K_TOKENS,
                ),
            )
            if i < CONSUMERS
            else (
                _produce,
                (
                    inputs, buffers, q_origin, k_origin, h * tokens_q + start_q,
                    k_head * tokens_k + start_k, first, blocks,
                ),
            )
            for i in (0, 1, 2, 3, 4)
        ],
        [4, 4, 4, 1],
        [112, 112, 112, 24],
    )  # fmt: skip
