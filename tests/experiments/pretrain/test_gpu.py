"""What only a GPU shows: bf16, compiled layers, the kernels, and the same bits all the same."""

import pytest

from sagesim.experiments.pretrain.distributed import world
from sagesim.experiments.pretrain.runlog import Log
from sagesim.experiments.pretrain.settings import Machine
from sagesim.experiments.pretrain.train import train
from tests.experiments.pretrain.test_train import Killed, assert_same_state, killed_after

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch's own, in 2.11
    pytest.mark.filterwarnings("ignore::UserWarning"),  # inductor's advice on settings
]


@pytest.mark.usefixtures("as_installed")  # the compiler cannot trace checks of shapes
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
    with world() as here:
        train(run, tmp_path / "whole", corpus, machine, here)
        with pytest.raises(Killed):
            train(run, tmp_path / "cut", corpus, machine, here, progress=killed_after(3))
        train(run, tmp_path / "cut", corpus, machine, here)
    assert_same_state(tmp_path / "cut", tmp_path / "whole")
    cut, whole = (Log.read(tmp_path / name).curve("train", "loss") for name in ("cut", "whole"))
    assert cut == whole


def test_kernels_train_as_the_emulator_does(corpus, make_run, tmp_path):
    """Four steps in bf16: codes are the same but where float32 sums round the other way."""
    losses = []
    for family in ("kernels", "emulator"):
        run = make_run(
            attention=f"{family}:factored", precision="bf16", context=128, tokens_per_step=1024
        )
        with world() as here:
            train(run, tmp_path / family, corpus, Machine(micro_batch=4), here)
        losses.append([loss for _, loss in Log.read(tmp_path / family).curve("train", "loss")])
    assert losses[0] == pytest.approx(losses[1], abs=5e-3)
