"""The scripts for SLURM, run for real on CPUs; only SLURM's own commands are stand-ins."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sagesim.experiments.pretrain.run.log import Log
from sagesim.experiments.pretrain.text.preparation import prepare

FOLDER = Path(__file__).parents[1] / "scripts" / "slurm"
PAGES = Path(__file__).parent / "sagesim" / "experiments" / "pretrain" / "pages"

SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames $SLURM_JOB_NODELIST" ] && printf '127.0.0.1\\nanother\\n'
"""

SRUN = """#!/bin/sh
# Every machine runs the command; here they are processes of this one.
pids=
for _ in $(seq "$SLURM_NNODES"); do "$@" & pids="$pids $!"; done
for pid in $pids; do wait "$pid" || exit 1; done
"""


@pytest.fixture
def sbatch(tmp_path):
    """Runs a script as a job on `nodes` machines of one process each."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(script, nodes, *words):
        slurm = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "here[1-2]",
            "SLURM_NNODES": str(nodes),
            "SLURM_GPUS_ON_NODE": "1",
            "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        job = subprocess.Popen(
            ["bash", FOLDER / script, *map(str, words)],
            env=os.environ | slurm,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = job.communicate(timeout=200)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
        return job.returncode, out, err

    return run


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_two_machines_train_one_run_by_torchrun(sbatch, tmp_path):
    corpus, folder = tmp_path / "corpus", tmp_path / "run"
    prepare(PAGES, corpus, vocabulary=500, validation=0.1)
    words = "--size tiny --context 32 --tokens-per-step 256 --steps 4 --warmup 1 --precision fp32"
    words = [*words.split(), "--micro-batch", 4, "--evaluate-sequences", 5]
    code, out, err = sbatch("pretrain.sbatch", 2, corpus, folder, *words)
    assert code == 0, err
    assert out == f"{folder}: 4 steps done\n", "one process prints"
    log = Log.read(folder)
    assert log.is_finished and log.about["processes"] == "2"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("script", sorted(path.name for path in FOLDER.iterdir()))
def test_bash_can_read_the_scripts(script):
    subprocess.run(["bash", "-n", FOLDER / script], check=True, timeout=60)
