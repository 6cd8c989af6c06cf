"""Losses on single held-out sequences, and without the tokens after the predicted one."""

import pytest

from sagesim.experiments.pretrain.model.attention import Attention
from sagesim.experiments.pretrain.run.log import Log
from sagesim.experiments.pretrain.run.settings import Machine
from sagesim.experiments.pretrain.training.held_out import cut_points, held_out_losses
from sagesim.experiments.pretrain.training.trainer import train
from tests.sagesim.experiments.pretrain.conftest import ALONE

SDPA = Attention("sdpa")


@pytest.fixture
def trained(corpus, make_run, tmp_path):
    """Trains a run; returns its folder."""

    def trained(**changes):
        folder = tmp_path / "run"
        train(make_run(**changes), folder, corpus, Machine(micro_batch=8), ALONE)
        return folder

    return trained


def test_by_its_own_attention_the_mean_is_the_loss_in_the_log(trained, corpus):
    folder = trained(attention="emulator:sagebwd")
    own, by_sdpa = held_out_losses(folder, corpus, ALONE, [SDPA])
    assert (own.attention, by_sdpa.attention) == ("emulator:sagebwd", "sdpa")
    logged = Log.read(folder).curve("evaluation", "loss")[-1][1]
    assert len(own.losses) == 5
    assert sum(own.losses) / 5 == pytest.approx(logged, rel=1e-5)
    assert 0 < abs(sum(by_sdpa.losses) / 5 - logged) < 1e-2
    assert own.whole == own.cut == ()


def test_an_attention_is_evaluated_once(trained, corpus):
    (own,) = held_out_losses(trained(), corpus, ALONE, [SDPA])
    assert own.attention == "sdpa"


def test_later_tokens_have_an_influence_exactly_where_tokens_share_scales(trained, corpus):
    safe = Attention.parse("emulator:causal_safe")
    folder = trained(attention="emulator:sagebwd")
    own, without, by_sdpa = held_out_losses(folder, corpus, ALONE, [safe, SDPA], cuts=8)
    for found in (own, without, by_sdpa):
        assert len(found.whole) == len(found.cut) == 5
    # Sums of other lengths have another order.
    assert max(map(abs_difference, without.whole, without.cut)) < 1e-5
    assert max(map(abs_difference, by_sdpa.whole, by_sdpa.cut)) < 1e-5
    assert max(map(abs_difference, own.whole, own.cut)) > 1e-4


def abs_difference(a, b):
    return abs(a - b)


def test_all_cuts_together_are_the_whole_sequence(trained, corpus):
    (found,) = held_out_losses(trained(), corpus, ALONE, [SDPA], cuts=32)
    assert found.whole == pytest.approx(found.losses, rel=1e-5)
    assert found.cut == pytest.approx(found.losses, rel=1e-5)


@pytest.mark.parametrize(("context", "count"), [(2048, 64), (32, 32), (7, 0)])
def test_cut_points(context, count):
    found = cut_points(context, count)
    assert len(set(found)) == count and found == sorted(found)
    assert all(1 <= n <= context for n in found)
    if count == 64:  # evenly spread over the sequence, and over the places in a block
        assert all(sum(n // 512 == i for n in found) >= 4 for i in range(4))
        assert all(sum(n % 64 // 16 == i for n in found) >= 10 for i in range(4))


def test_errors(trained, corpus, make_run, tmp_path):
    folder = trained()
    with pytest.raises(ValueError, match="cuts=33 is more than the 32 tokens"):
        held_out_losses(folder, corpus, ALONE, [], cuts=33)
    with pytest.raises(ValueError, match="attention kernels:fpa: "):
        held_out_losses(folder, corpus, ALONE, [Attention.parse("kernels:fpa")])
    newest = max((folder / "checkpoints").glob("step-*.pt"))
    newest.rename(newest.with_name("step-00000003.pt"))
    with pytest.raises(ValueError, match="step 3 of 4"):
        held_out_losses(folder, corpus, ALONE, [])

    def interrupted():
        return True

    begun = tmp_path / "begun"
    train(make_run(), begun, corpus, Machine(micro_batch=8), ALONE, interrupted=interrupted)
    with pytest.raises(ValueError, match="1 of 4 steps are done"):
        held_out_losses(begun, corpus, ALONE, [])


def test_a_run_that_stopped(trained, corpus):
    with pytest.raises(ValueError, match="the run stopped: step 2: "):
        held_out_losses(trained(lr=1e30, steps=4), corpus, ALONE, [])
