"""What the emulator costs, measured on a small problem."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sagesim.command import exit_code
from sagesim.files import WriteError
from sagesim_kernels.bench import emulator
from sagesim_kernels.bench.emulator import eager, emulated, gaussian_inputs, machine, main
from tests.support.assertions import assert_sqnr_at_least

ROOT = Path(__file__).parents[3]
SMALL = ["--tokens", "128", "--head-dim", "16", "--rounds", "1", "--specs", "sagebwd"]


def test_the_record_names_its_command_and_every_scheme(tmp_path, capsys):
    out = tmp_path / "cost.json"
    main([*SMALL, "sagebwd dp=int8", "--out", str(out)])
    record = json.loads(out.read_text())
    assert record["command"] == (
        "python -m sagesim_kernels.bench.emulator "
        "--device cpu --heads 1 --tokens 128 --head-dim 16 --rounds 1 "
        "--specs sagebwd 'sagebwd dp=int8'"
    )
    assert record["shape"] == [1, 1, 128, 16]
    assert list(record["runs"]) == ["eager", "sagebwd", "sagebwd dp=int8"]
    for run in record["runs"].values():
        assert run["seconds"] > 0 and run["bytes"] >= 0
    assert record["runs"]["eager"]["ratio"] == 1
    printed = capsys.readouterr().out
    assert printed.count("\n") == 3 and "x eager" in printed


def test_a_record_that_cannot_be_written_raises_before_anything_is_timed(tmp_path, monkeypatch):
    def timed(*_):
        raise AssertionError("something was timed")

    monkeypatch.setattr(emulator, "seconds", timed)
    with pytest.raises(WriteError, match="cannot be written: Is a directory"):
        main([*SMALL, "--out", str(tmp_path)])


def test_the_memory_of_a_scheme_is_measured_in_its_own_process():
    """Eager attention keeps whole maps: 64 MB each at 4096 tokens."""
    command = [sys.executable, "-m", "sagesim_kernels.bench.emulator"]
    asked = ["--tokens", "4096", "--head-dim", "16", "--memory-of", "eager"]
    done = subprocess.run(
        [*command, *asked], capture_output=True, text=True, timeout=120, cwd=ROOT, check=True
    )
    assert 2 * 64e6 < int(done.stdout) < 20 * 64e6


def test_both_schemes_compute_attention():
    q, k, v, _ = gaussian_inputs(heads=2, tokens=64, head_dim=16, device=torch.device("cpu"))
    true = torch.softmax(q.double() @ k.double().mT / 4, -1) @ v.double()
    assert_sqnr_at_least(actual=eager(q, k, v), exact=true, floor_db=100, what="o")
    assert_sqnr_at_least(actual=emulated("sagebwd")(q, k, v), exact=true, floor_db=25, what="o")


def test_a_label_that_is_not_a_spec():
    with pytest.raises(ValueError, match="sagebw"):
        emulated("sagebw")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--specs", "sagebw"], "--specs: "),
        (["--rounds", "0"], "--rounds 0: not a positive number"),
        (["--heads", "-1"], "--heads -1: not a positive number"),
        (["--heads", "0"], "--heads 0: not a positive number"),
        (["--head-dim", "0"], "--head-dim 0: not a positive number"),
        (["--device", "gpu"], "--device gpu: not a device"),
        (["--device", "meta"], "--device meta: neither cpu nor cuda"),
        (["--device", "cuda"], "--device cuda: this machine has 0 CUDA devices"),
        (["--device", "cuda:0"], "--device cuda:0: this machine has 0 CUDA devices"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert exit_code("emulator", lambda: main([*SMALL, *arguments]), {}) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and words in line and arguments[-1] in line


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_the_machine_of_a_gpu_is_its_name(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    assert machine(emulator._device(name)) == f"GPU of {name}, torch {torch.__version__}"
