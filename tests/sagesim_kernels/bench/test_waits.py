"""The meter of a CUDA device keeps it busy until the host has launched a run. On a fake device."""

import pytest
import torch

from sagesim_kernels.bench import cuda


class Device:
    """Needs a time unit for each write of the buffer; the host needs `launching` for a run."""

    def __init__(self, launching: int) -> None:
        self.launching = launching
        self.runs = 0
        self.writes = 0  #: before the last run
        self.since = 0  #: time since the host recorded the start

    def zero_(self) -> None:
        self.writes += 1

    def synchronize(self) -> None:
        self.writes = self.since = 0

    def prepare(self):
        def run() -> None:
            self.runs += 1
            self.since += self.launching
            self.last = self.writes

        return run

    def event(self, enable_timing):
        return self

    def record(self) -> None:
        """The start or the end is recorded."""

    def query(self) -> bool:
        return self.since >= self.writes

    def elapsed_time(self, end) -> float:
        return 7.0


@pytest.fixture
def on_a_device_whose_host_needs(monkeypatch: pytest.MonkeyPatch):
    def make(launching: int) -> tuple[cuda.CudaMeter, Device]:
        device = Device(launching)
        monkeypatch.setattr(torch, "empty", lambda size, **options: device)
        monkeypatch.setattr(torch.cuda, "Event", device.event)
        monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
        return cuda.CudaMeter(), device

    return make


@pytest.mark.parametrize(
    ("launching", "runs", "writes"), [(0, 1, 64), (63, 1, 64), (64, 2, 128), (500, 4, 512)]
)
def test_a_run_is_repeated_until_the_device_is_busy_long_enough(
    on_a_device_whose_host_needs, launching, runs, writes
):
    meter, device = on_a_device_whose_host_needs(launching)
    found = meter.elapsed(device.prepare)
    assert (device.runs, device.last) == (runs, writes)
    assert found.device == 0.007 and not found.waited
    meter.elapsed(device.prepare)
    assert device.runs == runs + 1, "later runs start with as many writes"


def test_a_run_that_waits_for_the_device_is_marked(on_a_device_whose_host_needs):
    meter, device = on_a_device_whose_host_needs(10_000)
    assert meter.elapsed(device.prepare).waited
    assert (device.runs, device.last) == (4, 512)
    assert meter.elapsed(device.prepare).waited
    assert device.runs == 5
