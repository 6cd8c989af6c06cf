"""The tiles of keys that a backward program computes, one after another.

If tiles are dealt, there is one program for each multiprocessor. While it stores a tile, it loads
the next one. Otherwise there is a program for each tile. Each warp finds the tiles by itself, or
the producer finds them for all warps, if several tiles have 64 channels.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalMemberAccess=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sagesim_kernels.gluon_compat import barrier
from sagesim_kernels.hopper.backward_structures import (
    FoundTile,
    KeyTile,
    PlacedTile,
    QueryLoop,
)
from sagesim_kernels.hopper.dealt_tiles import number_of, share_tile, shared_tile
from sagesim_kernels.hopper.dq_parts import BLOCK_Q, TILE_K
from sagesim_kernels.hopper.program_places import place_of
from sagesim_kernels.operands import (
    causal_offset,
    is_live_key,
    length_of,
    live_keys,
    live_queries,
    lowest_diagonal,
    query_loops,
    stored_start_of,
)


@gluon.jit
def find_tile(wave, scheduler, lengths, SPLITS: gl.constexpr):
    """Return the `FoundTile` that this program computes in a wave."""
    number = number_of(wave, scheduler.programs)
    count = scheduler.tiles * scheduler.all_heads
    index, z, b, head, out_head = place_of(
        gl.minimum(number, count - 1),
        scheduler.tiles,
        scheduler.heads,
        scheduler.all_heads,
        scheduler.heads_per_group,
        scheduler.packed_tiles,
        SPLITS,
    )
    first = index * TILE_K
    is_valid = (number < count) & (first < length_of(lengths.cu_k, lengths.n_k, b))
    return FoundTile(gl.where(is_valid, first, -1), b, z, head, out_head)


@gluon.jit
def place_tile(found, scheduler, lengths, GROUPS: gl.constexpr):
    """Return the `PlacedTile` of a `FoundTile`."""
    keys, loop, start_q, start_k = locate(lengths, found.b, found.first)
    first_q_head = found.out_head * GROUPS
    row_q = first_q_head * scheduler.tokens_q + start_q
    row_k = found.head * scheduler.tokens_k + start_k + found.first
    return PlacedTile(
        found.b, found.z, found.head, found.out_head, first_q_head, keys, loop, start_q, start_k,
        row_q, row_k,
    )  # fmt: skip


@gluon.jit
def found_tile(scheduler, wave):
    """Return the `FoundTile` of a wave, which has been found."""
    first, b, z, head, out_head = shared_tile(scheduler.found, wave)
    return FoundTile(first, b, z, head, out_head)


@gluon.jit
def wait_for_tile(scheduler, wave, lengths, SPLITS: gl.constexpr):
    """Return the `FoundTile` of a wave when the producer has found it."""
    if scheduler.found is None:
        found = find_tile(wave, scheduler, lengths, SPLITS)
    else:
        mbarrier.wait(scheduler.full.index(wave % 2), (wave // 2) & 1)
        found = found_tile(scheduler, wave)
        barrier()  # all warps have read it
        mbarrier.arrive(scheduler.empty.index(wave % 2), count=1)
    return found


@gluon.jit
def find_next_tile(scheduler, wave, lengths, SPLITS: gl.constexpr):
    """Return the `FoundTile` of a wave, to the producer, which finds it for the other warps.

    The program finds the tile of the first wave before its warps part.
    """
    if scheduler.found is None:
        found = find_tile(wave, scheduler, lengths, SPLITS)
    else:
        if wave > 0:
            mbarrier.wait(scheduler.empty.index(wave % 2), ((wave // 2) & 1) ^ 1)
            share_tile(scheduler.found, wave, find_tile(wave, scheduler, lengths, SPLITS))
            barrier()  # it is stored before a thread arrives
            mbarrier.arrive(scheduler.full.index(wave % 2), count=1)
        found = found_tile(scheduler, wave)
    return found


@gluon.jit
def locate(lengths, b, first):
    """Return four facts about the keys from `first` of sequence b.

    These are their `KeyTile`, their `QueryLoop`, and the first query and the first key of the
    sequence in padded storage. No field is None, because a function cannot return it.
    """
    first_live, n_q = live_queries(lengths, b)
    n_live = live_keys(lengths, b)
    offset = causal_offset(lengths, b)
    begin, unmasked, unmasked_end, end = query_loops(
        lengths, b, first, TILE_K, BLOCK_Q, n_live, offset, first_live, n_q
    )
    end = (end + BLOCK_Q - 1) // BLOCK_Q
    if lengths.key_mask is not None:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        live = is_live_key(lengths, b, first + gl.arange(0, TILE_K, LAYOUT)).to(gl.int32)
        if gl.min(live, 0) == 0:
            unmasked = n_q
        end = gl.where(gl.max(live, 0) == 0, 0, end)
    # The program id is a 0 that is opaque to the compiler. If the loop over masked blocks is known
    # to be empty, ptxas makes each product of the other loop wait for the product before it.
    unmasked = (unmasked + BLOCK_Q - 1) // BLOCK_Q + gl.program_id(1)
    start_q = stored_start_of(lengths.cu_q, lengths.n_q, b).to(gl.int32)
    start_k = stored_start_of(lengths.cu_k, lengths.n_k, b).to(gl.int32)
    shift = 0
    if lengths.left is not None or lengths.seqused_k is not None or lengths.key_mask is not None:
        unmasked = gl.minimum(unmasked, end)
    if lengths.left is not None:
        unmasked_end = gl.maximum(gl.minimum(unmasked_end // BLOCK_Q, end), unmasked)
    else:
        unmasked_end = end
        if not lengths.IS_CAUSAL:  # a tile starts where its keys are, as far as there are queries
            shift = first // BLOCK_Q % gl.maximum(end, 1)
    loop = QueryLoop(gl.minimum(begin // BLOCK_Q, end), unmasked, unmasked_end, end, shift)
    length = length_of(lengths.cu_k, lengths.n_k, b)
    tile = KeyTile(first, length, n_live, offset, lowest_diagonal(lengths, b))
    return tile, loop, start_q, start_k
