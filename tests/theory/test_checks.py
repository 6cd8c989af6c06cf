"""Every statement holds, and the command that says so."""

import json

import pytest
import torch

from theory.__main__ import main
from theory.check import bounded, estimated
from theory.checks import CHECKS

TOPICS = [pytest.param(t, marks=pytest.mark.long if t == "budget" else ()) for t in CHECKS]


@pytest.mark.parametrize("topic", TOPICS)
def test_every_statement_of_a_topic_holds(topic):
    found = list(CHECKS[topic]())
    assert found and {c.topic for c in found} == {topic}
    assert not [c for c in found if not c.holds]


def violated():
    yield bounded("x", "1 <= 0.5", "nothing", bound=torch.tensor(0.5), measured=torch.tensor(1.0))


def test_a_violated_statement_is_told_and_counts(monkeypatch, capsys):
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


def test_json(monkeypatch, capsys):
    monkeypatch.setattr("theory.__main__.CHECKS", {"x": violated})
    assert main(["x", "--json"]) == 1
    (record,) = json.loads(capsys.readouterr().out)
    assert record["statement"] == "1 <= 0.5" and record["ratio"] == 2.0 and not record["holds"]


def test_an_unknown_topic_is_named(capsys):
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
def test_a_bound_holds_where_every_element_does(bound, measured, holds):
    check = bounded("x", "", "", bound=torch.tensor(bound), measured=torch.tensor(measured))
    assert check.holds is holds


@pytest.mark.parametrize(
    ("predicted", "measured", "holds"),
    [(2.0, 2.19, True), (2.0, 2.3, False), (2.0, 1.7, False), (0.0, 0.0, True), (0.0, 1.0, False)],
)
def test_an_estimate_holds_within_what_it_claims(predicted, measured, holds):
    check = estimated("x", "", "", predicted=predicted, measured=measured, within=0.1)
    assert check.holds is holds
