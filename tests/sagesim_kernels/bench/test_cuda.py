"""The meter of a CUDA device, and a small run on it."""

import time

import pytest
import torch

from sagesim_kernels.bench.cases import PASSES, PEERS, GaussianCase, Shape, TimedCase
from sagesim_kernels.bench.models import SDPA, ModelCase, TrainingCase
from sagesim_kernels.bench.record import Record, read
from sagesim_kernels.bench.run import Setup, run

pytestmark = pytest.mark.gpu

SPECS = ["factored", "factored_pv16"]


@pytest.fixture(scope="module")
def meter():
    from sagesim_kernels.bench.cuda import CudaMeter

    return CudaMeter()


def test_it_times_the_device_and_not_the_host(meter):
    x = torch.randn(4096, 4096, device="cuda")

    def prepare():
        (x @ x).sum()  # not timed
        return lambda: x @ x

    def slow_to_prepare():
        time.sleep(0.05)
        return prepare()

    meter.elapsed(prepare)
    fast, slow = meter.elapsed(prepare), meter.elapsed(slow_to_prepare)
    # 1.4e11 operations: longer than a launch, and on any device shorter than the sleep.
    assert 2e-5 < fast.device < 0.04 and slow.device < 0.04
    assert 0 < fast.host < 0.01


def test_the_device_does_not_wait_for_a_slow_host(meter):
    x = torch.randn(64, 64, device="cuda")

    def slow_to_launch():
        y = x @ x
        time.sleep(0.015)
        return y @ x

    found = meter.elapsed(lambda: slow_to_launch)
    assert found.host > 0.015 and (found.waited or found.device < 0.015)


def test_a_run_that_waits_for_the_device_is_marked(meter):
    x = torch.randn(64, 64, device="cuda")
    assert meter.elapsed(lambda: lambda: (x @ x).sum().item()).waited


def test_it_counts_bytes_and_launches(meter):
    x = torch.ones(2**20, device="cuda")
    assert meter.added_bytes(lambda: x + 1) == 2**22
    names = [kernel.name for kernel in meter.kernels(lambda: (x + 1).cos())]
    assert len(names) == 2 and "cos" in names[1]
    clock = meter.clock_mhz()
    assert clock is None or 0 < clock < 10_000


def test_a_small_run(meter, tmp_path):
    from sagesim_kernels.bench.machine import describe

    contenders = (*SPECS, *PEERS)
    cases = [
        TimedCase("speed", Shape(1, 2, 512, 64, True), contenders),
        GaussianCase(1.0, 64, True, contenders, tokens=256, draws=2),
    ]
    settings = {"specs": SPECS, "peers": list(PEERS)}
    path = tmp_path / "bench.json"
    record = Record.open(path, machine=describe(), settings=settings, command="test")
    setup = Setup(torch.device("cuda"), torch.bfloat16, meter, 3)
    run(cases, record, setup, lambda case, count: None)

    timed, errors = read(path)["cases"].values()
    assert {*SPECS, "sdpa flash"} <= set(timed["runs"]), timed["not_run"]
    assert set(timed["runs"]) | set(timed["not_run"]) == set(contenders)
    for name, one in timed["runs"].items():
        assert "not_measured" not in one, (name, one["not_measured"])
        assert all(one[which]["ms"] > 0 for which in PASSES) and one["apart"] < 0.1
    for name in SPECS:
        jobs = timed["runs"][name]["jobs_ms"]
        assert {"forward", "dq, dk and dv", "quantizing", "smoothing", "delta"} <= set(jobs)
    assert errors["errors"]["factored"]["dq"] < 0.05


def test_a_loop_takes_the_time_of_the_slower_one_of_host_and_device(meter):
    x = torch.randn(4096, 4096, device="cuda")
    tiny = torch.randn(64, 64, device="cuda")

    def slow_host():
        time.sleep(0.01)
        return tiny @ tiny

    one = meter.elapsed(lambda: lambda: x @ x).device
    assert 0.5 * one < meter.loop(lambda: x @ x, 20) < 3 * one + 1e-3
    assert 0.01 < meter.loop(slow_host, 5) < 0.02


def test_shapes_of_models_and_a_training_step(meter, tmp_path):
    from sagesim_kernels.bench.machine import describe

    cases = [
        ModelCase("grouped", Shape(1, 4, 512, 64, True, kv_heads=2), ("factored_qk", *SDPA)),
        ModelCase("cross", Shape(1, 4, 512, 128, False, keys=77), ("factored_qk", *SDPA)),
        *(
            TrainingCase(1, 256, 64, 512, 2, is_compiled, ("factored_qk", *SDPA))
            for is_compiled in (False, True)
        ),
    ]
    path = tmp_path / "bench.json"
    record = Record.open(path, machine=describe(), settings={}, command="test")
    setup = Setup(torch.device("cuda"), torch.bfloat16, meter, 3)
    run(cases, record, setup, lambda case, count: None)
    for key, case in read(path)["cases"].items():
        assert {"factored_qk", "sdpa flash"} <= set(case["runs"]), (key, case["not_run"])
        for one in case["runs"].values():
            assert one["wall"]["ms"] > 0 and one["apart"] < 0.1, key
