"""The training loop: gradient accumulation, resuming, killed processes, and non-finite numbers."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sagesim.experiments.pretrain.run.log import Log
from sagesim.experiments.pretrain.run.settings import Machine
from sagesim.experiments.pretrain.training import checkpoint
from sagesim.experiments.pretrain.training.trainer import Trainer, train
from sagesim.files import WriteError
from tests.sagesim.experiments.pretrain.conftest import ALONE
from tests.support.assertions import assert_bitwise, assert_within_bound
from tests.support.full_disk import full_disk

MACHINE = Machine(micro_batch=4, checkpoint_every=2)


class Killed(Exception):
    pass


def killed_after(steps):
    def progress(step, _loss, _speed):
        if step == steps:
            raise Killed

    return progress


def numbers(folder):
    """All rows of the log except times."""
    return [row for row in Log.read(folder).rows if row.name != "tokens_per_second"]


def assert_same_numbers(one: Path, other: Path) -> None:
    """By their texts, in which NaN equals NaN: two sequences give no standard error."""
    assert list(map(repr, numbers(one))) == list(map(repr, numbers(other)))


def assert_same_state(one, other):
    """The newest checkpoints of two runs have the same weights and the same optimizer state."""
    states = []
    for folder in (one, other):
        steps = checkpoint.steps_in(folder / "checkpoints")
        states.append(checkpoint.load(checkpoint.path_of(folder / "checkpoints", steps[-1])))
    a, b = states
    assert a["step"] == b["step"]
    for name, weight in a["model"].items():
        assert_bitwise(actual=weight, expected=b["model"][name], what=name)
    for name, moments in a["optimizer"]["state"].items():
        for key, moment in moments.items():
            expected = b["optimizer"]["state"][name][key]
            assert_bitwise(actual=moment, expected=expected, what=f"{name} {key}")
    groups = [
        # Loading a checkpoint turns a tuple into a list.
        [{**group, "betas": tuple(group["betas"])} for group in state["optimizer"]["param_groups"]]
        for state in states
    ]
    assert groups[0] == groups[1]


def test_accumulation_adds_up_to_one_large_batch(corpus, make_run, tmp_path):
    """Micro-batches of 8 and of 1 give the same gradient, in float64, up to the order of sums.

    A weight's gradient is a sum over 256 tokens; each term comes from sums of up to 512 terms. The
    error of a sum of n terms is at most n eps times the size of its terms.
    """
    gradients = []
    for micro_batch in (8, 1):
        machine = Machine(micro_batch=micro_batch)
        trainer = Trainer(make_run(clip=1e9), tmp_path, corpus, machine, ALONE)
        trainer.model.double()
        trainer.gradient()
        gradients.append({n: p.grad for n, p in trainer.model.named_parameters()})
    whole, parts = gradients
    for name, gradient in whole.items():
        scale = gradient.abs().max()
        assert_within_bound(
            actual=parts[name],
            exact=gradient,
            # The loss rounds the logits to float32, so eps is 2^-24.
            bound=(256 + 512) * 2.0**-24 * scale,
            what=name,
        )
        assert scale > 0


def test_a_run_learns_and_logs_its_numbers(corpus, make_run, tmp_path):
    run = make_run(lr=5e-3, steps=12, monitor=("emulator:sagebwd",), monitor_sequences=2)
    seen = []
    outcome = train(run, tmp_path / "a", corpus, MACHINE, ALONE, progress=lambda *x: seen.append(x))
    assert (outcome.step, outcome.stop) == (12, "")
    log = Log.read(tmp_path / "a")
    assert log.is_finished and log.run == run and log.about["device"] == "CPU"
    losses = log.curve("train", "loss")
    assert [step for step, _ in losses] == list(range(1, 13))
    assert [(step, loss) for step, loss, _ in seen] == losses
    held_out = log.curve("evaluation", "loss")
    assert [step for step, _ in held_out] == [0, 2, 4, 6, 8, 10, 12]
    assert held_out[-1][1] < held_out[0][1] - 0.3
    measured = {(r.group, r.attention, r.layer) for r in log.rows if r.step == 12}
    assert {("layer", "emulator:sagebwd", 1), ("gradient", "emulator:sagebwd", -1)} <= measured
    assert checkpoint.steps_in(tmp_path / "a" / "checkpoints") == [12]


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "emulator:factored round=stochastic@3"])
@pytest.mark.parametrize("after", [1, 3])
def test_resuming_gives_the_same_bits(attention, after, corpus, make_run, tmp_path):
    """A resumed run has the same weights, optimizer state, data and random numbers."""
    run = make_run(attention=attention, monitor=("emulator:sagebwd",), monitor_sequences=2)
    train(run, tmp_path / "whole", corpus, MACHINE, ALONE)
    with pytest.raises(Killed):
        train(run, tmp_path / "cut", corpus, MACHINE, ALONE, progress=killed_after(after))
    outcome = train(run, tmp_path / "cut", corpus, MACHINE, ALONE)
    assert outcome.step == 4
    assert_same_state(tmp_path / "cut", tmp_path / "whole")
    assert_same_numbers(tmp_path / "cut", tmp_path / "whole")


def test_measuring_does_not_change_the_run(corpus, make_run, tmp_path):
    run = make_run(monitor_every=1, monitor_sequences=2)
    train(run, tmp_path / "plain", corpus, MACHINE, ALONE)
    run = make_run(monitor=("emulator:factored",), monitor_every=1, monitor_sequences=2)
    train(run, tmp_path / "measured", corpus, MACHINE, ALONE)
    assert_same_state(tmp_path / "measured", tmp_path / "plain")


def test_a_finished_run_is_not_changed(corpus, make_run, tmp_path):
    train(make_run(), tmp_path, corpus, MACHINE, ALONE)
    before = numbers(tmp_path)
    outcome = train(make_run(), tmp_path, corpus, MACHINE, ALONE, progress=killed_after(4))
    assert outcome.step == 4
    assert numbers(tmp_path) == before


def test_a_folder_belongs_to_one_run(corpus, make_run, tmp_path):
    train(make_run(), tmp_path, corpus, MACHINE, ALONE)
    with pytest.raises(ValueError, match=r"other settings: size 'tiny' and '8m', lr 0\.001 and"):
        train(make_run(lr=0.01, size="8m"), tmp_path, corpus, MACHINE, ALONE)
    (tmp_path / "log.parquet").unlink()
    with pytest.raises(ValueError, match="has checkpoints but no log"):
        train(make_run(), tmp_path, corpus, MACHINE, ALONE)


def test_two_processes_cannot_train_in_one_folder(corpus, make_run, tmp_path):
    def second(_step, _loss, _speed):
        train(make_run(), tmp_path, corpus, MACHINE, ALONE)

    with pytest.raises(BlockingIOError, match="another process trains there"):
        train(make_run(), tmp_path, corpus, MACHINE, ALONE, progress=second)


def command(corpus, folder, run, *more):
    options = {
        "--attention": run.attention,
        "--size": run.size,
        "--context": run.context,
        "--tokens-per-step": run.tokens_per_step,
        "--steps": run.steps,
        "--warmup": run.warmup,
        "--precision": run.precision,
        "--evaluate-every": run.evaluate_every,
        "--evaluate-sequences": run.evaluate_sequences,
        "--micro-batch": 4,
        "--checkpoint-every": 2,
    }
    words = [str(x) for pair in options.items() for x in pair]
    return ["pretrain", "run", str(corpus.folder), str(folder), *words, *more]


DIES_IN_ITS_SECOND_CHECKPOINT = """
import os, signal, sys, torch
from sagesim.cli import main

save = torch.save
saved = 0

def dies(state, file):
    global saved
    saved += 1
    if saved < 2:
        return save(state, file)
    file.write(b"half of a checkpoint")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

torch.save = dies
main(sys.argv[1:])
"""


def run_python(*words):
    return subprocess.run(
        [sys.executable, *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
def test_a_process_killed_while_writing_a_checkpoint_resumes(corpus, make_run, tmp_path):
    run, folder = make_run(), tmp_path / "run"
    words = command(corpus, folder, run)
    ended = run_python("-c", DIES_IN_ITS_SECOND_CHECKPOINT, *words)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    checkpoints = folder / "checkpoints"
    assert checkpoint.steps_in(checkpoints) == [2]
    partial = checkpoints / ".step-00000004.pt.new"
    assert partial.read_bytes() == b"half of a checkpoint"
    # The resumed run may save other steps, and must not keep the partial file.
    partial.rename(checkpoints / ".step-00000003.pt.new")
    train(run, tmp_path / "whole", corpus, MACHINE, ALONE)
    outcome = train(run, folder, corpus, MACHINE, ALONE)
    assert outcome.step == 4
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000004.pt"]
    assert_same_state(folder, tmp_path / "whole")
    assert_same_numbers(folder, tmp_path / "whole")


def test_an_interrupted_run_saves_its_step_and_resumes(corpus, make_run, tmp_path):
    """It loses no step, and gives the bits of a run that was not interrupted."""
    machine, seen = Machine(micro_batch=4, checkpoint_every=100), []

    def after_the_third_step():
        return len(seen) == 2  # the progress of this step is shown afterwards

    outcome = train(
        make_run(), tmp_path / "cut", corpus, machine, ALONE,
        progress=lambda *x: seen.append(x), interrupted=after_the_third_step,
    )  # fmt: skip
    assert (outcome.step, outcome.stop, outcome.is_interrupted) == (3, "", True)
    assert checkpoint.steps_in(tmp_path / "cut" / "checkpoints") == [3]
    log = Log.read(tmp_path / "cut")
    assert log.last_step == 3 and log.stop == "" and not log.is_finished
    outcome = train(make_run(), tmp_path / "cut", corpus, machine, ALONE, interrupted=lambda: True)
    assert (outcome.step, outcome.is_interrupted) == (4, False), "no step was left to resume"
    train(make_run(), tmp_path / "whole", corpus, machine, ALONE)
    assert_same_state(tmp_path / "cut", tmp_path / "whole")
    assert_same_numbers(tmp_path / "cut", tmp_path / "whole")


def test_a_full_disk_keeps_the_earlier_checkpoints(corpus, make_run, tmp_path, monkeypatch):
    path = checkpoint.path_of(tmp_path / "checkpoints", 4)
    save = torch.save

    def full(state, file):
        if state["step"] < 4:
            return save(state, file)
        with full_disk():
            return save(state, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(WriteError) as failure:
        train(make_run(), tmp_path, corpus, MACHINE, ALONE)
    assert str(failure.value) == f"{path}: cannot be written: File too large"
    assert [file.name for file in path.parent.iterdir()] == ["step-00000002.pt"]
    monkeypatch.undo()
    assert train(make_run(), tmp_path, corpus, MACHINE, ALONE).step == 4


def test_a_checkpoint_that_is_removed_meanwhile_is_not_missed(corpus, make_run, tmp_path):
    """The run may write a newer checkpoint and remove this one before it is read."""
    train(make_run(), tmp_path, corpus, MACHINE, ALONE)
    folder = tmp_path / "checkpoints"
    newest = checkpoint.path_of(folder, 4)
    load = checkpoint.load

    def loads(path):
        if path == newest and newest.exists():
            newest.rename(checkpoint.path_of(folder, 6))
        return load(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "load", loads)
        step, state = checkpoint.load_newest(folder)
    assert step == 6 and "model" in state
    assert checkpoint.load_newest(tmp_path / "nothing") is None


def test_a_damaged_checkpoint_raises(corpus, make_run, tmp_path):
    train(make_run(), tmp_path, corpus, MACHINE, ALONE)
    checkpoint.path_of(tmp_path / "checkpoints", 4).write_bytes(b"half")
    with pytest.raises(ValueError, match=r"step-00000004\.pt: not a readable checkpoint"):
        train(make_run(), tmp_path, corpus, MACHINE, ALONE)


def test_a_checkpoint_with_code_is_refused_without_advice_to_run_it(tmp_path):
    path = tmp_path / "step-00000001.pt"
    torch.save({"step": Killed()}, path)
    with pytest.raises(ValueError, match=r"objects other than tensors and plain values$") as caught:
        checkpoint.load(path)
    assert "weights_only" not in str(caught.value)
    assert caught.value.__suppress_context__, "a traceback would show PyTorch's message"


def poison(monkeypatch, step, how):
    """Change the model before a step."""
    gradient = Trainer.gradient

    def poisoned(trainer):
        if trainer.step == step:
            with torch.no_grad():
                how(trainer.model)
        return gradient(trainer)

    monkeypatch.setattr(Trainer, "gradient", poisoned)


def overflow_logits(model):
    # Q and K of about 1e20 are finite; their products are not.
    model.layers[1].attention.qkv.weight[: 2 * 64] *= 1e21


def overflow_feed_forward(model):
    model.layers[0].feed_forward.gate_up.weight *= 1e30


def lose_a_weight(model):
    model.layers[1].attention.out.weight[3, 5] = float("nan")


@pytest.mark.parametrize(
    "how, attention, where",
    [
        (overflow_logits, "sdpa", r"layers\.1\.attention\.core: site qk of the forward"),
        (
            overflow_logits,
            "emulator:sagebwd",
            r"layers\.1\.attention\.core: site qk of the forward, sequence 0, head 0",
        ),
        (overflow_feed_forward, "sdpa", r"layers\.0\.feed_forward\.down: its output"),
        (lose_a_weight, "sdpa", r"weight layers\.1\.attention\.out\.weight, before the step"),
    ],
)
def test_a_loss_that_is_not_finite_stops_the_run(
    how, attention, where, corpus, make_run, tmp_path, monkeypatch
):
    poison(monkeypatch, 3, how)
    run = make_run(attention=attention, steps=6)
    machine = Machine(micro_batch=4, checkpoint_every=1)
    outcome = train(run, tmp_path, corpus, machine, ALONE)
    assert outcome.step == 3
    assert re.match(rf"step 4: loss nan; first bad: {where}", outcome.stop), outcome.stop
    # Step 4 starts from the checkpoint after step 3, so the good one is that after step 2.
    good = checkpoint.path_of(tmp_path / "checkpoints", 2)
    assert outcome.stop.endswith(f"last good checkpoint: {good}")
    assert checkpoint.steps_in(tmp_path / "checkpoints") == [2, 3]
    log = Log.read(tmp_path)
    assert log.stop == outcome.stop and not log.is_finished and log.last_step == 3


def test_a_gradient_that_is_not_finite_stops_the_run(corpus, make_run, tmp_path, monkeypatch):
    """The forward is finite; in the backward, attention gives NaN for a finite dO."""
    from sagesim.experiments.pretrain.model import attention as module

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return v.clone()

        @staticmethod
        def backward(ctx, do):
            return do * float("nan"), do, do

    attend = module._attend

    def broken(family, q, k, v, spec):
        o = attend(family, q, k, v, spec)
        return o + 0 * Broken.apply(q, k, v) if spec.block_q == 32 else o

    monkeypatch.setattr(module, "_attend", broken)
    run = make_run(attention="emulator:sagebwd block=32x64")
    outcome = train(run, tmp_path, corpus, MACHINE, ALONE)
    assert outcome.step == 0
    assert re.match(
        r"step 1: norm of the gradient nan; first bad: layers\.1\.attention\.core: "
        r"emulator:sagebwd block=32x64 of the backward, sequence 0, head 0; the emulator gives "
        r"finite numbers for these inputs; last good checkpoint: none",
        outcome.stop,
    ), outcome.stop


@pytest.mark.parametrize(
    "changes, machine, message",
    [
        ({"corpus": "0" * 16}, {}, "the run uses corpus 0000000000000000"),
        ({"vocabulary": 499}, {}, "vocabulary=499; the corpus has 500 tokens"),
        ({"evaluate_sequences": 10**6}, {}, "in the validation split; 1000000 needed"),
        ({}, {"micro_batch": 3}, "do not divide"),
        ({}, {"tracker": "wandb"}, "tracker='wandb' is not one of none, tensorboard"),
        ({}, {"fsdp": True}, "fsdp shards over several processes"),
        ({"attention": "kernels:fpa"}, {}, "kernels:fpa"),
        ({"monitor": ("kernels:fpa",), "monitor_sequences": 2}, {}, "kernels:fpa"),
    ],
)
def test_a_run_that_cannot_be_trained_raises_before_training(
    changes, machine, message, corpus, make_run, tmp_path
):
    with pytest.raises(ValueError, match=message):
        train(make_run(**changes), tmp_path / "a", corpus, Machine(**machine), ALONE)
    assert not (tmp_path / "a" / "log.parquet").exists()
