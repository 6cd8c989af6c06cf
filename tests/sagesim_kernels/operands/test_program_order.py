"""The order of programs that own a tile each: the last of them end at nearly the same time."""

import pytest
import torch
import triton
import triton.language as tl

from sagesim_kernels.operands import (
    Grid,
    choose_backward_heads,
    choose_forward_heads,
    program_coordinates,
    program_order,
)

PROGRAMS = 132


@triton.jit
def store_coordinates(grid, out, LAST_FIRST: tl.constexpr):
    tile, h, b = program_coordinates(grid, LAST_FIRST)
    ptrs = out + 3 * tl.program_id(0)
    tl.store(ptrs, tile)
    tl.store(ptrs + 1, h)
    tl.store(ptrs + 2, b)


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("heads_per_group", [1, 2, 4, 6])
def test_every_program_has_a_place_of_its_own(heads_per_group: int, last_first: bool) -> None:
    tiles, heads, sequences = 5, 3, 2
    grid = Grid(tiles, heads, sequences, heads_per_group=heads_per_group)
    out = torch.empty(grid.programs[0], 3, dtype=torch.int32)
    store_coordinates[grid.programs](grid, out, last_first)
    places = [tuple(row) for row in out.tolist()]
    assert set(places) == {
        (t, h, b) for t in range(tiles) for h in range(heads) for b in range(sequences)
    }
    # A group of heads is complete before the next begins, and its tiles are in order.
    group = tiles * heads_per_group
    for first in range(0, len(places), group):
        part = places[first : first + group]
        of_tiles = [tile for tile, _, _ in part]
        assert of_tiles == sorted(of_tiles, reverse=last_first)
        assert len({(h, b) for _, h, b in part}) * tiles == len(part)


def end_of_backward(
    n: int, heads: int, groups: int, group: int, left: int | None = None
) -> tuple[int, float]:
    """Return the steps until the last program ends, and those of a perfect balance: causal mask.

    A multiprocessor starts the next program of the launch when it has finished one.
    """
    tiles = -(-n // 128)
    ends = [0] * PROGRAMS
    total = 0
    for first in range(0, heads, group):
        for tile in range(tiles):
            for _ in range(min(group, heads - first)):
                last = n if left is None else min(128 * (tile + 1) + left, n)
                steps = groups * (-(-last // 64) - 2 * tile) + 4
                ends[ends.index(min(ends))] += steps
                total += steps
    return max(ends), total / PROGRAMS


@pytest.mark.parametrize(
    ("n", "heads", "groups"),
    [(8192, 32, 1), (8192, 8, 4), (4096, 16, 4), (4096, 8, 7), (4000, 7, 7), (1024, 192, 1)],
)
def test_the_programs_of_the_backward_end_together(n: int, heads: int, groups: int) -> None:
    group = choose_backward_heads(n, n, 0, 128, heads, groups, PROGRAMS)
    last, average = end_of_backward(n, heads, groups, group)
    longest, tiles = groups * -(-n // 64) + 4, -(-n // 128)
    shortest = 2 * groups + 4  # the programs that start last
    assert last <= max(1.01 * average + shortest, longest)
    # Several programs of a head run at the same time.
    assert group * 4 <= PROGRAMS or group * tiles < 1.1 * PROGRAMS
    # Fewer heads would not do, unless they are enough for all multiprocessors to start with.
    assert group * tiles < 2 * PROGRAMS or (
        end_of_backward(n, heads, groups, group // 2)[0] > 1.005 * last
    )


@pytest.mark.parametrize(("n", "heads", "left"), [(16384, 16, 1023), (4096, 8, 700)])
def test_the_programs_of_a_window_end_together(n: int, heads: int, left: int) -> None:
    group = choose_backward_heads(n, n, 0, 128, heads, 2, PROGRAMS, lowest=-left)
    last, average = end_of_backward(n, heads, 2, group, left)
    longest = 2 * -(-(left + 128) // 64) + 4
    assert last <= 1.03 * average + longest
    assert last < end_of_backward(n, heads, 2, group)[0]


def test_one_head_after_another_would_end_late() -> None:
    last, average = end_of_backward(4096, 8, 7, 1)
    assert last > 1.4 * average


@pytest.mark.parametrize(("n", "heads"), [(1024, 2**17), (131072, 64), (64, 2**20)])
def test_many_programs_of_the_backward_are_not_simulated(
    n: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(program_order, "_end_of")
    group = choose_backward_heads(n, n, 0, 128, heads, 1, PROGRAMS)
    assert 0.9 * PROGRAMS <= group * -(-n // 128) < 2 * max(PROGRAMS, -(-n // 128))


@pytest.mark.parametrize(("n_q", "n_k", "offset"), [(1, 1, None), (1, 500, 499), (500, 1, -499)])
def test_small_backwards_have_an_order(n_q: int, n_k: int, offset: int | None) -> None:
    assert 1 <= choose_backward_heads(n_q, n_k, offset, 128, 3, 2, PROGRAMS) <= 3


@pytest.mark.parametrize(("n", "heads", "rows"), [(4096, 64, 64), (8192, 64, 128), (1024, 512, 64)])
def test_the_programs_of_a_forward_end_together(n: int, heads: int, rows: int) -> None:
    group = choose_forward_heads(n, n, 0, None, rows, heads, 2 * PROGRAMS)
    steps = [-(-min(first + rows, n) // 64) + 4 for first in range(0, n, rows)][::-1]
    ends = [0] * (2 * PROGRAMS)
    for first in range(0, heads, group):
        for time in steps:
            for _ in range(min(group, heads - first)):
                ends[ends.index(min(ends))] += time
    average = heads * sum(steps) / len(ends)
    assert max(ends) <= 1.01 * average + steps[-1]
