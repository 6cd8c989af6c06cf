"""Calls of other lengths: which lengths they have, and what is measured of them."""

import random
from itertools import pairwise

import torch
from triton import knobs

from scripts import other_lengths
from tests.sagesim_kernels.bench.fakes import FakeMeter, cpu_setup


def test_packed_texts_fill_their_tokens(monkeypatch):
    seen = []

    def attend(q, k, v, cu_q, cu_k, longest_q, longest_k, *, is_causal):
        assert cu_q is cu_k and is_causal
        seen.append((q.shape[0], cu_q.tolist(), longest_q, longest_k))
        return q

    monkeypatch.setattr(other_lengths, "attention_varlen", attend)
    draw = random.Random(3)
    for _ in range(4):
        other_lengths.KINDS["packed"](draw, torch.device("cpu"))()
    assert len({total for total, *_ in seen}) == 4
    for total, starts, *bounds in seen:
        lengths = [end - begin for begin, end in pairwise(starts)]
        assert starts[0] == 0 and starts[-1] == total and 5000 <= total < 20000
        assert bounds == [max(lengths)] * 2 and min(lengths) > 0


def test_first_and_repeated_calls_are_timed_in_each_round(monkeypatch):
    made, calls, forgotten = [], [], []

    def make(draw, device):
        number = len(made)
        made.append(device)

        def call():
            calls.append((number, len(forgotten)))
            return torch.ones(2, requires_grad=True) * 2

        return call

    monkeypatch.setattr(other_lengths, "KINDS", {"some": make})
    monkeypatch.setattr(other_lengths, "CALLS", 3)
    monkeypatch.setattr(other_lengths, "forget_plans", lambda: forgotten.append(None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(knobs.compilation, "listener", None)  # is restored after the test
    (row,) = other_lengths.measure(cpu_setup(FakeMeter(), 2, torch.bfloat16))
    assert made == [torch.device("cpu")] * 3
    # once before the plans are forgotten, and twice after each time
    expected = [(number, when) for when in (0, 1, 1, 2, 2) for number in range(3)]
    assert calls == expected
    assert row["kind"] == "some" and row["compiled"] == [0, 0, 0]
    assert row["ms"].keys() == {"first", "again"}
    assert all(times.keys() == {"forward", "backward"} for times in row["ms"].values())
