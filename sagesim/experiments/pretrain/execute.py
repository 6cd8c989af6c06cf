"""Make the runs of a plan, one after the other or on several GPUs side by side."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from sagesim.experiments.pretrain.checks import check
from sagesim.experiments.pretrain.corpus import Corpus
from sagesim.experiments.pretrain.distributed import World
from sagesim.experiments.pretrain.guards import alone
from sagesim.experiments.pretrain.plan import Planned
from sagesim.experiments.pretrain.runlog import Log
from sagesim.experiments.pretrain.settings import Machine
from sagesim.experiments.pretrain.train import Outcome, train
from sagesim.experiments.pretrain.trained import captured

CAPTURE = "capture.safetensors"


def execute(
    planned: Sequence[Planned],
    root: Path,
    corpus: Corpus,
    machine: Machine,
    here: World,
    *,
    started: Callable[[Planned], None],
    progress: Callable[[int, float, float], None],
    ended: Callable[[Planned, Outcome], None],
) -> None:
    """Make the runs that are not done, in their order. A run that is stopped stops no other.

    Several processes may make the same list: each takes what no other holds.

    Raises:
        ValueError: before the first, where one of them cannot be trained here.
    """
    for each in planned:
        check(each.run, corpus, machine, here)
    if any(each.capture_heads for each in planned) and find_spec("safetensors") is None:
        raise ValueError("the plan records captures: the package safetensors is not installed")
    for each in planned:
        folder = root / each.folder
        if not each.is_done(root):
            started(each)
            # Compiled graphs of the run before have its attention built in.
            torch.compiler.reset()
            try:
                outcome = train(each.run, folder, corpus, machine, here, progress=progress)
            except BlockingIOError:
                continue
            ended(each, outcome)
        if each.capture_heads:
            with contextlib.suppress(BlockingIOError), alone(folder, here):
                _record(folder, each.capture_heads, corpus, here)


def _record(folder: Path, heads: Sequence[int], corpus: Corpus, here: World) -> None:
    """The trained model's attention problems, unless it was stopped."""
    if not (folder / CAPTURE).exists() and not Log.read(folder).stop:
        captured(folder, corpus, here, heads=heads).save(folder / CAPTURE)


def side_by_side(command: Sequence[str], gpus: int) -> int:
    """Run a command once for each of so many GPUs, each seeing one; the largest exit code.

    Raises:
        ValueError: for more GPUs than there are.
    """
    if gpus > torch.cuda.device_count():
        raise ValueError(f"{gpus} GPUs asked for; there are {torch.cuda.device_count()}")
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "sagesim.cli", *command],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": str(index)},
        )
        for index in range(gpus)
    ]
    try:
        return max(worker.wait() for worker in workers)
    finally:
        for worker in workers:
            worker.terminate()
