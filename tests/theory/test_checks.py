"""Every statement of `theory` holds, and `python -m theory` reports one that does not."""

import json

import pytest
import torch

from theory.__main__ import main
from theory.checks import CHECKS
from theory.checks.check import bounded, estimated

# The build of docs/theory/index.md measures these as well, and fails if a statement is violated.
SLOW = {"matmul", "ds_bound", "ds_error", "fp8_sums", "int8_dp", "noise"}
LONG = [pytest.mark.slow, pytest.mark.exhaustive]
TOPICS = [
    pytest.param(topic, marks=LONG * (topic in SLOW))
    for topic in CHECKS
    if topic != "budget"  # takes minutes; docs/theory/budget.md measures it at each build
]


@pytest.mark.parametrize("topic", TOPICS)
def test_every_statement_of_a_topic_holds(topic):
    found = list(CHECKS[topic]())
    assert found and {c.topic for c in found} == {topic}
    assert not [c for c in found if not c.holds]


def violated():
    yield bounded("x", "1 <= 0.5", "nothing", bound=torch.tensor(0.5), measured=torch.tensor(1.0))


def test_a_violated_statement_is_reported_and_the_exit_code_is_1(monkeypatch, capsys):
    monkeypatch.setattr("theory.__main__.CHECKS", {"x": violated})
    assert main([]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].split() == [
        "x",
        "1",
        "<=",
        "0.5",
        "nothing",
        "0.5",
        "1",
        "2.000",
        "NO",
    ]
    assert err == "1 of 1 statements do not hold\n"


def test_json_output_has_the_ratio_and_the_verdict(monkeypatch, capsys):
    monkeypatch.setattr("theory.__main__.CHECKS", {"x": violated})
    assert main(["x", "--json"]) == 1
    (record,) = json.loads(capsys.readouterr().out)
    assert record["statement"] == "1 <= 0.5" and record["ratio"] == 2.0 and not record["holds"]


def test_the_error_names_an_unknown_topic(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["nonsense"])
    assert stopped.value.code == 2
    assert "no topic is called 'nonsense'; there are " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bound", "measured", "holds"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0], [0.5, 2.1], False),
        ([0.0, 1.0], [0.0, 0.5], True),
        ([0.0, 1.0], [1e-30, 0.5], False),
        ([float("nan"), 1.0], [0.0, 0.5], False),
        ([1.0, 1.0], [0.0, float("nan")], False),
        ([float("inf"), 1.0], [5.0, 0.5], True),
    ],
)
def test_a_bound_holds_if_it_holds_for_every_element(bound, measured, holds):
    check = bounded("x", "", "", bound=torch.tensor(bound), measured=torch.tensor(measured))
    assert check.holds is holds


@pytest.mark.parametrize(
    ("predicted", "measured", "holds"),
    [(2.0, 2.19, True), (2.0, 2.3, False), (2.0, 1.7, False), (0.0, 0.0, True), (0.0, 1.0, False)],
)
def test_an_estimate_holds_within_its_tolerance(predicted, measured, holds):
    check = estimated("x", "", "", predicted=predicted, measured=measured, within=0.1)
    assert check.holds is holds
