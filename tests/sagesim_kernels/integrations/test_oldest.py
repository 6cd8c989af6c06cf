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
FAST = ["-m", "not slow and not exhaustive"]
RUNS = {
    ("transformers",): [*FAST, "test_transformers.py", "test_transformers_arguments.py"],
    ("diffusers",): [*FAST, "test_diffusers.py"],
    ("trl", "peft"): ["-m", "not exhaustive", "test_training.py"],
}
"""The tests of frameworks, as pytest's arguments."""

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def installed():
    if not INSTALLED.exists():
        pytest.skip("they are not installed: make .venv/.frameworks-oldest")


def test_they_are_the_lower_bounds():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {x.name: x.version for x in distributions(path=[str(INSTALLED)])}
    for name in (name for names in RUNS for name in names):
        (bound,) = (
            requirement.removeprefix(f"{name}>=")
            for requirement in extras["optional-dependencies"][name]
            if requirement.startswith(name)
        )
        assert re.fullmatch(rf"{re.escape(bound)}(\.0)*", found[name])


@pytest.mark.parametrize("names", RUNS, ids=" and ".join)
def test_the_tests_pass_with_them(names):
    """In a process that finds them first; with warnings, which newer versions mend."""
    path = os.pathsep.join([str(INSTALLED), str(ROOT)])
    checks = "".join(f"assert {x}.__file__.startswith({str(INSTALLED)!r})\n" for x in names)
    words = ["-q", "-W", "ignore", *RUNS[names]]
    code = f"import sys, pytest, {', '.join(names)}\n{checks}sys.exit(pytest.main({words}))\n"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
