"""Context managers around a run: the lock on its folder, and deterministic algorithms."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from sagesim.experiments.pretrain.run.distributed import World
from sagesim.files import WriteError, locked


@contextlib.contextmanager
def locked_folder(folder: Path, world: World) -> Generator[None]:
    """Lock a run's folder, which is created if needed, so that no other run writes to it.

    Raises:
        BlockingIOError: if another run has locked the folder.
        WriteError: if the folder cannot be created. All processes of the run raise the same error.
    """
    failure: OSError | None = None
    with contextlib.ExitStack() as stack:
        if world.is_first:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(folder, wait=False))
            except BlockingIOError:
                failure = BlockingIOError(f"{folder}: another process trains there")
            except OSError as error:
                failure = WriteError.of(folder, error)
        if (failure := world.from_first(failure)) is not None:
            raise failure
        yield


@contextlib.contextmanager
def deterministic(wanted: bool) -> Generator[None]:
    """Switch PyTorch's deterministic algorithms on or off inside the block.

    With `wanted`, an operation that has no deterministic algorithm raises RuntimeError.
    """
    before = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic  # its attributes have no type declarations
    filled = settings.fill_uninitialized_memory
    # cuBLAS reads this at its first use. Without it, the order of its sums can vary.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled
