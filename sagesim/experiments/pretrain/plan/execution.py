"""Train the runs of a plan: one after the other, or on several GPUs at the same time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from sagesim.experiments.pretrain.plan.plan import PlannedRun
from sagesim.experiments.pretrain.run.checks import check_run
from sagesim.experiments.pretrain.run.distributed import World
from sagesim.experiments.pretrain.run.guards import locked_folder
from sagesim.experiments.pretrain.run.interruption import first_signal
from sagesim.experiments.pretrain.run.log import Log
from sagesim.experiments.pretrain.run.settings import Machine
from sagesim.experiments.pretrain.text.corpus import Corpus
from sagesim.experiments.pretrain.training.trained_model import capture_trained
from sagesim.experiments.pretrain.training.trainer import Outcome, Progress, train

CAPTURE = "capture.safetensors"
"""The file in a run's folder with the capture of the trained model."""


@dataclass(frozen=True, slots=True)
class Reporter:
    """Functions that report how the runs of a plan proceed, and that end them."""

    started: Callable[[PlannedRun], None]  #: called before each run
    progress: Progress  #: called after each step
    ended: Callable[[PlannedRun, Outcome], None]  #: called after each run
    interrupted: Callable[[], bool] = lambda: False  #: called after each step: whether to end


def execute(
    planned: Sequence[PlannedRun],
    root: Path,
    corpus: Corpus,
    machine: Machine,
    world: World,
    reporter: Reporter,
) -> bool:
    """Train the runs that are not done, in order, each in its folder of `root`.

    A run that stops at a non-finite loss does not stop the others. Several processes may execute
    the same list: each skips runs that another process is training.

    Returns:
        Whether it came to the end of the list; False if `reporter.interrupted` ended it.

    Raises:
        ValueError: if a run cannot be trained here, or a capture is wanted and safetensors is not
            installed. It is raised before the first run.
        WriteError: if a file of a run cannot be written.
    """
    for each in planned:
        check_run(each.run, corpus, machine, world)
    if any(each.capture_heads for each in planned) and find_spec("safetensors") is None:
        raise ValueError("the plan records captures: the package safetensors is not installed")
    for each in planned:
        if reporter.interrupted():
            return False
        folder = root / each.folder
        if not each.is_done(root):
            reporter.started(each)
            # Graphs that were compiled for the previous run contain its attention.
            torch.compiler.reset()
            try:
                outcome = train(
                    each.run,
                    folder,
                    corpus,
                    machine,
                    world,
                    progress=reporter.progress,
                    interrupted=reporter.interrupted,
                )
            except BlockingIOError:
                continue
            reporter.ended(each, outcome)
            if outcome.is_interrupted:
                return False
        if each.capture_heads:
            with contextlib.suppress(BlockingIOError), locked_folder(folder, world):
                _record(folder, each.capture_heads, corpus, world)
    return True


def _record(folder: Path, heads: Sequence[int], corpus: Corpus, world: World) -> None:
    """Capture the trained model, unless a capture exists or the run stopped."""
    if not (folder / CAPTURE).exists() and not Log.read(folder).stop:
        capture_trained(folder, corpus, world, heads=heads).save(folder / CAPTURE)


def run_on_gpus(command: Sequence[str], gpus: int) -> int:
    """Run a `sagesim` command in `gpus` processes, each with one visible GPU.

    The first Ctrl-C, or signal that asks this process to end, is passed on to the processes, which
    finish their step.

    Args:
        command: the words after `sagesim`.

    Returns:
        The largest exit code. That of a process that a signal ended is 128 plus the signal.

    Raises:
        ValueError: if this machine has fewer GPUs.
    """
    if gpus > torch.cuda.device_count():
        raise ValueError(f"{gpus} GPUs asked for; this machine has {torch.cuda.device_count()}")
    workers: list[subprocess.Popen[bytes]] = []

    def pass_on() -> None:
        for worker in workers:
            worker.send_signal(signal.SIGINT)

    try:
        with first_signal(pass_on):
            for index in range(gpus):
                worker = subprocess.Popen(
                    [sys.executable, "-m", "sagesim.cli", *command],
                    env=os.environ | {"CUDA_VISIBLE_DEVICES": str(index)},
                    # A terminal sends Ctrl-C to a whole session. It would arrive twice.
                    start_new_session=True,
                )
                workers.append(worker)
            codes = [worker.wait() for worker in workers]
    finally:
        for worker in workers:
            worker.terminate()
    return max(code if code >= 0 else 128 - code for code in codes)
