"""The processes of a run: those that torchrun started, or a single one."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class World:
    """The processes of a run, from the point of view of one of them."""

    rank: int
    processes: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process has rank 0. Only that process writes files."""
        return self.rank == 0

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the processes, with the same bits in each. Overwrites x."""
        if self.processes > 1:
            dist.all_reduce(x)
            x /= self.processes
        return x

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the processes, with the same bits in each. Overwrites x."""
        if self.processes > 1:
            dist.all_reduce(x)
        return x

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in a process; all processes get the same answer."""
        if self.processes == 1:
            return flag
        return bool(self.sum(torch.tensor(int(flag), device=self.device)))

    def gather(self, item: _T) -> list[_T]:
        """The items of all processes, in the order of ranks; every process gets the list."""
        if self.processes == 1:
            return [item]
        items: list[Any] = [None] * self.processes
        dist.all_gather_object(items, item)
        return items

    def from_first(self, item: _T) -> _T:
        """The item of the process with rank 0."""
        return self.gather(item)[0]

    def wait(self) -> None:
        """Wait until all processes have called this."""
        if self.processes > 1:
            dist.barrier()


@contextlib.contextmanager
def join_processes() -> Generator[World]:
    """Join the process group that torchrun describes in the environment.

    Without torchrun the world is this process alone. Each process uses its own GPU if there are
    GPUs, and the CPU otherwise.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    if processes == 1:
        yield World(0, 1, device)
        return
    # The functions of torch.distributed.nn have the default process group as a default argument,
    # which is evaluated when the module is imported. DDP and FSDP import it. If that happened after
    # init_process_group, the module would keep the group alive until the interpreter ends, and the
    # group's threads sometimes abort the interpreter then. So it is imported here, before.
    importlib.import_module("torch.distributed.nn")
    if has_gpu:
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield World(dist.get_rank(), processes, device)
    finally:
        dist.destroy_process_group()


def distribute(model: nn.Module, layers: list[nn.Module], world: World, *, fsdp: bool) -> nn.Module:
    """Prepare a model for training by several processes: copied by DDP or sharded by FSDP2.

    Args:
        layers: the layers that FSDP2 shards and gathers one at a time.

    Returns:
        The module to call in training. FSDP2 changes `model` in place and returns it.

    Raises:
        ValueError: if `fsdp` is set and there is one process.
    """
    if fsdp:
        if world.processes == 1:
            raise ValueError("fsdp shards over several processes; this is one (use torchrun)")
        from torch.distributed.fsdp import fully_shard

        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
        return model
    if world.processes == 1:
        return model
    from torch.nn.parallel import DistributedDataParallel

    ids = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


def full_tensor(x: Tensor) -> Tensor:
    """The full tensor of x, which may be sharded. All processes must call this."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def local_part(x: Tensor) -> Tensor:
    """This process' part of x if x is sharded, and x otherwise."""
    return x.to_local() if isinstance(x, DTensor) else x


@contextlib.contextmanager
def gradient_sync(model: nn.Module, *, is_last: bool) -> Generator[None]:
    """Around a micro-batch's forward and backward: exchange gradients if it is the step's last."""
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        yield
    elif isinstance(model, DistributedDataParallel) and not is_last:
        with model.no_sync():
            yield
    else:
        yield
