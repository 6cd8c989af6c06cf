import pytest
import torch

from sagesim.experiments.pretrain.model.attention import (
    Attention,
    AttentionCore,
    rounding_seed,
    use_attention,
)
from sagesim.experiments.pretrain.run.settings import Machine
from sagesim.experiments.pretrain.training.trainer import Trainer
from tests.sagesim.experiments.pretrain.conftest import ALONE
from tests.support.assertions import assert_bitwise


@pytest.mark.parametrize(
    "name, message",
    [
        ("flash", "unknown family 'flash'; use sdpa, emulator:LABEL or kernels:LABEL"),
        ("sdpa:sagebwd", "sdpa takes no label"),
        ("emulator", "emulator needs a label"),
        ("kernels:sagebvd", "sagebvd"),
    ],
)
def test_unknown_names_raise(name, message):
    with pytest.raises(ValueError, match=message):
        Attention.parse(name)


def test_a_name_is_the_shortest_label():
    assert Attention.parse("kernels:sagebwd dp=int8").name == "kernels:sagebwd_all_int8"
    assert Attention.parse("sdpa").name == "sdpa"


@pytest.mark.parametrize(
    "name, dtype, device, message",
    [
        ("kernels:fpa", torch.float32, "cpu", "site qk: fp32"),
        ("kernels:sagebwd block=16x64", torch.float32, "cpu", "block_q=16"),
        ("kernels:sagebwd", torch.bfloat16, "cuda", "the device here is cuda"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are not interpreted here")
def test_attention_without_a_kernel_raises(name, dtype, device, message):
    with pytest.raises(ValueError, match=message):
        Attention.parse(name).check(head_size=64, dtype=dtype, device=device)


def test_use_attention_changes_a_core_only_inside_the_block():
    q, k, v = torch.randn(3, 1, 2, 10, 8, generator=torch.Generator().manual_seed(0))
    core = AttentionCore(Attention("sdpa"), 0, 0)
    plain = core(q, k, v)
    with use_attention([core], Attention.parse("emulator:sagebwd")):
        assert not torch.equal(core(q, k, v), plain)
    assert_bitwise(actual=core(q, k, v), expected=plain, what="o afterwards")


def test_stochastic_rounding_differs_between_steps_layers_and_seeds():
    attention = Attention.parse("emulator:sagebwd round=stochastic@7")
    q, k, v = torch.randn(3, 1, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    seen = []
    for layer, seed, draw in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        core = AttentionCore(attention, layer, seed)
        core.draw = draw
        seen.append(core(q, k, v))
        assert_bitwise(actual=core(q, k, v), expected=seen[-1], what="the same draw")
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_rounding_seeds_are_odd_and_small_so_that_triton_compiles_one_kernel():
    core = AttentionCore(Attention.parse("kernels:sagebwd round=stochastic@7"), 3, 5)
    seeds = set()
    for core.draw in range(500):
        seeds.add(rounding_seed(core))
    assert len(seeds) == 500
    assert all(2 < seed < 2**31 and seed % 2 == 1 for seed in seeds)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are not interpreted here")
@pytest.mark.parametrize(
    "label", ["sagebwd", pytest.param("factored", marks=pytest.mark.exhaustive)]
)
def test_emulator_and_kernels_train_alike(label, corpus, make_run, tmp_path):
    """Two steps of training with the emulator, the kernels and 16-bit attention.

    Emulator and kernels compute the same codes: their losses differ only by the order of float32
    sums. Their losses differ from those of 16-bit attention by the error of small gradients.
    """
    losses = {}
    for name in ("sdpa", f"emulator:{label}", f"kernels:{label}"):
        run = make_run(attention=name, tokens_per_step=64, steps=2)
        trainer = Trainer(run, tmp_path / name, corpus, Machine(micro_batch=2), ALONE)
        losses[name] = []
        for trainer.step in range(2):
            losses[name].append(trainer.gradient()[0])
            trainer.update(1e-3)
    exact, emulated, launched = losses.values()
    # One INT8 code that rounds differently changes a step of Adam as much as quantization does.
    assert launched == pytest.approx(emulated, abs=1e-4)
    assert emulated == pytest.approx(exact, abs=1e-2)
    assert emulated != exact
