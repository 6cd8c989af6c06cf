"""`apply` and what else replaces or copies the forward of a module: accelerate and DataParallel."""

import copy

import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn

import sagesim
from sagesim_kernels.integrations.torch import apply, remove
from tests.sagesim_kernels.integrations.test_torch import emulated, stack
from tests.support.assertions import assert_bitwise

X = torch.randn(2, 11, 16, generator=torch.Generator().manual_seed(2))
PLAIN = stack()(X)
UNDER_THE_SPEC = emulated()[0]


def assert_plain(model: nn.Module) -> None:
    assert_bitwise(actual=model(X), expected=PLAIN, what="o")


def assert_under_the_spec(model: nn.Module) -> None:
    assert_bitwise(actual=model(X), expected=UNDER_THE_SPEC, what="o")


@pytest.mark.parametrize("by_handle", [True, False])
def test_remove_under_a_hook_of_accelerate(by_handle):
    model = stack()
    applied = apply(model, sagesim.SAGEBWD)
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    assert_under_the_spec(model)
    for _ in range(2):
        applied.remove() if by_handle else remove(model)
        assert_plain(model)
    with pytest.raises(ValueError, match="the forward of '' is already replaced"):
        apply(model)
    remove_hook_from_module(model, recurse=True)
    assert_plain(model)
    remove(model)
    apply(model, sagesim.SAGEBWD)
    assert_under_the_spec(model)


@pytest.fixture
def unwrapped() -> nn.Module:
    """A model under a spec that accelerate has prepared for 16 bit and unwrapped again."""
    model = stack()
    apply(model, sagesim.SAGEBWD)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(model)
    assert prepared(X).dtype is torch.float32
    return accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)


def test_a_model_that_accelerate_has_unwrapped(unwrapped):
    assert_under_the_spec(unwrapped)
    other = copy.deepcopy(unwrapped)
    with torch.no_grad():
        for parameter in unwrapped.parameters():
            parameter.zero_()
    assert_under_the_spec(other)
    for model in (other, unwrapped):
        remove(model)
        assert not any("forward" in vars(module) for module in model.modules())
    assert_plain(other)


def with_zeros(model: nn.Module) -> nn.Module:
    """A replica of a model as `nn.DataParallel` makes one, with other parameters: zeros."""
    replica = model._replicate_for_data_parallel()
    for name, child in model.named_children():
        setattr(replica, name, with_zeros(child))
        replica._modules[name] = getattr(replica, name)
    for name, parameter in model.named_parameters(recurse=False):
        setattr(replica, name, torch.zeros_like(parameter))
    return replica


def test_a_replica_of_data_parallel_computes_with_its_own_weights():
    model = stack()
    apply(model, sagesim.SAGEBWD)
    replica: Tensor = with_zeros(model)(X)
    assert_bitwise(actual=replica, expected=torch.zeros_like(X), what="o")
    assert_under_the_spec(model)
    remove(model)
    assert_bitwise(actual=with_zeros(model)(X), expected=torch.zeros_like(X), what="o")
    assert_plain(model)
