"""Which blocks the kernels for heads with more than 128 channels visit, and which ones they mask.

Of the forward of other heads, it is only tested which ones it masks. The functions that decide this
run on the CPU. What the loops of `compute_o` and `compute_gradient` do with the decision is written
here again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sagesim_kernels import operands
from sagesim_kernels.hopper import forward_tiles, wide_softmax, wide_warps
from sagesim_kernels.hopper.backward_masks import part_of
from sagesim_kernels.hopper.backward_structures import QueryLoop
from sagesim_kernels.hopper.wide_structures import BlockMask
from sagesim_kernels.operands import Lengths
from tests.sagesim_kernels.hopper.visits import attended
from tests.support.device_functions import Numbers, Pointer, on_host, raw

BLOCK, TILE = 64, 128

walk_of = on_host(wide_warps.walk_of)
without_padding = on_host(wide_warps.without_padding)
part_of_tile = on_host(wide_warps.part_of_tile)
blocks_before = on_host(wide_warps.blocks_before)
at_least_one = on_host(wide_softmax.at_least_one)
key_blocks = on_host(forward_tiles.key_blocks)
consumer_blocks = on_host(forward_tiles.consumer_blocks)
attends_in_block = on_host(wide_warps.attends_in_block)
parts = on_host(part_of)
live_keys, causal_offset = on_host(operands.live_keys), on_host(operands.causal_offset)
is_live_key = on_host(operands.is_live_key)
lowest_diagonal = on_host(operands.lowest_diagonal)

Map = NDArray[np.bool_]

LENGTHS = ((1, 1), (64, 64), (200, 200), (333, 333), (520, 300), (130, 450), (1, 300), (300, 1))
WINDOWS = ((-1, -1), (-1, 0), (0, 0), (70, 130), (127, 0), (64, -1), (-1, 40), (200, 0), (5, 1))


def lengths_of(
    n_q: int, n_k: int, left: int, right: int, lower_right: bool, live: Any, seqused: Any
) -> Lengths:
    """A kernel's argument. live: of a key mask, or None."""
    runs = None
    if live is not None:
        (at,) = live.nonzero()
        first = at[0] if at.size else n_k
        (dead,) = (~live[first:]).nonzero()
        first_end = first + dead[0] if dead.size else n_k
        runs = Pointer([first, first_end, at[-1] + 1 if at.size else 0])
    return Lengths(
        cu_q=None,
        cu_k=None,
        n_q=Numbers(n_q),
        n_k=Numbers(n_k),
        IS_CAUSAL=right >= 0,
        LOWER_RIGHT=lower_right and (left >= 0 or right >= 0),
        left=Numbers(left) if left >= 0 else None,
        right=Numbers(right) if right >= 0 else None,
        seqused_k=None if seqused is None else Pointer([seqused]),
        key_mask=None if live is None else Pointer(live.astype(int)),
        key_counts=None,
        key_runs=runs,
    )


def steps(walk: Any, tile_walk: Any, before: int, has_tail: bool) -> list[tuple[int, bool]]:
    """The steps of a consumer of a gradient: places in the tile's walk, and whether they mask. The
    order of the places is that in which the producer loads the blocks."""
    unmasked_end = walk.count - walk.masked_at_end if has_tail else None
    loop = QueryLoop(0, walk.masked_at_begin, unmasked_end, walk.count, 0)
    found: list[tuple[int, bool]] = []
    for part in range(3 if has_tail else 2):
        begin, end = parts(loop, part)
        found += [(before + j, part != 1) for j in range(int(begin), int(end))]
    assert [place for place, _ in found] == list(range(before, before + int(walk.count)))
    after = int(tile_walk.count) - before - int(walk.count)
    assert after >= 0 if has_tail else after == 0
    return found


def softmax_steps(walk: Any, tile_walk: Any, before: int, has_tail: bool) -> list[tuple[int, bool]]:
    """The same for O. In each step the block is counted down as `compute_o` does it."""
    first = int(tile_walk.first) - before if has_tail else int(walk.first)
    masked, tail, count = int(walk.masked_at_begin), int(walk.masked_at_end), int(walk.count)
    block = first - masked + 1
    found = [(first - j, True) for j in range(masked)]
    for part in range(2 if has_tail else 1):
        n = block
        if has_tail:
            n = tail if part else count - masked - tail
        found += [(block - 1 - i, bool(part)) for i in range(n)]
        block -= n
    assert len(found) == count
    after = int(tile_walk.count) - before - count
    assert after >= 0 if has_tail else after == 0
    return [(int(tile_walk.first) - block, is_masked) for block, is_masked in found]


def block_mask(first: int, lengths: Lengths, *, owns_queries: bool) -> BlockMask:
    """The mask of a consumer, as `compute_o` and `compute_gradient` describe it."""
    b = Numbers(0)
    keys = None
    if lengths.key_mask is not None and not owns_queries:
        own = Numbers(first + np.arange(BLOCK))
        keys = Numbers(np.where(raw(is_live_key(lengths, b, own)), own.value, 2**30))
    return BlockMask(
        first=Numbers(first),
        n_k=live_keys(lengths, b),
        offset=causal_offset(lengths, b),
        lowest=None if lengths.left is None else lowest_diagonal(lengths, b),
        key_mask=lengths.key_mask if owns_queries else None,
        keys=keys,
    )


def check(mask: Map, lengths: Lengths, *, owns_queries: bool, is_forward: bool) -> None:
    """Hold the walks of all consumers against the mask."""
    has_left, has_mask = lengths.left is not None, lengths.key_mask is not None
    has_tail = has_left or (owns_queries and has_mask)
    seen = mask if owns_queries else mask.T  # [owned, streamed]
    owned, streamed = seen.shape
    blocks = -(-streamed // BLOCK)
    b = Numbers(0)
    for first in range(0, owned, TILE):
        tile_walk = walk_of(Numbers(first), TILE, lengths, b, owns_queries)
        if not owns_queries and has_mask:
            tile_walk = without_padding(tile_walk, Numbers(first), lengths, b)
        if is_forward:
            tile_walk = at_least_one(tile_walk, lengths)
        for own in range(first, first + TILE, BLOCK):
            walk = walk_of(Numbers(own), BLOCK, lengths, b, owns_queries)
            if not owns_queries and has_mask:
                walk = part_of_tile(walk, tile_walk)
            if is_forward:
                walk = at_least_one(walk, lengths)
            before = int(blocks_before(walk, tile_walk, has_tail, owns_queries))
            list_steps = softmax_steps if is_forward else steps
            sign = -1 if owns_queries else 1
            device_mask = block_mask(own, lengths, owns_queries=owns_queries)
            visited: dict[int, bool] = {}
            rows = seen[own : own + BLOCK]
            for place, is_masked in list_steps(walk, tile_walk, before, has_tail):
                block = int(tile_walk.first) + sign * place
                if not is_forward:  # the number in the loop is that of the block that was loaded
                    assert block == int(walk.first) + sign * (place - before)
                assert 0 <= block < max(blocks, 1) and block not in visited
                visited[block] = is_masked
                if is_masked:
                    columns = slice(block * BLOCK, (block + 1) * BLOCK)
                    found = raw(attends_in_block(Numbers(block), device_mask, owns_queries))
                    expected = rows[:, columns]
                    assert np.array_equal(found[: len(rows), : expected.shape[1]], expected)
                    beyond = found[:, expected.shape[1] :] if owns_queries else found[len(rows) :]
                    assert not beyond.any(), "a key behind the last one"
                elif rows.size:
                    part = rows[:, block * BLOCK : (block + 1) * BLOCK]
                    some = np.any(seen, axis=0)[block * BLOCK : (block + 1) * BLOCK]
                    live = part if owns_queries else part[:, some]
                    assert live.all(), "an entry without its mask"
                    assert own + BLOCK <= owned or owns_queries
                    if owns_queries:
                        assert (block + 1) * BLOCK <= streamed
            entries = [rows[:, i * BLOCK : (i + 1) * BLOCK] for i in range(blocks)]
            needed = {i for i, entry in enumerate(entries) if entry.any()}
            assert needed <= visited.keys(), "a block is left out"
            if not has_mask:  # nothing outside of the mask is computed
                assert len(visited.keys() - needed) <= (is_forward and not needed)


@pytest.mark.parametrize("padding", ["none", "seqused", "right", "left", "random", "one", "all"])
@pytest.mark.parametrize("lower_right", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_visible_entry_is_visited_and_every_other_one_masked(
    lengths: tuple[int, int], lower_right: bool, padding: str
) -> None:
    n_q, n_k = lengths
    generator = np.random.default_rng(n_q + n_k)
    used = {"seqused": (0, 1, 64, 100, n_k), "right": (1, 64, 100), "left": (1, 64, 129)}
    for count in used.get(padding, (n_k,)):
        count = min(count, n_k)
        key = np.arange(n_k)
        live = {
            "left": key >= n_k - count,
            "random": generator.random(n_k) < 0.7,
            "one": key == n_k // 3,
            "all": key < 0,
        }.get(padding, key < count)
        is_mask = padding not in ("none", "seqused")
        for left, right in WINDOWS:
            arguments = (n_q, n_k, left, right, lower_right)
            seqused = count if padding == "seqused" else None
            device = lengths_of(*arguments, live if is_mask else None, seqused)
            mask = attended(*arguments, live)
            check(mask, device, owns_queries=True, is_forward=True)
            check(mask, device, owns_queries=True, is_forward=False)
            check(mask, device, owns_queries=False, is_forward=False)


def blocks_of_o(first: int, lengths: Lengths) -> dict[int, bool]:
    """The blocks of keys that the forward of wide heads visits for 64 queries, in order, and
    whether it masks them."""
    b = Numbers(0)
    has_tail = lengths.left is not None or lengths.key_mask is not None
    tile_walk, walk = (
        at_least_one(walk_of(Numbers(at), rows, lengths, b, True), lengths)
        for at, rows in ((first // TILE * TILE, TILE), (first, BLOCK))
    )
    before = int(blocks_before(walk, tile_walk, has_tail, True))
    found = softmax_steps(walk, tile_walk, before, has_tail)
    return {int(tile_walk.first) - place: is_masked for place, is_masked in found}


def blocks_of_narrow_o(first: int, lengths: Lengths) -> dict[int, bool]:
    """The same for other heads."""
    b = Numbers(0)
    tile_blocks = key_blocks(Numbers(first // TILE * TILE), TILE, lengths, b)
    blocks = consumer_blocks(Numbers(first), lengths.n_q, tile_blocks, lengths, b)
    begin, whole, whole_end, end = map(int, blocks)
    return {i: not whole <= i < whole_end for i in range(end - 1, begin - 1, -1)}


@pytest.mark.parametrize("visited", [blocks_of_o, blocks_of_narrow_o])
@pytest.mark.parametrize("lower_right", [False, True])
@pytest.mark.parametrize("lengths", [*LENGTHS, (330, 300), (640, 640)])
def test_the_same_padding_masks_the_same_blocks(
    lengths: tuple[int, int], lower_right: bool, visited: Any
) -> None:
    """Logits are rounded in another way where a mask is applied. For the same bits with seqused_k,
    with a key mask and without the padding, the same blocks need a mask."""
    n_q, n_k = lengths
    compared = 0
    for used in (1, 64, 65, 129, 192, 256, n_k):
        used = min(used, n_k)
        live = np.arange(n_k) < used
        for left, right in (*WINDOWS, (200, 0), (200, 300), (300, 129)):
            calls = [
                lengths_of(n_q, n_k, left, right, lower_right, None, used),
                lengths_of(n_q, n_k, left, right, lower_right, live, None),
            ]
            if used == n_k or not lower_right:  # the diagonal is that of the key tensor
                calls.append(lengths_of(n_q, used, left, right, lower_right, None, None))
            mask = attended(n_q, n_k, left, right, lower_right, live)
            for first in range(0, n_q, BLOCK):
                rows = mask[first : first + BLOCK]
                blocks = range(-(-n_k // BLOCK))
                needed = [i for i in blocks if rows[:, i * BLOCK : (i + 1) * BLOCK].any()]
                found = [
                    [item for item in visited(first, call).items() if item[0] in needed]
                    for call in calls
                ]
                assert all(x == found[0] for x in found), (used, left, right, first)
                compared += len(found[0])
    assert compared


@pytest.mark.parametrize("visited", [blocks_of_o, blocks_of_narrow_o])
def test_few_blocks_between_padding_are_all_masked(visited: Any) -> None:
    """A key mask leaves 128 keys, and 512 after a gap. The masked blocks of the last part of the
    loop are faster than those of the first part, which here would be all but two."""
    key = np.arange(704)
    for first_end, unmasked in ((128, []), (448, list(range(6, -1, -1)))):
        live = (key < first_end) | (key >= first_end + 64)
        found = visited(0, lengths_of(64, 704, -1, -1, False, live, None))
        assert list(found) == list(range(10, -1, -1))
        assert [block for block, is_masked in found.items() if not is_masked] == unmasked


@pytest.mark.parametrize("owns_queries", [False, True])
def test_the_time_is_linear_in_the_window(owns_queries: bool) -> None:
    """However many tokens there are, a tile meets the blocks of its window. Each consumer computes
    one fewer, and masks two."""
    lengths = lengths_of(2**20, 2**20, 1023, 0, False, None, None)
    for first in (2**15, 2**19):
        walk = walk_of(Numbers(first), TILE, lengths, Numbers(0), owns_queries)
        assert int(walk.count) == 18
        walk = walk_of(Numbers(first), BLOCK, lengths, Numbers(0), owns_queries)
        assert int(walk.count) == 17 and int(walk.masked_at_begin) + int(walk.masked_at_end) == 2
