"""Checkpoints: one complete file each, from which a run resumes with the same bits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from sagesim.files import replacing

CHECKPOINTS: Final = "checkpoints"
"""The folder of the checkpoints in a run's folder."""

KEEP: Final = 2
"""Number of checkpoints to keep.

All losses between the two were finite, so the older one is good even if the run stops right after
the newer one.
"""

_NAME: Final = re.compile(r"step-(\d{8})\.pt")


def path_of(folder: Path, step: int) -> Path:
    """The file of the checkpoint after `step` steps."""
    return folder / f"step-{step:08}.pt"


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, ascending."""
    names = (_NAME.fullmatch(path.name) for path in folder.glob("step-*.pt"))
    return sorted(int(name[1]) for name in names if name)


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The full weights and optimizer moments, on the CPU. All processes must call this.

    If the weights are sharded, only the process with rank 0 gets them.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optimizer": moments}


def set_state(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state of `state_of`. The number of processes may differ from that at saving."""
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )


def save(folder: Path, step: int, state: Mapping[str, Any], *, keep: int) -> Path:
    """Write the checkpoint after `step` steps, then remove all but the newest `keep`.

    A process that is killed at any moment leaves the earlier checkpoints intact.

    Raises:
        WriteError: if the checkpoint cannot be written. The earlier checkpoints stay.
    """
    path = path_of(folder, step)
    with replacing(path) as temporary, temporary.open("wb") as file:
        try:
            torch.save({"step": step, **state}, file)
        except RuntimeError as error:
            # torch.save closes its archive after a failed write, which raises this error instead.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
    for old in steps_in(folder)[:-keep]:
        path_of(folder, old).unlink()
    return path


def load_newest(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """The step and the state of the newest checkpoint in a folder; None without a checkpoint.

    A process that trains meanwhile may remove the checkpoint. The next newest is then loaded.

    Raises:
        ValueError: if the newest checkpoint is not readable.
    """
    while steps := steps_in(folder):
        path = path_of(folder, steps[-1])
        try:
            return steps[-1], load(path)
        except ValueError:
            if path.exists():
                raise
    return None


def load(path: Path) -> dict[str, Any]:
    """Load a checkpoint onto the CPU.

    Raises:
        ValueError: if the file is not a readable checkpoint.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if missing := {"step", "model", "optimizer"} - state.keys():
            raise ValueError(f"has no {', '.join(sorted(missing))}")
    except Exception as error:  # torch.load can raise any exception for damaged files
        reason = str(error)
        if "weights_only" in reason:  # PyTorch recommends to load without it, which runs any code
            reason = "it is damaged, or has objects other than tensors and plain values"
        raise ValueError(f"{path}: not a readable checkpoint: {reason}") from None
    return state


def remove_unfinished(folder: Path) -> None:
    """Remove files that a killed process left. No other process may be writing to the folder."""
    for path in folder.glob(".step-*"):
        path.unlink()
