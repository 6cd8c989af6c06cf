"""Experiment trackers: a run can send its numbers to TensorBoard or trackio."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from sagesim.experiments.pretrain.run.settings import Run

Track = Callable[[int, Mapping[str, float]], None]
"""Called with a step and its numbers."""

_MODULES: Final = {"tensorboard": "tensorboard", "trackio": "trackio"}
TRACKERS: Final = ("none", *_MODULES)


def check_tracker(name: str) -> None:
    """Check the name of a tracker.

    Raises:
        ValueError: if `name` is not one of `TRACKERS`, or its package is not installed.
    """
    if name not in TRACKERS:
        raise ValueError(f"tracker={name!r} is not one of {', '.join(TRACKERS)}")
    if name != "none" and importlib.util.find_spec(_MODULES[name]) is None:
        raise ValueError(f"tracker={name!r}: the package {_MODULES[name]} is not installed")


def open_tracker(name: str, folder: Path, run: Run) -> Track:
    """Start a tracker and return the function that sends numbers to it.

    Raises:
        ValueError: if `check_tracker` does.
    """
    check_tracker(name)
    if name == "tensorboard":
        board: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

        def write(step: int, values: Mapping[str, float]) -> None:
            for key, value in values.items():
                board.add_scalar(key, value, step)

        return write
    if name == "trackio":
        trackio: Any = importlib.import_module("trackio")
        trackio.init(project="sagesim", name=folder.name, config={"run": run.to_json()})
        return lambda step, values: trackio.log(dict(values), step=step)
    return lambda _step, _values: None
