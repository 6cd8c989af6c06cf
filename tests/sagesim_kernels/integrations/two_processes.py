"""What each of two processes computes for test_two_processes.py.

    python -m tests.sagesim_kernels.integrations.two_processes RANK FOLDER

Process 0 writes results.pt into the folder: tensors by case and name.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import ContextParallelConfig
from diffusers.models._modeling_parallel import ParallelConfig
from diffusers.models.attention_dispatch import dispatch_attention_fn
from peft import LoraConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.nn.parallel import DistributedDataParallel

import sagesim
from sagesim_kernels.integrations import diffusers, transformers
from sagesim_kernels.integrations.torch_flash import flash_attention
from tests.sagesim_kernels.integrations.flux import flux, results
from tests.sagesim_kernels.integrations.models import model, tokens

PROCESSES = 2
SPEC = sagesim.SAGEBWD


def draw(heads: int = 2, n: int = 64) -> list[Tensor]:
    """q, k, v and do [batch, heads, tokens, 16]."""
    return list(torch.randn(4, 1, heads, n, 16, generator=torch.Generator().manual_seed(0)))


def adapted_flux() -> nn.Module:
    made = flux()
    made.requires_grad_(False)
    torch.manual_seed(1)
    made.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v"]))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:  # zero at first, which would hide the gradients of A
            nn.init.normal_(parameter)
    return made


def own(x: Tensor, dim: int) -> Tensor:
    """This process's part."""
    return x.chunk(PROCESSES, dim)[dist.get_rank()].clone()


def whole(x: Tensor, dim: int) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(PROCESSES)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


def named(found: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(("o", "dq", "dk", "dv"), found, strict=True))


def gradients(net: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in net.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def ddp() -> dict[str, Tensor]:
    net = DistributedDataParallel(model("llama", "sagebwd"))
    row = own(tokens(PROCESSES), 0)
    net(input_ids=row, labels=row).loss.backward()
    return gradients(net.module)


def fsdp2() -> dict[str, Tensor]:
    net = model("llama", "sagebwd")
    for layer in net.model.layers:
        fully_shard(layer)
    fully_shard(net)
    row = own(tokens(PROCESSES), 0)
    net(input_ids=row, labels=row).loss.backward()
    return gradients(net)


def flux_fsdp2_lora() -> dict[str, Tensor]:
    net = adapted_flux()
    diffusers.set_attention_backend(net)
    for block in (*net.transformer_blocks, *net.single_transformer_blocks):
        fully_shard(block)
    fully_shard(net)
    out = results(net)["out"]  # both processes see the same images
    return {"out": out} | gradients(net)


def flux_ulysses() -> dict[str, Tensor]:
    return with_ulysses(flux())


def flux_ulysses_lora() -> dict[str, Tensor]:
    return with_ulysses(adapted_flux())


def with_ulysses(net: nn.Module) -> dict[str, Tensor]:
    diffusers.set_attention_backend(net, "exact")
    with mock.patch("torch.accelerator.device_count", lambda: 1):  # diffusers divides by it
        net.enable_parallelism(config=ContextParallelConfig(ulysses_degree=PROCESSES))
    out = results(net)["out"]
    found = gradients(net)
    for grad in found.values():  # each is that of the tokens of a process
        dist.all_reduce(grad)
    return {"out": out} | found


def ulysses() -> dict[str, Tensor]:
    """Tokens before heads, as diffusers has them; with padded keys."""
    mesh = init_device_mesh("cpu", (1, PROCESSES), mesh_dim_names=("ring", "ulysses"))
    context = ContextParallelConfig(ulysses_degree=PROCESSES, mesh=mesh)
    parallel = ParallelConfig(context_parallel_config=context)
    context.setup(dist.get_rank(), PROCESSES, torch.device("cpu"), mesh)
    q, k, v, do = (own(x.transpose(1, 2), 1) for x in draw())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = own(torch.arange(64)[None, None, None] < 50, 3)
    o = dispatch_attention_fn(*leaves, mask, backend="sagebwd", parallel_config=parallel)
    grads = torch.autograd.grad(o, leaves, do)
    return named([whole(x, 1) for x in (o.detach(), *grads)])


HEAD_AND_TAIL = [0, 3, 1, 2]
"""Quarters of the tokens as PyTorch balances causal attention: process 0 has the first and last."""


def balanced(x: Tensor) -> Tensor:
    quarters = x.chunk(4, 2)
    return torch.cat([quarters[i] for i in HEAD_AND_TAIL], 2)


def restored(x: Tensor) -> Tensor:
    quarters = x.chunk(4, 2)
    return torch.cat([quarters[HEAD_AND_TAIL.index(i)] for i in range(4)], 2)


def ring_attention(*, causal: bool, balance: bool = False) -> dict[str, Tensor]:
    """PyTorch's own ring, around the kernels in Triton's interpreter."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    ring._cp_options.enable_load_balance = balance
    q, k, v, do = (own(balanced(x) if balance else x, 2) for x in draw())
    with flash_attention(SPEC, device="CPU"):
        o, lse, *rest = ring._scaled_dot_product_ring_flash_attention(
            mesh, q, k, v, dropout_p=0.0, is_causal=causal, return_debug_mask=False
        )
        grads = ring._scaled_dot_product_ring_flash_attention_backward(
            mesh, do, q, k, v, o, lse, *rest[:4], 0.0, causal, *rest[4:6]
        )
    found = [whole(x, 2) for x in (o, *grads)]
    return named([restored(x) for x in found] if balance else found)


def context_parallel_attention() -> dict[str, Tensor]:
    """PyTorch's public functions, with its default balancing of the load.

    On a CPU, SDPA calls another operator than on a GPU, which PyTorch's ring does not take. The
    operator of a GPU takes its place here; all else is PyTorch's.
    """
    ring._cp_options.enable_load_balance = True  # PyTorch's default
    mesh = init_device_mesh("cpu", (PROCESSES,))
    *leaves, do = draw()

    def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    with (
        mock.patch.object(F, "scaled_dot_product_attention", scaled_dot_product_attention),
        flash_attention(SPEC, device="CPU"),
        context_parallel(mesh, buffers=[*leaves, do], buffer_seq_dims=[2] * 4),
    ):
        q, k, v = (x.detach().requires_grad_() for x in leaves)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        grads = torch.autograd.grad(o, (q, k, v), do)
        found = context_parallel_unshard(mesh, [o.detach(), *grads], [2] * 4)
    return named(found)


CASES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "flux_fsdp2_lora": flux_fsdp2_lora,
    "flux_ulysses": flux_ulysses,
    "flux_ulysses_lora": flux_ulysses_lora,
    "ulysses": ulysses,
    "ring": lambda: ring_attention(causal=False),
    "causal ring": lambda: ring_attention(causal=True),
    "balanced ring": lambda: ring_attention(causal=True, balance=True),
    "context_parallel": context_parallel_attention,
}


def main(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES
    )
    transformers.register(spec=SPEC)
    diffusers.register(spec=SPEC)
    diffusers.register("exact", spec=sagesim.FPA)
    found = {name: case() for name, case in CASES.items()}
    if rank == 0:
        torch.save(found, folder / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
