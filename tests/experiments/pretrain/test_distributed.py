"""Two processes, copies (DDP) or shards (FSDP2), against one."""

import os
import re
import subprocess
import sys

import pytest

from sagesim.experiments.pretrain.runlog import Log
from sagesim.experiments.pretrain.settings import Machine
from sagesim.experiments.pretrain.train import train
from tests.experiments.pretrain.conftest import ALONE
from tests.experiments.pretrain.test_train import assert_same_state, numbers


def torchrun(module: str, *arguments: str) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    ended = subprocess.run(
        [sys.executable, *words, f"tests.experiments.pretrain.{module}", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    from sagesim.experiments.pretrain.settings import Run

    root = tmp_path_factory.mktemp("runs")
    run = Run(
        attention="sdpa",
        size="tiny",
        corpus=corpus.id,
        vocabulary=512,
        context=32,
        tokens_per_step=256,
        steps=4,
        warmup=1,
        precision="fp32",
        evaluate_every=2,
        evaluate_sequences=5,
        monitor=("emulator:sagebwd",),
        monitor_sequences=2,
        qk_norm=True,
    )
    torchrun("worker", str(corpus.folder), str(root), run.to_json())
    train(run, root / "alone", corpus, Machine(micro_batch=4, checkpoint_every=2), ALONE)
    return root


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_two_processes_train_as_one(name, runs):
    """Losses and norms of the gradient after up to four steps.

    The same sequences in another order of sums: float32 sums of some hundred terms differ by some
    1e-6, and Adam makes a full step, of lr, of a gradient that is all rounding. Of 137 thousand
    weights few are so: 1e-4 is 20 times what was seen, and a lost or doubled sequence is 1e-2.
    """
    alone, together = numbers(runs / "alone"), numbers(runs / name)
    assert [row[:5] for row in together] == [row[:5] for row in alone]
    for ours, theirs in zip(together, alone, strict=True):
        if ours.name in ("loss", "gradient_norm"):
            assert ours.value == pytest.approx(theirs.value, rel=1e-4), ours


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_both_measure_what_one_measures(name, runs):
    """Errors of quantization move by some percent when a code rounds the other way."""
    alone, together = numbers(runs / "alone"), numbers(runs / name)
    for ours, theirs in zip(together, alone, strict=True):
        if ours.name in ("rms_ds", "dq_rel_l2", "gamma_q_rms", "trace", "square", "bias_trace"):
            assert ours.value == pytest.approx(theirs.value, rel=0.1), ours


def test_shards_are_resumed_with_the_same_bits(runs):
    assert_same_state(runs / "cut", runs / "fsdp")
    assert numbers(runs / "cut") == numbers(runs / "fsdp")


@pytest.mark.parametrize("name", ["bad-ddp", "bad-fsdp"])
def test_all_processes_stop_where_one_goes_bad(name, runs):
    said = r"step 3: loss nan; first bad: layers\.0\.feed_forward\.down: its output"
    assert re.match(said, Log.read(runs / name).stop)


def test_a_checkpoint_of_shards_is_that_of_one_process(corpus, runs):
    """It can be gone on with by one process: its weights are whole, under their own names."""
    from sagesim.experiments.pretrain.trained import captured, load

    _, step, model = load(runs / "fsdp")
    assert step == 4
    assert {name for name, _ in model.named_parameters()} >= {"embedding.weight", "norm.weight"}
    assert len(captured(runs / "fsdp", corpus, ALONE).calls) == 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at threads by /proc")
def test_a_group_ends_before_its_process():
    """Threads that it leaves behind now and then abort the interpreter at its end."""
    torchrun("leaver")
