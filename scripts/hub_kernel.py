"""Write the attention as a hub kernel, a folder that Hugging Face's `kernels` loads.

    python scripts/hub_kernel.py out/hub_kernel

The folder is a project of kernel-builder: build.toml, and in torch-ext/ those modules of this
checkout that the attention needs, with relative imports. It is also built: build/ has a variant for
CUDA devices, on which the kernels compute, and one for CPUs, on which the emulator does. The
operators have a namespace of their own for each build, so that it can be loaded beside an installed
sagesim_kernels and beside other builds.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sagesim.command import exit_code  # noqa: E402
from sagesim.terminal import Failure  # noqa: E402

NAME: Final = "sagebwd-attention"
PACKAGE: Final = NAME.replace("-", "_")
VERSION: Final = 1
LICENSE: Final = "Apache-2.0"
BACKENDS: Final = ("cuda", "cpu")
PACKAGES: Final = ("sagesim", "sagesim_kernels")
START: Final = "sagesim_kernels.integrations.torch"

PROJECT: Final = f"""\
[general]
name = "{NAME}"
version = {VERSION}
edition = 6
license = "{LICENSE}"
backends = [{", ".join(f'"{backend}"' for backend in BACKENDS)}]

[torch-noarch]
"""

INIT: Final = '''\
"""FlashAttention's functions, with gradients: Q K^T in INT8 and everything else in 16 bit.

`Functions(spec)` has the same functions under another spec; `spec` has the specs.
"""

from .sagesim import spec
from .sagesim_kernels.integrations.torch import Functions

flash_attn_func = Functions().flash_attn_func
flash_attn_varlen_func = Functions().flash_attn_varlen_func

__all__ = ["Functions", "flash_attn_func", "flash_attn_varlen_func", "spec"]
'''

OPS: Final = '''\
"""The namespace of the operators of this build."""


def add_op_namespace_prefix(name: str) -> str:
    return f"{namespace}::{{name}}"
'''


def sources() -> dict[str, str]:
    """The files of the kernel's Python package, by their paths in it."""
    files = {"__init__.py": INIT}
    files |= {f"{package}/__init__.py": "" for package in PACKAGES}
    waiting = [START]
    while waiting:
        module = waiting.pop()
        path = _path(module)
        if path is None or path in files:
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        waiting += [name for node in _imports(text, path) for name in _names(node)]
        waiting.append(module.rpartition(".")[0])
        files[path] = _in_namespace(_relative(text, path), path)
    for package in PACKAGES:  # compiled when a kernel is launched
        for path in (ROOT / package).rglob("*.c"):
            files[str(path.relative_to(ROOT))] = path.read_text(encoding="utf-8")
    return dict(sorted(files.items()))


def _path(module: str) -> str | None:
    """The file of a module; None if the name is that of something inside a module."""
    for path in (f"{module.replace('.', '/')}.py", f"{module.replace('.', '/')}/__init__.py"):
        if module and (ROOT / path).exists():
            return path
    return None


def _imports(text: str, path: str) -> Iterator[ast.ImportFrom]:
    """The imports of the packages' own modules."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            yield node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in PACKAGES:
                    raise Failure(f"{path}: 'import {alias.name}' has no relative form")


def _names(node: ast.ImportFrom) -> list[str]:
    assert node.module is not None
    return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]


def _relative(text: str, path: str) -> str:
    """The source with relative imports."""
    lines = text.splitlines(keepends=True)
    for node in _imports(text, path):
        dots = "." * (path.count("/") + 1)
        line = lines[node.lineno - 1]
        lines[node.lineno - 1] = line.replace(f"from {node.module}", f"from {dots}{node.module}", 1)
    return "".join(lines)


def _in_namespace(text: str, path: str) -> str:
    """The source with its operators in the namespace of the build."""
    operators = re.compile(r'custom_op\(\s*"\w+::(\w+)"')
    if not operators.search(text):
        return text
    dots = "." * (path.count("/") + 1)
    head = f"from {dots}_ops import add_op_namespace_prefix\n"
    text = operators.sub(r'custom_op(add_op_namespace_prefix("\1")', text)
    first = text.index("\nimport ") + 1  # after the docstring and __future__
    return text[:first] + head + text[first:]


def write(folder: Path) -> None:
    """Write the project and its builds into a new folder.

    Raises:
        Failure: if the folder exists.
    """
    if folder.exists():
        raise Failure(f"{folder}: exists")
    files = sources()
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:7]
    (folder / "build").mkdir(parents=True)
    (folder / "build.toml").write_text(PROJECT, encoding="utf-8")
    _write_all(folder / "torch-ext" / PACKAGE, files)
    for backend in BACKENDS:
        identity = f"_{PACKAGE}_{backend}_{digest}"
        variant = folder / "build" / f"torch-{backend}"
        metadata = {
            "name": NAME,
            "id": identity,
            "version": VERSION,
            "license": LICENSE,
            "python-depends": [],
            "backend": {"type": backend},
        }
        _write_all(variant, files)
        _write_all(
            variant,
            {
                "_ops.py": OPS.format(namespace=identity),
                "metadata.json": json.dumps(metadata, indent=2) + "\n",
            },
        )
    shutil.copy(ROOT / "LICENSE", folder)


def _write_all(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    write(parser.parse_args().folder)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("hub_kernel.py", main, {}))
