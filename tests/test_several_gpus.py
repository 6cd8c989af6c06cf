"""scripts/several_gpus.py, with two processes on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "several_gpus.py"


@pytest.mark.slow
@pytest.mark.xdist_group("two_processes")
def test_two_processes_compute_what_one_does(tmp_path):
    out = tmp_path / "found.json"
    sizes = {"tokens": 32, "rows": 1, "layers": 1, "words": 50, "steps": 1}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(SCRIPT), "--out", str(out), "--spec", "sagebwd"]
    command += [x for name, size in sizes.items() for x in (f"--{name}", str(size))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(out.read_text())
    assert found["setting"] == {"spec": "sagebwd", **sizes}
    cases = found["cases"]
    # context_parallel runs on GPUs only; test_two_processes.py runs it with another operator.
    assert cases.keys() == {"ddp", "fsdp2", "ring", "ulysses"}
    for name in ("ddp", "fsdp2", "ulysses"):  # halving is exact: the same bits
        assert cases[name]["difference"] == 0.0, name
    # K is smoothed with the mean of each part: other codes of the same accuracy.
    assert cases["ring"]["difference"] > 0
    for name, error in cases["ring"]["error"].items():
        assert error <= 1.5 * cases["ring"]["one_error"][name], name


def test_without_torchrun_it_says_how_to_start_it(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "LOCAL_RANK"}
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path / "x.json")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "start it with torchrun" in ran.stderr
