"""The order of Hopper's tiles: all programs finish at nearly the same time."""

import pytest

from sagesim_kernels.hopper import tile_scheduler
from sagesim_kernels.hopper.tile_scheduler import (
    choose_backward_order,
    choose_heads_per_group,
    has_few_steps,
    prefers_two_programs,
)
from sagesim_kernels.operands import query_heads_per_program

PROGRAMS = 132


def steps_of_programs(
    n_q: int,
    n_k: int,
    offset: int | None,
    rows: int,
    heads: int,
    group: int,
    lowest: int | None = None,
) -> tuple[int, float]:
    """Return the steps of the program with the most steps, and the average of all programs.

    Tiles are dealt as the kernel deals them. Each tile has four steps of overhead.
    """
    tiles = -(-n_q // rows)
    programs = [0] * PROGRAMS
    for index in range(heads * tiles):
        wave, place = divmod(index, PROGRAMS)
        tile = index % (tiles * group) // group
        first, end = 0, n_k
        if offset is not None:
            tile = tiles - 1 - tile
            end = max(1, min(n_k, (tile + 1) * rows + offset))
        if lowest is not None:
            first = min(max(tile * rows + lowest, 0), end - 1)
        steps = -(-end // 64) - first // 64 + 4
        programs[PROGRAMS - 1 - place if wave % 2 else place] += steps
    return max(programs), sum(programs) / PROGRAMS


@pytest.mark.parametrize("rows", [192, 256])
@pytest.mark.parametrize("heads", [32, 48, 96, 100, 256])
@pytest.mark.parametrize("n", [2048, 3000, 4096, 5000, 16384])
@pytest.mark.parametrize("offset", [0, 700, None])
def test_no_program_takes_much_longer_than_the_average(
    rows: int, heads: int, n: int, offset: int | None
) -> None:
    n_k = n + (offset or 0)
    group = choose_heads_per_group(n, n_k, offset, rows, heads, PROGRAMS, head_bytes=1)
    assert heads % group == 0
    longest, average = steps_of_programs(n, n_k, offset, rows, heads, group)
    # Tiles cannot be divided, so some program computes one tile of average length in each wave.
    waves = -(-heads * -(-n // rows) // PROGRAMS)
    whole = waves * PROGRAMS / (heads * -(-n // rows))
    assert longest <= 1.1 * whole * average


@pytest.mark.parametrize(("n", "left", "offset"), [(16384, 1023, 0), (3000, 500, None)])
@pytest.mark.parametrize("heads", [32, 100])
def test_tiles_of_a_window_are_balanced(n: int, left: int, offset: int | None, heads: int) -> None:
    group = choose_heads_per_group(n, n, offset, 192, heads, PROGRAMS, 1, lowest=-left)
    longest, average = steps_of_programs(n, n, offset, 192, heads, group, -left)
    waves = -(-heads * -(-n // 192) // PROGRAMS)
    whole = waves * PROGRAMS / (heads * -(-n // 192))
    assert longest <= 1.1 * whole * average
    # All tiles of a long sequence take as long as the last one, whatever is before the window.
    assert longest < steps_of_programs(n, n, offset, 192, heads, group)[0]


def test_the_choice_is_the_order_that_finishes_first() -> None:
    problem = (16384, 16384, 0, 256, 32)
    group = choose_heads_per_group(*problem, PROGRAMS, head_bytes=1)
    ends = {each: steps_of_programs(*problem, each)[0] for each in (2, 4, 8, 16, 32)}
    assert ends[group] == min(ends.values())
    assert max(ends.values()) > 1.5 * min(ends.values())


def test_groups_that_exceed_the_cache_are_avoided() -> None:
    """A slightly better load balance does not make up for keys and values outside the cache."""
    problem = (4096, 4096, 0, 192, 64, PROGRAMS)
    assert choose_heads_per_group(*problem, head_bytes=1) == 64
    assert choose_heads_per_group(*problem, head_bytes=4096 * 128 * 3) == 16


@pytest.mark.parametrize(("n", "heads"), [(4096, 2048), (16384, 3000), (32768, 16384)])
@pytest.mark.parametrize("head_bytes", [1, 32768 * 128 * 3])
def test_many_tiles_are_not_simulated(
    n: int, heads: int, head_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulation would take half a second, and again for every new number of packed sequences."""
    monkeypatch.delattr(tile_scheduler, "_most_steps")
    group = choose_heads_per_group(n, n, 0, 192, heads, PROGRAMS, head_bytes)
    assert heads % group == 0
    if heads < 10_000:
        longest, average = steps_of_programs(n, n, 0, 192, heads, group)
        assert longest <= 1.02 * average


@pytest.mark.parametrize("heads", [1, 2, 7, 139])
def test_any_number_of_heads_can_be_divided(heads: int) -> None:
    group = choose_heads_per_group(300, 200, -100, 192, heads, PROGRAMS, head_bytes=1)
    assert group in ({1} if heads in (1, 139) else {heads})


def test_groups_are_divided_if_they_are_large_or_heads_of_k_and_v_are_few() -> None:
    found = {
        (heads, groups): query_heads_per_program(heads, groups, most=4)
        for heads, groups in (
            (1, 1),
            (1, 8),
            (2, 7),
            (2, 8),
            (3, 4),
            (4, 7),
            (8, 4),
            (1, 3),
            (8, 8),
        )
    }
    assert found == {
        (1, 1): 1, (1, 8): 2, (2, 7): 1, (2, 8): 4, (3, 4): 2, (4, 7): 1, (8, 4): 4, (1, 3): 1,
        (8, 8): 4,
    }  # fmt: skip
    assert [query_heads_per_program(4, groups, most=groups) for groups in (1, 7, 8)] == [1, 7, 8]
    assert [query_heads_per_program(2, groups, most=groups) for groups in (1, 7, 8)] == [1, 1, 4]


def steps_of_backward(n: int, heads: int, group: int, is_causal: bool) -> tuple[int, float]:
    """The same for programs of the backward, which own 128 keys of a head."""
    programs, index = [0] * PROGRAMS, 0
    for first_head in range(0, heads, group):
        for tile in range(-(-n // 128)):
            for _ in range(min(group, heads - first_head)):
                wave, place = divmod(index, PROGRAMS)
                steps = -(-n // 64) - (2 * tile if is_causal else 0) + 2
                programs[PROGRAMS - 1 - place if wave % 2 else place] += steps
                index += 1
    return max(programs), sum(programs) / PROGRAMS


@pytest.mark.parametrize(
    ("n", "heads"), [(1024, 128), (1024, 192), (2048, 128), (3000, 48), (4096, 128), (8192, 64)]
)
def test_dealt_programs_of_a_causal_backward_end_together(n: int, heads: int) -> None:
    order = choose_backward_order(n, n, 0, 128, heads, 1, PROGRAMS, 64)
    last, average = steps_of_backward(n, heads, order.heads_per_group, is_causal=True)
    assert order.is_dealt
    assert last <= 1.03 * average


@pytest.mark.parametrize("heads", [48, 56])
def test_few_heads_of_a_long_backward_are_computed_at_a_time(heads: int) -> None:
    """Queries and sums of dQ of a head have 9 bytes a channel; all stay in the cache."""
    order = choose_backward_order(8192, 8192, 0, 128, heads, 1, PROGRAMS, 64)
    assert order.heads_per_group * 8192 * 64 * 9 < 2**25


@pytest.mark.parametrize(
    ("n", "heads", "groups", "channels", "expected"),
    [
        (512, 384, 1, 64, True),
        (729, 1024, 1, 128, True),
        (512, 20, 1, 64, False),  # each program has one tile anyway
        (8192, 16, 1, 128, False),  # long tiles: what dealing saves is less than what it costs
        (4096, 40, 4, 128, False),
    ],
)
def test_which_backwards_are_dealt(
    n: int, heads: int, groups: int, channels: int, expected: bool
) -> None:
    order = choose_backward_order(n, n, None, 128, heads, groups, PROGRAMS, channels)
    assert order.is_dealt is expected


@pytest.mark.parametrize(
    ("n_q", "n_k", "offset", "groups", "lowest", "expected"),
    [
        (1472, 128, None, 1, None, True),  # 23 blocks of queries
        (1536, 128, None, 1, None, False),
        (384, 100, None, 3, None, True),  # 6 blocks for each of 3 query heads
        (384, 100, None, 4, None, False),
        (2048, 2048, 0, 1, None, True),  # 17 on average
        (3072, 3072, 0, 1, None, False),
        (16384, 16384, 0, 1, -1023, True),
        (16384, 16384, 0, 4, -1023, False),
        (1, 1, None, 1, None, True),
    ],
)
def test_which_tiles_have_few_steps(
    n_q: int, n_k: int, offset: int | None, groups: int, lowest: int | None, expected: bool
) -> None:
    assert has_few_steps(n_q, n_k, offset, 128, groups, lowest) is expected


def test_many_tiles_of_a_backward_are_not_all_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0

    def most_steps(steps: object, heads: int, *rest: object) -> int:
        nonlocal largest
        largest = max(largest, heads)
        return 1

    monkeypatch.setattr(tile_scheduler, "_most_steps", most_steps)
    choose_backward_order(1024, 1024, 0, 128, 2**17, 1, PROGRAMS, 64)
    assert largest < 2000


@pytest.mark.parametrize(
    ("n_q", "n_k", "offset", "heads", "expected"),
    [
        *((4096, 77, None, 80, True), (256, 256, None, 96, True), (512, 512, 0, 256, True)),
        *((1024, 1024, 0, 128, True), (640, 640, None, 192, True), (1024, 1024, None, 256, False)),
        *((512, 512, None, 384, True), (1536, 1536, 0, 128, True), (1024, 1024, 0, 12, True)),
        *((4096, 4096, 0, 128, False), (8192, 8192, None, 64, False)),
    ],
)
def test_a_forward_of_few_steps_has_two_programs_a_multiprocessor(
    n_q: int, n_k: int, offset: int | None, heads: int, expected: bool
) -> None:
    """These calls were timed with both; docs/kernel_variants.md has most of the times."""
    problem = (n_q, n_k, offset, 256, heads, PROGRAMS)
    assert prefers_two_programs(*problem, n_k * 64 * 3) == expected


def test_few_tiles_have_two_programs_as_long_as_each_has_a_multiprocessor() -> None:
    """A program computes half of the queries, but takes as long for a step if it is alone."""
    few = {
        heads: prefers_two_programs(2048, 2048, None, 256, heads, PROGRAMS, 1)
        for heads in (1, 8, 9, 16)
    }
    assert few == {1: True, 8: True, 9: False, 16: False}
