"""The training loop, from the newest checkpoint or the first step to the last step."""

from __future__ import annotations

import contextlib
import math
import platform
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sagesim
from sagesim.experiments.pretrain.diagnostics.bias import measure_bias
from sagesim.experiments.pretrain.diagnostics.monitor import Measured, measure
from sagesim.experiments.pretrain.diagnostics.nonfinite import locate_nonfinite
from sagesim.experiments.pretrain.model.attention import Attention
from sagesim.experiments.pretrain.model.llama import SIZES, Llama, token_loss
from sagesim.experiments.pretrain.run.checks import check_run, share_of
from sagesim.experiments.pretrain.run.distributed import (
    World,
    distribute,
    gradient_sync,
    local_part,
)
from sagesim.experiments.pretrain.run.guards import deterministic, locked_folder
from sagesim.experiments.pretrain.run.log import LogWriter, check_log
from sagesim.experiments.pretrain.run.settings import DTYPES, Machine, Run
from sagesim.experiments.pretrain.run.trackers import open_tracker
from sagesim.experiments.pretrain.text.batches import micro_batches
from sagesim.experiments.pretrain.text.corpus import Corpus
from sagesim.experiments.pretrain.training import checkpoint
from sagesim.experiments.pretrain.training.evaluation import Evaluation
from sagesim.experiments.pretrain.training.optimizer import adamw, clip, set_learning_rate

Progress = Callable[[int, float, float], None]
"""Called after each step with the number of steps done, the step's loss, and tokens per second."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    step: int  #: number of steps done
    stop: str  #: why the run stopped at a number that is not finite; empty if it did not
    is_interrupted: bool = False  #: whether `interrupted` ended the run before its last step


def _never() -> bool:
    return False


def train(
    run: Run,
    folder: Path,
    corpus: Corpus,
    machine: Machine,
    world: World,
    *,
    progress: Progress | None = None,
    interrupted: Callable[[], bool] = _never,
) -> Outcome:
    """Train a run, from the newest checkpoint in its folder if there is one.

    A step with a loss or gradient that is not finite stops the run. That step does not change the
    weights, and the existing checkpoints stay. A held-out loss that is not finite stops it too.

    Args:
        folder: the folder of this run only, for its log and checkpoints.
        interrupted: called after each step. If it is true in one of the processes, all of them save
            log and checkpoint and end.

    Raises:
        ValueError: if the settings do not fit each other, the corpus, the machine or the files in
            the folder. It is raised before training starts.
        BlockingIOError: if another process trains in the folder.
        WriteError: if the folder, the log or a checkpoint cannot be written. Earlier files stay.
    """
    check_run(run, corpus, machine, world)
    with locked_folder(folder, world), deterministic(machine.deterministic):
        saved = checkpoint.steps_in(folder / checkpoint.CHECKPOINTS)
        check_log(folder, run, is_begun=bool(saved))
        return Trainer(run, folder, corpus, machine, world).train(progress, interrupted)


class Trainer:
    """The state of a run in one of its processes."""

    def __init__(
        self, run: Run, folder: Path, corpus: Corpus, machine: Machine, world: World
    ) -> None:
        self.run, self.folder, self.corpus = run, folder, corpus
        self.machine, self.world = machine, world
        self.share = share_of(run, machine, world)
        self.model = build(run).to(world.device)
        self._loss = token_loss
        if machine.compile:
            for layer in self.model.layers:
                layer.compile()
            self._loss = torch.compile(token_loss)
        self.distributed = distribute(self.model, list(self.model.layers), world, fsdp=machine.fsdp)
        self.optimizer = adamw(self.model, run)
        self.evaluation = Evaluation(run, corpus, world, machine.micro_batch)
        self.checkpoints = folder / checkpoint.CHECKPOINTS
        self.step = self._resume()

    def train(self, progress: Progress | None, interrupted: Callable[[], bool]) -> Outcome:
        """Train to the last step; see the function `train`."""
        run, first = self.run, self.world.is_first
        # Without a checkpoint the run starts again, and -1 drops all rows of the log.
        kept = self.step if self.step else -1
        log = LogWriter(self.folder, run, self.about(), step=kept) if first else None
        track = open_tracker(self.machine.tracker if first else "none", self.folder, run)

        def record_measured(found: Measured) -> None:
            if log is not None:
                log.add(
                    self.step,
                    found.group,
                    found.values,
                    attention=found.attention,
                    layer=found.layer,
                )
                track(self.step, {found.key(name): x for name, x in found.values.items()})

        def record(group: str, values: Mapping[str, float]) -> None:
            record_measured(Measured(group, values))

        def save() -> None:
            if log is not None:
                log.save()

        def evaluated() -> str:
            loss = self.evaluate()
            record("evaluation", {"loss": loss})
            return "" if math.isfinite(loss) else self._explain_held_out(loss)

        def stopped(stop: str) -> Outcome:
            if log is not None:
                log.set_stop(stop)
            save()
            return Outcome(self.step, stop)

        save()
        if not self.step and (stop := evaluated()):
            return stopped(stop)
        while self.step < run.steps:
            start = time.perf_counter()
            lr = run.learning_rate(self.step)
            loss, norm = self.gradient()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                return stopped(self._explain(loss, norm))
            self.update(lr)
            speed = run.tokens_per_step / (time.perf_counter() - start)
            self.step += 1
            numbers = {"loss": loss, "gradient_norm": norm, "lr": lr, "tokens_per_second": speed}
            record("train", numbers)
            if self._is_due(run.evaluate_every) and (stop := evaluated()):
                return stopped(stop)
            if run.monitor and self._is_due(run.monitor_every):
                for found in self.monitor():
                    record_measured(found)
            if run.bias_sequences and self.step in (1, run.steps):
                for found in self.bias():
                    record_measured(found)
            is_interrupted = self.world.any(interrupted())
            if is_interrupted or self._is_due(self.machine.checkpoint_every):
                save()
                self._checkpoint()
            elif log is not None:
                log.save_if_due()
            if progress is not None:
                progress(self.step, loss, speed)
            if is_interrupted and self.step < run.steps:
                return Outcome(self.step, "", is_interrupted=True)
        return Outcome(self.step, "")

    def gradient(self) -> tuple[float, float]:
        """Accumulate the gradient of the next step over its micro-batches, and clip it.

        Returns:
            The step's mean loss, and the norm of the gradient before clipping.
        """
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.world.device)
        for index, tokens in enumerate(self._micro_batches()):
            self._set_draw(index)
            is_last = index == self.share.micro_batches - 1
            with gradient_sync(self.distributed, is_last=is_last):
                loss = self.loss(self.distributed, tokens) / self.share.micro_batches
                loss.backward()
            total += loss.detach()
        loss = self.world.mean(total)
        norm = clip(self.model.parameters(), self.run.clip)
        return float(loss), float(norm)

    def update(self, lr: float) -> None:
        """Update the weights with the accumulated gradient."""
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """The mean loss of sequences, int64 [batch, context + 1], which may be on any device."""
        tokens = tokens.to(self.world.device)
        with autocast(self.run, self.world):
            return self._loss(model(tokens[:, :-1]), tokens[:, 1:])

    def evaluate(self) -> float:
        """The mean loss of the held-out sequences."""
        with torch.no_grad():
            return self.evaluation.loss(lambda tokens: self.loss(self.model, tokens))

    def monitor(self) -> list[Measured]:
        """Measure the errors of the run's `monitor` attentions; see `diagnostics.monitor`."""

        # Measurements do not change the weights, so they need no deterministic algorithms.
        with deterministic(False):
            return measure(
                self.model,
                self._losses_of_sequences(self.run.monitor_sequences),
                [Attention.parse(name) for name in self.run.monitor],
                self.world,
                sequences=self.run.monitor_sequences,
                sharded=self.machine.fsdp,
            )

    def bias(self) -> list[Measured]:
        """Measure the bias of the run's `monitor` attentions; see `diagnostics.bias`."""

        def second_moment(parameter: nn.Parameter) -> Tensor:
            state = self.optimizer.state[parameter]
            seen = 1.0 - self.run.beta2 ** float(state["step"])
            return local_part(state["exp_avg_sq"]) / seen

        with deterministic(False):
            return measure_bias(
                self.model,
                self._losses_of_sequences(self.run.bias_sequences),
                [Attention.parse(name) for name in self.run.monitor],
                second_moment,
                self.world,
                sequences=self.run.bias_sequences,
                sharded=self.machine.fsdp,
            )

    def _losses_of_sequences(self, count: int) -> Callable[[int], Tensor]:
        """A function from an index below `count` to the mean loss of a held-out sequence."""

        def loss(index: int) -> Tensor:
            for core in self.model.cores():
                core.draw = self.step * self.run.sequences + index
            return self.loss(self.model, self.evaluation.sequence(index, count))

        return loss

    def about(self) -> dict[str, str]:
        """The device, versions and `Machine` settings, for the log."""
        device = self.world.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        return {
            "device": name,
            "processes": str(self.world.processes),
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
        if self.world.is_first:
            # The older checkpoint is kept in case the next step is not finite. The last step has no
            # next step.
            keep = 1 if self.step == self.run.steps else checkpoint.KEEP
            checkpoint.save(self.checkpoints, self.step, state, keep=keep)
        self.world.wait()

    def _resume(self) -> int:
        if self.world.is_first:
            checkpoint.remove_unfinished(self.checkpoints)
        steps = self.world.from_first(checkpoint.steps_in(self.checkpoints))
        if not steps:
            return 0
        state = checkpoint.load(checkpoint.path_of(self.checkpoints, steps[-1]))
        checkpoint.set_state(self.model, self.optimizer, state)
        return steps[-1]

    def _explain(self, loss: float, norm: float) -> str:
        """Why the step after the current one stops the run."""
        batches = list(self._micro_batches())

        def repeat(index: int) -> Tensor:
            self._set_draw(index)
            return self.loss(self.model, batches[index])

        what = f"loss {loss}" if not math.isfinite(loss) else f"norm of the gradient {norm}"
        return f"step {self.step + 1}: {what}; {self._first_bad(repeat, len(batches))}"

    def _explain_held_out(self, loss: float) -> str:
        """Why the held-out loss after the current step stops the run."""
        sequences = self.evaluation.sequences()

        def repeat(index: int) -> Tensor:
            return self.loss(self.model, sequences[index : index + 1])

        where = self._first_bad(repeat, len(sequences))
        return f"step {self.step}: held-out loss {loss}; {where}"

    def _first_bad(self, repeat: Callable[[int], Tensor], count: int) -> str:
        self.optimizer.zero_grad(set_to_none=True)
        where = locate_nonfinite(self.model, repeat, range(count), self.world)
        # A checkpoint at self.step is not good: its weights give the number that is not finite.
        good = [step for step in checkpoint.steps_in(self.checkpoints) if step < self.step]
        kept = checkpoint.path_of(self.checkpoints, good[-1]) if good else "none"
        return f"first bad: {where}; last good checkpoint: {kept}"


def build(run: Run) -> Llama:
    """The model of a run with its initial weights, on the CPU."""
    return Llama(
        SIZES[run.size],
        vocabulary=run.vocabulary,
        context=run.context,
        attention=Attention.parse(run.attention),
        tied=run.tied,
        qk_norm=run.qk_norm,
        qk_gain=run.qk_gain,
        seed=run.seed,
    )


def autocast(run: Run, world: World) -> contextlib.AbstractContextManager[Any]:
    """The autocast context of the run's forwards, for its precision."""
    dtype = DTYPES[run.precision]
    return torch.autocast(world.device.type, dtype, enabled=dtype is not torch.float32)
