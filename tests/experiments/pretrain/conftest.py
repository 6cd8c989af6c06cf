"""A corpus of some pages of this project's own documentation, and runs that take seconds on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sagesim.experiments.pretrain.corpus import Corpus
from sagesim.experiments.pretrain.distributed import World
from sagesim.experiments.pretrain.prepare import prepare
from sagesim.experiments.pretrain.settings import Run

TEXT = Path(__file__).parent / "text"
ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "corpus"
    prepare(TEXT, folder, vocabulary=500, validation=0.1, shard_tokens=9000, source="our pages")
    return Corpus(folder)


@pytest.fixture
def make_run(corpus):
    """A run of four steps, with some fields changed."""

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


@pytest.fixture(autouse=True)
def one_thread():
    """Sums have one order, whatever ran before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
