"""The table of `pays_off` is made from a record."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sagesim.command import exit_code
from sagesim_kernels.bench.export import entry, left_out, main, smallest_that_pays
from sagesim_kernels.bench.model_tables import ratio
from sagesim_kernels.bench.models import MODEL_SPECS, model_cases
from sagesim_kernels.bench.record import read
from sagesim_kernels.measured_speed import MEASURED, CallShape, expected
from tests.sagesim_kernels.bench.documents import document, of_other_code, without

DATA = Path(__file__).parents[3] / "docs" / "data"
KEY = "models grouped b2 h28/4 n4096 d128 causal"


def test_the_committed_table_is_that_of_the_committed_records():
    committed = json.loads(MEASURED.read_text(encoding="utf-8"))
    by_gpu: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(DATA.glob("bench_models*.json"), key=lambda x: (len(x.name), x.name)):
        made = read(path)
        by_gpu.setdefault(made["machine"]["gpu"], []).append(made)
    table = {gpu: entry(*made) for gpu, made in by_gpu.items()}
    assert committed == table, (
        "run python -m sagesim_kernels.bench.export on all records of each GPU"
    )


def test_every_case_has_its_shape_and_both_ratios():
    made = document()
    made["cases"][KEY]["runs"]["factored_qk"]["wall"]["ms"] *= 2
    found = entry(made)
    assert list(found["calls"]) == [case.key for case in model_cases()]
    for case in model_cases():
        shape = CallShape(**found["calls"][case.key]["shape"])
        assert (shape.batch, shape.heads, shape.queries, shape.head_size) == case.shape.q_size
        assert (shape.batch, shape.kv_heads, shape.keys, shape.head_size) == case.shape.kv_size
        assert shape.is_causal == case.shape.is_causal
    assert found["calls"][KEY]["gpu"] == dict.fromkeys(MODEL_SPECS, 1.25)
    assert found["calls"][KEY]["wall"] == {"factored_qk": 0.625, "fpa_bf16": 1.25}
    (record,) = found["records"]
    assert record["machine"].startswith("Fake 1, torch 2.0") and found["dtype"] == "bfloat16"


def test_of_a_call_in_two_records_the_last_counts():
    older, newer = document(), document()
    del newer["cases"]["models tiny b1 h4 n128 d64 causal"]
    older["cases"][KEY]["runs"]["factored_qk"]["wall"]["ms"] *= 2
    older["command"] = "another"
    made = entry(older, newer)
    found, alone = made["calls"], entry(document())["calls"]
    numbers = {key: call.pop("record") for key, call in found.items()}
    assert numbers == {key: int("tiny" not in key) for key in alone}
    assert [each["command"] for each in made["records"]] == ["another", document()["command"]]
    for call in alone.values():
        del call["record"]
    assert found == alone
    assert entry(newer, older)["calls"][KEY] != alone[KEY]


@pytest.mark.parametrize(("part", "field"), [("machine", "gpu"), ("settings", "dtype")])
def test_records_of_several_machines_are_refused(part, field):
    other = document()
    other[part][field] = "other"
    with pytest.raises(ValueError, match=r"several .*, other"):
        entry(document(), other)


def test_a_spec_that_did_not_run_is_not_in_the_table():
    made = document()
    del made["cases"][KEY]["runs"]["fpa_bf16"]
    assert list(entry(made)["calls"][KEY]["wall"]) == ["factored_qk"]


def test_pays_off_answers_what_the_record_has():
    made = document()
    case = made["cases"][KEY]
    case["runs"]["factored_qk"]["wall"]["ms"] *= 2
    table = {"Fake 1": entry(made)}
    call = CallShape(2, 28, 4096, 128, 4, 4096, True)
    found = expected(table, "Fake 1", call, "factored_qk", torch.bfloat16, includes_host=True)
    assert found.ratio == pytest.approx(ratio(case, "factored_qk", "wall")) and not found


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (without(document(), "models"), "no case of the part models"),
        (of_other_code(), "code of another GPU"),
    ],
)
def test_other_records_are_refused(made, words):
    with pytest.raises(ValueError, match=words):
        entry(made)


def test_the_command_replaces_the_entry_of_the_gpu(tmp_path, capsys):
    record, out = tmp_path / "bench.json", tmp_path / "table.json"
    record.write_text(json.dumps(document()))
    other = document()
    other["cases"][KEY]["runs"]["factored_qk"]["wall"]["ms"] *= 2
    out.write_text(json.dumps({"Fake 1": entry(other), "Fake 2": entry(other)}))
    main([str(record), "--out", str(out)])
    assert json.loads(out.read_text()) == {"Fake 1": entry(document()), "Fake 2": entry(other)}
    assert f"{len(model_cases())} calls on Fake 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a JSON file"),
        (None, "cannot be read: No such file or directory"),
        (json.dumps(document() | {"machine": {}}), "machine has no 'gpu'"),
        (json.dumps(document() | {"cases": []}), "cases is a list, not an object"),
        (json.dumps(without(document(), "models")), "the record has no case of the part models"),
    ],
)
def test_a_file_that_is_no_record_ends_the_command(tmp_path, capsys, text, words):
    """The error names this file once, and no other."""
    good, record, out = (tmp_path / f"{name}.json" for name in ("good", "record", "out"))
    good.write_text(json.dumps(document()))
    if text is not None:
        record.write_text(text)
    argv = [str(good), str(record), "--out", str(out)]
    assert exit_code("export", lambda: main(argv), {}) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and words in line
    assert line.count(str(record)) == 1 and str(good) not in line
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a table of this command: Expecting"),
        ("[]", "not a table of this command: it is a list, not an object"),
        ('{"Fake 1": "old"}', "['Fake 1'] is 'old', not an object"),
        (json.dumps(document()), "['format'] is 1, not an object"),
        (None, "cannot be read: Is a directory"),
    ],
)
def test_another_file_is_not_replaced(tmp_path, capsys, text, words):
    record, out = tmp_path / "bench.json", tmp_path / "out"
    record.write_text(json.dumps(document()))
    if text is None:
        out.mkdir()
    else:
        out.write_text(text)
    assert exit_code("export", lambda: main([str(record), "--out", str(out)]), {}) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and f"--out {out}: " in line and words in line
    assert text is None or out.read_text() == text


def test_calls_that_are_left_out_are_predicted_from_the_others():
    made = document()
    table = left_out({"Fake 1": entry(made)})
    assert [row[:3] for row in table.rows] == [
        ["Fake 1", spec, figure] for figure in ("GPU", "wall") for spec in MODEL_SPECS
    ]
    for row in table.rows:
        assert row[4] == "0%", "all ratios are equal"
        known, many = row[3].split(" of ")
        assert 0 < int(known) < int(many) == len(model_cases()) and row[5] == f"{known} of {known}"
    made["cases"][KEY]["runs"]["factored_qk"]["wall"]["ms"] *= 2
    changed = {tuple(row[1:3]): row for row in left_out({"Fake 1": entry(made)}).rows}
    right, known = map(int, changed["factored_qk", "wall"][5].split(" of "))
    assert right < known
    assert changed["fpa_bf16", "wall"] == table.rows[3]


def test_from_how_many_tokens_on_it_pays():
    made = document()
    text = smallest_that_pays(entry(made))
    count = len(model_cases())
    assert f"at no measured shape of less than 128 tokens, and at {count} of the {count}" in text
    for case in made["cases"].values():
        if case["part"] == "models" and case["tokens"] < 8192:
            case["runs"]["factored_qk"]["wall"]["ms"] *= 5
    long = [case for case in model_cases() if case.shape.tokens >= 8192]
    text = smallest_that_pays(entry(made))
    assert f"less than 8192 tokens, and at {len(long)} of the {len(long)} of 8192" in text
    for case in made["cases"].values():
        if case["part"] == "models":
            case["runs"]["factored_qk"]["wall"]["ms"] *= 5
    assert f"host's time, at none of {count} measured shapes" in smallest_that_pays(entry(made))


def test_an_empty_table_predicts_nothing():
    assert left_out({}).rows == []
