"""Aims beside what records have: reached, missed, or not measured."""

import importlib
from pathlib import Path

import pytest

from tests.sagesim_kernels.bench.documents import document, without

BUILD = Path(__file__).parents[2] / "docs" / "build"


@pytest.fixture
def aims(monkeypatch):
    monkeypatch.syspath_prepend(str(BUILD))
    return importlib.import_module("aims")


def found(aims, *values):
    return [aims.Found(x) for x in values]


def row(rows, case, beside):
    (aim,) = (each for each in rows if (each.case, each.beside) == (case, beside))
    return aim


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((1.2, 1.0), "reached"),
        ((0.996,), "reached"),  # it is shown as 1.00
        ((0.994,), "**missed**"),
        ((1.2, 0.9, 0.8), "**missed** at 2 of 3"),
        ((1.2, None), "reached, 1 of 2 not measured"),
        ((0.9, None), "**missed** at 1 of 2, 1 of 2 not measured"),
        ((None, None), "not measured"),
    ],
)
def test_the_worst_case_decides(aims, values, verdict):
    assert aims.Aim("x", "y", found(aims, *values), least=1.0).verdict == verdict


def test_a_limit_is_reached_from_below(aims):
    assert aims.Aim("x", "y", found(aims, 0.05, 0.06), most=0.06, unit="%").verdict == "reached"
    aim = aims.Aim("x", "y", found(aims, 0.05, 0.061), most=0.06, unit="%")
    assert aim.row == ["x", "y", "at most 6.0%", "5.0% to 6.1%", "**missed** at 1 of 2"]


def test_a_figure_of_the_earlier_record_is_marked(aims):
    aim = aims.Aim("x", "y", [aims.Found(1.1), aims.Found(1.2, is_earlier=True)], least=1.0)
    assert aim.row[3] == "1.10x to 1.20x †"


def test_figures_are_those_of_the_record(aims):
    """Our specs take 1/1.25 of cuDNN's time and half of FlashAttention-2's."""
    on_hopper = list(aims.on_hopper(document()))
    for aim in on_hopper:
        if "`fp8_gradients`" in aim.case or aim.beside.startswith("FlashAttention-4"):
            assert aim.verdict == "not measured", aim
    case = "`factored_qk`, d 64, 4096 to 16384 tokens"
    assert row(on_hopper, case, "cuDNN").row[2:] == ["at least 1.00x", "1.25x", "reached"]
    assert row(on_hopper, case, "FlashAttention-2").row[3] == "2.00x"
    assert row(on_hopper, "preparation, `factored_qk`, 8192 tokens", "all kernels' time").row[
        3:
    ] == [
        "10.0%",
        "**missed** at 4 of 4",
    ]


def test_a_deterministic_peer_is_found_by_its_name(aims):
    made = document()
    for case in made["cases"].values():
        if case["part"] == "speed":
            case["runs"]["flash-attn-4 deterministic"] = case["runs"]["sdpa cudnn"]
    aim = row(
        list(aims.on_hopper(made)),
        "`factored_qk`, d 128, 4096 to 16384 tokens",
        "FlashAttention-4, deterministic",
    )
    assert aim.row[2:] == ["at least 1.10x", "1.25x", "reached"]


def test_models(aims):
    made = document()
    every = list(aims.of_models(made))
    assert {aim.verdict for aim in every if aim.beside == "FlashAttention-2 or cuDNN"} == {
        "reached"
    }
    (host,) = (aim for aim in every if aim.unit == " ms")
    assert host.row[2:] == ["at most 0.60 ms", "0.50 ms", "reached"]
    key = "models grouped b2 h28/4 n4096 d128 causal"
    made["cases"][key]["runs"]["factored_qk"]["both"]["ms"] *= 1.1
    grouped = row(
        list(aims.of_models(made)),
        "time with grouped queries, `factored_qk`",
        "as many heads of K and V as of Q",
    )
    assert grouped.row[3:] == ["1.00x to 1.10x", "**missed** at 1 of 4"]


@pytest.mark.parametrize(
    ("kernels", "mark"), [((None, None), " †"), (("a", "a"), ""), (("a", "b"), " †")]
)
def test_a_shape_that_the_newer_record_lacks_is_that_of_another(aims, kernels, mark):
    """It is marked unless both records have the same kernels."""
    newer, earlier = document(), document()
    newer["machine"]["kernels"], earlier["machine"]["kernels"] = kernels
    key = "models grouped b2 h32/8 n4096 d64 causal"
    del newer["cases"][key]
    aim = row(
        list(aims.of_models(newer, earlier)),
        "b2 h32/8 n4096 d64 causal, GPU",
        "FlashAttention-2 or cuDNN",
    )
    assert aim.row[3] == f"1.25x{mark}"
    aim = row(list(aims.of_models(newer)), aim.case, aim.beside)
    assert aim.row[3:] == ["-", "not measured"]


def test_training_masks_and_other_code(aims):
    made = document()
    (first, *_) = aims.of_training(made)
    assert first.row == [
        "l12 w768 d64 n1024 eager",
        "FlashAttention-2 or cuDNN",
        "at least 1.00x",
        "1.25x",
        "reached",
    ]
    masks = {(aim.case, aim.beside): aim.row[3:] for aim in aims.of_masks(made)}
    assert masks["window of 1024, 16384 tokens", "FlashAttention-2"] == ["2.00x", "reached"]
    assert masks["window of 1024, 16384 tokens", "FlashAttention-4"] == ["-", "not measured"]
    assert masks["time of padded keys by `key_mask`", "the same keys, packed"] == [
        "0.67x",
        "reached",
    ]
    code = list(aims.of_code(made))
    assert (
        row(code, "`factored`, d 64, 4096 to 8192 tokens", "FlashAttention-2").verdict == "reached"
    )


def test_a_peer_that_the_newer_record_lacks_is_that_of_the_earlier(aims):
    newer, earlier = document(), document()
    key = "masks b1 h16 n16384 d64 window1024"
    runs = earlier["cases"][key]["runs"]
    runs["flash-attn-4"] = runs["factored_qk"]
    del newer["cases"]["training l12 w768 d64 n1024 eager"]
    masks = {(aim.case, aim.beside): aim for aim in aims.of_masks(newer, earlier)}
    with_peer = masks["window of 1024, 16384 tokens", "FlashAttention-4"]
    assert with_peer.row[3:] == ["1.00x †", "reached, 3 of 4 not measured"]
    assert masks["window of 1024, 16384 tokens", "FlashAttention-2"].row[3] == "2.00x"
    (first, *_) = aims.of_training(newer, earlier)
    assert first.row[3:] == ["1.25x †", "reached"]


def test_without_any_case_nothing_is_measured(aims):
    empty = without(document(), "speed", "models", "masks", "training")
    every = [
        *aims.on_hopper(empty),
        *aims.of_models(),
        *aims.of_models(empty),
        *aims.of_training(),
        *aims.of_masks(),
        *aims.of_code(empty),
        *aims.of_card({"predictions": [], "accurate": []}),
    ]
    assert {aim.verdict for aim in every} == {"not measured"}


def test_the_card_is_predicted_by_its_best_spec_of_six_int8_products(aims):
    def predicted(spec, d, ratio):
        return {"card": "RTX 4090", "spec": spec, "head_size": d, "ratios": [ratio, 9.0]}

    speeds = {"factored": 1.7, "sagebwd": 1.5, "factored_qk": 3.0, "flash": 1.0}
    made = [predicted(spec, d, x) for d in (64, 128) for spec, x in speeds.items()]
    rows = [aim.row for aim in aims.of_card({"predictions": made, "accurate": ["factored"]})]
    assert rows[0] == [
        "best spec of six INT8 products, `factored`, d 64",
        "FlashAttention-2",
        "at least 1.67x",
        "1.70x",
        "reached",
    ]
    assert rows[1][4] == "**missed**"


def test_the_summary_counts_every_aim(aims):
    groups = aims.groups()
    count = sum(len(group.aims) for group in groups)
    assert aims.summary().startswith(f"Of {count} aims for speed, ")
    assert all(group.source for group in groups)
