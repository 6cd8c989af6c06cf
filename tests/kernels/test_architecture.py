"""Kernels share the spec with the emulator and no arithmetic; arrows among them form no cycle."""

from pathlib import Path

import pytest

import sagesim_kernels
from tests.support.sources import assert_no_cycle, imports_of

PACKAGE = Path(sagesim_kernels.__file__).parent
SOURCES = sorted(
    path.relative_to(PACKAGE).with_suffix("").as_posix()
    for folder in (PACKAGE, PACKAGE / "hopper")
    for path in folder.glob("*.py")
    if path != PACKAGE / "__init__.py"
)
SHARED = {"sagesim.spec", "sagesim.presets", "sagesim.arguments"}

BENCH = sorted(f"bench/{path.stem}" for path in (PACKAGE / "bench").glob("*.py"))
OF_BENCH: dict[str, set[str]] = {
    "bench/accuracy": {
        "sagesim._exact",
        "sagesim.captured",
        "sagesim.data",
        "sagesim.experiments.gaussian",
    },
    "bench/machine": {"sagesim"},  # its version
    "bench/record": {"sagesim._atomic"},
    "bench/cli": {"sagesim.cli.terminal"},
}
"""What else rooms of the benchmark take from `sagesim`: how it prints and writes files, and in one
room the float64 reference with the inputs of published errors. Never the emulator."""


def imports(module: str) -> set[str]:
    path = PACKAGE / f"{module}.py"
    return imports_of(path, deferred=False) | imports_of(path, deferred=True)


@pytest.mark.parametrize("module", SOURCES)
def test_only_the_spec_is_shared_with_the_emulator(module):
    emulator = {name for name in imports(module) if name.split(".")[0] in ("sagesim", "theory")}
    assert emulator <= SHARED


@pytest.mark.parametrize("module", BENCH)
def test_what_the_benchmark_takes_from_the_emulator(module):
    others = {name for name in imports(module) if name.split(".")[0] in ("sagesim", "theory")}
    assert others <= SHARED | OF_BENCH.get(module, set())


@pytest.mark.parametrize("module", SOURCES)
def test_no_kernel_knows_the_benchmark(module):
    assert not {name for name in imports(module) if name.startswith("sagesim_kernels.bench")}


def test_no_cycles():
    own = {
        f"sagesim_kernels.{module.removesuffix('/__init__').replace('/', '.')}": module
        for module in SOURCES
    }
    assert_no_cycle({m: {own[n] for n in imports(m) if n in own} for m in SOURCES})
    prefix = "sagesim_kernels.bench."
    within = {
        module: {f"bench/{n.removeprefix(prefix)}" for n in imports(module) if n.startswith(prefix)}
        for module in BENCH
    }
    assert_no_cycle(within)


@pytest.mark.parametrize("module", SOURCES + BENCH)
def test_a_file_over_400_lines_is_two_rooms(module):
    assert len((PACKAGE / f"{module}.py").read_text(encoding="utf-8").splitlines()) <= 400
