"""Trainer, TRL and PEFT train with `attn_implementation="sagebwd"` as they do with eager."""

from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import sagesim
from sagesim_kernels.integrations.transformers import register, unregister
from tests.sagesim_kernels.integrations.models import model, results, tokens
from tests.support.assertions import assert_bitwise
from tests.support.language_models import tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

STEPS = 3


@pytest.fixture(autouse=True)
def registered():
    register("exact", spec=sagesim.FPA)
    register()
    yield
    unregister("exact")
    unregister()


def arguments(folder, kind=TrainingArguments, **changes):
    return kind(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"save_strategy": "no"} | changes,
    )


def losses(trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_and_a_checkpoint(tmp_path):
    """The losses are eager attention's, and the checkpoint holds nothing of ours."""
    data = [{"input_ids": row, "labels": row} for row in tokens(8)]
    found = {}
    for attention in ("eager", "exact"):
        trained = model("llama", attention)
        found[attention] = losses(Trainer(trained, arguments(tmp_path), train_dataset=data))
    assert found["exact"] == pytest.approx(found["eager"], rel=1e-5)
    assert found["eager"][0] != found["eager"][-1]

    trained.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert "exact" not in (tmp_path / "config.json").read_text()
    assert loaded.state_dict().keys() == model("llama", "eager").state_dict().keys()
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="exact")
    inputs = {"input_ids": tokens(), "labels": tokens()}
    expected, actual = results(trained, **inputs), results(again, **inputs)
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_bitwise(actual=actual[name], expected=expected[name], what=name)


def test_trainer_resumes_from_its_checkpoint(tmp_path):
    """The weights after a stop and a start are those of a run without a stop."""
    data = [{"input_ids": row, "labels": row} for row in tokens(8)]
    whole, stopped = model("llama", "sagebwd"), model("llama", "sagebwd")
    losses(Trainer(whole, arguments(tmp_path / "whole"), train_dataset=data))
    saving = {"save_strategy": "steps", "save_steps": 2}
    given = arguments(tmp_path / "stopped", **saving)
    Trainer(stopped, given, train_dataset=data).train()
    resumed = model("llama", "sagebwd")
    checkpoint = tmp_path / "stopped" / "checkpoint-2"
    Trainer(resumed, given, train_dataset=data).train(resume_from_checkpoint=str(checkpoint))
    for name, expected in whole.state_dict().items():
        assert_bitwise(actual=resumed.state_dict()[name], expected=expected, what=name)


@pytest.mark.slow
@pytest.mark.parametrize("padding_free", [False, True])
def test_trl(tmp_path, padding_free):
    """Padding-free batches give the losses of padded ones: no sequence sees another.

    A first token has no loss. The completion mask says so, because older versions of transformers
    divide by the number of labels, and only padding-free batches leave out those of first tokens.
    """
    torch.manual_seed(0)
    rows = [
        {"input_ids": list(range(1, n + 1)), "completion_mask": [0] + [1] * (n - 1)}
        for n in range(3, 15, 2)
    ]
    options = {"max_length": None, "bf16": False, "completion_only_loss": True}
    found = {}
    for attention in ("eager", "exact"):
        free = padding_free and attention == "exact"
        trainer = SFTTrainer(
            model("llama", attention),
            arguments(tmp_path, SFTConfig, padding_free=free, **options),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(pad_token="<unk>", eos_token="w19"),
        )
        found[attention] = losses(trainer)
    assert found["exact"] == pytest.approx(found["eager"], rel=1e-4)


def test_peft():
    """LoRA's adapters get the gradients of the emulated SDPA, bit by bit."""
    found = {}
    for attention in ("sdpa", "sagebwd"):
        base = model("llama", attention)
        torch.manual_seed(1)
        adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        with sagesim.emulate(sagesim.FACTORED_QK) if attention == "sdpa" else nullcontext():
            found[attention] = results(adapted, input_ids=tokens(), labels=tokens())
    names = found["sdpa"].keys()
    assert found["sagebwd"].keys() == names
    assert all("lora" in name for name in names - {"logits"})
    for name in names:
        assert_bitwise(actual=found["sagebwd"][name], expected=found["sdpa"][name], what=name)
