"""The order of the forward's tiles: whatever the lengths, no program has much more to do."""

import pytest

from sagesim_kernels.hopper import schedule
from sagesim_kernels.hopper.schedule import group_of

PROGRAMS = 132


def last_done(
    n_q: int, n_k: int, offset: int | None, rows: int, heads: int, group: int
) -> tuple[int, float]:
    """Steps of the program that has most of them, dealt as the kernel deals, and of an average one;
    four of each tile are overhead."""
    tiles = -(-n_q // rows)
    programs = [0] * PROGRAMS
    for index in range(heads * tiles):
        lap, place = divmod(index, PROGRAMS)
        tile = index % (tiles * group) // group
        seen = n_k
        if offset is not None:
            seen = max(1, min(n_k, (tiles - tile) * rows + offset))
        programs[PROGRAMS - 1 - place if lap % 2 else place] += -(-seen // 64) + 4
    return max(programs), sum(programs) / PROGRAMS


@pytest.mark.parametrize("rows", [192, 256])
@pytest.mark.parametrize("heads", [32, 48, 96, 100, 256])
@pytest.mark.parametrize("n", [2048, 3000, 4096, 5000, 16384])
@pytest.mark.parametrize("offset", [0, 700, None])
def test_no_program_is_long_after_the_others(
    rows: int, heads: int, n: int, offset: int | None
) -> None:
    n_k = n + (offset or 0)
    group = group_of(n, n_k, offset, rows, heads, PROGRAMS, head_bytes=1)
    assert heads % group == 0
    longest, average = last_done(n, n_k, offset, rows, heads, group)
    # What cannot be divided: as many tiles as there are laps, of average length.
    laps = -(-heads * -(-n // rows) // PROGRAMS)
    whole = laps * PROGRAMS / (heads * -(-n // rows))
    assert longest <= 1.1 * whole * average


def test_the_order_is_the_one_that_ends_first() -> None:
    problem = (16384, 16384, 0, 256, 32)
    group = group_of(*problem, PROGRAMS, head_bytes=1)
    ends = {each: last_done(*problem, each)[0] for each in (2, 4, 8, 16, 32)}
    assert ends[group] == min(ends.values())
    assert max(ends.values()) > 1.5 * min(ends.values())


def test_keys_that_the_cache_cannot_hold_cost_more_than_the_last_percent() -> None:
    problem = (4096, 4096, 0, 192, 64, PROGRAMS)
    assert group_of(*problem, head_bytes=1) == 64
    assert group_of(*problem, head_bytes=4096 * 128 * 3) == 16


@pytest.mark.parametrize(("n", "heads"), [(4096, 2048), (16384, 3000), (32768, 16384)])
@pytest.mark.parametrize("head_bytes", [1, 32768 * 128 * 3])
def test_many_tiles_are_not_counted(
    n: int, heads: int, head_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of packed sequences, whose number is another at each step: that took half a second."""
    monkeypatch.delattr(schedule, "_longest")
    group = group_of(n, n, 0, 192, heads, PROGRAMS, head_bytes)
    assert heads % group == 0
    if heads < 10_000:
        longest, average = last_done(n, n, 0, 192, heads, group)
        assert longest <= 1.02 * average


@pytest.mark.parametrize("heads", [1, 2, 7, 139])
def test_any_number_of_heads_can_be_divided(heads: int) -> None:
    group = group_of(300, 200, -100, 192, heads, PROGRAMS, head_bytes=1)
    assert group in ({1} if heads in (1, 139) else {heads})
