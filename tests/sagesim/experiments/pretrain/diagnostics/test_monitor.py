import weakref

import pytest
import torch

from sagesim import AttentionSpec, exact
from sagesim.analysis import TENSORS, errors
from sagesim.experiments.pretrain.diagnostics import monitor
from sagesim.experiments.pretrain.diagnostics.monitor import measure, record_attention
from sagesim.experiments.pretrain.model.attention import Attention
from sagesim.experiments.pretrain.run.settings import Machine
from sagesim.experiments.pretrain.training.trainer import Trainer
from tests.sagesim.experiments.pretrain.conftest import ALONE

NAMES = ("emulator:sagebwd", "emulator:factored")


@pytest.fixture
def trainer(corpus, make_run, tmp_path):
    run = make_run(monitor=NAMES, monitor_sequences=3, qk_norm=True)
    return Trainer(run, tmp_path, corpus, Machine(micro_batch=4), ALONE)


def loss_of(trainer):
    return lambda index: trainer.loss(trainer.model, trainer.evaluation.sequence(index, 3))


def values(found, **place):
    """The numbers with the given attention and layer."""
    wanted = {"attention": "", "layer": -1} | place
    merged = {}
    for each in found:
        if all(getattr(each, name) == value for name, value in wanted.items()):
            merged |= each.values
    return merged


def test_errors_equal_those_of_a_capture(trainer):
    found = trainer.monitor()
    calls = record_attention(trainer.model, loss_of(trainer)).calls
    assert [call.index for call in calls] == [0, 1]
    for call in calls:
        for name in NAMES:
            expected = errors(call, AttentionSpec.parse(name.partition(":")[2]))
            measured = values(found, attention=name, layer=call.index)
            assert {t: measured[f"{t}_rel_l2"] for t in TENSORS} == {
                t: expected[t].rel_l2 for t in TENSORS
            }
        expected, own = exact(call), values(found, layer=call.index)
        pairs = call.q.shape[1] * sum(range(1, 33))
        for t in ("p", "dp", "ds"):
            square = getattr(expected, t).square().sum() / pairs
            assert own[f"rms_{t}"] == pytest.approx(square.sqrt().item(), rel=1e-12)
        assert own["sigma_q"] == pytest.approx(call.q.std().item(), rel=1e-5)
        assert own["gamma_q_rms"] == own["gamma_k_max"] == 1.0


def test_the_bias_of_the_gradient_is_the_mean_error_that_attention_adds(trainer):
    """Compares with gradients from torch.autograd.grad, for three sequences."""
    by_name = {}
    for name in ("sdpa", *NAMES):
        for core in trainer.model.cores():
            core.attention = Attention.parse(name)
        rows = []
        for index in range(3):
            gradient = torch.autograd.grad(
                loss_of(trainer)(index), list(trainer.model.parameters())
            )
            rows.append(torch.cat([g.flatten() for g in gradient]).double())
        by_name[name] = torch.stack(rows)
    for core in trainer.model.cores():
        core.attention = Attention("sdpa")
    found = trainer.monitor()
    plain = by_name["sdpa"]

    def off_diagonal(a, b):
        gram = a @ b.mT
        return (gram.sum() - gram.diagonal().sum()).item() / 6

    square = off_diagonal(plain, plain)
    assert values(found)["square"] == pytest.approx(square, rel=1e-6)
    for name in NAMES:
        error, measured = by_name[name] - plain, values(found, attention=name)
        assert measured["bias_square"] == pytest.approx(
            off_diagonal(error, error), rel=1e-4, abs=1e-4 * error.square().sum().item()
        )
        along = off_diagonal(error, plain) / square
        assert measured["bias_along"] == pytest.approx(along, rel=1e-3, abs=1e-5)


def test_the_errors_of_one_attention_are_freed_before_those_of_the_next(trainer, monkeypatch):
    alive, kept = [], []
    real = monitor.gradients_of

    def recorded(*args, **options):
        alive.append(sum(x() is not None for x in kept))
        found = real(*args, **options)
        kept.append(weakref.ref(found.examples[0][0]))
        return found

    monkeypatch.setattr(monitor, "gradients_of", recorded)
    trainer.monitor()
    assert alive == [0, 1, 1]  # the gradients without errors stay


def test_measuring_does_not_change_the_model(trainer):
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.monitor()
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.grad is None
    assert {core.attention.name for core in trainer.model.cores()} == {"sdpa"}


def test_a_model_with_a_loss_that_is_not_finite_is_not_measured(trainer):
    with torch.no_grad():
        trainer.model.norm.weight.fill_(float("inf"))
    found = measure(
        trainer.model,
        loss_of(trainer),
        [Attention.parse(NAMES[0])],
        ALONE,
        sequences=3,
        sharded=False,
    )
    assert [each.values for each in found] == [{"not_finite": 1.0}]
