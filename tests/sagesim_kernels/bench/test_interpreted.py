"""A whole run on a CPU: our kernels in Triton's interpreter beside SDPA, with a real clock."""

import time

import pytest
import torch

from sagesim_kernels.bench.cases import PASSES, GaussianCase, Shape, TimedCase
from sagesim_kernels.bench.every_table import every_table
from sagesim_kernels.bench.meter import Elapsed
from sagesim_kernels.bench.record import read
from sagesim_kernels.bench.run import Setup, run
from tests.sagesim_kernels.bench.fakes import MACHINE, FakeMeter, record
from tests.support.kernels import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="for Triton's interpreter")

SPECS = ["factored", "factored_pv16", "sagebwd"]
PEERS = ["sdpa flash", "sdpa cudnn"]


class Clock(FakeMeter):
    """The clock of this machine."""

    def elapsed(self, prepare):
        run = prepare()
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        return Elapsed(seconds, seconds)


@pytest.mark.slow
def test_everything_but_the_device(tmp_path):
    contenders = (*SPECS, *PEERS)
    cases = [
        TimedCase("speed", Shape(1, 1, 40, 16, True), contenders),
        GaussianCase(1.0, 16, True, contenders, tokens=40, draws=2),
    ]
    settings = {"specs": SPECS, "peers": PEERS, "quick": False, "dtype": "float16"}
    to = record(tmp_path / "bench.json", settings=settings)
    setup = Setup(torch.device("cpu"), torch.float16, Clock(), 1)
    run(cases, to, setup, lambda case, count: None)

    made = read(to.path)
    assert made["machine"] == MACHINE
    timed, errors = made["cases"].values()
    assert list(timed["runs"]) == [*SPECS, "sdpa flash"]
    assert list(timed["not_run"]) == list(errors["not_run"]) == ["sdpa cudnn"]
    for name in SPECS:
        assert all(timed["runs"][name][which]["ms"] > 0 for which in PASSES)
        assert 0 < timed["runs"][name]["apart"] < 0.1
    # Errors in the order of docs/kernels.md: 16 bit, then ours, then the paper's scheme.
    size = {name: max(e.values()) for name, e in errors["errors"].items()}
    assert size["sdpa flash"] < 0.002 < size["factored"] < size["sagebwd"] < 0.1
    heads = [table.title.split(",")[0] for table in every_table(made)]
    assert heads == [
        "MB saved for the backward / added at the peak",
        "ms",
        "preparation",
        "relative L2 error",
        "not run",
        *["TFLOP/s"] * 3,
        *["times as fast as each peer"] * 6,  # of the one shape, and over all
    ]
