"""The planted bugs of scripts/mutate.py are bugs of the kernels as they are."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def test_the_tests_that_bugs_name_exist():
    plan = SCRIPT["HOPPER"]
    assert all(bug.tests for bug in plan.bugs)
    named = SCRIPT["named_tests"](plan.bugs, plan)
    assert len(named) == len({*named}) > 20
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    found = subprocess.run(
        [*command, *plan.tests], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert {*named} <= {*re.findall(r"^\S+::.*$", found, re.M)}


def test_what_runs_without_a_bug():
    plan, controls = SCRIPT["HOPPER"], SCRIPT["controls"]
    named = SCRIPT["named_tests"](plan.bugs, plan)
    parts = controls(plan.bugs, plan, 7)
    assert len(parts) == 7
    assert sorted(test for part in parts for test in part) == sorted(named)
    assert controls(SCRIPT["BUGS"], SCRIPT["INTERPRETED"], 7) == [SCRIPT["TESTS"]]


def test_the_record_has_each_bug_as_soon_as_it_was_planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The device may be lost, or its time end, before the last bug."""
    main, out = SCRIPT["main"], tmp_path / "record.json"
    names = [bug.name for bug in SCRIPT["BUGS"] if "scales" in bug.name][:4]
    ran: list[Any] = []

    def run(bug: Any, plan: Any, tests: list[str]) -> dict[str, object]:
        if len(ran) == 2:  # one job: the first two have ended
            raise RuntimeError("the time ended")
        ran.append(bug)
        return {"name": bug.name, "file": bug.file, "caught": True, "by": tests[0], "seconds": 0.1}

    monkeypatch.setitem(main.__globals__, "run", run)
    command = ["mutate.py", "--jobs", "1", "--out", str(out), "--only", *names]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(RuntimeError, match="the time ended"):
        main()
    record = json.loads(out.read_text())
    assert [bug["name"] for bug in record["bugs"]] == names[:2]
    assert record["caught"] == 2
    assert capsys.readouterr().out.count("caught") == 2
    ran.clear()
    monkeypatch.setitem(main.__globals__, "controls", lambda *_: [])
    monkeypatch.setattr(sys, "argv", [*command, "--add"])
    assert main() == 0
    assert [bug.name for bug in ran] == names[2:]
    assert [bug["name"] for bug in json.loads(out.read_text())["bugs"]] == names
