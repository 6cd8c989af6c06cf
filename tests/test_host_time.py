"""Loops of short calls: each contender in two threads and in one."""

from contextlib import contextmanager

import torch

from sagesim_kernels.bench.contenders import Contender
from scripts.host_time import SHAPES, measure
from tests.sagesim_kernels.bench.fakes import FakeMeter, cpu_setup


def test_each_contender_is_timed_in_its_context_in_two_threads_and_in_one(monkeypatch):
    monkeypatch.setattr("scripts.host_time.SHAPES", {"small": next(iter(SHAPES.values()))})
    inside, several = [], set()

    @contextmanager
    def selected():
        inside.append(True)
        yield
        inside.pop()

    def attend(q, k, v):
        assert inside == [True]
        return q + k + v

    class Meter(FakeMeter):
        def loop(self, run, calls):
            run()
            several.add((torch.autograd.is_multithreading_enabled(), calls))
            return 2.5e-4

    one = Contender("one", lambda tokens, is_causal, device: attend, selected=selected)
    setup = cpu_setup(Meter(), 2, torch.bfloat16)
    assert measure(setup, [one]) == [
        {"call": "small", "threads": threads, "us": {"one": 250.0}}
        for threads in ("two threads", "one thread")
    ]
    assert several == {(True, 300), (False, 300)}
