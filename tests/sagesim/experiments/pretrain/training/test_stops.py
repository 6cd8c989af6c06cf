"""A held-out loss that is not finite stops a run, also after its last update."""

import math

import pytest

from sagesim.experiments.pretrain.run.log import Log
from sagesim.experiments.pretrain.run.settings import Machine
from sagesim.experiments.pretrain.training import checkpoint
from sagesim.experiments.pretrain.training.held_out import held_out_losses
from sagesim.experiments.pretrain.training.trainer import train
from tests.sagesim.experiments.pretrain.conftest import ALONE


@pytest.mark.parametrize("steps", [1, 4])
def test_a_held_out_loss_that_is_not_finite_stops_the_run(steps, corpus, make_run, tmp_path):
    """The first update makes weights so large that the loss overflows."""
    run = make_run(steps=steps, warmup=0, lr=3e17, evaluate_every=1)
    outcome = train(run, tmp_path, corpus, Machine(micro_batch=4), ALONE)
    assert outcome.step == 1
    assert outcome.stop.startswith("step 1: held-out loss nan; first bad: "), outcome.stop
    assert outcome.stop.endswith("; last good checkpoint: none")
    assert "nothing" not in outcome.stop
    log = Log.read(tmp_path)
    assert log.stop == outcome.stop and not log.is_finished
    assert math.isnan(log.curve("evaluation", "loss")[-1][1])
    assert checkpoint.steps_in(tmp_path / "checkpoints") == []
    with pytest.raises(ValueError, match="the run stopped: step 1: held-out loss nan"):
        held_out_losses(tmp_path, corpus, ALONE, [])
