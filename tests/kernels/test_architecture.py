"""Kernels share the spec with the emulator and no arithmetic; arrows among them form no cycle."""

import ast
from pathlib import Path

import pytest

import sagesim_kernels

PACKAGE = Path(sagesim_kernels.__file__).parent
SOURCES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")
SHARED = {"sagesim.spec", "sagesim.presets", "sagesim.arguments"}


def imports(module: str) -> set[str]:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None
            found.add(node.module)
    return found


@pytest.mark.parametrize("module", SOURCES)
def test_only_the_spec_is_shared_with_the_emulator(module):
    emulator = {name for name in imports(module) if name.split(".")[0] in ("sagesim", "theory")}
    assert emulator <= SHARED


def test_no_cycles():
    arrows = {
        module: {n.split(".")[1] for n in imports(module) if n.startswith("sagesim_kernels.")}
        for module in SOURCES
    }
    done: set[str] = set()
    while len(done) < len(arrows):
        ready = {m for m, needs in arrows.items() if m not in done and needs <= done}
        assert ready, f"a cycle among {sorted(set(arrows) - done)}"
        done |= ready


@pytest.mark.parametrize("module", SOURCES)
def test_a_file_over_400_lines_is_two_rooms(module):
    assert len((PACKAGE / f"{module}.py").read_text(encoding="utf-8").splitlines()) <= 400
