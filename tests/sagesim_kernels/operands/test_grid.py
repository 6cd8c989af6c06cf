"""The programs of a launch: every tile of packed sequences has one, and few have none."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from sagesim_kernels.operands import Grid, program_coordinates, reversed_coordinates
from sagesim_kernels.operands.grid import Sequences
from tests.support import examples


@triton.jit
def store_coordinates(grid, out, IS_REVERSED: tl.constexpr):
    if IS_REVERSED:
        tile, h, b = reversed_coordinates(grid)
    else:
        tile, h, b = program_coordinates(grid)
    ptrs = out + 3 * tl.program_id(0)
    tl.store(ptrs, tile)
    tl.store(ptrs + 1, h)
    tl.store(ptrs + 2, b)


def coordinates(grid: Grid, *, is_reversed: bool = False) -> list[tuple[int, int, int]]:
    """The tile, head and sequence of each program."""
    out = torch.empty(grid.programs[0], 3, dtype=torch.int32)
    if grid.programs[0]:
        store_coordinates[grid.programs](grid, out, is_reversed)
    return [(t, h, b) for t, h, b in out.tolist()]


def grid_of(lengths: list[int], rows: int, heads: int, together: int, rest: int = 0) -> Grid:
    """A grid of packed sequences. rest: tokens behind the last one."""
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    sequences = Sequences(cu, len(lengths), max(lengths), sum(lengths) + rest)
    return Grid.of_tokens(sequences, rows, heads, together=together)


@examples(40)
@given(
    lengths=st.lists(st.integers(0, 40) | st.just(0), min_size=1, max_size=9),
    rows=st.sampled_from([1, 2, 6, 16]),
    heads=st.integers(1, 3),
    together=st.sampled_from([1, 2, 4]),
    rest=st.integers(0, 20),
    heads_per_group=st.none() | st.integers(1, 3),
)
def test_every_tile_of_packed_sequences_has_one_program(
    lengths: list[int],
    rows: int,
    heads: int,
    together: int,
    rest: int,
    heads_per_group: int | None,
) -> None:
    grid = grid_of(lengths, rows, heads, together, rest)._replace(heads_per_group=heads_per_group)
    found = coordinates(grid)
    assert len(set(found)) == len(found)
    tokens = rows * together
    needed = {
        (tile, h, b)
        for b, length in enumerate(lengths)
        for tile in range(-(-length // tokens) * together)
        for h in range(heads)
    }
    assert needed <= set(found)
    most = (sum(lengths) + rest) // tokens + len(lengths)
    assert len(found) <= heads * together * most


def test_tiles_of_a_sequence_are_in_order() -> None:
    grid = grid_of([5, 0, 9], 4, heads=2, together=1)
    first = [(0, 0, 0), (1, 0, 0), (0, 0, 1), (0, 0, 2), (1, 0, 2), (2, 0, 2)]
    assert coordinates(grid) == first + [(tile, 1, b) for tile, _, b in first]
    assert coordinates(grid, is_reversed=True) == coordinates(grid)[::-1]


def test_programs_do_not_grow_with_sequences_times_the_longest() -> None:
    lengths = [4096, *[128] * 63]
    grid = grid_of(lengths, 128, heads=16, together=1)
    assert grid.programs[0] <= 16 * (sum(lengths) // 128 + len(lengths))


@pytest.mark.parametrize("together", [1, 2])
def test_sequences_that_are_not_packed_have_equally_many_tiles(together: int) -> None:
    grid = Grid.of_tokens(Sequences(None, 3, 100, 100), 16, 2, together=together)
    assert grid == Grid(7 if together == 1 else 8, 2, 3)
    assert len(set(coordinates(grid))) == grid.programs[0]


def test_packed_sequences_of_one_length_have_equally_many_tiles() -> None:
    """Then the host knows the order in which the tiles end together."""
    assert grid_of([100] * 3, 16, heads=2, together=1) == Grid(7, 2, 3)
    assert grid_of([100], 16, heads=2, together=1) == Grid(7, 2, 1)
