"""The rules that decide about gaps, on numbers with known answers."""

import numpy as np
import pytest

from sagesim.experiments.pretrain.report.rules import Verdict, batch_or_updates, decide

SEEDS = (0, 1, 2, 3)


def losses(**offsets):
    """Losses of arms that differ from sdpa by an offset for each seed, on 8 sequences."""
    drawn = np.random.default_rng(0).normal(3.0, 1.0, (4, 8))
    arms = {"sdpa": (0.0,) * 4, "twin": (0.01, -0.01, 0.01, -0.01)} | offsets
    return {
        arm: {seed: list(drawn[seed] + each[seed]) for seed in SEEDS} for arm, each in arms.items()
    }


def decided(found, **options):
    gaps = decide(found, twin="twin", scheme="sagebwd", **options)
    return {arm: gap.verdict for arm, gap in gaps.items()}


def even(x):
    return (x - 0.01, x + 0.01, x, x)


def test_a_gap_is_real_above_three_deviations_and_closed_up_to_two():
    found = losses(sagebwd=even(0.05), large=even(0.0301), small=even(0.0199), between=even(0.0299))
    gaps = decide({"own": found, "sdpa": found}, twin="twin", scheme="sagebwd")
    assert gaps["sagebwd"].differences["own"] == pytest.approx(0.05)
    assert gaps["sagebwd"].deviations["sdpa"] == pytest.approx(0.01)
    assert decided({"own": found, "sdpa": found}) == {
        "sagebwd": Verdict.REAL,
        "large": Verdict.REAL,
        "small": Verdict.CLOSES,
        "between": Verdict.UNDECIDED,
    }


def test_both_evaluations_have_to_agree():
    one = losses(sagebwd=even(0.05), a=even(0.05), b=even(0.0), c=even(-0.05))
    other = losses(sagebwd=even(0.05), a=even(0.0), b=even(0.025), c=even(-0.05))
    assert decided({"own": one, "sdpa": other}) == {
        "sagebwd": Verdict.REAL,
        "a": Verdict.UNDECIDED,
        "b": Verdict.UNDECIDED,
        "c": Verdict.CLOSES,
    }


def test_without_a_gap_of_the_scheme_no_arm_closes_it():
    found = losses(sagebwd=even(0.029), a=even(0.0), b=even(0.1))
    assert decided({"own": found}) == {
        "sagebwd": Verdict.WITHDRAWN,
        "a": Verdict.WITHDRAWN,
        "b": Verdict.REAL,
    }


def test_a_run_that_stopped_has_a_real_gap():
    found = losses(a=even(0.0))
    assert decided({"own": found}, stopped=["sagebwd"]) == {
        "a": Verdict.CLOSES,
        "sagebwd": Verdict.REAL,
    }


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_counts_as_a_stop(bad):
    """In one sequence, of one seed, under one evaluation."""
    one, other = (losses(sagebwd=even(0.0), a=even(0.0)) for _ in range(2))
    one["sagebwd"][2][5] = bad
    gaps = decide({"own": one, "sdpa": other}, twin="twin", scheme="sagebwd")
    assert {arm: gap.verdict for arm, gap in gaps.items()} == {
        "a": Verdict.CLOSES,
        "sagebwd": Verdict.REAL,
    }
    assert gaps["sagebwd"].differences == {}
    for arm in ("sdpa", "twin"):
        found = losses(sagebwd=even(0.05))
        found[arm][0][0] = bad
        with pytest.raises(ValueError, match=f"a run of {arm} stopped, so the rules decide"):
            decide({"own": found}, twin="twin", scheme="sagebwd")


def test_chance_is_called_real_as_often_as_the_page_says():
    """Arms that differ from sdpa as the twin does; the page has the probability of one arm."""
    draw = np.random.default_rng(0).normal(0.0, 0.01, (4000, 2, 4))
    real = 0
    for twin, arm in draw:
        found = losses(twin=tuple(twin), sagebwd=tuple(arm))
        real += decided({"own": found})["sagebwd"] is Verdict.REAL
    # t.sf(6, 4) is .0019; of 4000 draws, 1 to 19 are within four standard deviations.
    assert 1 <= real <= 19


CELLS = {"large long": (524_288, 1600), "small long": (65_536, 1600), "small short": (65_536, 200)}


def answers(**offsets):
    """The answers about sagebwd, whose difference to sdpa in each cell has a known mean."""
    verdicts = {
        CELLS[name.replace("_", " ")]: decided({"own": losses(sagebwd=even(x))})["sagebwd"]
        for name, x in offsets.items()
    }
    found = batch_or_updates(verdicts)
    return found.batch_masks, found.updates_make


def test_batch_or_updates_follows_the_rules_of_the_page():
    gap, undecided, none = 0.05, 0.025, 0.0
    assert answers(large_long=gap, small_long=none, small_short=none) == (True, False)
    assert answers(large_long=gap, small_long=undecided, small_short=gap) == (True, False)
    assert answers(large_long=gap, small_long=gap, small_short=none) == (False, True)
    assert answers(large_long=none, small_long=gap, small_short=undecided) == (False, True)
    assert answers(large_long=gap, small_long=gap, small_short=gap) == (False, False)
    assert answers(large_long=undecided, small_long=none, small_short=none) == (False, False)
    assert answers(large_long=none, small_long=none, small_short=gap) == (False, False)


def test_batch_or_updates_answers_nothing_about_open_cells():
    assert answers() == (None, None)
    assert answers(large_long=0.05, small_short=0.0) == (None, None)
    assert answers(large_long=0.05, small_long=0.0) == (True, None)
    assert answers(small_long=0.05, small_short=0.0) == (None, True)


def test_errors():
    found = losses(sagebwd=even(0.05))
    with pytest.raises(ValueError, match="no runs of the twin other"):
        decide({"own": found}, twin="other", scheme="sagebwd")
    with pytest.raises(ValueError, match="no runs of sdpa"):
        decide({"own": {"twin": found["twin"]}}, twin="twin", scheme="sagebwd")
    del found["sagebwd"][3]
    with pytest.raises(ValueError, match=r"sagebwd has seeds \[0, 1, 2\]"):
        decide({"own": found}, twin="twin", scheme="sagebwd")
    found = losses(sagebwd=even(0.05))
    found["sagebwd"][1].pop()
    with pytest.raises(ValueError, match="sagebwd, seed 1: 7 sequences, and 8 of sdpa"):
        decide({"own": found}, twin="twin", scheme="sagebwd")
