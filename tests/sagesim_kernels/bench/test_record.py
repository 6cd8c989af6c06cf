"""A record is valid after every case, can be continued, and belongs to one machine."""

import json
from typing import Any

import pytest

from sagesim_kernels.bench.record import Record, read
from tests.sagesim_kernels.bench.documents import document
from tests.sagesim_kernels.bench.fakes import MACHINE, SETTINGS, record

SPEED, MODELS = "speed d64 full n4096", "models tiny b1 h4 n128 d64 causal"
CASE = {"part": "accuracy", "errors": {}, "not_run": {}}


def test_a_new_record_is_written_at_once(tmp_path):
    path = tmp_path / "new" / "bench.json"
    record(path)
    assert read(path)["cases"] == {} and read(path)["machine"] == MACHINE


def test_a_result_is_written_at_once_and_read_again(tmp_path):
    path = tmp_path / "bench.json"
    record(path).add("a", CASE)
    again = record(path)
    assert "a" in again and "b" not in again
    assert again.document["cases"]["a"] == CASE
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
    record(path).add("a", CASE)
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
        (json.dumps({"format": 1, "cases": {}}), "not a record of .*: no 'command'"),
    ],
)
def test_other_files_are_refused(tmp_path, text, word):
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=word) as raised:
        record(path)
    assert str(path) in str(raised.value)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (["machine", "gpu"], None, "machine has no 'gpu'"),
        (["machine", "gpu"], " ", "machine.gpu is ' ', not a string with a word"),
        (["machine"], "H100", "machine is 'H100', not an object"),
        (["settings", "specs"], "factored", "settings.specs is 'factored', not a list"),
        (["settings", "peers"], [1], "settings.peers[0] is 1, not a string"),
        (["settings", "dtype"], None, "settings has no 'dtype'"),
        (["settings", "code"], "sm80", "machine has no 'compute_capability'"),
        (["cases"], [], "cases is a list, not an object"),
        (["cases", SPEED], {}, f"cases[{SPEED!r}] has no 'part'"),
        (["cases", SPEED, "part"], "spee", f"cases[{SPEED!r}].part is 'spee', not one of speed,"),
        (["cases", SPEED, "tokens"], None, f"cases[{SPEED!r}] has no 'tokens'"),
        (["cases", SPEED, "tokens"], -1, "tokens is -1, not a positive integer"),
        (["cases", SPEED, "is_causal"], 1, "is_causal is 1, not true or false"),
        (["cases", SPEED, "not_run"], None, f"cases[{SPEED!r}] has no 'not_run'"),
        (["cases", SPEED, "runs", "factored"], {}, "runs['factored'] has no 'forward'"),
        (["cases", SPEED, "runs", "factored", "both", "ms"], 0, "ms is 0, not a positive"),
        (["cases", SPEED, "runs", "factored", "jobs_ms"], [], "not an object of numbers or null"),
        (["cases", MODELS, "kv_heads"], None, f"cases[{MODELS!r}] has no 'kv_heads'"),
        (["cases", MODELS, "runs", "fpa_bf16", "wall"], None, "runs['fpa_bf16'] has no 'wall'"),
        (["lost"], {"a": []}, "lost['a'] is a list, not an object"),
    ],
)
def test_a_field_that_is_missing_or_wrong_is_named(tmp_path, where, value, words):
    """value: None takes the field out."""
    path, made = tmp_path / "bench.json", document()
    inside: Any = made
    for name in where[:-1]:
        inside = inside[name]
    if value is None:
        del inside[where[-1]]
    else:
        inside[where[-1]] = value
    path.write_text(json.dumps(made))
    with pytest.raises(ValueError) as raised:
        read(path)
    assert str(raised.value).startswith(f"{path}: ") and words in str(raised.value)


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
