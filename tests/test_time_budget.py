"""scripts/time_budget.py says whether another run fits into the time that is left."""

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "time_budget.py"))


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_a_run_fits_if_the_longest_before_it_would(clock):
    budget = SCRIPT["TimeBudget"](minutes=10, first=3)
    for seconds, left in ((120, 480), (60, 420), (200, 220)):
        assert budget.fits()
        clock[0] += seconds
        assert budget.ended() == seconds
        assert budget.end - clock[0] == left
    assert budget.fits()  # 1.1 times 200 seconds
    clock[0] += 1
    assert not budget.fits()
    assert not budget.is_over()
    clock[0] += 220
    assert budget.is_over()


def test_the_first_run_takes_what_it_is_expected_to_take(clock):
    assert SCRIPT["TimeBudget"](minutes=3, first=3).fits()
    assert not SCRIPT["TimeBudget"](minutes=2.9, first=3).fits()
