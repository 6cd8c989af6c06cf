"""scripts/smollm2_seeds.py trains every attention on the same tokens; here on a CPU."""

import json
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch

import sagesim
from sagesim.files import locked
from sagesim_kernels.integrations.transformers import register, unregister
from tests.sagesim_kernels.integrations.models import WORDS, model

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "smollm2_seeds.py"))
IDS = torch.randint(1, WORDS, (24 * 16,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def registered():
    for name, spec in (("exact", sagesim.FPA), ("sagebwd", sagesim.SAGEBWD)):
        register(name, spec=spec)
    yield
    for name in ("exact", "sagebwd"):
        unregister(name)


def run(attention, seed=0):
    train, held_out = SCRIPT["split"](IDS, rows=20, held_out=4, tokens=16)
    start = model("llama", "sdpa")
    before = {name: x.clone() for name, x in start.state_dict().items()}
    found = SCRIPT["tune"](start, attention, seed, train, held_out, rows=4, steps=5, every=2)
    assert all(torch.equal(x, before[name]) for name, x in start.state_dict().items())
    return found


def test_an_exact_attention_trains_as_sdpa_does_and_the_papers_almost():
    sdpa, exact, paper = (run(name) for name in ("sdpa", "exact", "sagebwd"))
    assert [each["step"] for each in sdpa["evaluations"]] == [0, 2, 4, 5]
    assert len(sdpa["losses"]) == 5
    # bfloat16 has 8 bits.
    assert exact["losses"] == pytest.approx(sdpa["losses"], rel=2.0**-8)
    assert paper["losses"] != sdpa["losses"]
    assert paper["losses"] == pytest.approx(sdpa["losses"], rel=0.02)
    for each in sdpa["evaluations"]:
        assert each["own"] == each["sdpa"] and len(each["own"]) == 4
    for each in paper["evaluations"]:
        assert each["own"] != each["sdpa"]


def test_a_seed_is_an_order_of_the_training_sequences():
    first, again, other = run("sdpa"), run("sdpa"), run("sdpa", seed=1)
    assert first["losses"] == again["losses"] != other["losses"]


def test_a_run_that_is_given_up_is_nothing():
    train, held_out = SCRIPT["split"](IDS, rows=20, held_out=4, tokens=16)
    over = iter([False, True])
    start = model("llama", "sdpa")
    found = SCRIPT["tune"](
        start, "sdpa", 0, train, held_out, rows=4, steps=5, given_up=lambda: next(over)
    )
    assert found == {} and next(over, None) is None


def test_held_out_sequences_are_not_trained_on():
    ids = torch.arange(24 * 16)
    train, held_out = SCRIPT["split"](ids, rows=20, held_out=4, tokens=16)
    assert (train.shape, held_out.shape) == ((20, 16), (4, 16))
    assert sorted([*train.flatten().tolist(), *held_out.flatten().tolist()]) == ids.tolist()
    with pytest.raises(ValueError, match="the text has 384 tokens; 400 needed"):
        SCRIPT["split"](ids, rows=21, held_out=4, tokens=16)


def test_the_text_is_long_enough():
    needed = (SCRIPT["ROWS"] * SCRIPT["STEPS"] + SCRIPT["HELD_OUT"]) * SCRIPT["TOKENS"]
    assert len(SCRIPT["text"]()) > 4 * needed  # a token of SmolLM2 is 3 to 4 characters of code


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the script with a small model on the CPU; returns what it prints."""
    start = model("llama", "sdpa")
    monkeypatch.setattr(start, "to", lambda device: start)
    changed = {
        "ROWS": 4,
        "STEPS": 5,
        "HELD_OUT": 4,
        "TOKENS": 16,
        "EVALUATE_EVERY": 5,
        "SPECS": ("exact", "sagebwd"),
        "SEEDS": (0, 1),
        "load": lambda path: (start, None),
        "check_model": lambda path: None,
        "tokens_of": lambda tokenizer: IDS,
        "register": lambda name, spec: None,
    }
    for name, x in changed.items():
        monkeypatch.setitem(SCRIPT["main"].__globals__, name, x)
    # Defaults of arguments were read when the function was defined.
    small = partial(SCRIPT["tune"], rows=4, steps=5, every=5)
    monkeypatch.setitem(SCRIPT["main"].__globals__, "tune", small)
    monkeypatch.setattr("sagesim.AttentionSpec.parse", lambda label: label)
    monkeypatch.setattr("sagesim_kernels.bench.machine.describe", lambda: {"gpu": "none"})

    def run(records, *words):
        line = ["smollm2_seeds.py", "model.gguf", str(records), *map(str, words)]
        monkeypatch.setattr("sys.argv", line)
        assert SCRIPT["main"]() == 0
        return capsys.readouterr().out

    return run


def test_processes_share_the_runs_and_no_run_is_repeated(command, tmp_path):
    names = [f"{name}_seed{seed}.json" for seed in (0, 1) for name in ("sdpa", "exact", "sagebwd")]
    with locked(tmp_path / "exact_seed1"):  # as if another process made it
        assert command(tmp_path).endswith("1 of 6 runs are missing\n")
    made = {file.name: file.read_bytes() for file in tmp_path.glob("[!.]*")}
    assert sorted(made) == sorted(set(names) - {"exact_seed1.json"})
    assert command(tmp_path).endswith("0 of 6 runs are missing\n")
    assert all((tmp_path / name).read_bytes() == x for name, x in made.items())
    for name in names:
        found = json.loads((tmp_path / name).read_text())
        assert name == f"{found['attention']}_seed{found['seed']}.json"
        assert found["evaluations"][-1]["step"] == found["setting"]["steps"] == 5


def test_no_run_begins_or_stays_that_would_not_end_in_time(command, tmp_path):
    said = command(tmp_path, "--minutes", 1, "--first", 2)
    assert "another run does not fit" in said and "6 of 6 runs are missing" in said
    said = command(tmp_path, "--minutes", 1e-6, "--first", -1)
    assert "given up" in said and "6 of 6 runs are missing" in said
    assert not list(tmp_path.iterdir())


def test_runs_of_different_settings_do_not_mix(command, tmp_path, monkeypatch):
    command(tmp_path)
    monkeypatch.setitem(SCRIPT["main"].__globals__, "RATE", 1.0)
    with pytest.raises(ValueError, match=r"sdpa_seed0.json: of another setting .*rate 1,"):
        command(tmp_path)
