"""The processes of a run, as torchrun starts them, or one alone."""

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
    """This process among those of the run."""

    rank: int
    processes: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the processes, the same bits in each; x is overwritten."""
        if self.processes > 1:
            dist.all_reduce(x)
            x /= self.processes
        return x

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the processes; x is overwritten."""
        if self.processes > 1:
            dist.all_reduce(x)
        return x

    def gather(self, item: _T) -> list[_T]:
        """What each process has, in the order of ranks, in every process."""
        if self.processes == 1:
            return [item]
        items: list[Any] = [None] * self.processes
        dist.all_gather_object(items, item)
        return items

    def first(self, item: _T) -> _T:
        """What the first process has."""
        return self.gather(item)[0]

    def wait(self) -> None:
        """Until all are here."""
        if self.processes > 1:
            dist.barrier()


@contextlib.contextmanager
def world() -> Generator[World]:
    """Join the processes that torchrun started, by what it says in the environment; alone without.

    One process a GPU where there are GPUs, and on the CPU otherwise.
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
    # Its functions take the default group as it is when they are imported, which DDP and FSDP do. A
    # group that they kept would end with the interpreter, and its threads now and then abort that.
    importlib.import_module("torch.distributed.nn")
    if has_gpu:
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield World(dist.get_rank(), processes, device)
    finally:
        dist.destroy_process_group()


def distribute(model: nn.Module, layers: list[nn.Module], here: World, *, fsdp: bool) -> nn.Module:
    """The model as the processes train it together: by DDP, or sharded in place by FSDP2.

    Args:
        layers: those that FSDP2 gathers one at a time.

    Raises:
        ValueError: for fsdp with one process.
    """
    if fsdp:
        if here.processes == 1:
            raise ValueError("fsdp shards over several processes; this is one (use torchrun)")
        from torch.distributed.fsdp import fully_shard

        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
        return model
    if here.processes == 1:
        return model
    from torch.nn.parallel import DistributedDataParallel

    ids = [here.device.index] if here.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


def whole(x: Tensor) -> Tensor:
    """A tensor that may be sharded, whole; all processes have to call it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def part(x: Tensor) -> Tensor:
    """What this process has of a tensor that may be sharded."""
    return x.to_local() if isinstance(x, DTensor) else x


@contextlib.contextmanager
def adding_up(model: nn.Module, *, is_last: bool) -> Generator[None]:
    """Around a micro-batch's forward and backward: only the last of a step exchanges gradients."""
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
