"""The tables of the runs of experiments A and B, from records with known losses."""

import importlib
import json
from itertools import product
from pathlib import Path

import pytest

from sagesim.experiments.pretrain.run.log import FILE, LogWriter

BUILD = Path(__file__).parents[2] / "docs" / "build"
SEEDS = range(4)


@pytest.fixture
def experiment(monkeypatch):
    monkeypatch.syspath_prepend(str(BUILD))
    return importlib.import_module("experiment")


@pytest.fixture
def record(experiment, tmp_path):
    """Writes the record of a run whose losses are 2, plus its seed, plus something."""

    def record(part, attention, seed, more=0.0, by_sdpa=0.0, leak=0.0, stop=""):
        (each,) = (
            x
            for x in experiment.planned(part)
            if (x.run.attention, x.run.seed) == (attention, seed)
        )

        def evaluation(name, x):
            losses = [2 + seed + x, 4 + seed + x]
            return {
                "attention": name,
                "losses": losses,
                "whole": [1.0, 1.0],
                "cut": [1.0, 1.0 + 2 * leak],
            }

        names = {attention: more, "sdpa": by_sdpa, "kernels:sagebwd": more}
        found = {
            "about": {"device": "Fake 1"},
            "stop": stop,
            "evaluations": [] if stop else [evaluation(*x) for x in names.items()],
        }
        (tmp_path / f"{each.folder}.json").write_text(json.dumps(found))

    return record


def test_without_runs_the_page_says_so(experiment, tmp_path):
    assert experiment.arms(tmp_path) == "**None of the 36 runs has been made.**"
    assert experiment.leak(tmp_path) == "**None of the 16 runs has been made.**"


def test_what_is_made_is_shown_and_the_rest_is_open(experiment, record, tmp_path):
    record("arms", "sdpa", 0)
    record("arms", "kernels:sagebwd", 0, more=0.25, by_sdpa=0.125)
    record("arms", "kernels:factored", 0, stop="step 7: loss nan")
    record("arms", "kernels:sagebwd", 1)
    said = experiment.arms(tmp_path)
    lines = [line for line in said.splitlines() if line.startswith("|")]
    assert lines[0] == "| arm | seed 0 | seed 1 | seed 2 | seed 3 |"
    assert "| `sdpa` | 3.0000 | open | open | open |" in lines
    assert "| `kernels:sagebwd` | +0.2500, +0.1250 | no reference | open | open |" in lines
    assert "| `kernels:factored` | stopped | open | open | open |" in lines
    assert "4 of 36 runs are made, on Fake 1. The rules decide when all" in said


def test_the_rules_decide_when_all_runs_are_made(experiment, record, tmp_path):
    offsets = {"kernels:fpa_bf16": 0.001, "kernels:sagebwd": 0.1, "kernels:sagebwd delta=p": 0.0025}
    for each in experiment.planned("arms"):
        run = each.run
        if run.attention == "kernels:factored" and run.seed == 2:
            record("arms", run.attention, run.seed, stop="step 7: loss nan")
        else:
            x = offsets.get(run.attention, 0.0)
            x = -x if run.attention == "kernels:fpa_bf16" and run.seed % 2 else x
            record("arms", run.attention, run.seed, more=x, by_sdpa=x)
    said = experiment.arms(tmp_path)
    verdict = {
        cells[1].strip(" `"): cells[-2].strip()
        for cells in (line.split("|") for line in said.splitlines()[2:])
        if len(cells) > 3
    }
    assert verdict["kernels:sagebwd"] == verdict["kernels:factored"] == "real gap"
    assert verdict["kernels:sagebwd delta=p"] == "undecided"
    assert verdict["kernels:factored_qk"] == "closes the gap"
    assert "36 of 36 runs are made" in said and "when all" not in said


@pytest.mark.parametrize("stopped", ["sdpa", "kernels:fpa_bf16"])
def test_without_a_reference_the_rules_decide_nothing(experiment, record, tmp_path, stopped):
    for each in experiment.planned("arms"):
        run = each.run
        stop = "step 7: loss nan" if (run.attention, run.seed) == (stopped, 2) else ""
        record("arms", run.attention, run.seed, stop=stop)
    said = experiment.arms(tmp_path)
    assert "verdict |" not in said and "of the twin stopped, so the rules decide nothing" in said


@pytest.fixture
def outcome(experiment):
    return importlib.import_module("experiment_outcome")


@pytest.mark.parametrize(
    ("delta", "scales", "said"),
    [
        (0.1, 0.0, "Finer scales of P and dS alone close it.** d is +0.0000 and +0.0000 nats. So "
        "the second prediction holds in this setting, and the first fails."),
        (0.0, 0.1, "So the first prediction holds"),
        (0.0025, 0.0, "So the predictions are undecided."),
        (0.0, 0.0, "So each prediction is right about one change and wrong about the other."),
        (0.1, 0.1, "So both predictions fail in this setting."),
    ],
)  # fmt: skip
def test_what_the_verdicts_say_about_the_predictions(
    experiment, outcome, record, tmp_path, delta, scales, said
):
    assert outcome.outcome(tmp_path) == "The predictions are open."
    offsets = {"kernels:sagebwd": 0.1, outcome.DELTA: delta, outcome.SCALES: scales}
    for each in experiment.planned("arms"):
        run = each.run
        x = offsets.get(run.attention, 0.0)
        if run.attention == "kernels:fpa_bf16":
            x = -0.001 if run.seed % 2 else 0.001
        record("arms", run.attention, run.seed, more=x, by_sdpa=x)
    found = outcome.outcome(tmp_path)
    assert said in found
    assert "d is +0.1000 and +0.1000 nats. A real gap is above 0.003." in found
    assert "not tested" not in found


def test_without_a_real_gap_of_the_scheme_no_prediction_is_tested(
    experiment, outcome, record, tmp_path
):
    for each in experiment.planned("arms"):
        record("arms", each.run.attention, each.run.seed)
    assert "has no real gap, so the predictions are not tested" in outcome.outcome(tmp_path)


def test_numbers_of_the_models_are_those_of_the_last_step_and_the_largest_layer(
    experiment, outcome, tmp_path
):
    assert outcome.models(tmp_path) == "**No run has been made.**"
    for each in experiment.planned("arms"):
        if each.run.attention == "sdpa" and each.run.seed < 2:
            folder = tmp_path / each.folder
            folder.mkdir()
            log = LogWriter(folder, each.run, {})
            for step, layer in product((800, 1600), range(3)):
                for group, attention, name in outcome.MEASURED:
                    value = step / 80 + layer + each.run.seed
                    log.add(step, group, {name: value}, attention=attention, layer=layer)
            log.save()
            (folder / FILE).rename(tmp_path / f"{each.folder}.parquet")
    assert "| `sdpa` | 22 to 23 |" in outcome.models(tmp_path)


@pytest.mark.parametrize(
    ("leak", "said"),
    [(0.31, "exploits the leak: d is +0.3"), (0.25, "Undecided"), (0.1, "does not exploit")],
)
def test_the_leak(experiment, record, tmp_path, leak, said):
    for each in experiment.planned("leak"):
        sign = -1 if each.run.seed % 2 else 1
        known = {"kernels:fpa_bf16": 0.1 * sign, "kernels:sagebwd": leak}
        record("leak", each.run.attention, each.run.seed, leak=known.get(each.run.attention, 0.0))
    found = experiment.leak(tmp_path)
    assert said in found and "16 of 16 runs are made" in found
    assert "| `kernels:fpa_bf16` | +0.1000 | \u22120.1000 | +0.1000 | \u22120.1000 |" in found


@pytest.fixture
def record_cell(experiment, tmp_path):
    """Writes the records of a cell of experiment B, in which each arm has a known difference."""

    def record_cell(part, offsets, stopped=(), seeds=SEEDS):
        for each in experiment.planned(part, "batch_or_updates"):
            run = each.run
            if run.seed not in seeds:
                continue
            x = offsets.get(run.attention, 0.0)
            if run.attention == "kernels:fpa_bf16":
                x = 0.001 if run.seed % 2 else -0.001
            stop = "step 7: loss nan" if run.attention in stopped else ""
            evaluations = [
                {"attention": name, "losses": [2 + run.seed + y, 4 + run.seed + y]}
                for name, y in {run.attention: x, "sdpa": x / 2 if x > 0.01 else x}.items()
            ]
            found = {
                "about": {"device": "Fake 1"},
                "stop": stop,
                "evaluations": [] if stop else evaluations,
            }
            (tmp_path / f"{each.folder}.json").write_text(json.dumps(found))

    return record_cell


def cells_of(said):
    """The cells of a table by arm."""
    lines = [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("|")]
    return {name.strip("`"): cells for name, *cells in lines[2:]}


def test_open_cells_of_batch_or_updates_are_named(experiment, record_cell, tmp_path):
    said = experiment.cells(tmp_path)
    head = "| arm | 524,288 x 1,600 | 65,536 x 1,600 | 65,536 x 200 | 524,288 x 200 |"
    assert said.splitlines()[0] == head
    table = cells_of(said)
    assert len(table) == 6 and set(map(tuple, table.values())) == {("open",) * 4}
    assert "0 of 96 runs are made. The batch masks the error of `kernels:sagebwd`: open." in said
    assert said.endswith("Updates make its gap: open.")
    record_cell("small_long", {}, seeds=[0, 1])
    said = experiment.cells(tmp_path)
    assert cells_of(said)["kernels:sagebwd"] == ["open", "open, 2 of 4", "open", "open"]
    assert "12 of 96 runs are made, on Fake 1." in said


def test_the_rules_answer_batch_or_updates(experiment, record_cell, tmp_path):
    gap = {"kernels:sagebwd": 0.1, "kernels:factored": 0.0025}
    record_cell("large_long", gap, stopped=["kernels:factored_qk"])
    record_cell("small_long", {})
    said = experiment.cells(tmp_path)
    table = cells_of(said)
    assert table["sdpa"] == ["4.5000", "4.5000", "open", "open"]
    assert table["kernels:fpa_bf16"][0] == "0.0010, 0.0010"
    assert table["kernels:sagebwd"][:2] == [
        "+0.1000, +0.0500: real gap",
        "+0.0000, +0.0000: answers nothing",
    ]
    assert table["kernels:factored"][0] == "+0.0025, +0.0025: undecided"
    assert table["kernels:factored_qk"][0] == "stopped: real gap"
    assert "masks the error of `kernels:sagebwd`: yes. Updates make its gap: open." in said
    record_cell("small_short", {})
    record_cell("large_short", gap)
    said = experiment.cells(tmp_path)
    assert "96 of 96 runs are made" in said and "open," not in said
    assert "masks the error of `kernels:sagebwd`: yes. Updates make its gap: no." in said
