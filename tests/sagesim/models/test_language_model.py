"""Models as their users save them: right, wrong and old."""

import builtins
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)

from sagesim.models import Capture, LanguageModel, capture
from tests.support.assertions import assert_bitwise
from tests.support.language_models import llama, save, save_gguf

TEXT = " ".join(f"w{i % 19 + 1}" for i in range(0, 150, 3))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Change the weights of every safetensors file of a folder."""
    for path in folder.glob("*.safetensors"):
        save_file(change(load_file(path)), path, {"format": "pt"})
    return folder


def configure(folder: Path, name: str = "config.json", **changes) -> Path:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def record(folder: Path, tokens: int = 20) -> Capture:
    model = LanguageModel.load(folder)
    return model.capture(model.encode(TEXT, tokens))


def assert_same(found: Capture, expected: Capture) -> None:
    assert [call.name for call in found.calls] == [call.name for call in expected.calls]
    for a, b in zip(found.calls, expected.calls, strict=True):
        for name, x in b.tensors.items():
            assert_bitwise(actual=a.tensors[name], expected=x, what=f"{b}: {name}")


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Capture:
    """The capture of the Llama whose weights are saved right."""
    return record(save(llama(), tmp_path_factory.mktemp("right")))


@pytest.mark.parametrize(
    "prefixed",
    [lambda key: f"_orig_mod.{key}", lambda key: key.replace("layers.1.", "layers.1._orig_mod.")],
    ids=["model", "layer"],
)
@pytest.mark.parametrize("shard", ["5GB", "5KB"])
def test_a_model_that_was_saved_compiled_loads(tmp_path, expected, prefixed, shard):
    folder = save(llama(), tmp_path, max_shard_size=shard)
    rewrite(folder, lambda weights: {prefixed(key): x for key, x in weights.items()})
    index = folder / "model.safetensors.index.json"
    assert index.exists() == (shard == "5KB")
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] = {prefixed(k): v for k, v in content["weight_map"].items()}
        index.write_text(json.dumps(content))
    assert_same(record(folder), expected)


def test_tied_embeddings_are_not_missing(tmp_path):
    model = llama(tie_word_embeddings=True)
    folder = save(model, tmp_path)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert len(record(folder).calls) == 2


def test_a_base_model_without_its_head_loads_if_the_head_is_the_embeddings(tmp_path):
    model = llama(tie_word_embeddings=True)
    whole = record(save(model, tmp_path / "whole"))
    assert_same(record(save(model.model, tmp_path / "base")), whole)


def without_layer(weights):
    return {key: x for key, x in weights.items() if "layers.1.mlp" not in key}


WRONG = {
    "a base model without its head": (
        lambda folder: save(llama().model, folder),
        "LlamaForCausalLM needs lm_head.weight, which the checkpoint lacks$",
    ),
    "weights that are missing": (
        lambda folder: rewrite(save(llama(), folder), without_layer),
        "needs model.layers.1.mlp.down_proj.weight, .* which the checkpoint lacks$",
    ),
    "weights with a prefix": (
        lambda folder: rewrite(
            save(llama(), folder), lambda w: {f"module.{key}": x for key, x in w.items()}
        ),
        "needs lm_head.weight, .* and 18 more, .* the checkpoint has module.lm_head.weight, ",
    ),
    "weights that the model does not have": (
        lambda folder: rewrite(
            save(llama(), folder),
            lambda w: w | {"model.layers.0.self_attn.q_proj.bias": torch.ones(16)},
        ),
        "the checkpoint has model.layers.0.self_attn.q_proj.bias, which LlamaForCausalLM does not",
    ),
    "more layers than the config says": (
        lambda folder: configure(save(llama(), folder), num_hidden_layers=1),
        "the checkpoint has model.layers.1.input_layernorm.weight, ",
    ),
    "a weight of another shape": (
        lambda folder: rewrite(
            save(llama(), folder), lambda w: w | {"model.norm.weight": torch.ones(3)}
        ),
        r"model.norm.weight is \(3,\), LlamaForCausalLM needs \(16,\)$",
    ),
    "a damaged file": (
        lambda folder: save(llama(), folder) / "model.safetensors",
        "no causal language model loads from it: ",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path, name):
    make, message = WRONG[name]
    path = make(tmp_path / "model")
    if path.is_file():
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=f"model: .*{message}"):
        LanguageModel.load(tmp_path / "model")


BERT = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize("kind", [BertForMaskedLM, BertModel])
def test_an_encoder_is_refused(tmp_path, kind):
    folder = save(kind(BertConfig(**BERT)), tmp_path)
    message = "not a causal language model: tokens attend to later ones at SDPA call 0 in bert"
    with pytest.raises(ValueError, match=message):
        LanguageModel.load(folder)


def test_a_bert_that_is_a_decoder_loads(tmp_path):
    folder = save(BertLMHeadModel(BertConfig(is_decoder=True, **BERT)), tmp_path)
    assert all(call.is_causal for call in record(folder).calls)


def test_constants_of_old_checkpoints_are_harmless(tmp_path):
    """GPT-2 as it was saved by early versions: without a prefix, with causal masks as weights."""
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=20, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    )
    folder = save(model, tmp_path)
    whole = record(folder)

    def old(weights):
        plain = {key.removeprefix("transformer."): x for key, x in weights.items()}
        masks = {"h.0.attn.bias": torch.ones(1, 1, 64, 64).tril()}
        return plain | masks | {"h.0.attn.masked_bias": torch.tensor(-1e4)}

    assert_same(record(rewrite(folder, old)), whole)


def test_a_head_beside_the_model_is_named_and_not_used(tmp_path, expected):
    folder = save(llama(), tmp_path)
    rewrite(folder, lambda w: w | {"v_head.summary.weight": torch.ones(1, 16)})
    assert LanguageModel.load(folder).unused == ("v_head.summary.weight",)
    assert_same(record(folder), expected)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_in_the_folder_is_not_executed_and_nothing_is_asked(tmp_path, monkeypatch, name):
    folder = save(llama(), tmp_path / "model")
    (folder / "code.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    classes = ["code.Tokenizer", "code.Tokenizer"]
    auto = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M", "AutoTokenizer": classes}
    kind = {"model_type": "new"} if name == "config.json" else {"tokenizer_class": "New"}
    configure(folder, name, auto_map=auto, **kind)
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("it asked"))
    with pytest.raises(ValueError, match=r"code of its own \(auto_map in its configuration\)") as e:
        LanguageModel.load(folder)
    assert "trust_remote_code" not in str(e.value)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_16_bit_computes_in_float32_and_is_recorded_in_its_dtype(tmp_path, dtype):
    folder = save(llama().to(dtype), tmp_path)
    found = record(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).train(False)
    ids = torch.tensor([[i % 19 + 1 for i in range(0, 60, 3)]])
    with capture(loss_scale=32.0) as recording:
        (model(input_ids=ids, labels=ids).loss * 32).backward()
    assert_same(found, recording.result().to(dtype))
    assert found.calls[0].q.dtype is dtype
    assert found.source["computed in"] == "float32"


def test_a_gguf_file_loads(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    model = LanguageModel.load(save_gguf(llama(), tmp_path / "tiny.gguf"))
    assert model.layers == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    tokens = model.encode("abcab", 9)
    assert (tokens.ids.tolist(), model.positions) == ([[19, 3, 19]], 64)
    expected = llama().state_dict()
    for name, x in model._model.state_dict().items():
        if not name.endswith(("q_proj.weight", "k_proj.weight")):  # stored in another order
            assert_bitwise(actual=x, expected=expected[name], what=name)
    assert [call.q.shape for call in model.capture(tokens).calls] == [(1, 2, 3, 8)] * 2


class TestTokens:
    @pytest.fixture
    def model(self, tmp_path) -> LanguageModel:
        return LanguageModel.load(save(llama(), tmp_path))

    def test_are_the_beginning_of_the_text(self, model):
        model._tokenizer.truncation_side = "left"
        tokens = model.encode(TEXT, 3)
        assert (tokens.ids.tolist(), tokens.is_whole) == ([[1, 4, 7]], False)

    def test_may_be_all_of_the_text(self, model):
        assert [model.encode(TEXT, n).is_whole for n in (49, 50, 51)] == [False, True, True]
        assert model.encode(TEXT, 64).count == 50

    def test_beyond_the_positions_of_the_model_raise(self, model):
        with pytest.raises(ValueError, match=r"65 tokens: .* has 64 positions"):
            model.encode(TEXT, 65)

    def test_positions_have_several_names_and_the_tokenizer_may_know_fewer(self, tmp_path):
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=20, n_positions=48, n_embd=16, n_layer=1, n_head=2)
        )
        folder = save(model, tmp_path)
        assert LanguageModel.load(folder).positions == 48
        configure(folder, "tokenizer_config.json", model_max_length=40)
        assert LanguageModel.load(folder).positions == 40


def test_progress_counts_each_layer_forward_and_backward(tmp_path):
    model = LanguageModel.load(save(llama(), tmp_path))
    steps: list[int] = []
    model.capture(model.encode(TEXT, 9), layers=[1], progress=lambda: steps.append(1))
    assert len(steps) == 4


def test_a_layer_that_does_not_exist_raises(tmp_path):
    model = LanguageModel.load(save(llama(), tmp_path))
    with pytest.raises(ValueError, match="no layer 2, -1; the model has 0 to 1"):
        model.capture(model.encode(TEXT, 9), layers=[2, 0, -1])
