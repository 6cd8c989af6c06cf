"""docs/build/results.py keeps rows of a file and computes the missing ones."""

import importlib
from pathlib import Path

BUILD = Path(__file__).parents[2] / "docs" / "build"


def test_rows_of_the_file_are_kept_in_the_new_order_and_only_missing_ones_are_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(BUILD))
    results = importlib.import_module("results")
    heads = [{"label": x, "sigma": y} for x, y in (("a", 1.0), ("a", 2.0), ("b", 1.0))]
    earlier = [{"label": x, "sigma": 1.0, "error": f"kept {x}"} for x in ("b", "gone", "a")]
    measured = []

    def measure(place):
        measured.append(place)
        return {"error": "new"}

    rows = results.rows_of(heads, earlier, measure)
    assert measured == [1]
    assert [row["error"] for row in rows] == ["kept a", "new", "kept b"]
    assert all(row.items() >= head.items() for row, head in zip(rows, heads, strict=True))
