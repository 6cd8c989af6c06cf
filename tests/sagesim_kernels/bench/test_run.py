"""Cases run once, in order; a contender that fails is recorded with the reason."""

import itertools
import math
from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from sagesim_kernels.bench import timing
from sagesim_kernels.bench.contenders import Contender
from sagesim_kernels.bench.record import read
from sagesim_kernels.bench.run import DeviceLost, run
from tests.sagesim_kernels.bench.fakes import (
    FakeMeter,
    absent,
    capture,
    cpu_setup,
    explicit,
    fake,
    find,
    gaussian,
    model,
    record,
    timed,
    training,
)


def measure(cases, to, meter=None, find=find, rounds=3, dtype=torch.float32):
    """Run the cases, and return what `on_done` was called with."""
    seen = []
    run(
        cases,
        to,
        cpu_setup(meter or FakeMeter(), rounds, dtype),
        lambda c, n: seen.append((c.key, n)),
        find,
    )
    return seen


def test_a_timed_case(tmp_path):
    seconds = itertools.count(1)
    to = record(tmp_path / "r.json")
    meter = FakeMeter(lambda: float(next(seconds)))
    assert measure([timed("factored", "sdpa flash")], to, meter, rounds=1) == [
        ("speed d8 full n16", 1)
    ]
    case = read(to.path)["cases"]["speed d8 full n16"]
    assert (case["tokens"], case["head_dim"], case["is_causal"]) == (16, 8, False)
    assert case["flop"]["both"] == 3.5 * 4 * 2 * 3 * 16**2 * 8
    assert list(case["runs"]) == ["factored", "sdpa flash"] and case["not_run"] == {}
    # Peers are made first, so they are timed first.
    assert case["runs"]["sdpa flash"]["forward"]["ms"] == 1000
    assert case["runs"]["factored"]["both"] == {
        "ms": 6000,
        "quartiles_ms": [6000, 6000],
        "host_ms": 3000,
        "waited": 0,
    }
    for name, one in case["runs"].items():
        assert one["added_bytes"] == 5_000_000 and one["saved_bytes"] > 3 * 4 * 2 * 3 * 16 * 8
        assert one["apart"] == 0.0 and ("jobs_ms" in one) == (name == "factored")
    assert case["runs"]["factored"]["jobs_ms"] == {"forward": 1.0}
    assert case["sm_clock_mhz"] == 1980


def test_a_shape_of_a_model_is_also_timed_in_a_loop(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "SETTLING", 0.0)
    to = record(tmp_path / "r.json")
    seconds = itertools.count(1)
    meter = FakeMeter(lambda: 0.001 * next(seconds))
    case = model("factored", "sdpa flash", "absent")
    measure([case], to, meter, rounds=1)
    found = read(to.path)["cases"]["models cross b1 h4/2 n16x12 d8 full"]
    assert (found["part"], found["tokens"], found["keys"]) == ("models", 16, 12)
    assert (found["heads"], found["kv_heads"]) == (4, 2)
    assert found["flop"]["both"] == 3.5 * 4 * 4 * 16 * 12 * 8
    assert list(found["not_run"]) == ["absent"]
    # Three passes of two contenders come first; then five loops of each, in turn.
    assert found["runs"]["sdpa flash"]["both"]["ms"] == 3
    walls = [found["runs"][name]["wall"]["ms"] for name in ("sdpa flash", "factored")]
    assert walls == [11, 12], "medians of 7, 10, 11, 14, 15 and of the others"
    assert found["runs"]["factored"]["wall"]["calls"] == 5
    assert meter.loops == [10, 5, 5, 10, 10, 5, 5, 10, 10, 5]


def test_other_shapes_are_not_timed_in_loops(tmp_path):
    to, meter = record(tmp_path / "r.json"), FakeMeter()
    measure([timed("factored")], to, meter)
    (case,) = read(to.path)["cases"].values()
    assert meter.loops == [] and "wall" not in case["runs"]["factored"]


def test_a_contender_that_raises_in_a_loop_has_no_times(tmp_path):
    class Meter(FakeMeter):
        def loop(self, run, calls):
            raise ValueError("out of luck")

    to = record(tmp_path / "r.json")
    cases = [model("sdpa flash"), training("sdpa flash")]
    measure(cases, to, Meter(), dtype=torch.bfloat16)
    for case in read(to.path)["cases"].values():
        assert case["runs"] == {} and case["not_run"] == {"sdpa flash": "ValueError: out of luck"}


@pytest.fixture
def few_words(monkeypatch):
    monkeypatch.setattr("sagesim_kernels.bench.training.VOCABULARY", 64)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_training_step(tmp_path, monkeypatch, few_words, is_compiled):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda x, dynamic: compiled.append(dynamic) or x)
    monkeypatch.setattr(torch.compiler, "reset", lambda: compiled.append("reset"))
    to = record(tmp_path / "r.json")
    seconds = itertools.count(1)
    meter = FakeMeter(lambda: 0.1 * next(seconds))
    case = training("factored", "sdpa flash", is_compiled=is_compiled)
    measure([case], to, meter, rounds=1, dtype=torch.bfloat16)
    how = "compiled" if is_compiled else "eager"
    case = read(to.path)["cases"][f"training l2 w32 d16 n8 {how}"]
    assert compiled == (["reset", False, False] if is_compiled else [])
    assert (case["part"], case["layers"], case["batch"]) == ("training", 2, 3)
    assert list(case["runs"]) == ["factored", "sdpa flash"] and case["not_run"] == {}
    assert case["runs"]["sdpa flash"]["step"]["ms"] == 100
    assert case["runs"]["factored"]["step"]["host_ms"] == 100
    assert case["runs"]["factored"]["wall"]["calls"] == 3
    assert case["runs"]["factored"]["apart"] == 0.0


def test_a_training_step_with_wrong_gradients_is_not_timed(tmp_path, few_words):
    def reversed_keys(q, k, v):
        return explicit(q, k.flip(2), v) * 1.6

    def found(name):
        return fake(name, reversed_keys) if name == "slow" else find(name)

    to = record(tmp_path / "r.json")
    meter = FakeMeter(lambda: 1.0)
    measure([training("sdpa flash", "slow")], to, meter, found, dtype=torch.bfloat16)
    (case,) = read(to.path)["cases"].values()
    assert list(case["runs"]) == ["sdpa flash"]
    assert "off, relative L2" in case["not_run"]["slow"]


def test_finished_cases_are_not_run_again(tmp_path):
    path = tmp_path / "r.json"
    cases = [timed("factored"), gaussian("factored"), timed("factored", tokens=32)]
    measure(cases[:2], record(path))
    before = read(path)["cases"]
    meter = FakeMeter()
    assert [n for _, n in measure(cases, record(path), meter)] == [1, 2, 3]
    after = read(path)["cases"]
    assert list(after) == [case.key for case in cases] and meter.runs == 3 * 3
    assert {key: after[key] for key in before} == before


def test_an_interrupted_run_keeps_what_was_finished(tmp_path):
    path = tmp_path / "r.json"
    calls = itertools.count()

    def interrupting():
        if next(calls) == 10:
            raise KeyboardInterrupt
        return 1.0

    cases = [timed("factored"), timed("factored", tokens=32)]
    with pytest.raises(KeyboardInterrupt):
        measure(cases, record(path), FakeMeter(interrupting))
    assert list(read(path)["cases"]) == ["speed d8 full n16"]


def test_a_contender_that_cannot_run_is_recorded_with_the_reason(tmp_path):
    to = record(tmp_path / "r.json")
    measure([timed("factored", "absent", "sdpa flash"), gaussian("absent", "factored")], to)
    for case in read(to.path)["cases"].values():
        assert case["not_run"] == {"absent": "ModuleNotFoundError: No module named 'absent'"}
    assert list(case["errors"]) == ["factored"]


def test_a_contender_that_raises_at_one_shape_runs_at_others(tmp_path):
    def short(q, k, v):
        if q.shape[2] > 16:
            raise RuntimeError("No available kernel.\nAborting execution.")
        return explicit(q, k, v)

    to = record(tmp_path / "r.json")
    cases = [timed("slow"), timed("slow", tokens=32)]
    measure(cases, to, find=lambda name: fake(name, short))
    runs, refused = read(to.path)["cases"].values()
    assert list(runs["runs"]) == ["slow"] and refused["runs"] == {}
    assert refused["not_run"] == {"slow": "RuntimeError: No available kernel. Aborting execution."}


@pytest.mark.parametrize("broken", ["nan", "other numbers"])
def test_a_wrong_result_is_not_timed(tmp_path, broken):
    def wrong(q, k, v):
        return explicit(q, k, v) * (math.nan if broken == "nan" else 3.0)

    def found(name):
        return fake(name, wrong, is_ours=True) if name == "factored" else find(name)

    to = record(tmp_path / "r.json")
    measure([timed("factored", "sdpa flash")], to, find=found)
    (case,) = read(to.path)["cases"].values()
    assert list(case["runs"]) == ["sdpa flash"]
    assert "off, relative L2" in case["not_run"]["factored"]


def test_errors_that_are_not_finite_are_not_recorded(tmp_path):
    to = record(tmp_path / "r.json")
    nan = fake("sagebwd", lambda q, k, v: explicit(q, k, v) * math.nan, is_ours=True)
    measure([gaussian("sagebwd")], to, find=lambda name: nan)
    (case,) = read(to.path)["cases"].values()
    assert case["errors"] == {} and "not finite" in case["not_run"]["sagebwd"]


def test_a_measurement_that_fails_has_a_reason_and_times_are_kept(tmp_path):
    class Meter(FakeMeter):
        def added_bytes(self, run):
            raise ValueError("no such counter")

    to = record(tmp_path / "r.json")
    measure([timed("factored")], to, Meter(launched=[]))
    (case,) = read(to.path)["cases"].values()
    run = case["runs"]["factored"]
    assert run["both"]["ms"] == 1 and run["saved_bytes"] > 0
    assert run["added_bytes"] is run["jobs_ms"] is None
    assert run["not_measured"] == {
        "added_bytes": "ValueError: no such counter",
        "jobs_ms": "RuntimeError: the profiler saw no kernel",
    }


def test_after_a_lost_device_the_next_run_leaves_the_contender_out(tmp_path):
    path = tmp_path / "r.json"
    meter = FakeMeter()

    def reads_beside(q, k, v):
        meter.is_lost = True
        return explicit(q, k, v)

    def found(name):
        return fake(name, reads_beside) if name == "slow" else find(name)

    case = timed("sdpa flash", "slow")
    with pytest.raises(DeviceLost, match=r"slow.*illegal memory access"):
        measure([case], record(path), meter, found)
    assert read(path)["cases"] == {}
    measure([case], record(path), find=found)
    again = read(path)["cases"][case.key]
    assert list(again["runs"]) == ["sdpa flash"]
    assert "the device was lost" in again["not_run"]["slow"]


def test_errors_are_those_of_float64(tmp_path):
    """Attention in float32 has tiny errors; attention times 1.1 has errors of 0.1."""

    def off(name, factor):
        def make(tokens, is_causal, device):
            return lambda q, k, v: factor * attend(q, k, v, is_causal=is_causal)

        return Contender(name, make)

    attend = torch.nn.functional.scaled_dot_product_attention
    found = {"sdpa flash": off("sdpa flash", 1.0), "slow": off("slow", 1.1)}
    to = record(tmp_path / "r.json")
    measure([gaussian(*found), capture(*found)], to, find=found.__getitem__)
    for case in read(to.path)["cases"].values():
        assert all(e < 1e-5 for e in case["errors"]["sdpa flash"].values())
        assert all(abs(e - 0.1) < 1e-4 for e in case["errors"]["slow"].values())
    gaussians, layers = read(to.path)["cases"].values()
    assert gaussians["shape"] == [2, 1, 16, 8] and gaussians["problems"] == 1
    assert layers["shape"] == [1, 1, 2048, 64] and layers["problems"] == 6


def test_compilation_is_not_timed(tmp_path):
    """The first two calls of a contender come before the timed ones."""
    calls = itertools.count()
    compiling = []

    def attend(q, k, v):
        compiling.append(next(calls) < 2)
        return explicit(q, k, v)

    class Meter(FakeMeter):
        def elapsed(self, prepare):
            first = len(compiling)
            result = super().elapsed(prepare)
            assert not any(compiling[first:])
            return result

    measure([timed("slow")], record(tmp_path / "r.json"), Meter(), lambda n: fake(n, attend))
    assert sum(compiling) == 2


def test_layouts_reach_the_contender(tmp_path):
    seen = set()

    def attend(q, k, v):
        seen.add(tuple(x.transpose(1, 2).is_contiguous() for x in (q, k, v)))
        return explicit(q, k, v)

    native = Contender("slow", lambda tokens, is_causal, device: attend, tokens_first=True)
    measure([timed("slow")], record(tmp_path / "r.json"), find=lambda name: native)
    assert seen == {(True, True, True)}


def test_a_contender_runs_in_its_context(tmp_path, few_words):
    inside: list[bool] = []
    entered: list[str] = []
    calls = Counter()

    @contextmanager
    def selected():
        entered.append(at)
        inside.append(True)
        try:
            yield
        finally:
            inside.pop()

    def attend(q, k, v):
        assert inside == [True]
        calls[at] += 1
        return explicit(q, k, v)

    several = Contender("slow", lambda tokens, is_causal, device: attend, selected=selected)
    cases = [timed("slow"), model("slow"), training("slow"), gaussian("slow")]
    for i, case in enumerate(cases):
        at = case.key
        to = record(tmp_path / f"{i}.json")
        measure([case], to, find=lambda name: several, dtype=torch.bfloat16)
    assert set(calls) == set(entered) == {case.key for case in cases}


def test_the_fake_that_is_absent_is_absent():
    with pytest.raises(ModuleNotFoundError):
        absent(1, False, torch.device("cpu"))
