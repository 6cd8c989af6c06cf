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
