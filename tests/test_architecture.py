"""The direction of the imports between rooms, read from the sources of all packages together.

A room is a folder, or a file that stands alone in a package. FLOORS lists the rooms from the ground
up; a room imports only rooms that are listed before it. CONTRIBUTING.md explains what is inside.
"""

from pathlib import Path

import pytest

from tests.support.sources import imports_of

ROOT = Path(__file__).parents[1]
PACKAGES = ("sagesim", "sagesim_kernels", "theory")

FLOORS: dict[str, set[str]] = {
    "sagesim.shapes": set(),
    "sagesim.checks": set(),
    "sagesim.short_repr": set(),
    "sagesim.read_only": set(),
    "sagesim.allocator": set(),
    "sagesim.files": set(),
    "sagesim.process_wide": set(),
    "sagesim.printable": set(),
    "sagesim.progress_lines": set(),
    "sagesim.terminal": {"sagesim.printable", "sagesim.progress_lines"},
    "sagesim.command": {"sagesim.files", "sagesim.printable", "sagesim.terminal"},
    "sagesim.data": set(),
    "sagesim.spec": {"sagesim.checks"},
    "sagesim.problem": {
        "sagesim.checks",
        "sagesim.spec",
        "sagesim.shapes",
        "sagesim.short_repr",
    },
    "sagesim.emulator": {
        "sagesim.checks",
        "sagesim.read_only",
        "sagesim.short_repr",
        "sagesim.spec",
        "sagesim.problem",
        "sagesim.shapes",
        "sagesim.process_wide",
    },
    "sagesim.models": {
        "sagesim.checks",
        "sagesim.read_only",
        "sagesim.short_repr",
        "sagesim.spec",
        "sagesim.problem",
        "sagesim.emulator",
        "sagesim.files",
        "sagesim.process_wide",
        "sagesim.shapes",
        "sagesim.printable",
    },
    "sagesim.analysis": {
        "sagesim.checks",
        "sagesim",
        "sagesim.spec",
        "sagesim.problem",
        "sagesim.emulator",
        "sagesim.models",
        "sagesim.shapes",
        "sagesim.printable",
    },
    "sagesim.fuzzing": {"sagesim.spec", "sagesim.problem", "sagesim.emulator"},
    "sagesim_kernels.target": set(),
    "sagesim_kernels.interpreter": set(),
    "sagesim_kernels.launching": {"sagesim_kernels.interpreter", "sagesim_kernels.target"},
    "sagesim_kernels.operands": {
        "sagesim_kernels.launching",
        "sagesim.spec",
        "sagesim.problem",
        "sagesim_kernels.target",
        "sagesim_kernels.interpreter",
    },
    "sagesim_kernels.support": {
        "sagesim.checks",
        "sagesim.spec",
        "sagesim.problem",
        "sagesim_kernels.operands",
    },
    "sagesim_kernels.cards": {"sagesim.spec", "sagesim_kernels.target"},
    "sagesim_kernels.measured_speed": {
        "sagesim.checks",
        "sagesim.spec",
        "sagesim.problem",
        "sagesim_kernels.target",
    },
    "sagesim_kernels.preparation": {
        "sagesim_kernels.launching",
        "sagesim.spec",
        "sagesim_kernels.target",
        "sagesim_kernels.operands",
    },
    "sagesim_kernels.portable": {
        "sagesim_kernels.preparation",
        "sagesim_kernels.launching",
        "sagesim.spec",
        "sagesim_kernels.operands",
    },
    "sagesim_kernels.gluon_compat": set(),
    "sagesim_kernels.partial_sums": set(),
    "sagesim_kernels.channel_ranges": set(),
    "sagesim_kernels.ampere": {
        "sagesim_kernels.launching",
        "sagesim_kernels.interpreter",
        "sagesim.spec",
        "sagesim_kernels.target",
        "sagesim_kernels.operands",
        "sagesim_kernels.support",
        "sagesim_kernels.partial_sums",
        "sagesim_kernels.channel_ranges",
        "sagesim_kernels.gluon_compat",
        "sagesim_kernels.preparation",
        "sagesim_kernels.portable",
    },
    "sagesim_kernels.hopper": {
        "sagesim_kernels.launching",
        "sagesim_kernels.interpreter",
        "sagesim.spec",
        "sagesim_kernels.target",
        "sagesim_kernels.partial_sums",
        "sagesim_kernels.channel_ranges",
        "sagesim_kernels.gluon_compat",
        "sagesim_kernels.operands",
        "sagesim_kernels.support",
        "sagesim_kernels.preparation",
        "sagesim_kernels.portable",
    },
    "sagesim_kernels.dispatch": {
        "sagesim.spec",
        "sagesim_kernels.operands",
        "sagesim_kernels.preparation",
        "sagesim_kernels.portable",
        "sagesim_kernels.ampere",
        "sagesim_kernels.hopper",
    },
    "sagesim_kernels.traced": set(),
    "sagesim_kernels.labels": {"sagesim.spec"},
    "sagesim_kernels.ops": {
        "sagesim.spec",
        "sagesim.problem",
        "sagesim_kernels.labels",
        "sagesim_kernels.launching",
        "sagesim_kernels.operands",
        "sagesim_kernels.dispatch",
    },
    "sagesim_kernels.packing_kernel": {"sagesim_kernels.launching"},
    "sagesim_kernels.packing": {
        "sagesim.checks",
        "sagesim_kernels.traced",
        "sagesim_kernels.packing_kernel",
    },
    "sagesim_kernels.eager": {
        "sagesim.spec",
        "sagesim_kernels.labels",
        "sagesim_kernels.launching",
        "sagesim_kernels.ops",
        "sagesim_kernels.traced",
    },
    "sagesim_kernels.known_calls": {"sagesim.spec", "sagesim_kernels.ops"},
    "sagesim_kernels.api": {
        "sagesim_kernels.packing",
        "sagesim_kernels.target",
        "sagesim_kernels.interpreter",
        "sagesim.spec",
        "sagesim.problem",
        "sagesim_kernels.operands",
        "sagesim_kernels.support",
        "sagesim_kernels.labels",
        "sagesim_kernels.ops",
        "sagesim_kernels.eager",
        "sagesim_kernels.known_calls",
        "sagesim_kernels.traced",
    },
    "sagesim_kernels.tracing": {
        "sagesim.short_repr",
        "sagesim.spec",
        "sagesim.problem",
        "sagesim_kernels.operands",
        "sagesim_kernels.portable",
        "sagesim_kernels.dispatch",
        "sagesim_kernels.launching",
        "sagesim_kernels.api",
    },
    "sagesim_kernels.integrations": {
        "sagesim.checks",
        "sagesim.spec",
        "sagesim.problem",
        "sagesim.emulator",
        "sagesim_kernels.operands",
        "sagesim_kernels.launching",
        "sagesim_kernels.labels",
        "sagesim_kernels.ops",
        "sagesim_kernels.packing",
        "sagesim_kernels.api",
        "sagesim_kernels.support",
    },
    "theory": {
        "sagesim",
        "sagesim.spec",
        "sagesim.problem",
        "sagesim.emulator",
        "sagesim.analysis",
        "sagesim.data",
    },
    "sagesim_kernels.bench": {
        "sagesim_kernels.interpreter",
        "sagesim",
        "sagesim.spec",
        "sagesim.problem",
        "sagesim.emulator",
        "sagesim.models",
        "sagesim.analysis",
        "sagesim.data",
        "sagesim.files",
        "sagesim.terminal",
        "sagesim.allocator",
        "sagesim.command",
        "sagesim_kernels",
        "sagesim_kernels.api",
        "sagesim_kernels.support",
        "sagesim_kernels.measured_speed",
    },
    "sagesim.experiments": {
        "sagesim_kernels.interpreter",
        "sagesim",
        "sagesim.spec",
        "sagesim.problem",
        "sagesim.emulator",
        "sagesim.models",
        "sagesim.analysis",
        "sagesim.files",
        "sagesim_kernels",
        "sagesim_kernels.support",
        "theory",
    },
    "sagesim.cli": {
        "sagesim",
        "sagesim.spec",
        "sagesim.problem",
        "sagesim.data",
        "sagesim.models",
        "sagesim.analysis",
        "sagesim.fuzzing",
        "sagesim.experiments",
        "sagesim.files",
        "sagesim.terminal",
        "sagesim.command",
        "sagesim.printable",
        "sagesim.allocator",
    },
}
"""Each room, and the rooms it may import. "sagesim" is the package's face: its version."""

ARITHMETIC = {"sagesim.emulator", "sagesim.models", "sagesim.analysis", "sagesim.fuzzing"}
"""Rooms whose numbers the kernels are held against."""

FACES = {
    "sagesim.spec",
    "sagesim.problem",
    "sagesim.emulator",
    "sagesim.models",
    "sagesim.analysis",
    "sagesim.fuzzing",
    "sagesim_kernels.operands",
    "sagesim_kernels.cards",
    "sagesim_kernels.portable",
    "sagesim_kernels.hopper",
}
"""Folders of which other rooms see only what `__init__.py` exports."""

STANDARD_LIBRARY_OF_SPEC = {
    *("__future__", "collections", "dataclasses", "difflib", "enum", "functools", "typing"),
}

LAZY = {("sagesim.spec.attention_spec", "sagesim.spec.labels")}
"""Imports inside a function that close a circle: the grammar knows the presets, which know the
spec."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {
    module_name(path): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
MODULES = set(SOURCES)


def resolve(name: str) -> str:
    """The module that an import names, where it names something inside a module."""
    while name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    return name


def all_imports(path: Path) -> set[str]:
    names = imports_of(path, deferred=False) | imports_of(path, deferred=True)
    return {name for name in names if name.partition(".")[0] in PACKAGES}


def room_of(module: str) -> str:
    """ "theory" is one room: its checks are above its statements, which `theory_cycles` sees."""
    parts = module.split(".")
    if parts[0] == "theory" or len(parts) == 1:
        return parts[0]
    return ".".join(parts[:2])


def room_arrows(sources: dict[str, Path]) -> set[tuple[str, str]]:
    """Pairs of different rooms, of which the first imports the second."""
    arrows: set[tuple[str, str]] = set()
    for module, path in sources.items():
        here = room_of(module)
        for name in all_imports(path):
            there = room_of(resolve(name))
            if here != there:
                arrows.add((here, there))
    return arrows


def forbidden(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Arrows that FLOORS does not allow. A package's own face may import all of the package."""
    return {
        (here, there)
        for here, there in arrows
        if here not in PACKAGES[:2] and there not in FLOORS.get(here, set())
    }


def test_every_room_is_listed():
    rooms = {room_of(module) for module in SOURCES} - {"sagesim", "sagesim_kernels"}
    assert rooms == set(FLOORS)


def test_rooms_import_only_what_is_below_them():
    assert forbidden(room_arrows(SOURCES)) == set()


def test_the_list_is_a_ladder():
    order = list(FLOORS)
    for room, allowed in FLOORS.items():
        below = {*order[: order.index(room)], "sagesim", "sagesim_kernels"}
        assert allowed <= below, f"{room} may import upwards: {allowed - below}"


PLANTED = {
    "the emulator imports the kernels": ("sagesim/emulator/new.py", "import sagesim_kernels.api"),
    "the spec imports the problem": ("sagesim/spec/new.py", "from sagesim.problem import autocast"),
    "analysis imports theory": ("sagesim/analysis/new.py", "from theory.noise import noise_scale"),
    "a kernel imports the emulator": (
        "sagesim_kernels/portable/new.py",
        "def late():\n    from sagesim.emulator import quantize",
    ),
    "the emulator imports the analysis": (
        "sagesim/emulator/new.py",
        "from sagesim.analysis import compare",
    ),
    "the portable kernels import Hopper's": (
        "sagesim_kernels/portable/new.py",
        "from sagesim_kernels import hopper",
    ),
    "theory imports the kernels": ("theory/new.py", "from sagesim_kernels import supports"),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_a_planted_arrow_in_the_wrong_direction_fails(tmp_path, planted):
    file, text = planted
    path = tmp_path / "new.py"
    path.write_text(text)
    assert len(forbidden(room_arrows({module_name(ROOT / file): path}))) == 1


@pytest.mark.parametrize(
    "room", sorted(r for r in FLOORS if r not in ("sagesim.experiments", "sagesim.cli"))
)
def test_below_the_top_floor_sagesim_needs_neither_theory_nor_kernels(room):
    if room.startswith("sagesim."):
        assert not {r for r in FLOORS[room] if r.split(".")[0] in ("theory", "sagesim_kernels")}


def test_kernels_share_the_spec_with_the_emulator_and_no_arithmetic():
    # The benchmark measures errors, and an integration runs the emulator if there is no GPU.
    exempt = {"sagesim_kernels.bench", "sagesim_kernels.integrations"}
    for room in FLOORS.keys() - exempt:
        if room.startswith("sagesim_kernels."):
            assert not FLOORS[room] & ARITHMETIC, room


def module_arrows() -> dict[str, set[str]]:
    return {
        module: {resolve(name) for name in all_imports(path)} - {module}
        for module, path in SOURCES.items()
    }


def test_modules_form_no_circle():
    """Faces aside: `__init__.py` imports its whole folder, and only other folders import it."""
    arrows = {
        module: {
            there
            for there in names
            if SOURCES[there].name != "__init__.py" and (module, there) not in LAZY
        }
        for module, names in module_arrows().items()
        if SOURCES[module].name != "__init__.py"
    }
    done: set[str] = set()
    while len(done) < len(arrows):
        ready = {m for m, needs in arrows.items() if m not in done and needs <= done}
        assert ready, f"a circle among {sorted(set(arrows) - done)}"
        done |= ready


def test_other_rooms_see_only_the_face():
    """Gluon is experimental: the dispatcher imports Hopper's kernels when one of them runs."""
    past = {
        (module, name)
        for module, names in module_arrows().items()
        for name in names
        if room_of(name) in FACES and room_of(module) != room_of(name) != name
    }
    passes = (
        "forward",
        "forward_codes",
        "backward",
        "codes_backward",
        "wide_forward",
        "wide_backward",
    )
    kernels = {f"sagesim_kernels.hopper.{which}" for which in passes}
    assert past == {("sagesim_kernels.dispatch", name) for name in kernels}


def test_the_spec_imports_no_torch():
    outside: set[str] = set()
    for module, path in SOURCES.items():
        if room_of(module) == "sagesim.spec":
            outside |= imports_of(path, deferred=False) | imports_of(path, deferred=True)
    assert {name.split(".")[0] for name in outside} - {"sagesim"} <= STANDARD_LIBRARY_OF_SPEC


def test_the_float64_reference_shares_no_code_with_the_emulator():
    names = {resolve(name) for name in all_imports(SOURCES["sagesim.emulator.reference"])}
    assert {room_of(name) for name in names} <= {
        "sagesim.checks",
        "sagesim.shapes",
        "sagesim.short_repr",
        "sagesim.problem",
    }


def test_only_the_benchmark_knows_the_benchmark():
    for module, names in module_arrows().items():
        if not module.startswith("sagesim_kernels.bench"):
            assert not {n for n in names if n.startswith("sagesim_kernels.bench")}, module


def test_pretraining_meets_other_packages_in_one_place():
    """A machine that trains may lack the kernels, and everything that only draws pages."""
    folder = "sagesim.experiments.pretrain."
    for module in (m for m in MODULES if m.startswith(folder)):
        top = {name.split(".")[0] for name in imports_of(SOURCES[module], deferred=False)}
        inside = {name.split(".")[0] for name in imports_of(SOURCES[module], deferred=True)}
        name = module.removeprefix(folder)
        assert "sagesim_kernels" not in top
        assert ("sagesim_kernels" in inside) == name.endswith("attention"), name
        assert ("theory" in top | inside) == name.endswith(("noise", "monitor")), name
        assert not {"jinja2", "markupsafe", "rich", "matplotlib"} & top, name


def test_no_file_is_longer_than_400_lines():
    lengths = {m: len(p.read_text(encoding="utf-8").splitlines()) for m, p in SOURCES.items()}
    assert {m: n for m, n in lengths.items() if n > 400} == {}


def test_no_face_exports_the_name_of_a_module():
    """The exported name would hide the module from attribute access and from monkeypatch."""
    for face in FACES:
        names = imports_of(SOURCES[face], deferred=False)
        exported = {name.rpartition(".")[2] for name in names}
        assert not exported & {m.rpartition(".")[2] for m in MODULES if m.startswith(f"{face}.")}


def test_no_module_name_has_an_underscore_in_front():
    assert [m for m in MODULES if m.split(".")[-1].startswith("_") and "__" not in m] == []
