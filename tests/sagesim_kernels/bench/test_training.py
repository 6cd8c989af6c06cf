"""A training step: the same model for every contender, and its gradients and updates."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile

from sagesim_kernels.bench.contenders import contender
from sagesim_kernels.bench.training import VOCABULARY, TrainingStep
from tests.sagesim_kernels.bench.fakes import explicit, fake, training
from tests.support.assertions import assert_bitwise

CPU = torch.device("cpu")


def step(one=None):
    return TrainingStep.of(one or fake("slow", explicit), training("slow"), CPU, torch.bfloat16)


def test_every_contender_gets_the_same_weights_and_tokens():
    torch.manual_seed(3)
    first = step()
    torch.manual_seed(4)
    for (name, x), y in zip(first.model.named_parameters(), step().model.parameters(), strict=True):
        assert_bitwise(actual=x.detach(), expected=y.detach(), what=name)
    assert first.tokens.shape == first.following.shape == (3, 8)
    assert_bitwise(actual=first.tokens[:, 1:], expected=first.following[:, :-1], what="tokens")


def test_the_loss_before_training_is_that_of_guessing():
    one = step()
    loss = one.model(one.tokens, one.following)
    assert abs(loss.item() - torch.tensor(float(VOCABULARY)).log().item()) < 0.2


def test_attention_gets_heads_of_the_case_and_all_gradients_reach_it():
    seen = []

    def attend(q, k, v):
        seen.append((q.shape, q.dtype))
        return explicit(q, k, v)

    gradients = step(fake("slow", attend)).gradients()
    assert seen == [((3, 2, 8, 16), torch.bfloat16)] * 2
    assert list(gradients) == ["blocks.0.qkv.weight", "blocks.1.qkv.weight"]
    for x in gradients.values():
        assert all(part.abs().max() > 0 for part in x.chunk(3)), "of q, k and v"


def test_a_step_changes_every_weight_and_gradients_change_none():
    one = step(contender("sdpa flash"))
    before = {name: x.detach().clone() for name, x in one.model.named_parameters()}
    one.gradients()
    for name, x in one.model.named_parameters():
        assert_bitwise(actual=x.detach(), expected=before[name], what=name)
    one()
    assert all((x != before[name]).any() for name, x in one.model.named_parameters())
    assert all(x.grad is None for x in one.model.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own
def test_a_compiled_step_runs_the_backend_of_its_contender(monkeypatch):
    """All operators are PyTorch's own, because compiling others in C++ takes most of a minute."""
    monkeypatch.setattr("torch._inductor.config.fallback_by_default", True)
    flash = contender("sdpa flash")
    math = replace(flash, name="sdpa math", selected=lambda: sdpa_kernel(SDPBackend.MATH))
    case = replace(training("slow"), is_compiled=True)
    for each, is_flash in ((flash, True), (math, False), (flash, True)):
        with each.selected():
            one = TrainingStep.of(each, case, CPU, torch.bfloat16)
            one.gradients()
            with profile() as profiled:
                one.gradients()
        calls = [x.key for x in profiled.key_averages() if "flash_attention" in x.key]
        assert bool(calls) == is_flash, (each.name, calls)
