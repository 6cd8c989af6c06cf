"""Packed sequences: contenders get the same tokens, and their times are in microseconds."""

import torch

from scripts.packed_time import CONTENDERS, HEADS, measure
from tests.sagesim_kernels.bench.fakes import FakeMeter, cpu_setup


def test_each_contender_gets_the_lengths_of_each_call(monkeypatch):
    monkeypatch.setattr("scripts.packed_time.LENGTHS", {"two": [3, 5]})
    monkeypatch.setattr("scripts.packed_time.HEADS", HEADS[1:])
    calls = []

    def attend(q, k, v, cu, longest):
        calls.append((q.shape, k.shape, v.shape, str(cu.tolist()), longest))
        return q + (k + v).repeat_interleave(4, dim=1)

    contenders = dict.fromkeys(CONTENDERS, attend)
    (row,) = measure(cpu_setup(FakeMeter(), 2, torch.bfloat16), contenders)
    assert set(calls) == {((8, 32, 128), (8, 8, 128), (8, 8, 128), "[0, 3, 8]", 5)}
    assert row["call"] == "two" and row["lengths"] == [3, 5]
    assert (row["q"], row["kv"], row["size"]) == HEADS[1]
    assert row["us"].keys() == CONTENDERS.keys()
    assert all(times.keys() == {"forward", "backward", "both"} for times in row["us"].values())
