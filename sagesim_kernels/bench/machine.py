"""What a record was made with. Results of two machines are never in one record."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch
import triton

import sagesim

_SMI_FIELDS: Final = {
    "driver": "driver_version",
    "largest_sm_clock": "clocks.max.sm",
    "largest_memory_clock": "clocks.max.memory",
    "power_limit": "power.limit",
}
"""Field of ours -> of nvidia-smi; clocks in MHz, power in watts."""


def describe() -> dict[str, Any]:
    """The device, its settings, and the versions of all that is timed on it.

    kernels: a hash of the kernels' sources and of the presets, which change between versions.
    A field that cannot be read is None.
    """
    device = torch.cuda.get_device_properties()
    settings = nvidia_smi(*_SMI_FIELDS.values())
    return {
        "gpu": device.name,
        "compute_capability": f"{device.major}.{device.minor}",
        "multiprocessors": device.multi_processor_count,
        "memory_bytes": device.total_memory,
        **dict(zip(_SMI_FIELDS, settings, strict=True)),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        **versions(),
    }


def versions() -> dict[str, Any]:
    """Versions of the software, and the hash of the kernels."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "flash-attn-4": _installed("flash-attn-4"),
        "sagebwd": sagesim.__version__,
        "kernels": sources_hash(),
    }


def sources_hash() -> str:
    """12 hexadecimal digits of the sources of `sagesim_kernels`, Hopper's among them but not the
    benchmark's, and of the presets' definitions."""
    root = Path(__file__).parents[1]
    presets = Path(sagesim.__file__).parent / "presets.py"
    digest = hashlib.sha256()
    for path in [*sorted(root.glob("*.py")), *sorted(root.glob("hopper/*.py")), presets]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def one_line(machine: dict[str, Any]) -> str:
    """A machine for people."""
    names = ("torch", "triton", "driver", "cudnn", "flash-attn-4", "sagebwd", "kernels")
    known = [f"{name} {machine[name]}" for name in names if machine.get(name) is not None]
    return ", ".join([machine["gpu"], *known])


def nvidia_smi(*fields: str) -> list[str | None]:
    """What nvidia-smi says of the current device, as it is written there; None where it does not
    know, or is not there."""
    unknown: list[str | None] = [None] * len(fields)
    command = shutil.which("nvidia-smi")
    if command is None:
        return unknown
    uuid = f"GPU-{torch.cuda.get_device_properties().uuid}"
    query = [f"--id={uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            [command, *query], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return unknown
    cells = [cell.strip() for cell in answer.stdout.strip().split(",")]
    return [None if cell.startswith("[") else cell for cell in cells]


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
