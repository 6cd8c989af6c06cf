"""Send the numbers of a run to a dashboard as well."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from sagesim.experiments.pretrain.settings import Run

Track = Callable[[int, Mapping[str, float]], None]
"""Called with a step and its numbers."""

_MODULES: Final = {"tensorboard": "tensorboard", "trackio": "trackio"}
TRACKERS: Final = ("none", *_MODULES)


def check_tracker(name: str) -> None:
    """Raise ValueError where there is no such tracker, or its package is not installed."""
    if name not in TRACKERS:
        raise ValueError(f"tracker={name!r}; there are {', '.join(TRACKERS)}")
    if name != "none" and importlib.util.find_spec(_MODULES[name]) is None:
        raise ValueError(f"tracker={name!r}: the package {_MODULES[name]} is not installed")


def tracker(name: str, folder: Path, run: Run) -> Track:
    """What to call; see `check_tracker`."""
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
