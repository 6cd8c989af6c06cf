"""What the programs of heads with more than 128 channels share: their loads and their loops.

A program *owns* 128 tokens: queries for O and dQ, keys for dK and dV. It *streams* blocks of the
others, which a producer warp loads by TMA. It has two consumers, which are warpgroups. Each owns 64
of the tokens, keeps their result in registers, and shares nothing with the other consumer but the
streamed blocks.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sagesim_kernels.gluon_compat import tma_load
from sagesim_kernels.hopper.backward_masks import attends_between
from sagesim_kernels.hopper.channel_parts import (
    BLOCK,
    buffer_at,
    load_codes,
    load_numbers,
)
from sagesim_kernels.hopper.forward_masks import key_indices
from sagesim_kernels.hopper.token_loads import of_next_head
from sagesim_kernels.hopper.wide_structures import Walk
from sagesim_kernels.operands import (
    causal_offset,
    head_ptr,
    is_live_key,
    key_loops_without_padding,
    live_keys,
    live_queries,
    query_loops,
    row_stride,
)

CONSUMERS = gl.constexpr(2)
TILE = gl.constexpr(CONSUMERS.value * BLOCK.value)
"""Tokens that a program owns."""

CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)

ROW_STATS = gl.constexpr(4 * 64)
"""Row statistics of a block of queries, 64 numbers each: Q's scale times the scale of the logits;
lse2; delta; and with a softcap c, what smoothing K subtracted from the logits, divided by c. TMA
loads a power of two."""
STATS_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(0, 32, 1))
"""Layout of row statistics in shared memory."""

S_INT32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
"""Layout of S [owned, streamed] as the INT8 product leaves it."""
S_FLOAT32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
"""Layout of S, P, dP and dS [owned, streamed] in float32."""
OWNED = gl.constexpr(gl.SliceLayout(1, S_FLOAT32.value))
"""Layout of one number for each owned token."""
STREAMED = gl.constexpr(gl.SliceLayout(0, S_FLOAT32.value))
"""Layout of one number for each streamed token."""


@gluon.jit
def walk_of(first, ROWS: gl.constexpr, lengths, b, OWNS_QUERIES: gl.constexpr):
    """Return the `Walk` of owned tokens first..first + ROWS of sequence b.

    Padding among owned keys is ignored here; see `without_padding`.
    """
    offset = causal_offset(lengths, b)
    n_k = live_keys(lengths, b)
    first_live, n_q = live_queries(lengths, b)
    tail = 0
    if OWNS_QUERIES:
        begin, whole, whole_end, end = key_loops_without_padding(
            lengths, b, first, ROWS, BLOCK, n_k, offset
        )
        begin = begin // BLOCK
        end = (end + BLOCK - 1) // BLOCK
        count = gl.maximum(end - begin, 0)
        count = gl.where(first < n_q, count, 0)
        last = count - 1
        masked = count - gl.minimum(whole_end // BLOCK - begin, count)
        if lengths.left is not None or lengths.key_mask is not None:
            last = end - 1
            masked = gl.minimum(masked, count)
            tail = gl.maximum(gl.minimum(whole // BLOCK - begin, count - masked), 0)
        return Walk(last, masked, tail, count)
    else:
        begin, whole, whole_end, end = query_loops(
            lengths, b, first, ROWS, BLOCK, n_k, offset, first_live, n_q
        )
        end = (end + BLOCK - 1) // BLOCK
        begin = gl.where(first < n_k, gl.minimum(begin // BLOCK, end), end)
        # The program id is a 0 that is opaque to the compiler; see `key_loop_bounds`.
        whole = (whole + BLOCK - 1) // BLOCK + gl.program_id(1)
        masked = gl.maximum(gl.minimum(whole, end) - begin, 0)
        if lengths.left is not None:
            tail = gl.maximum(end - gl.maximum(whole_end // BLOCK, begin + masked), 0)
        return Walk(begin, masked, tail, end - begin)


@gluon.jit
def without_padding(walk, first, lengths, b):
    """Return the `Walk` of a tile of keys from `first`, of which some or all may be padding.

    If some are, every block needs a mask. If all are, there is no block.
    """
    live = is_live_key(lengths, b, first + gl.arange(0, TILE, OWNED)).to(gl.int32)
    count = gl.where(gl.max(live, 0) == 0, 0, walk.count)
    is_whole = gl.min(live, 0) != 0
    masked = gl.where(is_whole, walk.masked_at_begin, count)
    return Walk(walk.first, masked, gl.where(is_whole, walk.masked_at_end, 0), count)


@gluon.jit
def part_of_tile(walk, tile_walk):
    """Return the `Walk` of some keys of a tile, after `without_padding` for the tile.

    walk: `walk_of` these keys.
    """
    count = gl.minimum(walk.count, tile_walk.count)
    is_masked = tile_walk.masked_at_begin == tile_walk.count
    masked = gl.where(is_masked, count, walk.masked_at_begin)
    return Walk(walk.first, masked, gl.where(is_masked, 0, walk.masked_at_end), count)


@gluon.jit
def blocks_before(walk, tile_walk, HAS_TAIL: gl.constexpr, OWNS_QUERIES: gl.constexpr):
    """Return how many blocks of a tile come before those of one consumer.

    HAS_TAIL: whether there may be others after them.
    """
    others = tile_walk.count - walk.count
    if not HAS_TAIL:
        return others
    elif OWNS_QUERIES:
        return gl.minimum(gl.maximum(tile_walk.first - walk.first, 0), others)
    else:
        return gl.minimum(gl.maximum(walk.first - tile_walk.first, 0), others)


@gluon.jit
def produce(
    own, streamed, own_buffers, buffers, barriers, own_place, place, walk, CONFIG: gl.constexpr,
):  # fmt: skip
    """Load the owned tokens, and then the blocks of each step. One warp.

    own, streamed: `Tokens` as TMA descriptors. own_buffers, buffers: `Tokens` in shared memory.
    own_place, place: `Place` of the owned tokens and of the first streamed head. walk: of all
    consumers together.
    """
    STAGES: gl.constexpr = CONFIG.stages
    RIGHT_STAGES: gl.constexpr = CONFIG.right_stages
    HAS_DP: gl.constexpr = CONFIG.has_dp
    # Codes have one byte, numbers two.
    tokens_bytes: gl.constexpr = BLOCK * (CONFIG.tile_d + (2 * CONFIG.tile_dv if HAS_DP else 0))
    block_bytes: gl.constexpr = tokens_bytes + (0 if CONFIG.owns_queries else ROW_STATS * 4)
    right_bytes: gl.constexpr = BLOCK * 2 * (CONFIG.tile_d if HAS_DP else CONFIG.tile_dv)
    mbarrier.expect(barriers.own_full, CONSUMERS * tokens_bytes)
    for i in gl.static_range(CONSUMERS):
        row = own_place.stored_row + i * BLOCK
        load_codes(own.codes, row, barriers.own_full, buffer_at(own_buffers.codes, i))
        if HAS_DP:
            buffer = buffer_at(own_buffers.numbers, i)
            load_numbers(own.numbers, own_place.origin, i * BLOCK, barriers.own_full, buffer)
    for head in range(1 if CONFIG.owns_queries else CONFIG.groups):
        stored_row = place.stored_row + head * place.stored_tokens
        origin = of_next_head(place.origin, head)
        for j in range(walk.count):
            n = head * walk.count + j
            block = walk.first - j if CONFIG.owns_queries else walk.first + j
            stage = n % STAGES
            bar = barriers.full.index(stage)
            mbarrier.wait(barriers.empty.index(stage), ((n // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, block_bytes)
            row = stored_row + block * BLOCK
            load_codes(streamed.codes, row, bar, buffer_at(buffers.codes, stage))
            if not CONFIG.owns_queries:
                at = (stored_row // BLOCK + block) * ROW_STATS
                tma_load(streamed.stats, [at], bar, buffers.stats.index(stage))
            if HAS_DP:
                buffer = buffer_at(buffers.numbers, stage)
                load_numbers(streamed.numbers, origin, block * BLOCK, bar, buffer)
            stage = n % RIGHT_STAGES
            bar = barriers.right_full.index(stage)
            mbarrier.wait(barriers.right_empty.index(stage), ((n // RIGHT_STAGES) & 1) ^ 1)
            mbarrier.expect(bar, right_bytes)
            buffer = buffer_at(buffers.right, stage)
            load_numbers(streamed.right, origin, block * BLOCK, bar, buffer)


@gluon.jit
def skip_blocks(n, count, barriers):
    """Release `count` loads from load n on, which are for the other consumer; return the next."""
    STAGES: gl.constexpr = barriers.full.shape[0]
    RIGHT_STAGES: gl.constexpr = barriers.right_full.shape[0]
    n = gl.to_tensor(n)
    for _ in range(count):
        stage = n % STAGES
        mbarrier.wait(barriers.full.index(stage), (n // STAGES) & 1)
        mbarrier.arrive(barriers.empty.index(stage), count=1)
        stage = n % RIGHT_STAGES
        mbarrier.wait(barriers.right_full.index(stage), (n // RIGHT_STAGES) & 1)
        mbarrier.arrive(barriers.right_empty.index(stage), count=1)
        n += 1
    return n


@gluon.jit
def attends_in_block(block, mask, OWNS_QUERIES: gl.constexpr):
    """Return which of the owned tokens and of a streamed block attend to each other.

    mask: `BlockMask`.
    """
    own = mask.first + gl.arange(0, BLOCK, OWNED)
    # One comparison is enough for keys that no query attends to if their index is that large.
    if OWNS_QUERIES:
        keys = key_indices(block, mask)
        keys = gl.where(keys < mask.n_k, keys, 2**30)
        return attends_between(own[:, None], keys[None, :], mask.offset, mask.lowest)
    else:
        queries = block * BLOCK + gl.arange(0, BLOCK, STREAMED)
        keys = gl.where(own < mask.n_k, own, 2**30) if mask.keys is None else mask.keys
        return attends_between(queries[None, :], keys[:, None], mask.offset, mask.lowest)


@gluon.jit
def store_part(out, cu, b, h, first, live, length, value, column, CHANNELS: gl.constexpr):
    """Store a part of a gradient [BLOCK, D] from channel `column` as tokens from `first`.

    Tokens from `live` on get zeros, those from `length` on are not stored, and neither are channels
    from CHANNELS on. out: `Strided`.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, value.type.layout)
    COLUMN: gl.constexpr = gl.SliceLayout(0, value.type.layout)
    row = first + gl.arange(0, value.shape[0], ROW)
    channel = column + gl.arange(0, value.shape[1], COLUMN).to(gl.int64)
    value = gl.where((row < live)[:, None], value, 0.0).to(out.ptr.dtype.element_ty)
    ptrs = head_ptr(out, cu, b, h) + row.to(gl.int64) * row_stride(out)
    mask = (row < length)[:, None] & (channel < CHANNELS)[None, :]
    gl.store(ptrs[:, None] + (channel * out.stride_d)[None, :], value, mask=mask)
