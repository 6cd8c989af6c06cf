"""The machine and the software that a record was made with."""

from __future__ import annotations

import ast
import hashlib
import platform
import shutil
import subprocess
import tokenize
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
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
"""Field of a record -> field of nvidia-smi. Clocks are in MHz, power in watts."""


def describe() -> dict[str, Any]:
    """The device, its settings, and the versions of the software that is timed.

    "kernels" is `sources_hash`. A field that cannot be read is None.
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
    """Versions of the software, and `sources_hash`."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "flash-attn-4": installed("flash-attn-4"),
        "sagebwd": sagesim.__version__,
        "kernels": sources_hash(),
    }


def sources_hash() -> str:
    """12 hexadecimal digits of a hash of the kernels' code and of the presets.

    Not part of it are folders that the kernels do not use, comments and docstrings.
    """
    root = Path(__file__).parents[1]
    others = {root / name for name in ("bench", "cards", "integrations")}
    sources = sorted((*root.rglob("*.py"), *root.rglob("*.c")))
    kernels = [path for path in sources if others.isdisjoint(path.parents)]
    digest = hashlib.sha256()
    for path in [*kernels, Path(sagesim.__file__).parent / "spec" / "presets.py"]:
        code = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            code = _without_comments(code)
        digest.update(f"{path.name}\0{code}".encode())
    return digest.hexdigest()[:12]


@lru_cache(maxsize=512)
def _without_comments(source: str) -> str:
    """Return source code without comments, docstrings and empty lines."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                lines[first - 1 : last] = [""] * (last - first + 1)
            case _:
                pass
    return "\n".join(line.rstrip() for line in lines if line.strip())


def one_line(machine: dict[str, Any]) -> str:
    """A machine in one line for readers."""
    names = ("torch", "triton", "driver", "cudnn", "flash-attn-4", "sagebwd", "kernels")
    known = [f"{name} {machine[name]}" for name in names if machine.get(name) is not None]
    return ", ".join([machine["gpu"], *known])


def card(machine: dict[str, Any]) -> str:
    """The GPU of a machine in a word: H100, or RTX 4090."""
    words = machine["gpu"].removeprefix("NVIDIA ").removeprefix("GeForce ").split()
    return " ".join(words[: 2 if words[0] == "RTX" else 1])


def foreign(document: dict[str, Any]) -> str | None:
    """What a record timed, in one line, if that is not the code of the GPU itself."""
    code = document["settings"].get("code")
    if code is None:
        return None
    machine = document["machine"]
    other, own = code.removeprefix("sm"), machine["compute_capability"]
    return (
        f"sm_{other} code, assembled for sm_{own.replace('.', '')}, on {machine['gpu']}: "
        f"not the times of a GPU of compute capability {other[0]}.{other[1]}"
    )


def nvidia_smi(*fields: str) -> list[str | None]:
    """Fields of the current device as nvidia-smi prints them.

    A field is None if nvidia-smi does not have it. All are None if nvidia-smi does not run.
    """
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


def installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
