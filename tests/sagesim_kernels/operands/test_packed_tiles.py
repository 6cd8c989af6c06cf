"""The order of tiles of packed sequences, beside one from the mask itself."""

import heapq
from itertools import accumulate, groupby
from operator import itemgetter

import pytest
import torch

from sagesim import FACTORED_QK
from sagesim.problem import resolve_input16
from sagesim_kernels.operands import (
    Extras,
    KernelProblem,
    Packing,
    heads_of_packed_tiles,
    order_tiles,
)
from sagesim_kernels.operands.program_order import CACHE, choose_packed_heads
from tests.support.kernels import DEVICE, HERE

pytestmark = HERE

LENGTHS = {
    "some": ((700, 3, 0, 130, 64, 1, 300), (2, 500, 70, 0, 64, 128, 129)),
    "many": ((1500, *[1, 0, 30, 90] * 60), (*[0, 77, 40, 1] * 60, 3000)),
}


def packed(
    lengths: tuple[tuple[int, ...], tuple[int, ...]], lower_right: bool, window: tuple[int, int]
) -> KernelProblem:
    q, k = (torch.empty(1, 1, sum(x), 64, device=DEVICE, dtype=torch.float16) for x in lengths)
    cu_q, cu_k = (
        torch.tensor([0, *accumulate(x)], dtype=torch.int32, device=DEVICE) for x in lengths
    )
    return KernelProblem.of(
        q,
        k,
        k,
        spec=resolve_input16(FACTORED_QK, q.dtype),
        scale=1.0,
        is_causal=False,
        lower_right=lower_right,
        packing=Packing(cu_q, cu_k, *map(max, lengths)),
        extras=Extras(window=window),
    )


def work_of(n_q: int, n_k: int, lower_right: bool, window: tuple[int, int], rows: int) -> list[int]:
    """The tokens between the first and the last that each tile of queries attends to."""
    i = torch.arange(n_q)[:, None] + (n_k - n_q if lower_right else 0)
    j = torch.arange(n_k)[None]
    left, right = window
    attends = torch.ones(n_q, n_k, dtype=torch.bool)
    if right >= 0:
        attends &= j <= i + right
    if left >= 0:
        attends &= j >= i - left
    found: list[int] = []
    for tile in attends.split(rows) if n_q else ():
        keys = tile.any(0).nonzero()
        found.append(int(keys[-1] - keys[0]) + 1 if len(keys) else 0)
    return found


@pytest.mark.parametrize("rows", [64, 128, 192])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 0), (70, 60)])
@pytest.mark.parametrize("lower_right", [False, True])
@pytest.mark.parametrize("lengths", list(LENGTHS))
@pytest.mark.parametrize("queries", [True, False])
def test_tiles_that_take_longest_come_first(
    lengths: str, lower_right: bool, window: tuple[int, int], rows: int, queries: bool
) -> None:
    problem = packed(LENGTHS[lengths], lower_right, window)
    grid = problem.query_grid(rows) if queries else problem.key_grid(rows)
    tiles = order_tiles(problem, grid, rows, queries=queries)
    assert tiles is not None
    found = [tuple(x) for x in tiles.tolist()]
    work: dict[tuple[int, int], int] = {}
    for b, (n_q, n_k) in enumerate(zip(*LENGTHS[lengths], strict=True)):
        sides = (n_q, n_k, lower_right, window)
        if not queries:  # as seen from the keys, the mask is turned over
            left, right = window
            sides = (n_k, n_q, lower_right, (right, left))
        each = work_of(*sides, rows)
        if not queries:  # the tiles of a sequence stay together
            each = each[:1] * len(each)
        work |= {(i, b): n for i, n in enumerate(each)}
    assert len(set(found)) == len(found) == grid.tiles
    assert set(found[: len(work)]) == work.keys(), "the others have no tokens, and come last"
    in_order = [work[tile] for tile in found[: len(work)]]
    assert in_order == sorted(in_order, reverse=True)
    if not queries:
        together = [list(tiles) for _, tiles in groupby(found[: len(work)], itemgetter(1))]
        assert all(tiles == sorted(tiles) for tiles in together)
        assert len(together) == len({b for _, b in work})


def test_equal_lengths_need_no_order() -> None:
    problem = packed(((128, 128), (128, 128)), False, (-1, -1))
    assert order_tiles(problem, problem.query_grid(64), 64, queries=True) is None


@pytest.mark.parametrize(
    ("heads", "fitting", "longest", "expected"),
    [
        (8, 2, 0.0, 2),
        (8, 0.5, 0.0, 1),
        (8, 2, 0.3, 2),
        (8, 2, 0.5, 4),
        (8, 8, 0.5, 8),
        (6, 1, 0.5, 3),
        (8, 1, 0.9, 8),
        (8, 1, 3.0, 8),
        (7, 1, 0.3, 7),
    ],
)
def test_heads_that_fit_in_the_cache_unless_a_late_tile_is_long(
    heads: int, fitting: float, longest: float, expected: int
) -> None:
    assert choose_packed_heads(heads, int(CACHE / fitting), longest) == expected


@pytest.mark.parametrize("queries", [True, False])
@pytest.mark.parametrize("longest", [300, 1000, 4000, 16000])
def test_a_launch_with_one_long_sequence_is_balanced(longest: int, queries: bool) -> None:
    """Even if no two heads fit in the cache: programs begin in the order of the launch."""
    rows, heads, programs = 128, 8, 132
    lengths: tuple[int, ...] = (longest, *[128] * 64)
    problem = packed((lengths, lengths), False, (-1, 0))
    grid = problem.query_grid(rows)._replace(heads=heads)
    found = heads_of_packed_tiles(problem, grid, rows, programs, CACHE, queries=queries)
    steps = [2 * (i + 1) + 4 for i in reversed(range(-(-longest // rows)))] + [2 + 4] * 64
    ends = [0] * programs
    for _ in range(heads // found):
        for time in steps:
            for _ in range(found):
                heapq.heapreplace(ends, ends[0] + time)
    balanced = max(heads * sum(steps) / programs, max(steps))
    assert max(ends) <= 1.05 * balanced + min(steps)


def test_many_tiles_for_each_program_are_not_sorted() -> None:
    problem = packed(LENGTHS["many"], False, (-1, 0))
    for heads, is_sorted in ((1, True), (1000, False)):
        grid = problem.query_grid(64)._replace(heads=heads)
        tiles = order_tiles(problem, grid, 64, queries=True)
        assert tiles is not None
        assert len({tuple(x) for x in tiles.tolist()}) == grid.tiles
        sequences = tiles[:, 1].tolist()
        assert (sequences == sorted(sequences)) is not is_sorted
