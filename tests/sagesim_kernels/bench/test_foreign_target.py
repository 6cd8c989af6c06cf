"""Code of other GPUs on Hopper: what is compiled and loaded, and when it is refused."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends import backends
from triton.runtime import driver

from sagesim_kernels.bench import foreign_target
from sagesim_kernels.bench.foreign_target import CODES, compile_for
from tests.support.compiler import OLDEST, ROOT

WORKER = ROOT / "tests" / "support" / "foreign_kernels.py"


@pytest.mark.slow
@pytest.mark.parametrize("triton", ["installed", "oldest"])
def test_ptx_of_the_other_gpu_is_assembled_for_hopper(triton, tmp_path):
    path = [OLDEST, ROOT] if triton == "oldest" else [ROOT]
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-P", str(WORKER)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    found = json.loads(done.stdout)

    native, foreign = found["native"], found["foreign"]
    assert [native[c]["mma.sync"] for c in ("80", "90")] == [True, False]
    assert [native[c]["assembled"] for c in ("80", "90")] == ["sm_80", "sm_90a"]
    for capability in map(str, CODES.values()):
        kernel = foreign[capability]
        assert kernel["ptx"] == f"sm_{capability}" and kernel["mma.sync"]
        assert kernel["assembled"] == "sm_90a"
    # No kernel of the cache is taken for another: not for one that the other GPU itself can run.
    keys = [kernel["key"] for kernel in (*native.values(), *foreign.values())]
    assert len(set(keys)) == len(keys) == 5
    assert found["hopper"] == native["90"]

    absent = found["absent"]
    assert absent["capability"] == 89 and absent["multiprocessors"] == 132
    small, large = absent["loaded"]
    assert small["needs"] < 99 * 1024 and small["limit"] is None
    assert 99 * 1024 < large["needs"] < 163 * 1024 and large["limit"] == 99 * 1024


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch):
    """A process that has compiled nothing, on a machine with two H200. Yields what was chosen."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("TRITON_OVERRIDE_ARCH", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Fake {device}")
    compiled(monkeypatch, 0)
    chosen: list[int] = []

    def backend_for(capability: int) -> Any:
        chosen.append(capability)
        return SimpleNamespace(driver=lambda: f"driver of {capability}")

    monkeypatch.setattr(foreign_target, "backend_for", backend_for)
    monkeypatch.setitem(backends, "nvidia", backends["nvidia"])
    monkeypatch.setattr(driver, "_active", None)
    yield chosen


def compiled(monkeypatch: pytest.MonkeyPatch, kernels: int) -> None:
    version = SimpleNamespace(cache_info=lambda: SimpleNamespace(currsize=kernels))
    monkeypatch.setattr(foreign_target.compiler, "get_ptxas_version", version)


@pytest.mark.parametrize(("code", "capability"), [("sm80", 80), ("sm86", 86), ("sm89", 89)])
def test_the_target_of_the_process_is_replaced(on_hopper, code, capability):
    compile_for(code)
    assert on_hopper == [capability]
    assert driver.active == f"driver of {capability}" == backends["nvidia"].driver()


@pytest.mark.parametrize("code", ["sm_80", "80", "sm90", "sm120", ""])
def test_an_unknown_code_is_refused(on_hopper, code):
    with pytest.raises(ValueError, match=f"unknown code '{code}'; known are sm80, sm86, sm89"):
        compile_for(code)
    assert on_hopper == []


def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def overridden(monkeypatch):
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm86")


def without_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def second_device_is_an_a100(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 - device, 0))


def blackwell(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))


def after_a_kernel(monkeypatch):
    compiled(monkeypatch, 1)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (interpreted, "TRITON_INTERPRET is set"),
        (overridden, "TRITON_OVERRIDE_ARCH would replace sm80"),
        (without_a_device, "no CUDA device"),
        (second_device_is_an_a100, "Fake 1 has compute capability 8.0; .* a Hopper GPU"),
        (blackwell, "Fake 0 has compute capability 10.0; .* a Hopper GPU"),
        (after_a_kernel, "a kernel was compiled in this process before sm80"),
    ],
)
def test_a_process_whose_kernels_would_not_run_so_is_refused(on_hopper, monkeypatch, where, words):
    where(monkeypatch)
    with pytest.raises(RuntimeError, match=words):
        compile_for("sm80")
    assert on_hopper == []


@pytest.mark.slow
def test_a_compiled_kernel_is_noticed(tmp_path):
    """Whether it is compiled or found in the cache."""
    script = """
from sagesim_kernels.bench.foreign_target import compiler
from tests.support.foreign_kernels import compiled
assert not compiler.get_ptxas_version.cache_info().currsize
compiled(80)
assert compiler.get_ptxas_version.cache_info().currsize
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    env |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-P", "-c", script], env=env, check=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_pytest_refuses_a_code_that_nothing_runs():
    command = [sys.executable, "-m", "pytest", "--code", "sm70", "--collect-only", __file__]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    words = "--code: unknown code 'sm70'; without a GPU, sm80, sm86, sm89, sm90 are known"
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and words in done.stderr
