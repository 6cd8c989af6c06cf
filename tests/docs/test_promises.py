"""Every promise names tests that exist, and the page shows all promises."""

import re
from pathlib import Path

import pytest

from docs.build import promises

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
NAMED = sorted({test for promise in promises.every() for test in promise.tests})


@pytest.mark.parametrize("test", NAMED)
def test_a_named_test_exists(test):
    name = test.split("::")[-1]
    assert name.startswith("test_")
    assert promises.find(test).name == name


@pytest.mark.parametrize(
    "test",
    [
        "tests/docs/test_promises.py",
        "tests/docs/no_such_file.py::test_a_named_test_exists",
        "tests/docs/test_promises.py::test_that_is_not_here",
        "tests/docs/test_promises.py::TestNone::test_a_named_test_exists",
    ],
)
def test_a_test_that_does_not_exist_is_found_out(test):
    with pytest.raises(LookupError, match=re.escape(test)):
        promises.find(test)


def test_every_promise_has_a_test_and_is_one_sentence():
    for promise in promises.every():
        assert promise.tests, promise.text
        assert re.fullmatch(r"[A-Z`].*[^.]\.", promise.text), promise.text
        assert not re.search(r"\. [A-Z]", promise.text), promise.text


def test_the_page_names_the_same_tests():
    assert sorted(set(re.findall(r"`(tests/\S+::\S+)`", PAGE))) == NAMED
    for promise in promises.every():
        assert f"**{promise.text}**" in PAGE


@pytest.mark.parametrize(
    ("test", "where"),
    [
        ("tests/docs/test_promises.py::test_a_named_test_exists", {"CPU"}),
        ("tests/sagesim_kernels/test_fuzz.py::test_kernels_meet_the_contract", {"CPU", "GPU"}),
        ("tests/sagesim_kernels/hopper/test_in_16_bit.py::test_kernels_meet_the_contract", {"GPU"}),
    ],
)
def test_marks_say_where_a_test_runs(test, where):
    assert promises.devices(test) == where


def test_figures_are_read_from_the_tests():
    path = "tests/theory/test_attention_bound.py"
    assert promises.examples(f"{path}::test_the_emulator_stays_within_the_bound") == 300
    assert promises.constant("tests/sagesim_kernels/test_fuzz.py", "CASES")["fast"] == 54
    with pytest.raises(LookupError, match="examples"):
        promises.examples("tests/docs/test_promises.py::test_a_named_test_exists")
    with pytest.raises(LookupError, match="NOTHING"):
        promises.constant(path, "NOTHING")
