"""scripts/qk_gain.py finds a gain by bisection and records every attempt; here on a CPU."""

import io
import json
import math
import runpy
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest

from sagesim.experiments.pretrain.plan.plan import Plan
from sagesim.experiments.pretrain.text.preparation import prepare
from sagesim.terminal import Failure
from tests.sagesim.experiments.pretrain.plan.test_plan import FOLDER

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "tests" / "sagesim" / "experiments" / "pretrain" / "pages"
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "qk_gain.py"))
TARGET = SCRIPT["TARGET"]

PLAN = """
margin = 0.02
seeds = [0]

[base]
size = "tiny"
context = 32
warmup = 0.5
evaluate_every = 0.5
evaluate_sequences = 3
monitor_every = 1.0
monitor_sequences = 2
monitor = ["kernels:sagebwd"]
precision = "fp32"
qk_norm = true

[scale.cells]
small_short = { tokens_per_step = 64, steps = 2 }

[speed]
model = 1e9
sdpa = 1e9
kernels = 5e8
emulator = 1e8
overhead = 10

[part.small_short]
question = "Is there a gap?"

[[part.small_short.grid]]
attention = ["sdpa", "kernels:sagebwd"]
regime = "small_short"
bias_sequences = 2
"""


pytestmark = pytest.mark.usefixtures("one_thread")


class Text:
    """The corpus of the shipped plan, without its tokens."""

    id, padded_vocabulary = "af14e52ce502569f", 16384


@pytest.fixture(scope="module")
def run():
    plan = Plan.read(FOLDER / "batch_or_updates.toml")
    assert plan.corpus == Text.id
    return SCRIPT["run_to_train"](plan, Text)


class Attempts:
    """Errors that grow with the gain. The layer in the middle is the worst."""

    def __init__(self, error):
        self.error, self.gains = error, []

    def __call__(self, run):
        self.gains.append(run.qk_gain)
        x = self.error(run.qk_gain)
        stop = "" if math.isfinite(x) else "step 7: loss nan"
        return {"errors": [] if stop else [x / 2, x, x / 3], "stop": stop}


def search(out, run, error, **options):
    """The gain that is found, and the gains that were tried."""
    attempts = Attempts(error)
    return SCRIPT["search"](out, run, attempts, command="a command", **options), attempts.gains


def squared(gain):
    """The paper's error at a gain of 5."""
    return TARGET * (gain / 5) ** 2


def test_the_trained_run_is_that_of_the_cell(run):
    assert (run.attention, run.tokens_per_step, run.steps, run.seed) == ("sdpa", 65_536, 200, 0)
    assert run.qk_norm and run.warmup == 5 and not run.monitor and not run.bias_sequences


def test_a_gain_within_ten_percent_of_the_target_is_found(run, tmp_path):
    gain, tried = search(tmp_path / "a.json", run, squared)
    assert tried == [1.0, 16.0, 4.0, 8.0, 5.657, 4.757] and gain == 4.757
    assert abs(squared(gain) - TARGET) <= 0.1 * TARGET < abs(squared(5.657) - TARGET)
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["gain"] == gain and [x["gain"] for x in document["tried"]] == tried
    assert document["setting"]["target"] == TARGET and document["command"] == "a command"
    assert document["tried"][0]["errors"] == pytest.approx(
        [x * squared(1) for x in (0.5, 1, 1 / 3)]
    )


def test_an_end_of_the_bracket_may_be_the_gain(run, tmp_path):
    assert search(tmp_path / "a.json", run, squared, low=5.0, high=9.0)[0] == 5.0


def test_a_search_that_was_killed_goes_on(run, tmp_path):
    out = tmp_path / "a.json"

    def killed(gain):
        if gain == 5.657:
            raise KeyboardInterrupt
        return squared(gain)

    with pytest.raises(KeyboardInterrupt):
        search(out, run, killed)
    assert json.loads(out.read_text())["gain"] is None
    gain, tried = search(out, run, squared)
    assert (gain, tried) == (4.757, [5.657, 4.757])
    assert search(out, run, squared) == (gain, [])
    with pytest.raises(ValueError, match="of another setting; move it away"):
        search(out, replace(run, seed=1), squared)


def test_a_gain_whose_training_stops_is_too_large(run, tmp_path):
    gain, tried = search(tmp_path / "a.json", run, lambda x: squared(x) if x < 8 else math.inf)
    assert gain == 4.757 and tried[:4] == [1.0, 16.0, 4.0, 8.0]
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["tried"][1]["stop"] == "step 7: loss nan"


@pytest.mark.parametrize(
    "error, message",
    [
        (lambda _: 0.1, "outside the bracket: the error is 0.1000 with the gain 1 and 0.1000 with"),
        (lambda _: 0.5, "outside the bracket: the error is 0.5000 with the gain 1 and 0.5000 with"),
        (lambda x: 1 / x, "outside the bracket: the error is 1.0000 with the gain 1 and 0.0625"),
        (lambda x: 0.1 if x < 3 else 0.9, "jumps from 0.1000 with the gain 2.9.* to 0.9000 with 3"),
    ],
)
def test_a_target_that_no_gain_meets_is_an_error(error, message, run, tmp_path):
    with pytest.raises(ValueError, match=message):
        search(tmp_path / "a.json", run, error)
    assert json.loads((tmp_path / "a.json").read_text())["gain"] is None


def test_an_error_that_is_not_finite_is_refused(run, tmp_path):
    def attempt(_run):
        return {"errors": [0.1, math.nan], "stop": ""}

    with pytest.raises(ValueError, match=r"gain 1: an error of dQ by layer is in \[0.1, nan\]"):
        SCRIPT["search"](tmp_path / "a.json", run, attempt, command="a command")


@pytest.fixture(scope="module")
def main(tmp_path_factory):
    """Runs the script on a small model; returns what it prints."""
    root = tmp_path_factory.mktemp("gain")
    prepare(PAGES, root / "corpus", vocabulary=500, validation=0.1)
    (root / "plan.toml").write_text(PLAN)

    def main(out, plan=root / "plan.toml"):
        """With fewer sequences: each takes a tenth of a second."""
        words = [root / "corpus", out, "--plan", plan, "--micro-batch", 2]
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as said:
            patch.setattr(sys, "argv", ["qk_gain.py", *map(str, words)])
            patch.setitem(SCRIPT["main"].__globals__, "SEQUENCES", 2)
            assert SCRIPT["main"]() == 0
        return said.getvalue()

    return main


def test_the_script_trains_measures_and_prints_the_line(main, tmp_path):
    out = tmp_path / "a.json"
    said = main(out)
    document = json.loads(out.read_text())
    assert said.endswith(f"\nqk_gain = {document['gain']}\n")
    by_gain = {each["gain"]: each["errors"] for each in document["tried"]}
    assert {len(errors) for errors in by_gain.values()} == {2}
    assert max(by_gain[document["gain"]]) == pytest.approx(TARGET, rel=0.1)
    assert by_gain[1.0] < by_gain[16.0]
    assert {each["about"]["device"] for each in document["tried"]} == {"CPU"}
    measured = tmp_path / "plan.toml"
    measured.write_text(PLAN.replace("qk_norm = true", f"qk_norm = true\n{said.splitlines()[-1]}"))
    again = main(out, measured)
    assert "step" not in again and again.splitlines()[-1] == said.splitlines()[-1]


def test_the_corpus_of_the_plan_is_needed(main, tmp_path):
    with pytest.raises(Failure, match="for corpus af14e52ce502569f; this corpus is"):
        main(tmp_path / "a.json", FOLDER / "batch_or_updates.toml")
    assert not list(tmp_path.iterdir())
