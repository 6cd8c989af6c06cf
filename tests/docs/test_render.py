"""Tables that are rendered into the pages from records with known numbers."""

import importlib
import json
from pathlib import Path

import pytest

from sagesim_kernels.bench.models import MODELS
from tests.sagesim_kernels.bench.documents import document

BUILD = Path(__file__).parents[2] / "docs" / "build"


@pytest.fixture
def render(monkeypatch):
    monkeypatch.syspath_prepend(str(BUILD))
    return importlib.import_module("render")


def test_the_worst_shape_of_models_stands_beside_the_best(render):
    made = document()
    made["cases"]["models few b8 h12 n256 d64 full"]["runs"]["factored_qk"]["wall"]["ms"] *= 5
    text, count = render.model_speed(made), sum(map(len, MODELS.values())) - 1
    (line,) = (row for row in text.splitlines() if row.startswith("| `factored_qk` | wall |"))
    assert "| 0.25 (b8 h12 n256 d64 full) | 1.25 (" in line and line.endswith(f"| 1 of {count} |")
    assert text.endswith("on Fake 1, torch 2.0, triton 3.0.")


def test_without_measurements_of_models_the_page_says_so(render):
    assert "not in the record yet" in render.model_speed(None)


def test_the_record_of_models_may_be_one_of_its_own(render, monkeypatch, tmp_path):
    import records

    monkeypatch.setattr(records, "DATA", tmp_path)
    assert records.of_models() is None
    made = document()
    (tmp_path / "bench_models.json").write_text(json.dumps(made))
    assert records.of_models() == made
    speed = {key: case for key, case in made["cases"].items() if case["part"] == "speed"}
    (tmp_path / "bench.json").write_text(json.dumps(made | {"cases": speed}))
    assert records.of_models() == made
    (tmp_path / "bench.json").write_text(json.dumps(made | {"command": "whole"}))
    assert records.of_models()["command"] == "whole"
