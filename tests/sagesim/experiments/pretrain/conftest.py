"""A small corpus of pages of this project's documentation, and runs on it that take seconds."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from sagesim.cli import main
from sagesim.experiments.pretrain.run.distributed import World
from sagesim.experiments.pretrain.run.interruption import SIGNALS
from sagesim.experiments.pretrain.run.settings import Run
from sagesim.experiments.pretrain.text.corpus import Corpus
from sagesim.experiments.pretrain.text.preparation import prepare

TEXT = Path(__file__).parent / "pages"
ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(autouse=True)
def signals_act():
    """Signals act as in a terminal, also if pytest runs in the background, where a shell makes it
    ignore Ctrl-C."""
    usual = dict.fromkeys(SIGNALS, signal.SIG_DFL) | {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, action) for number, action in usual.items()}
    yield
    for number, action in before.items():
        signal.signal(number, action)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "corpus"
    prepare(TEXT, folder, vocabulary=500, validation=0.1, shard_tokens=9000, source="our pages")
    return Corpus(folder)


@pytest.fixture
def make_run(corpus):
    """Makes a run of four steps, with the given fields changed."""

    def make(**changes):
        fields = {
            "attention": "sdpa",
            "size": "tiny",
            "corpus": corpus.id,
            "vocabulary": 512,
            "context": 32,
            "tokens_per_step": 256,
            "steps": 4,
            "warmup": 1,
            "precision": "fp32",
            "evaluate_every": 2,
            "evaluate_sequences": 5,
        }
        return Run(**(fields | changes))

    return make


@pytest.fixture
def run(capsys):
    """Runs a command; returns its exit code, stdout and stderr."""

    def run(*argv):
        code = main([str(a) for a in argv])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(autouse=True)
def sums_in_one_order(one_thread):
    """Floating-point sums always have the same order."""
