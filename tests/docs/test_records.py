"""Pages say of a record whether it is of the present kernels. The figure is that of its record."""

import importlib
import json
from pathlib import Path

import pytest

from sagesim_kernels.bench.machine import sources_hash
from tests.sagesim_kernels.bench.documents import document

BUILD = Path(__file__).parents[2] / "docs" / "build"


@pytest.fixture
def build(monkeypatch):
    monkeypatch.syspath_prepend(str(BUILD))
    return importlib.import_module


def test_the_age_of_a_record(build):
    records = build("records")
    assert records.age({"kernels": sources_hash()}) == ""
    assert records.age({"kernels": "0123"}).startswith("**Measured with earlier kernels**")
    for machine in ({"gpu": "x"}, {"kernels": None}, "NVIDIA H200, torch 2.0"):
        assert "does not name its sources" in records.age(machine)
    assert records.age(f"NVIDIA H200, kernels {sources_hash()}") == ""
    assert records.age("NVIDIA H200, kernels 0123456789ab") == records.CHANGED
    assert records.with_age("text", {"kernels": sources_hash()}) == "text"
    assert records.with_age("text", {"kernels": "0"}) == f"text\n\n{records.CHANGED}"


def test_the_age_of_other_code_is_that_of_its_loops(build, monkeypatch):
    records = build("records")
    made = {"machine": {"kernels": "0"}, "settings": {"code": "sm80"}}
    for is_same, words in ((True, records.SAME_LOOPS), (False, records.CHANGED)):
        monkeypatch.setattr(records, "has_present_loops", lambda code, same=is_same: same)
        assert records.age_of_code(made) == words
    assert records.age_of_code(made | {"machine": {"kernels": sources_hash()}}) == ""


def test_each_figure_of_the_table_of_speed_is_of_the_newest_record_with_the_peer(
    build, monkeypatch
):
    render, default_spec = build("render"), build("default_spec")
    new, old = document(), document()
    for i, made in enumerate((new, old)):
        made["file"] = f"{i}.json"
        made["machine"]["kernels"] = sources_hash() if made is new else "0"
        for case in made["cases"].values():
            if case["part"] == "speed":
                case["runs"] = {
                    name: {"both": {"ms": 1.0 if name == "factored_qk" else 2.0 + i}}
                    for name in ("factored_qk", "sdpa flash", "flash-attn-4")
                    if not (made is new and name == "flash-attn-4")
                }
    monkeypatch.setattr(default_spec, "long_records", lambda: [new, old])
    lines = [
        line for line in render.speed().splitlines() if line.startswith("| `factored_qk` | 64")
    ]
    cells = [[cell.strip() for cell in line.strip("|").split("|")][2:] for line in lines[:2]]
    assert [row[1:4] + row[5:] for row in cells] == [
        ["2.00 to 2.00", "", "", "present"],
        ["", "", "3.00 to 3.00", "earlier"],
    ]


def test_the_age_of_several_records(build):
    records = build("records")
    new, old = {"kernels": sources_hash()}, {"kernels": "0"}
    assert records.age_of_several([new, new]) == ""
    assert records.age_of_several([old]) == records.CHANGED
    assert records.age_of_several([old, old]) == records.ALL_CHANGED
    assert records.age_of_several([new, old]).endswith("those of the records with kernels 0.")


def test_the_figure_belongs_to_its_record(build, tmp_path):
    pytest.importorskip("matplotlib")
    drawn = build("time_and_error")
    made, path = document(), tmp_path / "figure.svg"
    assert not drawn.is_current(made, path)
    path.write_text(drawn.svg(made))
    assert drawn.is_current(made, path)
    run = made["cases"]["speed d64 full n8192"]["runs"]["factored_qk"]
    run["both"]["ms"] *= 1.1
    assert not drawn.is_current(made, path)


def test_the_committed_figure_is_that_of_the_committed_records(build):
    drawn = build("time_and_error")
    assert drawn.is_current(drawn.record()), "run docs/build/render.py"


def test_a_time_in_the_figure_is_that_of_the_newest_record(build, tmp_path, monkeypatch):
    """It is relative to the peer in the same run."""
    drawn, records = build("time_and_error"), build("records")
    factors = dict(zip(drawn.TIMES, (2.0, 3.0, 5.0, 7.0, 11.0, 13.0), strict=True))
    newest = {"factored_qk": 2.0, "sagebwd": 3.0}
    for name, factor in factors.items():
        made = document()
        for case in made["cases"].values():
            runs = case.get("runs", {})
            is_timed = case["part"] == "speed" and drawn.FRONTIER_PEER in runs
            for x in newest.keys() & runs.keys() if is_timed else ():
                runs[x]["both"]["ms"] = factor * runs[drawn.FRONTIER_PEER]["both"]["ms"]
                if newest[x] > factor:
                    del runs[x]
        (tmp_path / f"{name}.json").write_text(json.dumps(made))
    (tmp_path / f"{drawn.EMULATED}.json").write_text(json.dumps({"cases": {}}))
    monkeypatch.setattr(records, "DATA", tmp_path)
    points = {p.name: p for p in drawn.frontier_points(drawn.record(), 64)}
    for name, time in newest.items():
        assert points[name].time == pytest.approx(time)
        assert points[name].least_time == points[name].most_time


def test_a_record_with_few_cases_is_not_used(build, tmp_path, monkeypatch):
    drawn, records = build("time_and_error"), build("records")
    for name in drawn.TIMES:
        made = document()
        if name == drawn.TIMES[0]:
            kept = ("speed d64 full n4096", "speed d64 causal n4096")
            made["cases"] = {key: case for key, case in made["cases"].items() if key in kept}
        (tmp_path / f"{name}.json").write_text(json.dumps(made))
    monkeypatch.setattr(records, "DATA", tmp_path)
    assert [*drawn.timed()] == [*drawn.TIMES[1:]]


def test_the_paragraph_on_the_default_names_every_safe_spec_of_the_figure(build):
    """A spec is safe if it has smaller errors than the paper's scheme on every input with it."""
    drawn = build("time_and_error")

    def of_specs(**values):
        return {name: dict.fromkeys(drawn.OUTPUTS, value) for name, value in values.items()}

    errors = [of_specs(sagebwd=0.2, a=0.1, b=0.1, c=0.1), of_specs(sagebwd=0.2, a=0.1, b=0.3)]
    errors[1]["a"]["dv"] = 0.19
    assert [name for name in "abc" if drawn.is_safe(name, errors)] == ["a", "c"]
    document = drawn.record()
    shown = {p.name for d in drawn.HEAD_SIZES for p in drawn.frontier_points(document, d)}
    every = drawn.every_error(document)
    safe = [x for x in shown - {drawn.PAPER} if x in drawn.PRESETS and drawn.is_safe(x, every)]
    named = drawn.choice().partition("Of the specs of the figure, ")[2].partition(" do. ")[0]
    assert {*named.replace(" and ", ", ").split(", ")} == {f"`{x}`" for x in safe}
    assert "factored_qk16" in safe


def test_each_command_of_the_figure_is_beside_the_file_of_its_record(build):
    drawn = build("time_and_error")
    text = drawn.figure()
    for name, made in drawn.timed().items():
        assert f"`docs/data/{name}.json`: `{made['command']}` on" in text


def test_what_is_faster_than_the_default_is_named_with_its_errors(build):
    drawn = build("time_and_error")

    def point(name, time, error):
        return drawn.Point(name, time, error, time, time, error, error)

    def of_size(*others):
        return {p.name: p for p in (point(drawn.DEFAULT, 1.0, 0.01), *others)}

    fast = of_size(point("fast", 0.5, 0.02), point("slow", 2.0, 0.001))
    assert drawn._faster({64: of_size(point("slow", 2.0, 0.001))}) == (
        "Nothing in the figure is faster."
    )
    assert drawn._faster({64: fast}) == (
        "Faster than the default is `fast`, which takes 0.50 of its time, with larger errors."
    )
    both = drawn._faster({64: fast, 128: of_size(point("slow", 0.8, 0.001))})
    assert "`fast`, which takes 0.50 of its time at one of the two head sizes" in both
    assert "`slow`, which takes 0.80 of its time at one of the two head sizes, with smaller" in both
