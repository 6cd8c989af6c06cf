"""DDP, FSDP2, PyTorch's ring attention and Ulysses on several GPUs, compared with one GPU.

    torchrun --nproc-per-node 2 scripts/several_gpus.py --out docs/data/several_gpus.json

DDP and FSDP2 train SmolLM2-135M with random weights, on some rows of the batch in each process. One
GPU computes the same rows one part after the other. The ring and Ulysses compute one attention with
some of the tokens in each process, the ring also by PyTorch's public `context_parallel`; Ulysses
needs diffusers. Without GPUs the processes use gloo, TRITON_INTERPRET=1 interprets the kernels, and
`context_parallel` is left out: PyTorch's ring does not take the operator of SDPA on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.distributed.tensor.experimental import context_parallel  # noqa: E402
from torch.distributed.tensor.experimental._attention import (  # noqa: E402
    context_parallel_unshard,
)
from torch.distributed.tensor.experimental._context_parallel import (  # noqa: E402
    _attention as ring,
)
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import sagesim  # noqa: E402
from sagesim.command import exit_code  # noqa: E402
from sagesim.files import check_writable, write_text  # noqa: E402
from sagesim_kernels.integrations.attend import Options, attend  # noqa: E402
from sagesim_kernels.integrations.torch_flash import flash_attention  # noqa: E402
from sagesim_kernels.integrations.transformers import register  # noqa: E402
from scripts.smollm2_speed import SIZES  # noqa: E402

DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
RESULTS: Final = ("o", "dq", "dk", "dv")
HEADS, HEAD = 8, 64

Gradients = dict[str, Tensor]


def own(x: Tensor, dim: int) -> Tensor:
    """This process's part."""
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def whole(x: Tensor, dim: int) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


def timed(compute: Callable[[], Any], steps: int) -> tuple[Any, float]:
    """The result of the last of some calls, and the median of their milliseconds but the first."""
    times: list[float] = []
    found = None
    for _ in range(steps + 1):
        dist.barrier()
        _synchronize()
        start = time.perf_counter()
        found = compute()
        _synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return found, statistics.median(times[1:])


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def relative(actual: Gradients, expected: Gradients) -> float:
    """Of all tensors together: L2 of the difference over L2 of what is expected."""
    pairs = [(actual[n].double(), x.double()) for n, x in expected.items()]
    difference = sum((a - e).square().sum() for a, e in pairs)
    return float((difference / sum(e.square().sum() for _, e in pairs)).sqrt())


def model(args: argparse.Namespace) -> Any:
    """The same weights in each process."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": args.layers, "vocab_size": args.words}
    made = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation=args.spec))
    return made.to(DEVICE).train()


def gradients(net: nn.Module, parts: list[Tensor]) -> Gradients:
    """Of the mean loss of the parts of a batch, computed one after the other."""
    net.zero_grad()
    for part in parts:
        with torch.autocast(DEVICE, torch.bfloat16) if DEVICE == "cuda" else nullcontext():
            loss = net(input_ids=part, labels=part).loss / len(parts)
        loss.backward()
    module = net.module if isinstance(net, DistributedDataParallel) else net
    found: Gradients = {}
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        assert grad is not None
        found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
    return found


def training(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """DDP and FSDP2 beside one GPU."""
    world = dist.get_world_size()
    ids = torch.randint(
        args.words, (args.rows * world, args.tokens), generator=torch.Generator().manual_seed(0)
    ).to(DEVICE)
    net = model(args)
    parts = list(ids.chunk(world))
    one, one_ms = timed(functools.partial(gradients, net, parts), args.steps)
    for name in ("ddp", "fsdp2"):
        net = model(args)
        if name == "ddp":
            net = DistributedDataParallel(net)
        else:
            for layer in net.model.layers:
                fully_shard(layer)
            fully_shard(net)
        several, ms = timed(functools.partial(gradients, net, [own(ids, 0)]), args.steps)
        yield name, {"difference": relative(several, one), "ms": ms, "one_ms": one_ms}


def draw(tokens: int) -> list[Tensor]:
    """q, k, v and do [1, heads, tokens, d], the same in each process."""
    drawn = torch.randn(4, 1, HEADS, tokens, HEAD, generator=torch.Generator().manual_seed(0))
    return list(drawn.to(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32))


def with_gradients(attention: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    *leaves, do = (x.detach().requires_grad_() for x in tensors)
    o = attention(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, do.detach())]


def ring_attention(spec: sagesim.AttentionSpec, tensors: list[Tensor]) -> list[Tensor]:
    """PyTorch's own ring; tensors are this process's tokens."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    ring._cp_options.enable_load_balance = False
    q, k, v, do = tensors
    with flash_attention(spec, device=DEVICE.upper()):
        o, lse, *rest = ring._scaled_dot_product_ring_flash_attention(
            mesh, q, k, v, dropout_p=0.0, is_causal=True, return_debug_mask=False
        )
        grads = ring._scaled_dot_product_ring_flash_attention_backward(
            mesh, do, q, k, v, o, lse, *rest[:4], 0.0, True, *rest[4:6]
        )
    return [o, *grads]


def public_ring(spec: sagesim.AttentionSpec, tensors: list[Tensor]) -> list[Tensor]:
    """`context_parallel`, which balances the load; tensors are all tokens, the results are own."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    ring._cp_options.enable_load_balance = True  # PyTorch's default
    buffers = [x.clone() for x in tensors]
    dims = [2] * len(buffers)
    with (
        flash_attention(spec),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims),
    ):
        # The name is looked up in the context, which replaces it.
        parts = with_gradients(
            lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), *buffers
        )
        return [own(x, 2) for x in context_parallel_unshard(mesh, parts, dims)]


def ulysses(tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
    """diffusers' exchange of tokens and heads; tensors are this process's tokens."""
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    world = dist.get_world_size()
    mesh = init_device_mesh(DEVICE, (1, world), mesh_dim_names=("ring", "ulysses"))
    context = ContextParallelConfig(ulysses_degree=world, mesh=mesh)
    parallel = ParallelConfig(context_parallel_config=context)
    context.setup(dist.get_rank(), world, torch.device(DEVICE), mesh)
    attention = functools.partial(
        dispatch_attention_fn, backend="sagebwd", parallel_config=parallel
    )
    return lambda: with_gradients(attention, *tensors)


def context_parallelism(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rings (causal) and Ulysses (not causal) beside one GPU, and all against float64."""
    spec = sagesim.AttentionSpec.parse(args.spec)
    tensors = draw(args.tokens * dist.get_world_size())
    local = [own(x, 2) for x in tensors]
    cases: dict[str, tuple[bool, int, Callable[[], list[Tensor]]]] = {
        "ring": (True, 2, lambda: ring_attention(spec, local))
    }
    if DEVICE == "cuda":
        cases["context_parallel"] = (True, 2, lambda: public_ring(spec, tensors))
    if importlib.util.find_spec("diffusers") is not None:
        from sagesim_kernels.integrations import diffusers

        diffusers.register(spec=spec)
        cases["ulysses"] = (False, 1, ulysses([x.transpose(1, 2) for x in local]))
    for name, (causal, dim, compute) in cases.items():
        options = Options(spec=spec, is_causal=causal)
        alone = functools.partial(
            with_gradients, lambda *x, options=options: attend(*x, options), *tensors
        )
        one, one_ms = timed(alone, args.steps)
        parts, ms = timed(compute, args.steps)
        several = [whole(x, dim) for x in parts]
        if dim == 1:
            several = [x.transpose(1, 2) for x in several]
        exact = with_gradients(
            functools.partial(F.scaled_dot_product_attention, is_causal=causal),
            *(x.double() for x in tensors),
        )
        yield (
            name,
            {
                "difference": relative(_named(several), _named(one)),
                "error": {n: relative({n: a}, {n: e}) for n, a, e in _zip(several, exact)},
                "one_error": {n: relative({n: a}, {n: e}) for n, a, e in _zip(one, exact)},
                "ms": ms,
                "one_ms": one_ms,
            },
        )


def _named(found: list[Tensor]) -> Gradients:
    return dict(zip(RESULTS, found, strict=True))


def _zip(actual: list[Tensor], exact: list[Tensor]) -> zip[tuple[str, Tensor, Tensor]]:
    return zip(RESULTS, actual, exact, strict=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--spec", default=sagesim.FACTORED_QK.label(), metavar="LABEL")
    parser.add_argument("--tokens", type=int, default=2048, help="of a row, and of a process")
    parser.add_argument("--rows", type=int, default=4, help="of a process")
    parser.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"])
    parser.add_argument("--words", type=int, default=SIZES["vocab_size"])
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    check_writable(args.out)
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("several_gpus.py: start it with torchrun --nproc-per-node 2")
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    register(args.spec, spec=sagesim.AttentionSpec.parse(args.spec))
    cases: dict[str, Any] = {}
    # Written after each case, so that one which fails or never ends does not take the others.
    for name, row in itertools.chain(training(args), context_parallelism(args)):
        cases[name] = row
        if dist.get_rank() == 0:
            write_text(args.out, json.dumps(_document(args, cases), indent=1) + "\n")
            print(f"{name:8} difference {row['difference']:.1e}, {row['ms']:.1f} ms, ", end="")
            print(f"one process {row['one_ms']:.1f} ms", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _document(args: argparse.Namespace, cases: dict[str, Any]) -> dict[str, Any]:
    names = ("spec", "tokens", "rows", "layers", "words", "steps")
    return {
        "command": f"torchrun --nproc-per-node {dist.get_world_size()} scripts/several_gpus.py",
        "machine": _machine(),
        "setting": {name: getattr(args, name) for name in names},
        "cases": cases,
    }


def _machine() -> dict[str, Any]:
    if DEVICE == "cpu":
        return {"gpu": "none", "torch": torch.__version__}
    from sagesim_kernels.bench.machine import describe

    return describe() | {"gpus": dist.get_world_size()}


if __name__ == "__main__":
    sys.exit(exit_code("several_gpus.py", main, {}))
