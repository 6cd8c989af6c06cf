"""Which held-out sequences a run takes: some from every part of the split."""

import pytest
import torch

from sagesim.experiments.pretrain.run.settings import Machine
from sagesim.experiments.pretrain.training.evaluation import Evaluation
from sagesim.experiments.pretrain.training.trainer import Trainer
from tests.sagesim.experiments.pretrain.conftest import ALONE


@pytest.mark.parametrize("count", [1, 3, 5])
def test_sequences_are_evenly_spaced(corpus, make_run, count):
    run = make_run(evaluate_sequences=count)
    evaluation = Evaluation(run, corpus, ALONE, 2)
    windows = corpus.windows("validation", run.context)
    places = [i * windows // count for i in range(count)]
    assert count == 1 or places[-1] > count  # not the first ones
    single = [evaluation.sequence(i, count) for i in range(count)]
    for place, found in zip(places, single, strict=True):
        window = torch.from_numpy(corpus.window("validation", run.context, place))
        assert found.equal(window[None])
    assert evaluation.sequences().equal(torch.cat(single))


def test_measurements_take_sequences_of_all_parts(corpus, make_run, tmp_path, monkeypatch):
    run = make_run(monitor=("emulator:sagebwd",), monitor_sequences=3, bias_sequences=4)
    trainer = Trainer(run, tmp_path / "run", corpus, Machine(micro_batch=8), ALONE)
    taken = []
    sequence = trainer.evaluation.sequence

    def spy(index, count):
        taken.append((index, count))
        return sequence(index, count)

    monkeypatch.setattr(trainer.evaluation, "sequence", spy)
    trainer.monitor()
    assert set(taken) == {(i, 3) for i in range(3)}
    taken.clear()
    for state in trainer.model.parameters():
        trainer.optimizer.state[state] = {"step": torch.ones(()), "exp_avg_sq": state.data.square()}
    trainer.bias()
    assert set(taken) == {(i, 4) for i in range(4)}
