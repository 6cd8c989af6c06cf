"""The direction of the import arrows, read from the sources."""

from pathlib import Path

import pytest

import sagesim
from tests.support.sources import assert_no_cycle, imports_of

PACKAGE = Path(sagesim.__file__).parent

ARROWS: dict[str, set[str]] = {
    "spec": set(),
    "_typing": set(),
    "presets": {"spec"},
    "label": {"spec", "presets"},
    "smoothing": {"spec"},
    "rounding": {"spec"},
    "_quantize": {"spec", "rounding", "_typing"},
    "matmul": {"spec", "_quantize"},
    "grid": set(),
    "arguments": {"spec", "presets"},
    "inputs": {"spec", "arguments", "grid"},
    "forward": {"spec", "smoothing", "_quantize", "matmul", "grid", "inputs"},
    "backward": {"spec", "_quantize", "matmul", "grid", "inputs", "forward"},
    "_attention": {
        "spec",
        "presets",
        "arguments",
        "inputs",
        "forward",
        "backward",
        "_typing",
    },
    "_exact": {"_typing"},
    "_trace": {
        "spec",
        "_quantize",
        "grid",
        "inputs",
        "forward",
        "backward",
        "_attention",
        "_typing",
    },
    "metrics": {"_exact", "_trace"},
    "attribution": {
        "spec",
        "presets",
        "inputs",
        "_exact",
        "_trace",
        "metrics",
        "_typing",
    },
    "sdpa_calls": set(),
    "_atomic": set(),
    "captured": {"_atomic"},
    "_capture": {"captured", "sdpa_calls"},
    "_emulate": {"spec", "arguments", "_attention", "sdpa_calls"},
    "qk_norm": {"_typing"},
    "measure": {"spec", "_exact", "_trace", "captured", "metrics"},
    "_fuzz_inputs": set(),
    "_fuzz_cases": {"_fuzz_inputs"},
    "_fuzz_strategies": {"spec", "presets", "_fuzz_inputs", "_fuzz_cases"},
    "_fuzz_hypothesis": set(),
    "_fuzz_noise": {
        "spec",
        "rounding",
        "_quantize",
        "grid",
        "inputs",
        "forward",
        "backward",
        "_attention",
        "_trace",
        "_fuzz_cases",
    },
    "_fuzz_contract": {
        "spec",
        "inputs",
        "_attention",
        "_exact",
        "_trace",
        "_fuzz_cases",
        "_fuzz_noise",
    },
    "_fuzz_diagnosis": {"spec", "presets", "_fuzz_cases", "_fuzz_contract"},
    "_fuzz_report": {"spec", "_fuzz_cases", "_fuzz_contract", "_fuzz_diagnosis"},
    "_fuzz": {
        "spec",
        "arguments",
        "_fuzz_cases",
        "_fuzz_contract",
        "_fuzz_diagnosis",
        "_fuzz_report",
    },
}
"""Module -> the modules of the package it may import. Rooms above these are free to import
downwards: they are checked for cycles, and for never being imported by the rooms below."""

DEFERRED = {"spec": {"label"}, "_fuzz": {"_fuzz_hypothesis", "_fuzz_strategies"}}
"""Imports inside functions: the grammar knows the presets, which know the spec; hypothesis is
optional."""

NO_TORCH = {"spec", "presets", "label"}

SOURCES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def imports(module: str, *, deferred: bool) -> set[str]:
    """Absolute names of what a module imports, at its top level or inside functions."""
    return imports_of(PACKAGE / f"{module}.py", deferred=deferred)


def rooms(module: str, *, deferred: bool) -> set[str]:
    names = imports(module, deferred=deferred)
    return {name.split(".")[1] for name in names if name.startswith("sagesim.")}


@pytest.mark.parametrize("module", ARROWS)
def test_the_core_imports_only_what_the_table_allows(module):
    assert module in SOURCES, "the table names a module that is gone"
    assert rooms(module, deferred=False) <= ARROWS[module]
    assert rooms(module, deferred=True) <= DEFERRED.get(module, set())


@pytest.mark.parametrize("module", sorted(NO_TORCH))
def test_the_spec_and_its_label_need_no_torch(module):
    outside = {n.split(".")[0] for n in imports(module, deferred=False)} - {"sagesim"}
    outside |= {n.split(".")[0] for n in imports(module, deferred=True)} - {"sagesim"}
    assert outside <= {"__future__", "collections", "dataclasses", "difflib", "enum", "typing"}


def test_the_reference_shares_no_code_with_the_emulator():
    assert rooms("_exact", deferred=False) <= {"_typing"}
    assert rooms("_exact", deferred=True) == set()


@pytest.mark.parametrize("module", SOURCES)
def test_modules_name_the_room_they_import_from(module):
    """`from sagesim import name` would hide an arrow behind the package's front door."""
    for name in rooms(module, deferred=False) | rooms(module, deferred=True):
        assert name in SOURCES or (PACKAGE / name).is_dir(), name


def test_no_cycles():
    arrows = {module: rooms(module, deferred=False) for module in SOURCES}
    assert_no_cycle(arrows)


def test_the_table_is_a_ladder():
    """Every module is above everything that it may import."""
    order = list(ARROWS)
    for module, allowed in ARROWS.items():
        below = set(order[: order.index(module)])
        assert allowed <= below, f"{module} may import upwards: {allowed - below}"


@pytest.mark.parametrize("module", SOURCES)
def test_the_emulator_never_imports_kernels(module):
    everything = imports(module, deferred=False) | imports(module, deferred=True)
    assert not {n for n in everything if n.split(".")[0] in ("sagesim_kernels", "theory")}


@pytest.mark.parametrize("module", SOURCES)
def test_a_file_over_400_lines_is_two_rooms(module):
    assert len((PACKAGE / f"{module}.py").read_text(encoding="utf-8").splitlines()) <= 400
