"""The loads of a backward program: tiles of keys, and blocks of queries, by TMA."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sagesim_kernels.gluon_compat import barrier, reinterpret, tma_load
from sagesim_kernels.hopper.backward_stores import whole_rows
from sagesim_kernels.hopper.backward_tiles import find_next_tile, place_tile
from sagesim_kernels.hopper.dq_parts import BLOCK_Q, TILE_K, block_of
from sagesim_kernels.hopper.token_loads import (
    key_origin,
    load_tokens,
    of_next_head,
    origin_of,
)

ROW_STATS = gl.constexpr(4 * 64)
"""Row statistics of a block of queries, 64 numbers each: Q's scale times the scale of the logits;
-lse2; delta; and 1 / unit of dQ."""

STATS_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(0, 32, 1))
"""Layout of row statistics in shared memory."""


@gluon.jit
def load_k16(k16, origin, first, buffer, bar):
    """Load a tile of K in 16 bit. k16: TMA descriptor. The others: see `load_tokens`."""
    D: gl.constexpr = buffer.shape[2]
    mbarrier.expect(bar, TILE_K * D * 2)
    load_tokens(k16, origin, first, bar, buffer.index(0))


@gluon.jit
def wait_for_k16(
    k16, bar, wave, mean, z, COUNT: gl.constexpr, KD: gl.constexpr, FIRST: gl.constexpr = 0
):
    """Wait for a tile of K in 16 bit, and subtract the mean in shared memory if there is one.

    Rows behind the last token are zeros, and become the mean's negative. They do not contribute,
    because their dS is 0.

    wave: tiles of the program before this one. mean: pointer to the means of all heads, or None.
    z: the head, over all sequences. COUNT: warps that call this. KD: channels of K; further
    channels of the tile stay zeros. FIRST: the first channel of k16.
    """
    if mean is None:
        mbarrier.wait(bar, wave & 1)
    else:
        mean += z.to(gl.int64) * KD
        D: gl.constexpr = k16.shape[1]
        ROWS: gl.constexpr = whole_rows(D, COUNT)
        # The 0 is opaque to the compiler. Without it, addresses for all tiles stay in registers.
        column = FIRST + gl.arange(0, D, gl.SliceLayout(0, ROWS)) + (wave >> 30)
        if KD < FIRST + D:
            mean = gl.load(mean + column, mask=column < KD, other=0.0)
        else:
            mean = gl.load(mean + column)
        mbarrier.wait(bar, wave & 1)
        k = k16.load(ROWS).to(gl.float32) - mean[None, :]
        k16.store(k.to(k16.dtype))
        fence_async_shared()
        barrier()


@gluon.jit
def load_kv(keys, row, origin, first, buffers, bar):
    """Load codes of K, and V, of a tile.

    keys: `KeyInputs`. row: the tile's first key in padded storage, over all heads. buffers:
    `KeyBuffers`. The others: see `load_tokens`.
    """
    D: gl.constexpr = buffers.v.shape[2]
    mbarrier.expect(bar, TILE_K * D * 3)
    tma_load(keys.k8, [row, 0], bar, buffers.k8.index(0))
    load_tokens(keys.v, origin, first, bar, buffers.v.index(0))


@gluon.jit
def row_stats_of(queries, stage):
    """Return the row statistics of a stage, [4, BLOCK_Q]."""
    stats = queries.row_stats.index(stage)
    return reinterpret(stats, gl.float32, [4, BLOCK_Q], STATS_LAYOUT)


@gluon.jit
def produce(
    keys, inputs, key_buffers, buffers, barriers, scheduler, lengths, Q_COPIED: gl.constexpr,
    K_COPIED: gl.constexpr, GROUPS: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Load tiles of keys after the first, and the queries of each step, by TMA. One warp.

    Before this warp loads the queries of step n, it waits for a barrier of an earlier step:

    - If other warps compute dQ and dK, for `ds_full` of step n - 3. After the wait no warp reads
      codes of Q, dO or delta of that step; they have three stages. Q in 16 bit and row statistics
      of steps n - 4 and n - 3 may still be read; they have five stages. The warps of dQ and dK
      load K in 16 bit by themselves.
    - If two warpgroups go on their own, for `q_empty` of step n - 2. After the wait no warp reads
      data of that step.
    - If eight warps go in step, for `dq_full` of step n - 2. After the wait no warp reads data of
      that step, so two stages are enough. Only Q in 16 bit of step n - 2 may still be read; it has
      three stages.

    keys: `KeyInputs`. inputs: `QueryInputs`. key_buffers: `KeyBuffers`. buffers: `QueryBuffers`.
    scheduler: `KeyScheduler`. Q_COPIED, K_COPIED: whether Q and dO, and whether K and V
    in 16 bit lie in padded storage.
    """
    done = 0
    for wave in range(scheduler.waves):
        found = find_next_tile(scheduler, wave, lengths, SPLITS)
        if found.first >= 0:
            tile = place_tile(found, scheduler, lengths, GROUPS)
            if wave > 0:
                origin = key_origin(
                    keys.v, K_COPIED, lengths.cu_k, tile.b, tile.head, tile.start_k,
                    tile.keys.n_live,
                )  # fmt: skip
                first = tile.keys.first
                if barriers.k16_empty is not None:
                    mbarrier.wait(barriers.k16_empty, (wave & 1) ^ 1)
                    load_k16(keys.k16, origin, first, key_buffers.k16, barriers.k16_full)
                mbarrier.wait(barriers.kv_empty, (wave & 1) ^ 1)
                load_kv(keys, tile.row_k, origin, first, key_buffers, barriers.kv_full)
            origin = origin_of(
                Q_COPIED, lengths.cu_q, tile.b, tile.first_q_head, tile.start_q
            )  # fmt: skip
            _load_queries(
                inputs, buffers, barriers, tile.loop, origin, tile.row_q, scheduler.tokens_q, done,
                GROUPS,
            )  # fmt: skip
            done += GROUPS * (tile.loop.end - tile.loop.begin)


@gluon.jit
def _load_queries(
    inputs, buffers, barriers, loop, origin, stored_row, stored_tokens, done, GROUPS: gl.constexpr
):
    """Load the block of queries of each step of a tile into buffers that are released.

    Args:
        loop: `QueryLoop`.
        origin: `TokenOrigin` of the first query head.
        stored_row: row of that head's first token in padded storage.
        stored_tokens: tokens of a head in padded storage.
        done: steps of the program before this tile.
    """
    STAGES: gl.constexpr = buffers.q8.shape[0]
    STAGES16: gl.constexpr = buffers.q16.shape[0]
    STAGES_STATS: gl.constexpr = buffers.row_stats.shape[0]
    SHIFT_BYTES: gl.constexpr = 0 if buffers.shifts is None else BLOCK_Q * 4
    DELTA_BYTES: gl.constexpr = 0 if buffers.deltas is None else BLOCK_Q * 32
    D: gl.constexpr = buffers.q8.shape[2]
    for head in range(GROUPS):
        for i in range(loop.begin, loop.end):
            n = done + head * (loop.end - loop.begin) + i - loop.begin
            stage = n % STAGES
            if n >= STAGES:
                if barriers.q_empty is not None:
                    mbarrier.wait(barriers.q_empty.index(stage), (n // STAGES & 1) ^ 1)
                elif barriers.ds_full is not None:
                    mbarrier.wait(barriers.ds_full.index(stage), (n // STAGES & 1) ^ 1)
                else:
                    mbarrier.wait(barriers.dq_full.index(stage), (n // STAGES & 1) ^ 1)
            at = of_next_head(origin, head)
            row8 = stored_row + head * stored_tokens
            block = block_of(i, loop)
            bar = barriers.q_full.index(stage)
            stage16 = n % STAGES16
            mbarrier.expect(bar, BLOCK_Q * D * 5 + ROW_STATS * 4 + SHIFT_BYTES + DELTA_BYTES)
            tma_load(inputs.q8, [row8 + block * BLOCK_Q, 0], bar, buffers.q8.index(stage))
            load_tokens(inputs.do, at, block * BLOCK_Q, bar, buffers.do.index(stage))
            stats = (row8 // BLOCK_Q + block) * ROW_STATS
            tma_load(inputs.row_stats, [stats], bar, buffers.row_stats.index(n % STAGES_STATS))
            if buffers.deltas is not None:
                first = row8 + block * BLOCK_Q
                tma_load(inputs.deltas, [first, 0], bar, buffers.deltas.index(stage))
            if buffers.shifts is not None:
                first = row8 + block * BLOCK_Q
                tma_load(inputs.shifts, [first], bar, buffers.shifts.index(stage))
            load_tokens(inputs.q16, at, block * BLOCK_Q, bar, buffers.q16.index(stage16))
