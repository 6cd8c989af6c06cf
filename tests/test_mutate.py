"""The planted bugs of scripts/mutate.py are bugs of the kernels as they are."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "mutate.py"))
BUGS = (*SCRIPT["BUGS"], *SCRIPT["HOPPER_BUGS"])


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_place_of_a_planted_bug_exists(bug):
    source = (ROOT / "sagesim_kernels" / bug.file).read_text()
    assert source.count(bug.old) == bug.times
    assert bug.new != bug.old


def test_names_are_unique():
    assert len({bug.name for bug in BUGS}) == len(BUGS)
