"""The planted bugs of scripts/mutate.py are bugs of the kernels as they are."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "mutate.py"))
BUGS = (*SCRIPT["BUGS"], *SCRIPT["AMPERE_BUGS"], *SCRIPT["HOPPER_BUGS"])


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_place_of_a_planted_bug_exists(bug):
    source = (ROOT / "sagesim_kernels" / bug.file).read_text()
    assert source.count(bug.old) == bug.times
    assert bug.new != bug.old


def test_names_are_unique():
    assert len({bug.name for bug in BUGS}) == len(BUGS)


@pytest.mark.parametrize(("plan", "several"), [("AMPERE", 5), ("HOPPER", 20)])
def test_the_tests_that_bugs_name_exist(plan: str, several: int):
    plan = SCRIPT[plan]
    assert all(bug.tests for bug in plan.bugs)
    named = SCRIPT["named_tests"](plan.bugs)
    assert len(named) == len({*named}) > several
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    found = subprocess.run(
        [*command, *plan.tests], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert {*named} <= {*re.findall(r"^\S+::.*$", found, re.M)}


def test_what_runs_without_a_bug():
    plan, controls = SCRIPT["HOPPER"], SCRIPT["controls"]
    named = SCRIPT["named_tests"](plan.bugs)
    parts = controls(plan.bugs, plan, 7)
    assert len(parts) == 7
    assert sorted(test for part in parts for test in part) == sorted(named)
    assert controls((), plan, 7) == []
    rest = controls(plan.bugs, plan, 7, clean=parts[0])
    assert sorted(test for part in rest for test in part) == sorted({*named} - {*parts[0]})
    assert controls(plan.bugs, plan, 7, clean=named) == []
    assert controls(SCRIPT["BUGS"], SCRIPT["INTERPRETED"], 7) == [SCRIPT["TESTS"]]
    assert controls(SCRIPT["BUGS"], SCRIPT["INTERPRETED"], 7, clean=SCRIPT["TESTS"]) == []


def test_the_time_without_a_bug_is_that_of_all_tests():
    """With one job, one part has the tests of every bug."""
    plan = SCRIPT["HOPPER"]
    (part,) = SCRIPT["controls"](plan.bugs, plan, 1)
    assert plan.limit(None, part) == len(part) * plan.limit(plan.bugs[0], part)
    assert SCRIPT["INTERPRETED"].limit(None, SCRIPT["TESTS"]) is None


def test_a_bug_has_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a mark, if a file that is copied has changed since."""
    commit = SCRIPT["commit"].__wrapped__
    monkeypatch.setitem(commit.__globals__, "ROOT", tmp_path)
    assert commit() == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    copied = [tmp_path / name for name in SCRIPT["COPIED"]]
    for path in copied:
        path.write_text("as it is")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    found = commit()
    assert re.fullmatch("[0-9a-f]{7,}", found)
    (tmp_path / "record.json").write_text("of a run")
    assert commit() == found
    copied[1].write_text("other")
    assert commit() == found + "+"


def test_a_record_is_continued_only_if_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["mutate.py", "--add"])
    with pytest.raises(SystemExit):
        SCRIPT["main"]()
    assert "--add needs --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "content", "message"),
    [
        (["--only", "scales", "nosuchbug"], None, "--only 'nosuchbug': no name of the"),
        (["--jobs", "0"], None, "--jobs 0: not a positive number"),
        (["--out", "{out}", "--only", "scales"], '{"bugs": []}', "{out}: it exists; --add"),
        (["--out", "{out}", "--add"], "{", "{out}: cannot be read as JSON"),
        (["--out", "{out}", "--add"], "[1]", "{out}: not a record of mutate.py"),
        (["--out", "{out}", "--add"], '{"bugs": [1]}', "{out}: not a record of mutate.py"),
    ],
)
def test_wrong_input_is_one_line_and_loses_nothing(
    options: list[str], content: str | None, message: str, tmp_path: Path
):
    out = tmp_path / "record.json"
    if content is not None:
        out.write_text(content)
    command = [sys.executable, str(ROOT / "scripts" / "mutate.py")]
    found = subprocess.run(
        [*command, *(x.replace("{out}", str(out)) for x in options)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert found.returncode == 2 and found.stdout == ""
    assert found.stderr.count("\n") == 1
    assert message.replace("{out}", str(out)) in found.stderr
    assert content is None or out.read_text() == content


def test_the_record_has_each_bug_as_soon_as_it_was_planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The device may be lost, or its time end, before the last bug."""
    main, out = SCRIPT["main"], tmp_path / "record.json"
    names = [bug.name for bug in SCRIPT["BUGS"] if "scales" in bug.name][:4]
    ran: list[Any] = []
    passes = False

    def run(bug: Any, plan: Any, tests: list[str]) -> dict[str, object]:
        if len(ran) == 2:  # one job: the first two have ended
            raise RuntimeError("the time ended")
        ran.append(bug)
        if bug is None:
            return {"name": "none", "file": "", "caught": not passes, "by": "", "seconds": 0.1}
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
    assert record["passed_without_a_bug"] == []
    command.append("--add")
    ran.clear()
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(RuntimeError, match="the time ended"):  # before the run without a bug
        main()
    assert [bug.name for bug in ran] == names[2:]
    assert [bug["name"] for bug in json.loads(out.read_text())["bugs"]] == names
    # Only the run without a bug is missing. While its tests fail, it is not recorded.
    for outcome, status, clean in ((False, 1, []), (True, 0, SCRIPT["TESTS"])):
        passes = outcome
        ran.clear()
        capsys.readouterr()
        assert main() == status
        assert ran == [None]
        printed = capsys.readouterr().out
        assert "all of these bugs are recorded" in printed and "4 of 4 planted" in printed
        assert json.loads(out.read_text())["passed_without_a_bug"] == clean
    ran.clear()
    assert main() == 0 and not ran
    assert "so are their tests without a bug" in capsys.readouterr().out
    # A bug that the script no longer has is dropped with the next that is planted.
    record = json.loads(out.read_text())
    record["bugs"][0]["name"] = "gone"
    out.write_text(json.dumps(record))
    assert main() == 0 and [bug.name for bug in ran] == names[:1]
    record = json.loads(out.read_text())
    assert [bug["name"] for bug in record["bugs"]] == names and record["caught"] == 4
    assert "4 of 4 planted bugs caught" in capsys.readouterr().out
