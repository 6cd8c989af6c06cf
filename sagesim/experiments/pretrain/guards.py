"""What holds around a run: nobody else writes to its folder, and its sums have one order."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from sagesim.experiments.pretrain.distributed import World


@contextlib.contextmanager
def alone(folder: Path, here: World) -> Generator[None]:
    """Hold the folder, so that no second run writes there."""
    if not here.is_first:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"{folder}: another process trains there") from None
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def deterministic(wanted: bool) -> Generator[None]:
    """Only algorithms that give the same bits again; what has none raises."""
    before = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic  # a module whose attributes are declared nowhere
    filled = settings.fill_uninitialized_memory
    # cuBLAS reads it when it is first used, and sums in an order of its own without.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled
