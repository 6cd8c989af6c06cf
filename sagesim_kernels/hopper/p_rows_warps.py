"""The warps of a program of `p_rows_kernel`, and what they share.

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
    warpgroup_mma_wait,
)

from sagesim_kernels.gluon_compat import tma_load
from sagesim_kernels.hopper.channel_products import products_of, start_product
from sagesim_kernels.hopper.forward_warps import compute_before_wait
from sagesim_kernels.hopper.token_loads import load_tokens
from sagesim_kernels.operands import part_of, upper_lse2
from sagesim_kernels.partial_sums import add_partial_products, columns_of, partial_sums

BLOCK = gl.constexpr(64)
"""Queries of a consumer, and keys of a step."""

CONSUMERS = gl.constexpr(4)
"""Warpgroups that compute."""

TILE = gl.constexpr(BLOCK.value * CONSUMERS.value)
"""Queries of a program."""

STAGES = gl.constexpr(3)
"""Blocks of keys in shared memory."""

_S_INT32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
"""Layout of S [queries, keys] as the INT8 product leaves it."""

_S_FLOAT32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
"""Layout of S, P and dP [queries, keys] in float32."""

_ROWS = gl.constexpr(gl.SliceLayout(1, _S_FLOAT32.value))
_COLUMNS = gl.constexpr(gl.SliceLayout(0, _S_FLOAT32.value))


class RowBuffers(NamedTuple):
    """Shared memory, and its barriers."""

    q8: Any  #: int8 [CONSUMERS, BLOCK, D]
    do: Any  #: 16 bit [CONSUMERS, BLOCK, D]; None without delta
    k8: Any  #: int8 [stages, BLOCK, D]
    v: Any  #: 16 bit [stages, BLOCK, D]; None, as do, without delta
    k_scale: Any  #: float32 [stages, BLOCK], or None if keys of a block share a scale
    q_full: Any  #: the queries have arrived
    full: Any  #: [stages], a block of keys has arrived
    empty: Any  #: [stages], all consumers have read it


class RowInputs(NamedTuple):
    """TMA descriptors of what the producer loads."""

    q8: Any  #: int8 [tokens of all heads, D]
    do: Any  #: 16 bit [sequences, heads, tokens, D]
    k8: Any  #: as q8
    v: Any  #: as do
    k_scale: Any  #: float32 [tokens of all heads], or None if keys of a block share a scale


class RowPointers(NamedTuple):
    """Pointers to a number of the head's first query."""

    lse2: Any
    delta: Any  #: None if delta comes from O
    p_sums: Any  #: None if they are not computed
    p_bound: Any  #: the largest P of the row; None if it is not computed
    d_lse: Any  #: the gradient of the logsumexp; None if it is 0
    q_scales: Any  #: of Q


class RowTile(NamedTuple):
    """The queries of a program or a consumer, and the blocks of keys that they attend to."""

    first: Any  #: first query
    begin: Any  #: first block
    whole: Any  #: first block that needs no mask
    whole_end: Any  #: first block after those that need no mask
    end: Any


class RowMask(NamedTuple):
    """Which keys the queries of a sequence attend to."""

    n_q: Any
    n_k: Any  #: no query attends to keys from this one on
    offset: Any  #: query i attends to no key after i + offset
    lowest: Any  #: query i attends to no key before i + lowest; None: no limit
    key_mask: Any  #: int8, 0 for padding; None: none is


@gluon.jit
def load_queries_and_keys(inputs, buffers, q_origin, k_origin, row_q, row_k, tile):
    """Load the tile of queries, and its blocks of keys. One warp."""
    D: gl.constexpr = buffers.q8.shape[2]
    BYTES: gl.constexpr = BLOCK * (
        D * (1 if buffers.v is None else 3) + (0 if buffers.k_scale is None else 4)
    )
    for i in gl.static_range(CONSUMERS):
        at = tile.first + i * BLOCK
        tma_load(inputs.q8, [row_q + at, 0], buffers.q_full, buffers.q8.index(i))
        if buffers.do is not None:
            load_tokens(inputs.do, q_origin, at, buffers.q_full, buffers.do.index(i))
    for n in range(tile.end - tile.begin):
        stage = n % STAGES
        mbarrier.wait(buffers.empty.index(stage), ((n // STAGES) & 1) ^ 1)
        bar = buffers.full.index(stage)
        key = (tile.begin + n) * BLOCK
        mbarrier.expect(bar, BYTES)
        tma_load(inputs.k8, [row_k + key, 0], bar, buffers.k8.index(stage))
        if buffers.v is not None:
            load_tokens(inputs.v, k_origin, key, bar, buffers.v.index(stage))
        if buffers.k_scale is not None:
            tma_load(inputs.k_scale, [row_k + key], bar, buffers.k_scale.index(stage))


@gluon.jit
def _wait_for_keys(buffers, n):
    """Wait until block n of the program's keys has arrived."""
    mbarrier.wait(buffers.full.index(n % STAGES), (n // STAGES) & 1)


@gluon.jit
def _skip(buffers, begin, end):
    """Release the blocks of some steps, which are for other queries of the tile only."""
    for n in range(begin, end):
        _wait_for_keys(buffers, n)
        mbarrier.arrive(buffers.empty.index(n % STAGES), count=1)


@gluon.jit
def _finite_product(top, factor):
    """Return the largest logit of each row from its largest S, which is -inf without keys."""
    return gl.where(top == -float("inf"), top, top * factor)


@gluon.jit
def compute_rows(
    CONSUMER: gl.constexpr, buffers, k_scales, scale_stride, rows, all_blocks, tile, mask,
    scale_log2, KD: gl.constexpr, VD: gl.constexpr, Q_TOKENS: gl.constexpr,
    K_TOKENS: gl.constexpr,
):  # fmt: skip
    """Compute the sums and maxima of 64 rows. One warpgroup, number CONSUMER.

    Args:
        k_scales: pointer to the scales of blocks of keys; not used if each key has its own.
        scale_stride: from one of them to the next.
        rows: `RowPointers`.
        all_blocks: `RowTile` of the program, whose blocks of keys are loaded.
        tile: `RowTile` of this consumer.
        mask: `RowMask`.
        KD, VD: channels of K and V.
        Q_TOKENS, K_TOKENS: queries and keys that share a scale.
    """
    D: gl.constexpr = buffers.q8.shape[2]
    delta = rows.delta
    queries = tile.first + gl.arange(0, BLOCK, _ROWS)
    is_query = queries < mask.n_q
    row_lse2 = gl.load(rows.lse2 + queries, mask=is_query, other=float("inf"))
    subtracted = upper_lse2(row_lse2)
    ptrs = rows.q_scales + (queries // Q_TOKENS).to(gl.int64)
    factor = gl.load(ptrs, mask=is_query, other=1.0) * scale_log2
    if K_TOKENS == 1:
        factor = factor * 1024.0  # see `operands.apply_k_scale`
    last_key = gl.minimum(queries + mask.offset, mask.n_k - 1)[:, None]
    p_sum = partial_sums(gl.zeros((BLOCK, BLOCK), gl.float32, _S_FLOAT32))
    delta_sum = p_sum
    top = gl.full((BLOCK,), -float("inf"), gl.float32, _ROWS)
    sign = gl.where(gl.to_tensor(scale_log2) < 0.0, -1.0, 1.0)
    mbarrier.wait(buffers.q_full, 0)
    q8 = buffers.q8.index(CONSUMER)
    _skip(buffers, 0, tile.begin - all_blocks.begin)
    if tile.begin < tile.end:
        _wait_for_keys(buffers, tile.begin - all_blocks.begin)
    # Without a limit on the left and a key mask, no key before the second part is masked.
    FIRST_PART: gl.constexpr = 1 if mask.lowest is None and mask.key_mask is None else 0
    for PART in gl.static_range(FIRST_PART, 3):
        part_begin, part_end = part_of(tile, PART)
        for block in range(part_begin, part_end):
            n = block - all_blocks.begin
            stage = n % STAGES
            if K_TOKENS != 1:
                at = block * (BLOCK // K_TOKENS) * scale_stride
                tile_factor = factor * gl.load(k_scales + at)
            s = start_product(q8, buffers.k8.index(stage), gl.int32, _S_INT32, KD)
            if K_TOKENS == 1:
                column = buffers.k_scale.index(stage).load(_COLUMNS) * 2.0**-10
            if delta is not None:
                do, v = buffers.do.index(CONSUMER), buffers.v.index(stage)
                dp = start_product(do, v, gl.float32, _S_FLOAT32, VD)
                s = warpgroup_mma_wait(products_of(VD, D, 16), deps=[s])
            else:
                s = warpgroup_mma_wait(0, deps=[s])
            x = gl.convert_layout(s.to(gl.float32), _S_FLOAT32)
            # `signed` is for the maxima: S times the sign of the logit scale. A later product by a
            # factor that is not negative keeps the order.
            if K_TOKENS == 1:
                signed = x * (column * sign)[None, :]
                x = x * column[None, :]
                factors = factor[:, None].broadcast_to(x.shape)
            else:
                signed = x * sign
                factors = tile_factor[:, None].broadcast_to(x.shape)
            x = gl.fma(x, factors, -subtracted[:, None].broadcast_to(x.shape))
            if PART != 1:
                keys = block * BLOCK + gl.arange(0, BLOCK, _COLUMNS)
                visible = keys[None, :] <= last_key
                if mask.lowest is not None:
                    visible = visible & (keys[None, :] >= (queries + mask.lowest)[:, None])
                if mask.key_mask is not None:
                    live = gl.load(mask.key_mask + keys, mask=keys < mask.n_k, other=0) != 0
                    visible = visible & live[None, :]
                x = gl.where(visible, x, -float("inf"))
                if rows.p_bound is not None:
                    signed = gl.where(visible, signed, -float("inf"))
            if rows.p_bound is not None:
                block_top = gl.max(signed, 1)
                if K_TOKENS != 1:
                    block_top = _finite_product(block_top, tile_factor * sign)
                top = gl.maximum(top, block_top)
            if rows.p_sums is not None or delta is not None:
                p = gl.exp2(x)
            if rows.p_sums is not None:
                p_sum += partial_sums(p)
            if delta is not None:
                # An eighth of P is enough. With more, the kernel is slower.
                compute_before_wait(columns_of(p)[7], rows.lse2)
            # The wait for the next step's keys is before that for dP, because it contains a branch.
            # ptxas moves the wait for a product upwards as far as the last branch before it.
            _wait_for_keys(buffers, gl.minimum(block + 1, tile.end - 1) - all_blocks.begin)
            if delta is not None:
                dp = warpgroup_mma_wait(0, deps=[dp])
                if PART != 1:
                    dp = gl.where(visible, dp, 0.0)  # it may be NaN where P is 0
                delta_sum = add_partial_products(delta_sum, p, dp)
            if K_TOKENS == 1:
                # Without this, a later write by TMA may overtake the loads of the scales.
                fence_async_shared()
            mbarrier.arrive(buffers.empty.index(stage), count=1)
    _skip(buffers, tile.end - all_blocks.begin, all_blocks.end - all_blocks.begin)
    if rows.p_sums is not None:
        sums = gl.convert_layout(gl.sum(p_sum, 1), _ROWS)
        gl.store(rows.p_sums + queries, sums, mask=is_query)
    if rows.p_bound is not None:
        if K_TOKENS == 1:
            top = _finite_product(top, factor * sign)
        # A maximum may drop a NaN. The logsumexp keeps it, and so do the sums of P.
        bound = gl.where(row_lse2 == row_lse2, gl.exp2(top - row_lse2), row_lse2)
        if rows.p_sums is not None:
            bound = gl.where(sums == sums, bound, sums)
        gl.store(rows.p_bound + queries, bound, mask=is_query)
    if delta is not None:
        row_delta = gl.convert_layout(gl.sum(delta_sum, 1), _ROWS)
        if rows.d_lse is not None:
            row_delta -= gl.load(rows.d_lse + queries, mask=is_query, other=0.0)
        row_delta = gl.where(row_lse2 == float("inf"), 0.0, row_delta)
        gl.store(delta + queries, row_delta, mask=is_query)
