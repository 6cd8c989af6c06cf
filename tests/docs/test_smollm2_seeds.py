"""The tables of SmolLM2 with several seeds, from records with known losses."""

import importlib
import json
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[2] / "docs" / "build"
TWIN = (0.01, -0.01, 0.01)
"""By seed; their root mean square is 0.01."""


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(BUILD))
    return importlib.import_module("smollm2_seeds")


@pytest.fixture
def record(page, tmp_path):
    """Writes all runs: the loss is 3 before, 2 by sdpa after it, and what the arms have more."""

    def record(own=0.0, by_sdpa=0.0, before=0.0, **changes):
        for name in ("sdpa", "fpa_bf16", "sagebwd", "factored", "factored_qk"):
            for seed, chance in enumerate(TWIN):
                more = {"own": 0.0, "sdpa": 0.0, "before": 0.0}
                if name == "fpa_bf16":
                    more |= {"own": chance, "sdpa": chance}
                if name == "sagebwd":
                    more = {"own": own, "sdpa": by_sdpa, "before": before}
                found = {
                    "attention": name,
                    "seed": seed,
                    "command": "python scripts/smollm2_seeds.py",
                    "machine": {"gpu": "Fake 1", "torch": "2.0"},
                    "setting": {
                        "model": "x.gguf",
                        "text": "a text",
                        "optimizer": "AdamW",
                        "tokens": 100,
                        "rows": 10,
                        "steps": 50,
                        "held_out": 2,
                    },
                    "evaluations": [
                        {"step": 0, "own": [2 + more["before"], 4 + more["before"]], "sdpa": [2, 4]}
                    ],
                }
                found["evaluations"] += [
                    {"step": 50, **{e: [1 + more[e], 3 + more[e]] for e in ("own", "sdpa")}}
                ]
                if (name, seed) == ("factored", 1):
                    found |= changes
                (tmp_path / f"{name}_seed{seed}.json").write_text(json.dumps(found))

    return record


def test_losses_and_differences_by_both_evaluations(page, record, tmp_path):
    record(own=0.25, by_sdpa=-0.125, before=0.5)
    finals = page.finals(tmp_path)
    assert "| `sdpa` | `sdpa` | 2.00000 | 2.00000 | 2.00000 |  |" in finals
    cells = " | ".join(["2.25000 (+0.25000)"] * 3)
    assert f"| `sagebwd` | its own | {cells} | +0.25000 |" in finals
    assert "| `fpa_bf16` | `sdpa` | 2.01000 (+0.01000) | 1.99000 (\u22120.01000) |" in finals
    assert "Before the first step the loss is 3.00000." in finals
    steps = page.by_step(tmp_path)
    assert "| `sagebwd` | its own | +0.50000 | +0.25000 |" in steps
    assert "| `sagebwd` | `sdpa` | +0.00000 | \u22120.12500 |" in steps
    findings = page.findings(tmp_path)
    assert "the differences are +0.50000 (`sagebwd`), +0.00000 (`factored`) and" in findings
    assert "which are 25.0 (`sagebwd`), 0.0 (`factored`)" in findings
    assert "is 0.01000 nats by its own attention and 0.01000 by `sdpa`" in findings
    assert "reduces the loss by 1.000 nats" in findings


def test_a_gap_is_named_only_if_both_evaluations_show_it(page, record, tmp_path):
    record(own=0.031, by_sdpa=0.029)
    assert "**No scheme differs from `sdpa` by more than 3 s" in page.findings(tmp_path)
    record(own=0.031, by_sdpa=0.031)
    assert "**`sagebwd` differs from `sdpa` by more than 3 s" in page.findings(tmp_path)


def test_the_differences_to_the_twin_are_counted(page, record, tmp_path):
    record(by_sdpa=0.02)
    # Those of sagebwd are 0.01, 0.03 and 0.01; of the other two, the twin's with the other sign.
    said = page.findings(tmp_path)
    assert "+0.01667 (`sagebwd`)" in said and "5 of the 9 differences are positive" in said


def test_runs_that_are_missing_or_differ_are_refused(page, record, tmp_path):
    record(setting={"steps": 1})
    with pytest.raises(ValueError, match="the runs differ in setting"):
        page.finals(tmp_path)
    record(machine={"gpu": "Fake 2"})
    with pytest.raises(ValueError, match="the runs differ in machine"):
        page.finals(tmp_path)
    record()
    (tmp_path / "factored_seed1.json").unlink()
    with pytest.raises(ValueError, match="no run of factored with seed 1"):
        page.finals(tmp_path)
