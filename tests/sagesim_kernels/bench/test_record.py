"""A record is valid after every case, can be continued, and belongs to one machine."""

import json

import pytest

from sagesim_kernels.bench.record import Record, read
from tests.sagesim_kernels.bench.fakes import MACHINE, SETTINGS, record


def test_a_new_record_is_written_at_once(tmp_path):
    path = tmp_path / "new" / "bench.json"
    record(path)
    assert read(path)["cases"] == {} and read(path)["machine"] == MACHINE


def test_a_result_is_written_at_once_and_read_again(tmp_path):
    path = tmp_path / "bench.json"
    record(path).add("a", {"ms": 1.0})
    again = record(path)
    assert "a" in again and "b" not in again
    assert again.document["cases"]["a"] == {"ms": 1.0}
    assert [p.name for p in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"machine": MACHINE | {"torch": "2.1"}}, ["machine", "torch", "'2.0'", "'2.1'"]),
        ({"machine": MACHINE | {"driver": "580"}}, ["machine", "driver", "None", "'580'"]),
        ({"machine": MACHINE | {"cudnn": 9}}, ["machine", "cudnn", "None", "9"]),
        ({"settings": SETTINGS | {"specs": ["fpa"]}}, ["settings", "specs", "'fpa'"]),
    ],
)
def test_another_machine_or_version_is_refused(tmp_path, changes, words):
    path = tmp_path / "bench.json"
    record(path).add("a", {"ms": 1.0})
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not mixed") as raised:
        record(path, **changes)
    for word in (str(path), "--out", *words):
        assert word in str(raised.value)
    assert path.read_bytes() == before


def test_another_command_and_tuples_continue_the_same_record(tmp_path):
    path = tmp_path / "bench.json"
    record(path, settings=SETTINGS | {"specs": ("factored", "sagebwd")})
    assert record(path, command="another").document["command"] == "test"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not a JSON file"),
        ("[]", "not a record"),
        ('{"rows": []}', "not a record"),
        (json.dumps({"format": 0, "cases": {}}), "format 0"),
        (json.dumps({"format": 1, "cases": {}}), "not a record of .*: no command"),
    ],
)
def test_other_files_are_refused(tmp_path, text, word):
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=word) as raised:
        record(path)
    assert str(path) in str(raised.value)
    assert path.read_text() == text


def test_nan_is_not_written(tmp_path):
    path = tmp_path / "bench.json"
    made = record(path)
    with pytest.raises(ValueError):
        made.add("a", {"ms": float("nan")})
    assert read(path)["cases"] == {}


def test_a_contender_that_lost_the_device_is_recorded(tmp_path):
    path = tmp_path / "bench.json"
    record(path).lose("a", "bad", "why")
    again = Record.open(path, machine=MACHINE, settings=SETTINGS, command="test")
    assert again.lost("a") == {"bad": "why"} and again.lost("b") == {}
