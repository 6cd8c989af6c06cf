"""Checkpoints: one file each, whole or not there, from which a run goes on bit for bit."""

from __future__ import annotations

import os
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

from sagesim._atomic import replacing

KEEP: Final = 2
"""Checkpoints that are kept: the older one was followed by finite losses up to the newer, and is
good whatever comes after."""

_NAME: Final = re.compile(r"step-(\d{8})\.pt")


def path_of(folder: Path, step: int) -> Path:
    """The file of the checkpoint after so many steps."""
    return folder / f"step-{step:08}.pt"


def steps_in(folder: Path) -> list[int]:
    """After how many steps there are checkpoints, ascending."""
    names = (_NAME.fullmatch(path.name) for path in folder.glob("step-*.pt"))
    return sorted(int(name[1]) for name in names if name)


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Weights and the optimizer's moments, whole and on the CPU; all processes have to call it.

    Where weights are sharded, only the first process gets them.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optimizer": moments}


def set_state(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Put back what `state_of` gave, into as many processes as there are now."""
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )


def save(folder: Path, step: int, state: Mapping[str, Any], *, keep: int) -> Path:
    """Write the checkpoint after `step` steps, then remove all but the newest `keep`.

    The file has its name only when its bytes are on the disk: a process that is killed at any
    moment leaves the checkpoints that were there.
    """
    path = path_of(folder, step)
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.save({"step": step, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)
    for old in steps_in(folder)[:-keep]:
        path_of(folder, old).unlink()
    return path


def load(path: Path) -> dict[str, Any]:
    """What was saved, on the CPU.

    Raises:
        ValueError: naming the file, where it is no checkpoint.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if missing := {"step", "model", "optimizer"} - state.keys():
            raise ValueError(f"has no {', '.join(sorted(missing))}")
    except Exception as error:  # torch.load raises what the bytes make it raise
        raise ValueError(f"{path}: not a readable checkpoint: {error}") from error
    return state


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process was writing. Nothing else may be writing there."""
    for path in folder.glob(".step-*"):
        path.unlink()


def _sync_folder(folder: Path) -> None:
    """The rename as well reaches the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
