"""Training on a GPU: bf16, compiled layers and kernels resume with the same bits."""

import pytest

from sagesim.experiments.pretrain.run.distributed import join_processes
from sagesim.experiments.pretrain.run.log import Log
from sagesim.experiments.pretrain.run.settings import Machine
from sagesim.experiments.pretrain.training.trainer import train
from tests.sagesim.experiments.pretrain.training.test_trainer import (
    Killed,
    assert_same_state,
    killed_after,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch's own, in 2.11
    pytest.mark.filterwarnings("ignore::UserWarning"),  # inductor's advice on settings
]


@pytest.mark.usefixtures("as_installed")  # torch.compile cannot trace the shape checks
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    "attention", ["sdpa", "kernels:sagebwd", "kernels:factored round=stochastic@3"]
)
def test_resuming_gives_the_same_bits(attention, is_compiled, corpus, make_run, tmp_path):
    run = make_run(
        attention=attention,
        precision="bf16",
        context=128,
        tokens_per_step=1024,
        qk_norm=True,
        monitor=("kernels:factored",),
        monitor_sequences=2,
    )
    machine = Machine(micro_batch=4, checkpoint_every=2, compile=is_compiled)
    with join_processes() as world:
        train(run, tmp_path / "whole", corpus, machine, world)
        with pytest.raises(Killed):
            train(run, tmp_path / "cut", corpus, machine, world, progress=killed_after(3))
        train(run, tmp_path / "cut", corpus, machine, world)
    assert_same_state(tmp_path / "cut", tmp_path / "whole")
    cut, whole = (Log.read(tmp_path / name).curve("train", "loss") for name in ("cut", "whole"))
    assert cut == whole


def test_kernels_train_as_the_emulator_does(corpus, make_run, tmp_path):
    """Losses of four steps in bf16 agree, up to codes that float32 sums round differently."""
    losses = []
    for family in ("kernels", "emulator"):
        run = make_run(
            attention=f"{family}:factored", precision="bf16", context=128, tokens_per_step=1024
        )
        with join_processes() as world:
            train(run, tmp_path / family, corpus, Machine(micro_batch=4), world)
        losses.append([loss for _, loss in Log.read(tmp_path / family).curve("train", "loss")])
    assert losses[0] == pytest.approx(losses[1], abs=5e-3)
