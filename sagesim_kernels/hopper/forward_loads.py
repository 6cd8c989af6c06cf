"""The loads of a forward program: its producer, which is a warp, and how its consumers await them.

Barriers, all in shared memory:

- `full` of a stage: K and V of the stage have arrived. `empty`: every consumer has read them.
- `q_full` of a Q buffer: its queries have arrived, and the producer has stored the tile. `q_empty`:
  its consumer has read them.

Each warp counts the loads and the waves from the start of the program, so its stages and phases
follow from its own counters. Different warps may be at different tiles at the same time.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sagesim_kernels.gluon_compat import barrier, tma_load
from sagesim_kernels.hopper.backward_structures import TokenOrigin
from sagesim_kernels.hopper.dealt_tiles import share_tile, shared_tile
from sagesim_kernels.hopper.forward_structures import Barriers, Tile
from sagesim_kernels.hopper.forward_tiles import BLOCK, key_blocks, tile_of, waves
from sagesim_kernels.hopper.token_loads import key_origin, load_tokens
from sagesim_kernels.operands import live_keys, stored_start_of

BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


@gluon.jit
def allocate_barriers(CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """Return the `Barriers` of a program, in their first phase."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS * 2, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS * 2, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), CONSUMERS)
    for i in gl.static_range(CONSUMERS * 2):
        mbarrier.init(q_full.index(i), 1)
        mbarrier.init(q_empty.index(i), 1)
    fence_async_shared()
    return Barriers(full, empty, q_full, q_empty)


@gluon.jit
def first_row(scales, cu, n, b, h):
    """Return the row of the first token of sequence b and head h, in padded storage."""
    return h.to(gl.int64) * scales.tokens + stored_start_of(cu, n, b)


@gluon.jit
def wait_for_tile(CONSUMER: gl.constexpr, barriers, buffers, wave):
    """Return the tile of a wave when its queries have arrived, and the index of their buffer."""
    slot = CONSUMER * 2 + wave % 2
    mbarrier.wait(barriers.q_full.index(slot), (wave // 2) & 1)
    b, h, k_head, first = shared_tile(buffers.tiles, wave)
    return Tile(b, h, k_head, first), slot


@gluon.jit
def wait_for_load(full, n):
    """Wait until load n of the program has arrived."""
    STAGES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)


@gluon.jit
def release(buffers, empty, stage):
    """Tell the producer that this consumer has read a stage.

    A thread's loads of scales from shared memory may still be in flight when all warps have passed
    the barrier before an arrival. The fence orders them before later writes by TMA.
    """
    if buffers.k_scale is not None or buffers.v_scale is not None:
        fence_async_shared()
    mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def skip_loads(full, empty, load_count, count):
    """Release the next loads, which the consumer does not use; return the loads up to then."""
    for _ in range(count):
        wait_for_load(full, load_count)
        mbarrier.arrive(empty.index(load_count % full.shape[0]), count=1)
        load_count += 1
    return load_count


@gluon.jit
def _load_v(inputs, buffers, stage, bar, origin, key, scale, V_CHANNELS: gl.constexpr, is_some):
    """Load V of a step to its stage, if is_some; and the scales of its channels, if each has one.

    origin: `TokenOrigin` of the sequence; of codes, h is the head's first row, and `row` the
    sequence's first token in padded storage. key: the step's first key. scale: the index of its
    first scale. V_CHANNELS: rows of a head of codes; 0 in 16 bit.
    """
    v_s = buffers.v.index(stage)
    if V_CHANNELS == 0:
        load_tokens(inputs.v, origin, key, bar, v_s, pred=is_some)
    else:
        tma_load(inputs.v, [origin.h, origin.row + key], bar, v_s, pred=is_some)
        if inputs.v_scale is not None:
            tma_load(inputs.v_scale, [scale], bar, buffers.v_scale.index(stage), pred=is_some)


@gluon.jit
def produce(
    inputs, scales, buffers, barriers, lengths, scheduler, CONSUMERS: gl.constexpr,
    IS_COPIED: gl.constexpr, DV: gl.constexpr, V_CHANNELS: gl.constexpr,
):  # fmt: skip
    """Load the tiles of Q, K and V by TMA. One warp.

    Load j of a tile holds K of step j and V of step j - 1. The consumers multiply with both at
    once, so a stage needs one barrier for "both have arrived" and one for "both are read". Keys are
    loaded from the last block to the first, so that the blocks that need a mask come before the
    loop over the other blocks.

    IS_COPIED: whether V, in 16 bit, lies in padded storage. DV: channels of V. V_CHANNELS: see
    `_load_v`.
    """
    STAGES: gl.constexpr = barriers.full.shape[0]
    ROWS: gl.constexpr = CONSUMERS * BLOCK
    D: gl.constexpr = inputs.q8.block_shape[1]
    K_BYTES: gl.constexpr = BLOCK * D + (0 if inputs.k_scale is None else 4 * BLOCK)
    V_BYTES: gl.constexpr = BLOCK * D * inputs.v.dtype.primitive_bitwidth // 8 + (
        0 if inputs.v_scale is None else 4 * D
    )
    load_count = 0
    for wave in range(waves(scheduler)):
        tile = tile_of(wave, lengths, scheduler, ROWS)
        for i in gl.static_range(CONSUMERS):
            q_empty = barriers.q_empty.index(i * 2 + wave % 2)
            mbarrier.wait(q_empty, ((wave // 2) & 1) ^ 1)
        share_tile(buffers.tiles, wave, tile)
        barrier()  # the tile is stored before a thread arrives
        if tile.first < 0:
            for i in gl.static_range(CONSUMERS):
                mbarrier.arrive(barriers.q_full.index(i * 2 + wave % 2), count=1)
        else:
            k_head = tile.k_head
            q_row = first_row(scales.q, lengths.cu_q, lengths.n_q, tile.b, tile.h).to(gl.int32)
            q_row += tile.first
            k_start = stored_start_of(lengths.cu_k, lengths.n_k, tile.b).to(gl.int32)
            k_row = k_head * scales.k.tokens + k_start
            v_scale = 0
            if V_CHANNELS == 0:
                v_origin = key_origin(
                    inputs.v, IS_COPIED, lengths.cu_k, tile.b, k_head, k_start,
                    live_keys(lengths, tile.b),
                )  # fmt: skip
            else:
                v_origin = TokenOrigin(0, k_head * V_CHANNELS, k_start, 0)
                v_scale = (k_head * scales.v.tokens + k_start) // BLOCK * DV
            tile_blocks = key_blocks(tile.first, ROWS, lengths, tile.b)
            blocks = tile_blocks.end - tile_blocks.begin
            for i in gl.static_range(CONSUMERS):
                slot = i * 2 + wave % 2
                bar = barriers.q_full.index(slot)
                mbarrier.expect(bar, BLOCK * D)
                tma_load(inputs.q8, [q_row + i * BLOCK, 0], bar, buffers.q.index(slot))
            for j in range(blocks + 1):
                stage = load_count % STAGES
                bar = barriers.full.index(stage)
                mbarrier.wait(barriers.empty.index(stage), ((load_count // STAGES) & 1) ^ 1)
                block = tile_blocks.end - 1 - j
                key = block * BLOCK
                mbarrier.expect(bar, K_BYTES + V_BYTES, pred=(j > 0) & (j < blocks))
                mbarrier.expect(bar, K_BYTES, pred=j == 0)
                mbarrier.expect(bar, V_BYTES, pred=j == blocks)
                tma_load(inputs.k8, [k_row + key, 0], bar, buffers.k.index(stage), pred=j < blocks)
                if inputs.k_scale is not None:
                    k_scale_s = buffers.k_scale.index(stage)
                    tma_load(inputs.k_scale, [k_row + key], bar, k_scale_s, pred=j < blocks)
                _load_v(
                    inputs, buffers, stage, bar, v_origin, key + BLOCK,
                    v_scale + (block + 1) * DV, V_CHANNELS, j > 0,
                )  # fmt: skip
                load_count += 1
