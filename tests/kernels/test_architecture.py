"""Kernels share the spec with the emulator and no arithmetic; arrows among them form no cycle."""

from pathlib import Path

import pytest

import sagesim_kernels
from tests.support.sources import assert_no_cycle, imports_of

PACKAGE = Path(sagesim_kernels.__file__).parent
SOURCES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")
SHARED = {"sagesim.spec", "sagesim.presets", "sagesim.arguments"}


def imports(module: str) -> set[str]:
    path = PACKAGE / f"{module}.py"
    return imports_of(path, deferred=False) | imports_of(path, deferred=True)


@pytest.mark.parametrize("module", SOURCES)
def test_only_the_spec_is_shared_with_the_emulator(module):
    emulator = {name for name in imports(module) if name.split(".")[0] in ("sagesim", "theory")}
    assert emulator <= SHARED


def test_no_cycles():
    arrows = {
        module: {n.split(".")[1] for n in imports(module) if n.startswith("sagesim_kernels.")}
        for module in SOURCES
    }
    assert_no_cycle(arrows)


@pytest.mark.parametrize("module", SOURCES)
def test_a_file_over_400_lines_is_two_rooms(module):
    assert len((PACKAGE / f"{module}.py").read_text(encoding="utf-8").splitlines()) <= 400
