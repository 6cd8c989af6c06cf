"""Tables that are rendered into the pages from records with known numbers."""

import importlib
import json
import runpy
from pathlib import Path

import pytest

from sagesim_kernels.bench.models import MODELS
from tests.sagesim_kernels.bench.documents import document

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "docs" / "build"


@pytest.fixture
def render(monkeypatch):
    monkeypatch.syspath_prepend(str(BUILD))
    return importlib.import_module("render")


def test_the_worst_shape_of_models_stands_beside_the_best(render):
    made = document()
    made["cases"]["models few b8 h12 n256 d64 full"]["runs"]["factored_qk"]["wall"]["ms"] *= 5
    text, count = render.model_speed(made), sum(map(len, MODELS.values()))
    (line,) = (row for row in text.splitlines() if row.startswith("| `factored_qk` | wall |"))
    assert "| 0.25 (b8 h12 n256 d64 full) | 1.25 (" in line and line.endswith(f"| 1 of {count} |")
    assert text.endswith(f"on Fake 1, torch 2.0, triton 3.0.\n\n{render.records.UNKNOWN}")


def test_shapes_of_an_earlier_record_count_and_are_named(render):
    newer, before = document(), document()
    key = "models tiny b1 h4 n128 d64 causal"
    before["cases"] = {key: newer["cases"].pop(key)}
    before["cases"][key]["runs"]["factored_qk"]["wall"]["ms"] *= 100
    before["machine"]["kernels"] = "0123"
    text = render.model_speed(newer, [before])
    assert "| 0.01 (b1 h4 n128 d64 causal) |" in text
    earlier = " 1 shape is from an earlier record, on Fake 1, of kernels 0123."
    assert text.endswith(f"{earlier}\n\n{render.records.UNKNOWN}")


def test_without_measurements_of_models_the_page_says_so(render):
    assert "not in the record yet" in render.model_speed(None)


def test_the_record_of_models_may_be_one_of_its_own(render, monkeypatch, tmp_path):
    import records

    monkeypatch.setattr(records, "DATA", tmp_path)
    assert records.of_models() is None
    made = document()
    (tmp_path / "bench_models.json").write_text(json.dumps(made))
    of_its_own = made | {"file": "docs/data/bench_models.json"}
    assert records.of_models() == of_its_own
    speed = {key: case for key, case in made["cases"].items() if case["part"] == "speed"}
    (tmp_path / "bench.json").write_text(json.dumps(made | {"cases": speed}))
    assert records.of_models() == of_its_own
    (tmp_path / "bench.json").write_text(json.dumps(made | {"command": "whole"}))
    assert records.of_models()["command"] == "whole"
    assert records.made_by(records.load("bench")).startswith("`docs/data/bench.json`: `whole` on ")


def test_earlier_records_have_the_cases_that_newer_ones_lack(render, monkeypatch, tmp_path):
    import records

    monkeypatch.setattr(records, "DATA", tmp_path)
    made = document()
    keys = [key for key, case in made["cases"].items() if case["part"] == "models"]
    for age, lacking in {"": [], "_2": keys[:1], "_3": keys[:2]}.items():
        cases = {key: case for key, case in made["cases"].items() if key not in lacking}
        (tmp_path / f"bench_models{age}.json").write_text(json.dumps(made | {"cases": cases}))
    assert len(records.of_part("models")) == 3
    assert [list(each["cases"]) for each in records.of_models_besides()] == [keys[1:2], keys[:1]]


MACHINE = {"gpu": "Fake 1", "torch": "2.0", "flash-attn-4": None}


def of_several_gpus() -> dict:
    case = {"difference": 1e-3, "ms": 12.34, "one_ms": 20.0}
    errors = {
        which: dict.fromkeys(("o", "dq", "dk", "dv"), 0.05) for which in ("error", "one_error")
    }
    return {
        "command": "torchrun --nproc-per-node 2 scripts/several_gpus.py",
        "machine": MACHINE | {"gpus": 2},
        "setting": {"spec": "factored_qk", "tokens": 2048, "rows": 4},
        "cases": {
            **dict.fromkeys(("ddp", "fsdp2"), case),
            **dict.fromkeys(("ring", "context_parallel", "ulysses"), case | errors),
        },
    }


def test_the_page_shows_several_gpus_as_soon_as_there_is_a_record(render, monkeypatch, tmp_path):
    import several_gpus

    monkeypatch.setattr(several_gpus, "DATA", tmp_path / "several_gpus.json")
    assert several_gpus.compared().startswith("Nothing has run on several GPUs yet. `torchrun")
    made = of_several_gpus()
    several_gpus.DATA.write_text(json.dumps(made))
    text = several_gpus.compared()
    assert "| DDP | 1.0e-03 |  |  | 12.3 ms | 20.0 ms |" in text
    errors = ", ".join(["5.0e-02"] * 4)
    assert f"| Ulysses of diffusers, full mask | 1.0e-03 | {errors} | {errors} |" in text
    assert "Not run" not in text
    assert "on 2 x Fake 1, torch 2.0." in text
    del made["cases"]["ulysses"]
    assert "Not run: Ulysses of diffusers" in several_gpus.shown(made)


def test_the_cases_of_several_gpus_have_names(render):
    """Those of the script's own test, and the one that it runs on GPUs only."""
    import several_gpus

    assert several_gpus.NAMES.keys() == of_several_gpus()["cases"].keys()


def test_the_page_shows_torchtitan_as_soon_as_there_is_a_record(render, monkeypatch, tmp_path):
    import torchtitan_steps

    monkeypatch.setattr(torchtitan_steps, "DATA", tmp_path / "torchtitan_steps.json")
    text = torchtitan_steps.losses()
    assert text.startswith("Nothing has been trained yet. `python scripts/torchtitan_steps.py`")
    losses = [9.0 - step for step in range(1, 6)]
    made = {
        "command": "python scripts/torchtitan_steps.py --steps 5",
        "machine": "CPU, torch 2.0",
        "setting": {
            "model": "llama3 debugmodel",
            "rows": 2,
            "tokens": 48,
            "documents": 30,
            "optimizer": "AdamW, learning rate 0.1",
        },
        "runs": {
            "sdpa": {"gradients_apart": 0.0, "losses": losses},
            "factored_qk": {"gradients_apart": 0.0123, "losses": losses},
        },
    }
    torchtitan_steps.DATA.write_text(json.dumps(made))
    text = torchtitan_steps.losses()
    assert "| `sdpa` | 8.0000 | 4.0000 |  |" in text
    assert "| `factored_qk` | 8.0000 | 4.0000 | 1.2e-02 |" in text
    assert "step 10" not in text
    assert "2 rows of 48 tokens (AdamW, learning rate 0.1); all rows together hold 30 doc" in text
    assert text.endswith("`python scripts/torchtitan_steps.py --steps 5` on CPU, torch 2.0.")


def of_speed(*names: str, **changes: object) -> dict:
    run = {"tokens_per_second": 2e4, "quartiles": [1e4, 3e4], "losses": [2.0, 1.5]}
    measured = {"runs": dict.fromkeys(names, run), "not_run": {}}
    return {
        "command": "python scripts/smollm2_speed.py",
        "machine": MACHINE,
        "setting": {"documents": 12, "tokens": [512, 2048], "weights": "random"},
        "layouts": {"padded": measured, "packed": measured},
    } | changes


def test_the_line_on_speed_names_the_spec_and_the_name_it_was_registered_by(render):
    import smollm2

    text = smollm2.speed_line()
    assert "If they are packed, `factored_qk` (registered as `sagebwd`) is " in text


def test_flash_attention_4_is_in_the_table_or_the_page_says_why_not(render):
    import smollm2

    text = smollm2.shown_speed(of_speed("sdpa"))
    assert "`flash_attention_4` did not run: not installed on that machine." in text
    with_4 = {"machine": MACHINE | {"flash-attn-4": "4.0"}}
    text = smollm2.shown_speed(of_speed("sdpa", "flash_attention_4", **with_4))
    assert "| packed | `flash_attention_4` | 20,000 | 10,000 to 30,000 | 1.00 |" in text
    assert "did not run" not in text
    failed = of_speed("sdpa", **with_4)
    failed["layouts"]["packed"] = failed["layouts"]["packed"] | {
        "not_run": {"flash_attention_4": "ValueError: no"}
    }
    text = smollm2.shown_speed(failed)
    assert "`flash_attention_4`, packed did not run: ValueError: no." in text


def test_the_page_shows_the_result_of_whole_models_as_soon_as_there_is_a_record(render):
    assert "have not run" in render.whole_models({})
    check = {
        "command": "python3 -m pytest -m gpu",
        "passed": True,
        "printed": ["[gw0] PASSED tests/x.py::test_1", "=== 33 passed in 99.00s (0:01:39) ==="],
        "machine": "1 x Fake 1",
    }
    text = render.whole_models({"whole models": check})
    assert text == "33 tests passed.\n\n`python3 -m pytest -m gpu` on 1 x Fake 1."
    check |= {"passed": False, "printed": ["=== 2 failed, 31 passed in 99.00s ==="]}
    assert "not all pass**: 2 tests failed, 31 tests passed." in render.whole_models(
        {"whole models": check}
    )


def test_every_check_of_the_gpu_has_words(render):
    checks = runpy.run_path(str(ROOT / "scripts" / "gpu_checks.py"))["CHECKS"]
    assert render.GPU_CHECKS.keys() == checks.keys()
