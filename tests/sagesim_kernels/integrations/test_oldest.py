"""The integrations with the oldest versions that pyproject.toml admits."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
INSTALLED = ROOT / ".venv" / ".frameworks-oldest"
FRAMEWORKS = {
    "transformers": ("test_transformers", "test_transformers_arguments", "test_training"),
    "diffusers": ("test_diffusers",),
}
"""Each with the modules of its tests."""

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def installed():
    if not INSTALLED.exists():
        pytest.skip("they are not installed: make .venv/.frameworks-oldest")


def test_they_are_the_lower_bounds():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {x.name: x.version for x in distributions(path=[str(INSTALLED)])}
    for name in FRAMEWORKS:
        (requirement,) = extras["optional-dependencies"][name]
        bound = requirement.removeprefix(f"{name}>=")
        assert re.fullmatch(rf"{re.escape(bound)}(\.0)*", found[name])


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_tests_pass_with_them(name):
    """In a process that finds them first; with warnings, which newer versions mend."""
    path = os.pathsep.join([str(INSTALLED), str(ROOT)])
    tests = [str(Path(__file__).with_name(f"{module}.py")) for module in FRAMEWORKS[name]]
    words = ["-q", "-W", "ignore", "-m", "not slow and not exhaustive", *tests]
    code = (
        f"import sys, pytest, {name}\n"
        f"assert {name}.__file__.startswith({str(INSTALLED)!r})\n"
        f"sys.exit(pytest.main({words}))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
