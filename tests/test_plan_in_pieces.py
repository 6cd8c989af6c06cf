"""scripts/plan_in_pieces.py trains a plan in pieces that merge; here on a CPU."""

import io
import json
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import sagesim
from sagesim.experiments.pretrain.plan.plan import Plan
from sagesim.experiments.pretrain.run.log import Log
from sagesim.experiments.pretrain.text.preparation import prepare
from sagesim.files import locked
from sagesim.terminal import Failure

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "tests" / "sagesim" / "experiments" / "pretrain" / "pages"
PLANS = Path(sagesim.__file__).parent / "experiments" / "pretrain" / "plan"
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "plan_in_pieces.py"))

PLAN = """
margin = 0.02
seeds = [0, 1]

[base]
size = "tiny"
context = 32
warmup = 0.5
evaluate_every = 1.0
evaluate_sequences = 3
monitor_every = 1.0
monitor_sequences = 2
monitor = ["kernels:sagebwd"]
precision = "fp32"

[scale.mini]
small = { tokens_per_step = 64, steps = 2 }

[speed]
model = 1e9
sdpa = 1e9
kernels = 5e8
emulator = 1e8
overhead = 10

[part.arms]
question = "Does it run?"

[[part.arms.grid]]
attention = ["sdpa", "kernels:factored"]
regime = "small"

[part.leak]
question = "Does it leak?"

[[part.leak.grid]]
attention = ["sdpa", "kernels:causal_safe"]
regime = "small"
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "corpus"
    prepare(PAGES, folder, vocabulary=500, validation=0.1)
    return folder


@pytest.fixture(scope="module")
def script(corpus, tmp_path_factory):
    """Runs a piece; returns what it prints."""
    plan = tmp_path_factory.mktemp("plan") / "plan.toml"
    plan.write_text(PLAN)

    def run(records, minutes, *words):
        words = (plan, corpus, records, "--minutes", minutes, "--micro-batch", 2, *words)
        line = ["plan_in_pieces.py", "--emulate", "--cuts", "2", *map(str, words)]
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as said:
            patch.setattr(sys, "argv", line)
            assert SCRIPT["main"]() == 0
        return said.getvalue()

    return run


@pytest.fixture(scope="module")
def records(script, tmp_path_factory):
    """The records of all runs, made in one piece."""
    folder = tmp_path_factory.mktemp("records")
    said = script(folder, 10)
    assert said.startswith("0 of 6 runs are recorded")
    assert "\ncell of 64 tokens per step, 2 steps: complete, 6 of 6 runs are recorded\n" in said
    assert said.endswith("0 of 6 runs are missing\n")
    return folder


@pytest.mark.parametrize(
    "words, message",
    [
        (["--scale", "nope"], "no scale is called 'nope'; the scales are mini"),
        (["--micro-batch", "3"], "do not divide"),
    ],
)
def test_options_that_do_not_fit_end_with_one_line(script, tmp_path, words, message):
    with pytest.raises(Failure, match=message):
        script(tmp_path, 10, *words)
    assert list(tmp_path.iterdir()) == []


def test_pieces_merge_and_no_run_is_repeated(script, records, tmp_path):
    names = sorted(path.name for path in records.glob("[!.]*"))
    assert len(names) == 12
    for name in names[1:]:  # without the losses of one run, as if it had been stopped
        (tmp_path / name).write_bytes((records / name).read_bytes())
    said = script(tmp_path, 10)
    assert said.startswith("5 of 6 runs are recorded") and said.count("held-out loss") == 1
    for name in names[2:]:
        assert (tmp_path / name).read_bytes() == (records / name).read_bytes()
    again, before = (json.loads((x / names[0]).read_text()) for x in (tmp_path, records))
    assert again["evaluations"] == before["evaluations"]


def test_processes_share_the_runs(script, records, tmp_path):
    """Another process makes the second run; the first two that are left are made here."""
    names = sorted(path.name for path in records.glob("*.json"))
    for name in names[3:]:
        (tmp_path / name).write_bytes((records / name).read_bytes())
    with locked(tmp_path / names[1].removesuffix(".json")):
        said = script(tmp_path, 10)
    made = [name for name in names[:3] if f"{name.removesuffix('.json')}: held-out loss" in said]
    assert made == [names[0], names[2]]
    assert said.endswith("1 of 6 runs are missing\n") and not (tmp_path / names[1]).exists()
    assert not [path for path in tmp_path.glob(".*") if names[1] not in path.name]


def test_what_a_run_leaves(records):
    found = {}
    for path in records.glob("[!.]*.json"):
        document = json.loads(path.read_text())
        log = Log.read(path.with_suffix(".parquet"))
        assert json.loads(log.run.to_json()) == document["run"]
        assert log.is_finished and not document["stop"]
        own = document["evaluations"][0]
        assert own["attention"] == log.run.attention
        last = log.curve("evaluation", "loss")[-1][1]
        assert sum(own["losses"]) / 3 == pytest.approx(last, rel=1e-5)
        found[log.run.attention, log.run.seed] = document
    assert len(found) == 6
    names = {
        attention: [each["attention"] for each in document["evaluations"]]
        for (attention, seed), document in found.items()
        if seed
    }
    assert names == {
        "sdpa": ["sdpa", "emulator:sagebwd"],
        "emulator:factored": ["emulator:factored", "sdpa"],
        "emulator:causal_safe": ["emulator:causal_safe", "sdpa", "emulator:sagebwd"],
    }
    assert [found["sdpa", 0]["cuts"], found["emulator:factored", 0]["cuts"]] == [2, 0]
    for each in found["sdpa", 0]["evaluations"]:
        assert len(each["whole"]) == len(each["cut"]) == 3
    assert "cut" not in found["emulator:factored", 0]["evaluations"][0]


def test_no_run_begins_that_would_not_end_in_time(script, tmp_path):
    said = script(tmp_path, 1, "--first", 2)
    assert "64 tokens per step, 2 steps: open, 0 of 6 runs are recorded" in said
    assert "another run does not fit" in said and "6 of 6 runs are missing" in said
    assert not list(tmp_path.glob("*.parquet"))


def test_a_run_that_does_not_end_in_time_leaves_nothing(script, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    said = script(tmp_path / "records", 1e-6, "--first", -1)
    assert "given up after 1 of 2 steps" in said and "6 of 6 runs are missing" in said
    assert not list((tmp_path / "records").iterdir()) and not list(scratch.iterdir())


def test_the_cells_of_batch_or_updates_come_in_the_order_of_its_page():
    plan = Plan.read(PLANS / "batch_or_updates.toml")

    class Text:
        id, padded_vocabulary = plan.corpus, 16384

    every = SCRIPT["pieces"](plan, Text, "cells", {}, 64)
    cells = [(524_288, 1600), (65_536, 1600), (65_536, 200), (524_288, 200)]
    assert [(x.cell, x.planned.run.seed) for x in every] == [
        (cell, seed) for cell in cells for seed in range(4) for _ in range(6)
    ]
    assert not any(x.cuts for x in every)


def test_the_runs_of_our_plan_come_seed_by_seed():
    plan = Plan.read(PLANS / "delta_or_scales.toml")

    class Text:
        id, padded_vocabulary = plan.corpus, 16384

    every = SCRIPT["pieces"](plan, Text, "100M", {}, 64)
    assert [x.planned.run.seed for x in every] == [seed for seed in range(4) for _ in range(10)]
    first = [x.planned.run.attention for x in every[:10]]
    assert first[:4] == ["sdpa", "kernels:fpa_bf16", "kernels:sagebwd", "kernels:sagebwd delta=p"]
    assert first[-1] == "kernels:causal_safe"
    assert {x.planned.run.attention for x in every if x.cuts} == {*first[:3], first[-1]}
