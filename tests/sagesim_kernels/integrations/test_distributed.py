"""One process: DTensor inputs raise an error that names local_map, which works, and FSDP2."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

import sagesim
import sagesim_kernels
from sagesim_kernels.integrations.torch import apply, remove
from tests.sagesim_kernels.integrations.test_torch import assert_same, backward, stack
from tests.support.assertions import assert_bitwise
from tests.support.kernels import DEVICE, HERE

pytestmark = [*HERE, pytest.mark.usefixtures("as_installed")]


@pytest.fixture
def mesh(tmp_path):
    """A mesh of this process alone."""
    backend = "gloo" if DEVICE == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh(DEVICE, (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("attention", [sagesim.attention, sagesim_kernels.attention])
def test_dtensors(mesh, attention):
    x = torch.randn(1, 2, 8, 16, device=DEVICE)
    heads = [Shard(1)]
    q = distribute_tensor(x, mesh, heads)

    def attend(q, k, v):
        return attention(q, k, v, spec=sagesim.FACTORED)

    with pytest.raises(TypeError, match=r"q is a DTensor.*local_map"):
        attend(q, q, q)
    with pytest.raises(TypeError, match=r"v is a DTensor"):
        attend(x, x, q)
    mapped = local_map(attend, out_placements=heads, in_placements=(heads,) * 3)
    o = mapped(q, q, q)
    assert isinstance(o, DTensor)
    assert_bitwise(actual=o.to_local(), expected=attend(x, x, x), what="o")


@pytest.mark.parametrize("apply_first", [True, False])
def test_fsdp2_shards_a_model_with_chosen_modules(mesh, apply_first):
    """It gives the modules other classes, before or after `apply`."""

    def shard(model: nn.Sequential) -> None:
        for block in model[:2]:
            fully_shard(block, mesh=mesh)

    def run(*steps: Callable[[nn.Sequential], object]) -> list[torch.Tensor]:
        model = stack()
        for step in steps:
            step(model)
        return [x.full_tensor() if isinstance(x, DTensor) else x for x in backward(model)]

    steps = [apply, shard] if apply_first else [shard, apply]
    assert_same(run(*steps), run(apply))
    assert_same(run(*steps, remove), run())
