"""Rounds, medians, and contenders that raise."""

import itertools
from contextlib import nullcontext

import pytest
import torch

from sagesim_kernels.bench.meter import Elapsed
from sagesim_kernels.bench.step import Step
from sagesim_kernels.bench.timing import interleaved, looped, summary
from tests.sagesim_kernels.bench.fakes import FakeMeter, explicit


def step(attend=explicit):
    q, k, v, do = torch.randn(4, 1, 1, 4, 4)
    return Step(attend, *(x.requires_grad_() for x in (q, k, v)), do)


def fine(name, error):
    """The device did not fail."""


def test_a_round_times_each_contender_once_and_starts_with_another():
    order = []

    def noting(name):
        def attend(q, k, v):
            order.append(name)
            return explicit(q, k, v)

        return attend

    timed = interleaved({n: step(noting(n)) for n in "abc"}, FakeMeter(), 4, on_error=fine)
    # A contender is called once for each pass.
    turns = [name for name, _ in itertools.groupby(order)]
    assert order == [name for name in turns for _ in range(3)]
    assert turns == list("abcbcacababc")
    assert {name: {p: len(t) for p, t in by.items()} for name, by in timed.times.items()} == {
        name: {"forward": 4, "backward": 4, "both": 4} for name in "abc"
    }


def test_only_the_pass_is_timed():
    """The forward that a backward needs is not part of its time."""
    calls = []

    def attend(q, k, v):
        calls.append(meter.timing)
        return explicit(q, k, v)

    class Meter(FakeMeter):
        timing = False

        def elapsed(self, prepare):
            run = prepare()
            self.timing = True
            run()
            self.timing = False
            return Elapsed(1.0, 1.0)

    meter = Meter()
    interleaved({"a": step(attend)}, meter, 1, on_error=fine)
    assert calls == [True, False, True]


def test_a_contender_that_raises_is_left_out_and_the_others_continue():
    calls = itertools.count()

    def fails(q, k, v):
        if next(calls) >= 4:
            raise ValueError("out of luck")
        return explicit(q, k, v)

    told = []
    timed = interleaved(
        {"a": step(), "b": step(fails)}, FakeMeter(), 3, on_error=lambda *x: told.append(x[0])
    )
    assert list(timed.times) == ["a"] and len(timed.times["a"]["both"]) == 3
    assert timed.not_run == {"b": "ValueError: out of luck"} and told == ["b"]


def test_no_contenders():
    assert interleaved({}, FakeMeter(), 3, on_error=fine).times == {}


@pytest.mark.parametrize("order", list(itertools.permutations([1.0, 2.0, 30.0])))
def test_medians(order):
    found = summary([Elapsed(1e-3 * s, 1e-3 * (31 - s)) for s in order])
    assert found == {"ms": 2.0, "quartiles_ms": [1.5, 16.0], "host_ms": 29.0, "waited": 0}


def test_rounds_in_which_the_device_may_have_waited_are_counted():
    rounds = [Elapsed(0.004, 0.001, waited) for waited in (True, False, True)]
    assert summary(rounds)["waited"] == 2


def test_the_median_of_one():
    assert summary([Elapsed(0.004, 0.001)])["quartiles_ms"] == [4.0, 4.0]


def test_a_loop_is_long_enough_to_be_timed():
    """30 ms, or three calls; the time is that of one call. A loop that is not timed precedes it."""
    meter, called = FakeMeter(lambda: 0.5), []
    calls = {"short": lambda: called.append("short"), "long": lambda: called.append("long")}
    found = looped(calls, {"short": 0.0031, "long": 0.2}, meter, 4, on_error=fine)
    assert meter.loops == [10, 10, 3, 3, 3, 3, 10, 10] * 2
    assert called.count("short") == 80 and called.count("long") == 24
    assert found.runs == {
        name: {"ms": 500.0, "quartiles_ms": [500.0, 500.0], "calls": n}
        for name, n in (("short", 10), ("long", 3))
    }


def test_untimed_loops_take_long_enough_for_a_gpu_to_change_its_clock():
    meter = FakeMeter(iter([0.002, 0.0029, 0.0111, 0.001, 0.2, 0.003]).__next__)
    found = looped({"a": lambda: None}, {"a": 0.003}, meter, 2, on_error=fine)
    assert meter.loops == [10] * 6
    assert found.runs["a"]["ms"] == pytest.approx(2.0)


def test_a_context_is_entered_once_for_a_loop():
    entered = []

    def within(name):
        entered.append(name)
        return nullcontext()

    calls = {"a": lambda: None, "b": lambda: None}
    looped(calls, {"a": 0.001, "b": 0.001}, FakeMeter(), 2, on_error=fine, within=within)
    assert entered == ["a", "b", "b", "a"]


def test_a_loop_that_raises_is_left_out():
    def fails():
        raise ValueError("out of luck")

    told = []
    found = looped(
        {"a": step().both, "b": fails},
        {"a": 1.0, "b": 1.0},
        FakeMeter(),
        3,
        on_error=lambda *x: told.append(x[0]),
    )
    assert list(found.runs) == ["a"] and found.not_run == {"b": "ValueError: out of luck"}
    assert told == ["b"]
