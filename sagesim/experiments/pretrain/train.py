"""The training loop: from the newest checkpoint, or the beginning, to the last step."""

from __future__ import annotations

import contextlib
import math
import platform
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import sagesim
from sagesim.experiments.pretrain import checkpoint
from sagesim.experiments.pretrain.attention import Attention
from sagesim.experiments.pretrain.batches import micro_batches
from sagesim.experiments.pretrain.checks import check, share_of
from sagesim.experiments.pretrain.corpus import Corpus
from sagesim.experiments.pretrain.distributed import World, adding_up, distribute
from sagesim.experiments.pretrain.evaluate import Evaluation
from sagesim.experiments.pretrain.guards import alone, deterministic
from sagesim.experiments.pretrain.model import SIZES, Llama, token_loss
from sagesim.experiments.pretrain.monitor import Measured, measure
from sagesim.experiments.pretrain.optimizer import adamw, clip, set_learning_rate
from sagesim.experiments.pretrain.runlog import Writer, check_log
from sagesim.experiments.pretrain.settings import DTYPES, Machine, Run
from sagesim.experiments.pretrain.trackers import tracker
from sagesim.experiments.pretrain.watch import locate

CHECKPOINTS: Final = "checkpoints"
"""Where in a run's folder they are."""

Progress = Callable[[int, float, float], None]
"""Called with the steps that are done, the loss of the last one and tokens per second."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    step: int  #: steps done
    stop: str  #: why there are no more; empty where it was the last


def train(
    run: Run,
    folder: Path,
    corpus: Corpus,
    machine: Machine,
    here: World,
    *,
    progress: Progress | None = None,
) -> Outcome:
    """Train, from the newest checkpoint in the folder if there is one.

    A step whose loss or gradient is not finite stops the run before it changes a weight, and the
    checkpoints that there are stay.

    Args:
        folder: of this run alone; it gets a log and checkpoints.

    Raises:
        ValueError: before anything is trained: for settings that do not fit each other, the
            corpus, the machine, or what the folder holds, naming them.
        BlockingIOError: where another process trains in the folder.
    """
    check(run, corpus, machine, here)
    check_log(folder, run, is_begun=bool(checkpoint.steps_in(folder / CHECKPOINTS)))
    with alone(folder, here), deterministic(machine.deterministic):
        return Trainer(run, folder, corpus, machine, here).train(progress)


class Trainer:
    """A run in one process of those that share it."""

    def __init__(
        self, run: Run, folder: Path, corpus: Corpus, machine: Machine, here: World
    ) -> None:
        self.run, self.folder, self.corpus = run, folder, corpus
        self.machine, self.here = machine, here
        self.share = share_of(run, machine, here)
        self.model = build(run).to(here.device)
        self._loss = token_loss
        if machine.compile:
            for layer in self.model.layers:
                layer.compile()
            self._loss = torch.compile(token_loss)
        self.distributed = distribute(self.model, list(self.model.layers), here, fsdp=machine.fsdp)
        self.optimizer = adamw(self.model, run)
        self.evaluation = Evaluation(run, corpus, here, machine.micro_batch)
        self.checkpoints = folder / CHECKPOINTS
        self.step = self._resume()

    def train(self, progress: Progress | None) -> Outcome:
        """To the end; see `train`."""
        run, first = self.run, self.here.is_first
        # Nothing of a run that has no checkpoint yet is kept: it begins again.
        kept = self.step if self.step else -1
        log = Writer(self.folder, run, self.about(), step=kept) if first else None
        track = tracker(self.machine.tracker if first else "none", self.folder, run)

        def record(group: str, values: Mapping[str, float], **place: Any) -> None:
            if log is not None:
                log.add(self.step, group, values, **place)
                if not place:
                    track(self.step, {f"{group}/{name}": x for name, x in values.items()})

        def save() -> None:
            if log is not None:
                log.save()

        save()
        if not self.step:
            record("evaluation", {"loss": self.evaluate()})
        while self.step < run.steps:
            start = time.perf_counter()
            lr = run.learning_rate(self.step)
            loss, norm = self.gradient()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                stop = self._explain(loss, norm)
                if log is not None:
                    log.stopped(stop)
                save()
                return Outcome(self.step, stop)
            self.update(lr)
            speed = run.tokens_per_step / (time.perf_counter() - start)
            self.step += 1
            numbers = {"loss": loss, "gradient_norm": norm, "lr": lr, "tokens_per_second": speed}
            record("train", numbers)
            if self._is_due(run.evaluate_every):
                record("evaluation", {"loss": self.evaluate()})
            if run.monitor and self._is_due(run.monitor_every):
                for found in self.monitor():
                    record(found.group, found.values, attention=found.attention, layer=found.layer)
            if self._is_due(self.machine.checkpoint_every):
                save()
                self._checkpoint()
            elif log is not None:
                log.tick()
            if progress is not None:
                progress(self.step, loss, speed)
        return Outcome(self.step, "")

    def gradient(self) -> tuple[float, float]:
        """Add up the gradient of the next step, clipped; returns its loss and its norm before."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.here.device)
        for index, tokens in enumerate(self._micro_batches()):
            self._set_draw(index)
            is_last = index == self.share.micro_batches - 1
            with adding_up(self.distributed, is_last=is_last):
                loss = self.loss(self.distributed, tokens) / self.share.micro_batches
                loss.backward()
            total += loss.detach()
        loss = self.here.mean(total)
        norm = clip(self.model.parameters(), self.run.clip)
        return float(loss), float(norm)

    def update(self, lr: float) -> None:
        """Change the weights by the gradient."""
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Mean loss of sequences, int64 [batch, context + 1] on any device."""
        tokens = tokens.to(self.here.device)
        with autocast(self.run, self.here):
            return self._loss(model(tokens[:, :-1]), tokens[:, 1:])

    def evaluate(self) -> float:
        """The mean loss of the held-out sequences."""
        with torch.no_grad():
            return self.evaluation.loss(lambda tokens: self.loss(self.model, tokens))

    def monitor(self) -> list[Measured]:
        """What `sagesim.experiments.pretrain.monitor.measure` finds."""

        def loss(index: int) -> Tensor:
            for core in self.model.cores():
                core.draw = self.step * self.run.sequences + index
            return self.loss(self.model, self.evaluation.sequence(index))

        # Nothing that is measured goes into the weights.
        with deterministic(False):
            return measure(
                self.model,
                loss,
                [Attention.parse(name) for name in self.run.monitor],
                self.here,
                sequences=self.run.monitor_sequences,
                sharded=self.machine.fsdp,
            )

    def about(self) -> dict[str, str]:
        """What the log says of the machine."""
        device = self.here.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        return {
            "device": name,
            "processes": str(self.here.processes),
            "sagesim": sagesim.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            **{key: str(value) for key, value in asdict(self.machine).items()},
        }

    def _micro_batches(self) -> Generator[Tensor]:
        yield from micro_batches(
            self.corpus,
            self.share,
            step=self.step,
            sequences=self.run.sequences,
            context=self.run.context,
            seed=self.run.seed,
        )

    def _set_draw(self, index: int) -> None:
        first = self.share.first + index * self.share.sequences
        for core in self.model.cores():
            core.draw = self.step * self.run.sequences + first

    def _is_due(self, every: int) -> bool:
        return self.step == self.run.steps or (every > 0 and self.step % every == 0)

    def _checkpoint(self) -> None:
        state = checkpoint.state_of(self.model, self.optimizer)
        if self.here.is_first:
            # After the last step nothing can go bad any more.
            keep = 1 if self.step == self.run.steps else checkpoint.KEEP
            checkpoint.save(self.checkpoints, self.step, state, keep=keep)
        self.here.wait()

    def _resume(self) -> int:
        if self.here.is_first:
            checkpoint.remove_unfinished(self.checkpoints)
        steps = self.here.first(checkpoint.steps_in(self.checkpoints))
        if not steps:
            return 0
        state = checkpoint.load(checkpoint.path_of(self.checkpoints, steps[-1]))
        checkpoint.set_state(self.model, self.optimizer, state)
        return steps[-1]

    def _explain(self, loss: float, norm: float) -> str:
        batches = list(self._micro_batches())

        def repeat(index: int) -> Tensor:
            self._set_draw(index)
            return self.loss(self.model, batches[index])

        self.optimizer.zero_grad(set_to_none=True)
        what = f"loss {loss}" if not math.isfinite(loss) else f"norm of the gradient {norm}"
        where = locate(self.model, repeat, range(len(batches)), self.here)
        # From the newest checkpoint this step may be the next; the ones before were survived.
        good = [step for step in checkpoint.steps_in(self.checkpoints) if step < self.step]
        kept = checkpoint.path_of(self.checkpoints, good[-1]) if good else "none"
        return f"step {self.step + 1}: {what}; first bad: {where}; last good checkpoint: {kept}"


def build(run: Run) -> Llama:
    """The model of a run, with its initial weights, on the CPU."""
    return Llama(
        SIZES[run.size],
        vocabulary=run.vocabulary,
        context=run.context,
        attention=Attention.parse(run.attention),
        tied=run.tied,
        qk_norm=run.qk_norm,
        seed=run.seed,
    )


def autocast(run: Run, here: World) -> contextlib.AbstractContextManager[Any]:
    """What the run's forwards are made under."""
    dtype = DTYPES[run.precision]
    return torch.autocast(here.device.type, dtype, enabled=dtype is not torch.float32)
