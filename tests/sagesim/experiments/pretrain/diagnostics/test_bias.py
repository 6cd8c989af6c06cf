"""The bias of the gradient by group of parameters, and runs with frozen gains."""

import pytest
import torch

from sagesim.experiments.pretrain.diagnostics.bias import group_of, measure_bias
from sagesim.experiments.pretrain.diagnostics.monitor import SDPA
from sagesim.experiments.pretrain.diagnostics.noise import gradients_of
from sagesim.experiments.pretrain.model.attention import Attention, use_attention
from sagesim.experiments.pretrain.run.log import Log
from sagesim.experiments.pretrain.run.settings import Machine
from sagesim.experiments.pretrain.training.trainer import Trainer, train
from tests.sagesim.experiments.pretrain.conftest import ALONE

PAPER = Attention.parse("emulator:sagebwd")
GROUPS = {"embedding", "attention", "mlp", "norms"}


@pytest.fixture
def trainer(corpus, make_run, tmp_path):
    run = make_run(qk_norm=True, bias_sequences=4)
    return Trainer(run, tmp_path / "run", corpus, Machine(micro_batch=8), ALONE)


def measured(trainer, attention, moment=1.0):
    found = measure_bias(
        trainer.model,
        trainer._losses_of_sequences(4),
        [attention],
        lambda p: torch.full_like(p, moment),
        ALONE,
        sequences=4,
        sharded=False,
    )
    assert [each.group for each in found] == ["bias", "bias"]
    return {name: x for each in found for name, x in each.values.items()}


def test_it_is_the_mean_over_pairs_of_an_even_and_an_odd_sequence(trainer):
    found = measured(trainer, PAPER)
    model, names = trainer.model, [name for name, _ in trainer.model.named_parameters()]
    with use_attention(model.cores(), SDPA):
        plain = gradients_of(model, trainer._losses_of_sequences(4), range(4))
    with use_attention(model.cores(), PAPER):
        error = gradients_of(model, trainer._losses_of_sequences(4), range(4), less=plain)
    for prefix, each in (("square", plain), ("bias_square", error)):
        for group in GROUPS:
            pairs = [
                (x.double() * y.double()).sum().item()
                for i in (0, 2)
                for j in (1, 3)
                for name, x, y in zip(names, each.examples[i], each.examples[j], strict=True)
                if group_of(name) == group
            ]
            size = sum(
                x.double().square().sum().item()
                for example in each.examples
                for name, x in zip(names, example, strict=True)
                if group_of(name) == group
            )
            assert abs(found[f"{prefix}_{group}"] - sum(pairs) / 4) < 1e-5 * size


def test_an_exact_attention_has_no_bias(trainer):
    found, paper = (measured(trainer, x) for x in (Attention.parse("emulator:fpa"), PAPER))
    for group in GROUPS:
        assert abs(found[f"bias_square_{group}"]) < 1e-4 * abs(paper[f"bias_square_{group}"])


def test_adams_metric_divides_by_the_root_of_the_second_moment(trainer):
    found = measured(trainer, PAPER, moment=0.25)
    for prefix in ("square", "bias_square"):
        for group in GROUPS:
            plain, adam = found[f"{prefix}_{group}"], found[f"{prefix}_adam_{group}"]
            assert adam == pytest.approx(4 * plain, rel=1e-4, abs=1e-30)


def test_a_run_measures_it_after_the_first_and_the_last_step(corpus, make_run, tmp_path):
    run = make_run(bias_sequences=2, monitor=("emulator:sagebwd",))
    train(run, tmp_path / "a", corpus, Machine(micro_batch=8), ALONE)
    rows = [row for row in Log.read(tmp_path / "a").rows if row.group == "bias"]
    assert {row.step for row in rows} == {1, 4}
    assert {row.attention for row in rows} == {"", "emulator:sagebwd"}
    assert {"square_mlp", "bias_square_adam_norms"} <= {row.name for row in rows}
    # After one step, Adam's second moment without its bias is the square of the gradient.
    state = Trainer(run, tmp_path / "b", corpus, Machine(micro_batch=8), ALONE)
    state.gradient()
    gradients = {n: p.grad.clone() for n, p in state.model.named_parameters()}
    state.update(1e-3)
    seen = {}
    real = measure_bias

    def spy(model, loss, attentions, second_moment, *args, **options):
        seen.update({n: second_moment(p) for n, p in model.named_parameters()})
        return real(model, loss, attentions, second_moment, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sagesim.experiments.pretrain.training.trainer.measure_bias", spy)
        state.bias()
    for name, gradient in gradients.items():
        wrong = (seen[name] - gradient.square()).abs() > 1e-3 * gradient.square() + 1e-20
        assert not bool(wrong.any()), name


def test_gains_of_qk_norm_can_be_a_constant(corpus, make_run, tmp_path):
    run = make_run(qk_norm=True, qk_gain=5.0, monitor=("emulator:sagebwd",))
    train(run, tmp_path / "a", corpus, Machine(micro_batch=8), ALONE)
    gains = [row for row in Log.read(tmp_path / "a").rows if row.name.startswith("gamma_")]
    assert gains and {row.value for row in gains} == {5.0}


def test_settings_that_make_no_sense(make_run):
    with pytest.raises(ValueError, match=r"qk_gain=2.0 is of QK-norm, and qk_norm is not set"):
        make_run(qk_gain=2.0)
    with pytest.raises(ValueError, match=r"qk_gain=-1.0 is not a finite number of at least 0"):
        make_run(qk_gain=-1.0, qk_norm=True)
    with pytest.raises(ValueError, match="bias_sequences=3 has no two equal halves"):
        make_run(bias_sequences=3)


def test_held_out_sequences_are_counted(corpus, make_run, tmp_path):
    with pytest.raises(ValueError, match="100000 needed"):
        train(make_run(bias_sequences=100000), tmp_path / "a", corpus, Machine(), ALONE)
