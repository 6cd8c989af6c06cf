"""docs/data/cards.json and the recommendations are what `scripts/cards.py` makes of the data."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from sagesim_kernels.cards import RECOMMENDED

SCRIPT = Path(__file__).parents[1] / "scripts" / "cards.py"
DATA = SCRIPT.parents[1] / "docs" / "data"


def same(now: Any, recorded: Any) -> bool:
    """Equal, with numbers within a thousandth: the fit stops at slightly different places."""
    if isinstance(recorded, dict):
        return now.keys() == recorded.keys() and all(same(now[k], recorded[k]) for k in recorded)
    if isinstance(recorded, list):
        return len(now) == len(recorded) and all(map(same, now, recorded))
    if isinstance(recorded, float):
        return now == pytest.approx(recorded, rel=1e-3, abs=1e-3)
    return now == recorded


def test_the_records_are_up_to_date(capsys: pytest.CaptureFixture[str]):
    main = runpy.run_path(str(SCRIPT))["main"]
    written: dict[str, Any] = {}
    main.__globals__["write_text"] = lambda path, text: written.update({path.name: text})
    main()
    for path in (DATA / "cards.json", RECOMMENDED):
        assert same(json.loads(written[path.name]), json.loads(path.read_text(encoding="utf-8")))
    assert "data centre" in capsys.readouterr().out


def test_the_usual_count_of_operations():
    names = runpy.run_path(str(SCRIPT))
    shape = names["shape_of"](64, True, 8192)
    assert shape.heads == 2 * 32
    assert names["tflop"](shape, 3.5) == pytest.approx(3.5 * 4 * 64 * 8192**2 * 64 / 2 / 1e12)


def predictions(gains: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Of every card alike. gains: the speeds of specs under two assumptions."""
    names = ("A100", "RTX 3090", "RTX 4090", "RTX 5090", "L40S", "H100", "H200")
    return [
        {"card": n, "spec": spec, "ratios": each} for n in names for spec, each in gains.items()
    ]


@pytest.mark.parametrize(
    ("factored", "factored_qk", "expected"),
    [
        ([1.5, 1.2], [1.3, 1.3], "factored"),  # the fastest as stated
        ([1.5, 1.05], [1.3, 1.3], "factored_qk"),  # the fastest may be no faster than 16 bit
        ([1.5, 1.05], [1.09, 1.3], "fpa_bf16"),
    ],
)
def test_int8_is_recommended_if_it_surely_pays(
    factored: list[float], factored_qk: list[float], expected: str
):
    names = runpy.run_path(str(SCRIPT))
    specs = ["fpa_bf16", "factored", "factored_qk"]
    names["recommendations"].__globals__["accurate_specs"] = lambda: specs
    gains = {"fpa_bf16": [1.0, 1.0], "factored": factored, "factored_qk": factored_qk}
    found = names["recommendations"](predictions(gains), 0.1)
    assert found["8.9 consumer"]["spec"] == found["8.0 data centre"]["spec"] == expected
    assert found["9.0 data centre"] == {"card": "H100", "spec": "factored_qk", "basis": "measured"}
