"""Train the runs of a plan: each is a job, which is run here or on a cluster."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Generator, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

from sagesim.experiments.jobs import Job, Report, Watch, Workers
from sagesim.experiments.pretrain.plan.plan import PlannedRun
from sagesim.experiments.pretrain.run.checks import check_run
from sagesim.experiments.pretrain.run.distributed import World, join_processes
from sagesim.experiments.pretrain.run.guards import locked_folder
from sagesim.experiments.pretrain.run.log import Log
from sagesim.experiments.pretrain.run.settings import Machine
from sagesim.experiments.pretrain.text.corpus import Corpus
from sagesim.experiments.pretrain.training.trained_model import capture_trained
from sagesim.experiments.pretrain.training.trainer import train
from sagesim.files import WriteError, locked

CAPTURE = "capture.safetensors"
"""The file in a run's folder with the capture of the trained model."""

DONE, INTERRUPTED, STOPPED = "done", "interrupted", "stopped at "
"""How a run ended. After `STOPPED` follows where and why."""

_EVERY: Final = 1.0
"""Seconds between two attempts to lock a run's folder."""


def has_work(planned: PlannedRun, root: Path) -> bool:
    """Whether there is anything to train or to capture."""
    return not planned.is_done(root) or _wants_capture(planned, root / planned.folder)


def execute(
    planned: Sequence[PlannedRun],
    root: Path,
    corpus: Corpus,
    machine: Machine,
    workers: Workers,
    watch: Watch,
) -> Iterator[tuple[PlannedRun, str | Exception]]:
    """Train runs, each in its folder of `root`, from its last checkpoint.

    Of a run that is done, only what is missing is made.

    Args:
        root, corpus: folders that all machines of a cluster share.

    Yields:
        Each run that has ended with `DONE`, `INTERRUPTED`, `STOPPED` and the reason, or the
        exception that it raised. Neither stops the other runs.

    Raises:
        ValueError: if a run cannot be trained, or a capture is wanted and safetensors is not
            installed. It is raised before the first run.
        BlockingIOError: if another process executes a plan in `root`.
        WriteError: if `root` cannot be created.
    """
    device = torch.device("cuda" if workers.has_gpu else "cpu")
    for each in planned:
        check_run(each.run, corpus, machine, World(0, 1, device))
    if any(each.capture_heads for each in planned) and find_spec("safetensors") is None:
        raise ValueError("the plan records captures: the package safetensors is not installed")
    # Jobs may run in another working directory.
    root, text = root.resolve(), corpus.folder.resolve()
    with _locked(root):
        jobs = [Job(each.folder, _train, (each, root, text, machine)) for each in planned]
        runs = {each.folder: each for each in planned}
        for job, end in workers.run(jobs, watch):
            yield runs[job.name], end


@contextlib.contextmanager
def _locked(root: Path) -> Generator[None]:
    with contextlib.ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(root, wait=False))
        except BlockingIOError:
            raise BlockingIOError(f"{root}: another command trains a plan there") from None
        except OSError as error:
            raise WriteError.of(root, error) from None
        yield


def _wants_capture(planned: PlannedRun, folder: Path) -> bool:
    """Whether the trained model is to be captured: unless it is already, or the run stopped."""
    is_made = (folder / CAPTURE).exists()
    return bool(planned.capture_heads) and not is_made and not Log.read(folder).stop


def _train(report: Report, planned: PlannedRun, root: Path, text: Path, machine: Machine) -> str:
    """The job of one run. Returns how it ended."""
    _check_shared(root)
    folder, corpus, steps = root / planned.folder, Corpus(text), planned.run.steps
    step, words = 0, ""

    def progress(done: int, loss: float, speed: float) -> None:
        nonlocal step, words
        step, words = done, f"loss {loss:.4f}  {speed:,.0f} tokens/s"

    # Graphs that were compiled for the previous run of this process contain its attention.
    torch.compiler.reset()
    with join_processes() as world:
        while True:
            try:
                if not planned.is_done(root):
                    outcome = train(
                        planned.run,
                        folder,
                        corpus,
                        machine,
                        world,
                        progress=progress,
                        interrupted=lambda: report(step, steps, words),
                    )
                    if outcome.is_interrupted:
                        return INTERRUPTED
                if _wants_capture(planned, folder):
                    with locked_folder(folder, world):
                        made = capture_trained(folder, corpus, world, heads=planned.capture_heads)
                        made.save(folder / CAPTURE)
                stop = Log.read(folder).stop
                return f"{STOPPED}{stop}" if stop else DONE
            except BlockingIOError:
                # A worker that is about to die, or `sagesim pretrain run`.
                if report(step, steps, "waits for another process in its folder"):
                    return INTERRUPTED
                time.sleep(_EVERY)


def _check_shared(root: Path) -> None:
    """Check that this machine sees the lock of `execute`."""
    try:
        with locked(root, wait=False):
            pass
    except BlockingIOError:
        return
    except OSError:
        pass
    raise ValueError(
        f"{root}: {socket.gethostname()} does not share this folder and its locks with the machine "
        "of the command"
    )
