"""The description of the machine in a record."""

import re
import subprocess
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import sagesim_kernels.bench.machine as machine
from sagesim_kernels.bench.cuda import device_kernels
from sagesim_kernels.bench.machine import describe, nvidia_smi, one_line, sources_hash, versions
from sagesim_kernels.bench.meter import Kernel


@pytest.fixture
def device(monkeypatch):
    properties = SimpleNamespace(
        name="Fake 1", major=9, minor=0, multi_processor_count=132, total_memory=7, uuid="ab-c"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)


def answering(monkeypatch, text, code=0):
    asked = []

    def run(command, **options):
        asked.append(command)
        if code:
            raise subprocess.CalledProcessError(code, command)
        return SimpleNamespace(stdout=text)

    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_describe(device, monkeypatch):
    asked = answering(monkeypatch, "580.65.06, 1980, [N/A], 700.00\n")
    found = describe()
    assert found["gpu"] == "Fake 1" and found["compute_capability"] == "9.0"
    assert (found["driver"], found["largest_sm_clock"]) == ("580.65.06", "1980")
    assert found["largest_memory_clock"] is None and found["power_limit"] == "700.00"
    assert found["torch"] == torch.__version__ and found["flash-attn-4"] is None
    assert "--id=GPU-ab-c" in asked[0]


@pytest.mark.parametrize("missing", ["program", "driver"])
def test_without_nvidia_smi(device, monkeypatch, missing):
    answering(monkeypatch, "", code=9)
    if missing == "program":
        monkeypatch.setattr("shutil.which", lambda name: None)
    assert nvidia_smi("clocks.sm", "power.limit") == [None, None]
    assert describe()["driver"] is None


def test_one_line(device, monkeypatch):
    answering(monkeypatch, "580.65.06, 1980, 3201, 700.00\n")
    assert re.match(r"Fake 1, torch 2.*, triton 3.*, driver 580\.65\.06, ", one_line(describe()))


@pytest.mark.parametrize("file", ["forward.py", "hopper/forward.py"])
def test_the_hash_changes_with_a_kernel(monkeypatch, tmp_path, file):
    before = sources_hash()
    assert versions()["kernels"] == before == sources_hash()
    assert re.fullmatch("[0-9a-f]{12}", before)
    (tmp_path / "bench").mkdir()
    (tmp_path / "hopper").mkdir()
    (tmp_path / file).write_text("one = 1")
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "bench" / "machine.py"))
    one = sources_hash()
    (tmp_path / file).write_text('# A comment.\none = 1  # one\n\n"""A docstring\nof lines."""\n')
    assert sources_hash() == one
    (tmp_path / file).write_text("one = 2")
    assert len({before, one, sources_hash()}) == 3


class TestKernelsOfAProfile:
    @staticmethod
    def event(name, start, microseconds, device="CUDA", is_user_annotation=False):
        return SimpleNamespace(
            name=name,
            device_type=SimpleNamespace(name=device),
            is_user_annotation=is_user_annotation,
            time_range=SimpleNamespace(start=start, end=start + microseconds),
        )

    def test_those_on_the_device_in_order(self):
        events = [
            self.event("later", 9, 3),
            self.event("cudaLaunchKernel", 1, 5, device="CPU"),
            self.event("a range of the user's", 1, 50, is_user_annotation=True),
            self.event("first", 2, 4),
        ]
        found = device_kernels(events)
        assert [k.name for k in found] == ["first", "later"]
        assert [k.seconds for k in found] == pytest.approx([4e-6, 3e-6])

    def test_the_wait_for_an_earlier_kernel_does_not_count(self):
        events = [
            self.event("long", 0, 10),
            self.event("starts early", 4, 9),
            self.event("ends early", 5, 2),
            self.event("alone", 20, 1),
        ]
        found = {k.name: round(1e6 * k.seconds) for k in device_kernels(events)}
        assert found == {"long": 10, "starts early": 3, "ends early": 0, "alone": 1}

    def test_a_profile_of_a_cpu_has_none(self):
        """The profiler's events have every field that is read."""
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            torch.ones(3).sum()
        events = list(profiler.events())
        assert events and device_kernels(events) == []
        for event in events:
            event.device_type = SimpleNamespace(name="CUDA")
        assert all(isinstance(kernel, Kernel) for kernel in device_kernels(events))
