"""Which room imports which, read from the sources."""

from pathlib import Path

import pytest

import sagesim.experiments.pretrain
from tests.support.sources import assert_no_cycle, imports_of

PACKAGE = Path(sagesim.experiments.pretrain.__file__).parent
NAME = "sagesim.experiments.pretrain"
ROOMS = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def imports(room, *, deferred):
    return imports_of(PACKAGE / f"{room}.py", deferred=deferred)


def test_no_cycles():
    arrows = {}
    for room in ROOMS:
        names = imports(room, deferred=False) | imports(room, deferred=True)
        inside = {n.removeprefix(f"{NAME}.") for n in names if n.startswith(f"{NAME}.")}
        arrows[room] = inside
    # `from sagesim.experiments.pretrain import checkpoint` names the package.
    for room in ("train", "trained"):
        arrows[room] = arrows[room] | {"checkpoint"}
    assert_no_cycle(arrows)


@pytest.mark.parametrize("room", ROOMS)
def test_outside_packages_are_met_in_one_place(room):
    """Kernels only where they are asked for; theory where its statistics are used."""
    top = {name.split(".")[0] for name in imports(room, deferred=False)}
    inside = {name.split(".")[0] for name in imports(room, deferred=True)}
    assert "sagesim_kernels" not in top
    assert ("sagesim_kernels" in inside) == (room == "attention")
    assert ("theory" in top | inside) == (room in ("noise", "monitor"))
    # A machine that trains may lack them: what is written there is read elsewhere.
    assert not {"jinja2", "markupsafe", "rich", "matplotlib"} & top


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_are_small(room):
    lines = (PACKAGE / f"{room}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 300
