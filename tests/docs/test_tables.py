"""Tables that code cells of the pages compute, from records with known numbers."""

import importlib
from pathlib import Path

import pytest

from sagesim_kernels.bench.cases import PEERS
from tests.sagesim_kernels.bench.documents import document

BUILD = Path(__file__).parents[2] / "docs" / "build"


@pytest.fixture
def build(monkeypatch):
    monkeypatch.syspath_prepend(str(BUILD))
    return importlib.import_module


def record(name, *, without=()):
    """A record of long sequences, docs/data/NAME.json, that lacks some contenders."""
    made = document() | {"file": f"docs/data/{name}.json"}
    for case in made["cases"].values():
        case["runs"] = {x: run for x, run in case.get("runs", {}).items() if x not in without}
    return made


@pytest.fixture
def default_spec(build, monkeypatch):
    """`default_spec` with two records, of which the newer one lacks cuDNN."""
    module = build("default_spec")
    newer, older = record("newer", without=["sdpa cudnn"]), record("older")
    for case in newer["cases"].values():
        if "sdpa flash" in case["runs"] and case["part"] == "speed":
            case["runs"]["sdpa flash"]["both"]["ms"] *= 0.4
    monkeypatch.setattr(module, "long_records", lambda: [newer, older])
    return module


def test_a_pivot_lists_several_records_of_a_cell_and_leaves_others_empty(build):
    rows = [("a", "x", "1"), ("a", "x", "2"), ("b", "y", "3")]
    text = build("tables").pivot("", rows, *(lambda row, i=i: row[i] for i in range(3)))
    assert text.splitlines()[2:] == ["| a | 1, 2 |  |", "| b |  | 3 |"]


def test_a_figure_is_of_the_newest_record_with_the_shape_and_the_peer(default_spec):
    text = default_spec.by_shape()
    (row,) = (x for x in text.splitlines() if x.startswith("| 64 | causal | 4096 |"))
    assert row == "| 64 | causal | 4096 | 0.80 ¹ | 1.25 ² | - | 1.00 ¹ |"
    assert "- ¹ `docs/data/newer.json`: " in text and "- ² `docs/data/older.json`: " in text


def test_the_short_answer_counts_the_shapes_at_which_the_default_spec_is_faster(default_spec):
    rows = [line.split(" | ") for line in default_spec.in_short().splitlines()]
    found = {(row[0].removeprefix("| "), row[1]): row[2:4] for row in rows if len(row) == 5}
    assert found["4096 to 32768 tokens", "FlashAttention-2"] == ["0.80 to 0.80", "0 of 16"]
    assert found["512 to 2048 tokens", "cuDNN"] == ["1.25 to 1.25", "12 of 12"]
    assert ("512 to 2048 tokens", "FlashAttention-4") not in found


def test_all_specs_are_shown_from_a_record_in_which_every_peer_ran(default_spec, monkeypatch):
    with pytest.raises(ValueError, match="no record has all peers"):
        default_spec.newest_with_all_peers()
    monkeypatch.undo()
    newest = default_spec.newest_with_all_peers()
    ran = {name for case in newest["cases"].values() for name in case.get("runs", {})}
    assert ran >= {*PEERS}


@pytest.mark.parametrize("unit", ["ms", "share"])
def test_a_decision_has_a_row_for_each_head_size_and_mask(build, unit):
    def row(head_size, is_causal, tokens, alternative, chosen):
        names = ("head_size", "is_causal", "tokens", "alternative", "chosen")
        return dict(zip(names, (head_size, is_causal, tokens, alternative, chosen), strict=True))

    rows = [
        row(64, True, 8192, 4.0, 3.0),
        row(64, True, 4096, 2.0, 1.0),
        row(64, False, 4096, 2.0, 3.0),
    ]
    entry = {"alternative": "a", "chosen": "b", "measured": "forward", "unit": unit, "machine": "m"}
    text = build("tables").decisions({"decisions": {"x": entry | {"rows": rows}}}, "x").data
    full, causal = text.splitlines()[2:4]
    first = f"| **x** (forward, {unit}): a → b | 64 | full |"
    figures = ("2 | 3", "2 | 1") if unit == "ms" else ("200% | 300%", "200% | 100%")
    assert full == f"{first} {figures[0]} | +50.0% |"
    assert (
        causal.replace("\N{NO-BREAK SPACE}", " ")
        == f"|  | 64 | causal | {figures[1]} | -50.0% to -25.0% |"
    )
