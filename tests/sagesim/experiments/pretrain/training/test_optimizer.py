"""Weight decay, the random numbers of each step, and what a tracker gets."""

import torch

from sagesim.experiments.pretrain.run.log import Log
from sagesim.experiments.pretrain.run.settings import Machine
from sagesim.experiments.pretrain.training import trainer as module
from sagesim.experiments.pretrain.training.optimizer import adamw
from sagesim.experiments.pretrain.training.trainer import Trainer, build, train
from tests.sagesim.experiments.pretrain.conftest import ALONE
from tests.support.assertions import assert_bitwise


def test_only_matrices_decay(make_run):
    """With gradients of 0 the decay is all that a step changes."""
    run = make_run(qk_norm=True, weight_decay=0.5, lr=0.5)
    model = build(run)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adamw(model, run).step()
    seen = set()
    for name, parameter in model.named_parameters():
        kept = 0.75 if parameter.ndim == 2 else 1.0
        seen.add(parameter.ndim)
        assert_bitwise(actual=parameter.detach(), expected=before[name] * kept, what=name)
    assert seen == {1, 2}


def test_every_micro_batch_of_every_step_has_its_own_random_numbers(corpus, make_run, tmp_path):
    run = make_run(attention="emulator:sagebwd round=stochastic@3")
    trainer = Trainer(run, tmp_path, corpus, Machine(micro_batch=2), ALONE)
    draws, loss = [], trainer.loss

    def recorded(model, tokens):
        (draw,) = {core.draw for core in trainer.model.cores()}
        draws.append(draw)
        return loss(model, tokens)

    trainer.loss = recorded
    for trainer.step in range(3):
        trainer.gradient()
    assert len(draws) == len(set(draws)) == 3 * 4


def test_a_tracker_gets_every_number_of_the_log(corpus, make_run, tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(
        module,
        "open_tracker",
        lambda *_: lambda step, values: sent.extend((step, *each) for each in values.items()),
    )
    run = make_run(steps=2, monitor=("emulator:sagebwd",), monitor_sequences=3, bias_sequences=2)
    train(run, tmp_path, corpus, Machine(micro_batch=4), ALONE)
    rows = Log.read(tmp_path).rows
    assert {row.group for row in rows} == {"train", "evaluation", "layer", "gradient", "bias"}
    assert [(step, repr(x)) for step, _, x in sent] == [(r.step, repr(r.value)) for r in rows]
    assert len({(step, key) for step, key, _ in sent}) == len(sent)
