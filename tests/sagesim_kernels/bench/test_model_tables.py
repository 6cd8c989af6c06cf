"""Tables of the models of a record with known numbers."""

import pytest

from sagesim_kernels.bench.model_tables import (
    extremes,
    grouped_queries,
    model_tables,
    ratio,
    ratios,
    shapes,
    times,
    training_ratios,
    training_times,
)
from sagesim_kernels.bench.models import MODEL_SPECS, MODELS, SDPA, model_cases
from tests.sagesim_kernels.bench.documents import document, without

KEY = "models short b8 h16 n1024 d64 causal"


def row(table, name):
    (found,) = (cells for first, *cells in table.rows if first == name)
    return found


def test_ratios_are_to_the_faster_sdpa_in_both_times():
    """Device time is 1.25 that of ours for cuDNN, and 2 for FlashAttention-2."""
    changed = document()
    case = changed["cases"][KEY]
    assert ratio(case, "factored_qk", "GPU") == pytest.approx(1.25)
    ours, flash = (case["runs"][name]["wall"] for name in ("factored_qk", "sdpa flash"))
    flash["ms"] = ours["ms"] / 2
    assert ratio(case, "factored_qk", "wall") == pytest.approx(0.5)
    assert row(ratios(changed), "short b8 h16 n1024 d64 causal") == [
        "1.25 / 0.50",
        "1.25 / 0.50",
    ]


def test_a_backend_that_did_not_run_is_no_reference():
    case = document()["cases"][KEY]
    del case["runs"]["sdpa cudnn"]
    assert ratio(case, "factored_qk", "GPU") == pytest.approx(2.0)
    del case["runs"]["sdpa flash"]
    assert ratio(case, "factored_qk", "GPU") is None
    assert ratio(document()["cases"][KEY], "flash-attn-4", "GPU") is None


def test_times_of_shapes():
    table = times(document())
    assert list(table.head)[1:] == [*MODEL_SPECS, *SDPA], "flash-attn-4 did not run"
    assert [f"models {first}" for first, *_ in table.rows] == [c.key for c in model_cases()]
    # 3.5 * 4 * 8 * 16 * 1024^2 * 64 / 2 / 10^12
    assert row(table, "short b8 h16 n1024 d64 causal")[0] == "0.0601 / 0.0601 (0.5)"


def test_what_grouped_queries_cost():
    changed = document()
    words = "b2 h28/4 n4096 d128 causal"
    changed["cases"][f"models grouped {words}"]["runs"]["factored_qk"]["both"]["ms"] *= 1.1
    table = grouped_queries(changed)
    assert [first for first, *_ in table.rows] == list(shapes(changed, "grouped"))
    assert row(table, words) == ["1.100", "1.000", "1.000", "1.000"]


def test_the_worst_and_the_best_shape_of_models():
    changed = document()
    ran = changed["cases"]["models few b8 h12 n256 d64 full"]["runs"]["factored_qk"]
    ran["wall"]["ms"] *= 5
    spec, figure, worst, best, slower = extremes(changed).rows[1]
    assert (spec, figure) == ("factored_qk", "wall")
    assert worst == "0.25 (b8 h12 n256 d64 full)" and best.startswith("1.25 (")
    assert slower == f"1 of {sum(map(len, MODELS.values()))}"
    assert extremes(changed).rows[0][4].startswith("0 of ")


def test_the_smallest_shape_counts():
    changed = document()
    tiny = changed["cases"]["models tiny b1 h4 n128 d64 causal"]["runs"]["factored_qk"]
    tiny["wall"]["ms"] *= 100
    assert extremes(changed).rows[1][2] == "0.01 (b1 h4 n128 d64 causal)"


def test_of_a_shape_in_two_records_the_first_counts():
    first, second = document(), document()
    for made in (first, second):
        made["cases"] = {KEY: made["cases"][KEY]}
    second["cases"][KEY]["runs"]["factored_qk"]["wall"]["ms"] *= 5
    second["cases"]["models tiny b1 h4 n128 d64 causal"] = document()["cases"][KEY]
    assert extremes(first, second).rows[1][4] == "0 of 2"
    assert extremes(second, first).rows[1][4] == "1 of 2"


def test_shapes_in_records_of_several_gpus_name_theirs():
    first, second = document(), document()
    first["cases"] = {KEY: first["cases"][KEY]}
    second["machine"] = second["machine"] | {"gpu": "NVIDIA GeForce RTX 4090"}
    second["cases"]["models few b8 h12 n256 d64 full"]["runs"]["factored_qk"]["wall"]["ms"] *= 5
    _, _, worst, best, _ = extremes(first, second).rows[1]
    assert worst == "0.25 (b8 h12 n256 d64 full, RTX 4090)"
    assert best == f"1.25 ({KEY.split(' ', 2)[2]}, Fake)"


def test_training_steps():
    first = "l12 w768 d64 n1024 eager"
    assert row(training_times(document()), first) == [
        "100 / 100",
        "100 / 100",
        "200 / 200",
        "125 / 125",
    ]
    assert row(training_ratios(document()), first) == ["1.25 / 1.25", "1.25 / 1.25"]


def test_a_record_without_models_has_no_table():
    assert model_tables(without(document(), "models", "training")) == []
    assert extremes(without(document(), "models")).rows == []
