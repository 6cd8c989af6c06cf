"""Every argument that transformers can pass to an attention is computed or refused by name."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AttentionInterface,
    BartConfig,
    BartModel,
    BertConfig,
    BloomConfig,
    BloomForCausalLM,
    DebertaV2Config,
    DebertaV2Model,
    DynamicCache,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    LlamaConfig,
    XLNetConfig,
    XLNetModel,
    masking_utils,
    modeling_flash_attention_utils,
)
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.bert.modeling_bert import eager_attention_forward as bert_eager
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_eager
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_eager
from transformers.models.t5 import modeling_t5
from transformers.utils.generic import TransformersKwargs

import sagesim
from sagesim_kernels.integrations.transformers import register, unregister, uses
from sagesim_kernels.integrations.transformers.attention import LayerAttention
from tests.sagesim_kernels.integrations.models import TOKENS, model, tokens


@pytest.fixture(autouse=True)
def registered():
    register("exact", spec=sagesim.FPA)
    yield
    unregister("exact")


N, CU = 6, torch.tensor([0, 2, 6], dtype=torch.int32)

HONOURED: dict[str, dict[str, Any]] = {
    "attention_mask": {"attention_mask": torch.arange(N)[None] > 1},
    "scaling": {"scaling": 3.0},
    "is_causal": {"is_causal": False},
    "sliding_window": {"sliding_window": 2},
    "softcap": {"softcap": 0.5},
    "s_aux": {"s_aux": torch.tensor([0.0, 1.0])},
    "position_ids": {"position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]])},
    "cu_seq_lens_q": {
        "cu_seq_lens_q": CU,
        "cu_seq_lens_k": CU,
        "max_length_q": 4,
        "max_length_k": 4,
    },
}
"""Arguments by the one that is tested. Each changes the output of a causal call."""
TOGETHER = {"cu_seq_lens_k", "max_length_q", "max_length_k"}
"""Arguments without a meaning of their own: those of `cu_seq_lens_q`."""

REFUSED: dict[str, Any] = {
    "block_indices": torch.zeros(1, 1, N, 1, dtype=torch.long),
    "dropout": 0.1,
    "indices": torch.zeros(1, N, 1, dtype=torch.long),
    "position_bias": torch.zeros(1, 2, N, N),
    "output_attentions": True,
    "cache": object(),
    "block_table": torch.zeros(1, 1),
    "cache_seqlens": torch.zeros(1),
    "k_cache": torch.zeros(1),
    "sinks": torch.zeros(1, 2, N, 1),
    "v_cache": torch.zeros(1),
}
NO_EFFECT: dict[str, Any] = {
    "deterministic": True,
    "num_items_in_batch": torch.tensor(3),
    "output_hidden_states": True,
    "output_router_logits": True,
    "seq_idx": torch.zeros(1, N, dtype=torch.int32),
}
TENSORS = {"module", "query", "key", "value"}
INTERNAL = {
    "attn_implementation",
    "implementation",
    "key_states",
    "query_length",
    "query_states",
    "softmax_scale",
    "target_dtype",
    "use_top_left_mask",
    "value_states",
}
"""What the library's FlashAttention wrapper passes on to itself; no model passes it."""

SIGNATURES = (
    flash_attention_forward,
    flex_attention_forward,
    sdpa_attention_forward,
    modeling_flash_attention_utils._flash_attention_forward,
    bert_eager,
    gemma2_eager,
    gpt_oss_eager,
    # transformers 5.8 has none: its T5 computes attention itself.
    *filter(None, [getattr(modeling_t5, "eager_attention_forward", None)]),
)


def parameters(function: Any) -> set[str]:
    found = inspect.signature(function).parameters.values()
    return {p.name for p in found if p.kind is not p.VAR_KEYWORD}


def known_to_transformers() -> set[str]:
    names = set().union(*(parameters(function) for function in SIGNATURES))
    flash = modeling_flash_attention_utils.FlashAttentionKwargs.__annotations__
    return names | set(TransformersKwargs.__annotations__) | set(flash)


TABLES = HONOURED.keys() | TOGETHER | REFUSED.keys() | NO_EFFECT.keys() | TENSORS | INTERNAL


def test_the_tables_name_every_argument():
    assert known_to_transformers() - TABLES == set()


def calls_in(text: str, name: str) -> Iterator[ast.Call]:
    """The calls of a function in a source; to parse all of it would take long."""
    for found in re.finditer(rf"\b{name}\(", text):
        depth, end = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        call = ast.parse(text[found.start() : end], mode="eval").body
        assert isinstance(call, ast.Call)
        yield call


def test_the_tables_name_every_argument_that_a_model_passes():
    """Of all models of the library, read from their sources."""
    models = Path(transformers.__file__).with_name("models")
    passed = {
        keyword.arg
        for path in models.glob("*/modeling_*.py")
        for call in calls_in(path.read_text(encoding="utf-8"), "attention_interface")
        for keyword in call.keywords
    }
    assert {"dropout", "scaling", "s_aux"} <= passed
    assert passed - TABLES == {None}  # **kwargs


def call(**arguments: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, N, 8, generator=generator)
    k, v = torch.randn(2, 1, 1, N, 8, generator=generator)
    layer = nn.Module()
    layer.is_causal, layer.layer_idx = True, 0
    layer.config = LlamaConfig(num_hidden_layers=1, attention_dropout=0.1)
    arguments = {"attention_mask": None, **arguments}
    o, weights = AttentionInterface()["exact"](layer, q, k, v, **arguments)
    assert weights is None
    assert o.shape == (1, N, 2, 8)
    return o


@pytest.mark.parametrize("name", HONOURED)
def test_an_argument_is_honoured(name):
    """What it computes, the tests of whole models compare with eager attention."""
    assert not torch.equal(call(**HONOURED[name]), call())


def test_positions_that_another_library_changes_are_read_again():
    positions = torch.arange(N)[None].clone()
    buffer = positions.numpy()
    plain = call(position_ids=positions)
    buffer[:, 3:] -= 3
    expected = call(position_ids=positions.clone())
    assert torch.equal(call(position_ids=positions), expected)
    assert not torch.equal(plain, expected)


def test_positions_that_change_in_place_are_read_again():
    positions = torch.arange(N)[None]
    plain = call(position_ids=positions)
    positions.copy_(HONOURED["position_ids"]["position_ids"])
    assert not torch.equal(call(position_ids=positions), plain)


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_is_refused_by_name(name):
    with pytest.raises(ValueError, match=name):
        call(**{name: REFUSED[name]})


@pytest.mark.parametrize("name", NO_EFFECT)
def test_an_argument_has_no_effect(name):
    assert torch.equal(call(**{name: NO_EFFECT[name]}), call())


@pytest.mark.parametrize("name", sorted(REFUSED.keys() | {"new_argument"}))
def test_an_argument_that_is_not_set_is_accepted(name):
    unset = 0.0 if name == "dropout" else None
    assert torch.equal(call(**{name: unset}), call())


def test_an_unknown_argument_is_refused():
    with pytest.raises(ValueError, match="new_argument is given, an argument of attention that"):
        call(new_argument=torch.zeros(1))


CALLS = {
    "config.attention_dropout": {"dropout": 0.1},
    "attention_mask is torch.float32 (1, 1, 6, 6)": {"attention_mask": torch.zeros(1, 1, N, N)},
    "attention_mask is torch.bool (1, 1, 6, 6)": {
        "attention_mask": torch.ones(1, 1, N, N, dtype=torch.bool)
    },
    "there are 6 keys in 1 sequences": {"attention_mask": torch.ones(1, 8, dtype=torch.bool)},
    "cu_seq_lens_q and attention_mask are given": {
        **HONOURED["cu_seq_lens_q"],
        **HONOURED["attention_mask"],
    },
    "must be given together": {"cu_seq_lens_q": CU},
    "max_length_q and max_length_k must be given": {"cu_seq_lens_q": CU, "cu_seq_lens_k": CU},
    "in steps of at most max_seqlen_q=3; got [0, 2, 6]": {
        **HONOURED["cu_seq_lens_q"],
        "max_length_q": 3,
    },
    "position_ids has shape (3, 1, 6)": {"position_ids": torch.zeros(3, 1, N)},
    "position_ids restart between tokens of a row, and attention_mask has padding": {
        **HONOURED["attention_mask"],
        "position_ids": torch.tensor([[0, 0, 0, 1, 0, 1]]),
        "is_causal": False,
    },
    "sliding_window=0; the window includes": {"sliding_window": 0},
    "sliding_window=-1; the window includes": {"sliding_window": -1},
}


@pytest.mark.parametrize("message", CALLS)
def test_errors_name_the_value(message):
    with pytest.raises(ValueError) as raised:
        call(**CALLS[message])
    assert message in str(raised.value)


def make_mask(**changes: Any) -> Any:
    config = LlamaConfig(attention_chunk_size=4, sliding_window=4)
    config._attn_implementation = "exact"
    arguments = {
        "config": config,
        "inputs_embeds": torch.zeros(1, N, 8),
        "attention_mask": None,
        "past_key_values": None,
    }
    make = changes.pop("make", masking_utils.create_causal_mask)
    return make(**arguments | changes)


def custom(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query - key < 2


MASKS = {
    "or_mask_function or and_mask_function": {"or_mask_function": custom},
    "or_mask_function or and_mask_function is given": {"and_mask_function": custom},
    "config.attention_chunk_size": {"make": masking_utils.create_chunked_causal_mask},
    "blockwise_overlay": {"block_sequence_ids": torch.zeros(1, N, dtype=torch.long)},
    "allow_is_causal_skip=False": {"allow_is_causal_skip": False},
}


@pytest.mark.parametrize("message", MASKS)
def test_masks_that_are_not_computed_are_refused(message):
    make = MASKS[message].get("make", masking_utils.create_causal_mask)
    if unknown := MASKS[message].keys() - {"make"} - inspect.signature(make).parameters.keys():
        pytest.skip(f"transformers {transformers.__version__} has no {unknown}")
    with pytest.raises(ValueError, match=message):
        make_mask(**MASKS[message])


def test_a_model_that_computes_its_attention_itself_is_refused():
    """Bloom would take no mask for attention to all tokens, later ones too."""
    config = BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2)
    config._attn_implementation = "exact"
    with pytest.raises(ValueError, match="the model of BloomConfig computes its attention in its"):
        BloomForCausalLM(config)(tokens())


def test_a_static_cache_is_refused():
    with pytest.raises(ValueError, match="cache_implementation='dynamic'"):
        model("llama", "exact").eval().generate(
            tokens(), max_new_tokens=2, cache_implementation="static"
        )


@pytest.mark.parametrize("make", ["create_causal_mask", "create_sliding_window_causal_mask"])
def test_masks_without_padding_are_none(make):
    assert make_mask(make=getattr(masking_utils, make)) is None


def test_the_mask_of_packed_positions_is_their_cu_seqlens():
    """Some models pass no position_ids to the attention."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 0]])
    inputs = torch.zeros(2, N, 8)
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        make = getattr(masking_utils, name)
        cu = make_mask(make=make, position_ids=positions, inputs_embeds=inputs)
        assert cu.dtype is torch.int32
        assert cu.tolist() == [0, 3, 6, 11, 12]


def test_the_mask_of_padding_is_that_of_the_keys():
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8), 0)
    padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1]])
    mask = make_mask(attention_mask=padding, past_key_values=cache)
    assert torch.equal(mask, padding.bool())
    assert make_mask(attention_mask=torch.ones(1, 10), past_key_values=cache) is None


def test_a_window_that_only_the_mask_knows_is_refused():
    layer = SimpleNamespace(
        is_causal=True,
        layer_idx=1,
        config=LlamaConfig(
            num_hidden_layers=2,
            sliding_window=4,
            layer_types=["full_attention", "sliding_attention"],
        ),
    )
    x = torch.randn(1, 2, N, 8)
    with pytest.raises(ValueError, match="does not pass sliding_window"):
        AttentionInterface()["exact"](layer, x, x, x, None)


def test_output_attentions_of_a_model_is_refused():
    with pytest.raises(ValueError, match=r"config\.output_attentions=False"):
        model("llama", "exact")(tokens(), output_attentions=True)


def test_dropout_of_a_model_is_refused_in_training():
    trained = model("bert", "exact", attention_probs_dropout_prob=0.1).train()
    with pytest.raises(ValueError, match=r"set config\.attention_probs_dropout_prob to 0"):
        trained(tokens())
    trained.eval()(tokens())


def test_cross_attention_computes_every_query():
    """The encoder's padding says nothing about the decoder's tokens, even if lengths are equal."""
    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    outputs = {}
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, 5:] = 0
    for attention in ("eager", "exact"):
        torch.manual_seed(0)
        config = EncoderDecoderConfig.from_encoder_decoder_configs(
            BertConfig(**sizes), BertConfig(**sizes)
        )
        made = EncoderDecoderModel(config).eval()
        made.set_attn_implementation(attention)
        outputs[attention] = made(
            input_ids=tokens(), attention_mask=mask, decoder_input_ids=tokens().flip(1)
        ).logits
    error = (outputs["exact"] - outputs["eager"]).abs().max()
    assert error <= 2.0**-20 * outputs["eager"].abs().max()


@pytest.mark.parametrize("name", ["eager", "sdpa", "flash_attention_2"])
def test_names_of_the_library_are_refused(name):
    with pytest.raises(ValueError, match=f"{name!r} is another attention"):
        register(name)


def test_names_are_checked():
    with pytest.raises(ValueError, match="name is ''; it must not be empty"):
        register("")
    with pytest.raises(TypeError, match="name is 3; it must be a str"):
        register(3)
    for name in ("sage/bwd", "paged|sagebwd", "my_flash"):
        with pytest.raises(ValueError, match=f"name is {re.escape(repr(name))}; transformers"):
            register(name)
        assert name not in AttentionInterface._global_mapping


OF_THEIR_OWN = {
    "deberta": (
        DebertaV2Model,
        DebertaV2Config,
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
    "xlnet": (XLNetModel, XLNetConfig, {"d_model": 16, "n_layer": 1, "n_head": 2, "d_head": 8}),
}
"""Models that ignore attn_implementation."""


def tiny(kind: str, attention: str = "exact") -> nn.Module:
    if kind in OF_THEIR_OWN:
        make, config, sizes = OF_THEIR_OWN[kind]
        return make(config(vocab_size=50, **sizes, attn_implementation=attention))
    made = model("llama", attention)
    return get_peft_model(made, LoraConfig(target_modules=["q_proj"])) if kind == "peft" else made


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT's use of transformers
@pytest.mark.parametrize("kind", ["llama", "peft", *OF_THEIR_OWN])
def test_uses_says_whether_a_model_calls_the_attention(kind, monkeypatch):
    calls = []
    attend = LayerAttention.__call__
    monkeypatch.setattr(
        LayerAttention, "__call__", lambda *a, **k: [calls.append(1), attend(*a, **k)][1]
    )
    made = tiny(kind)
    made(tokens())
    assert uses(made, "exact") is bool(calls) is (kind not in OF_THEIR_OWN)
    assert not uses(tiny(kind, "eager"), "exact")


def test_uses_knows_the_parts_of_a_model():
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    parts = BertConfig(**sizes), BertConfig(**sizes)
    made = EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(*parts))
    assert not uses(made, "exact")
    made.decoder.set_attn_implementation("exact")
    assert uses(made, "exact")
    with pytest.raises(ValueError, match="'sdpa' is not registered by sagesim_kernels"):
        uses(made, "sdpa")


def test_unregistering_what_is_not_registered_is_refused():
    with pytest.raises(ValueError, match="'sdpa' is not registered by sagesim_kernels"):
        unregister("sdpa")


LAYERS = {
    "the key -1": ({-1: sagesim.SAGEBWD}, ValueError),
    "the key 'q'": ({"q": sagesim.SAGEBWD}, TypeError),
    "not an AttentionSpec": ({0: "sagebwd"}, TypeError),
}


@pytest.mark.parametrize("message", LAYERS)
def test_layers_are_checked(message):
    layers, error = LAYERS[message]
    with pytest.raises(error, match=message):
        register("exact", layers=layers)


def test_a_layer_that_the_model_has_not_is_refused():
    register("exact", layers={7: sagesim.SAGEBWD})
    with pytest.raises(ValueError, match=r"config\.num_hidden_layers is 2"):
        model("llama", "exact")(tokens())


def test_layers_of_a_decoder_may_be_more_than_the_encoders():
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 50}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    bart = BartModel(BartConfig(**sizes, **heads, encoder_layers=1, decoder_layers=3)).eval()
    bart.set_attn_implementation("exact")
    register("exact", spec=sagesim.FPA)
    plain = bart(tokens()).last_hidden_state
    register("exact", spec=sagesim.FPA, layers={2: sagesim.SAGEBWD})
    assert not torch.equal(bart(tokens()).last_hidden_state, plain)
    register("exact", layers={3: sagesim.SAGEBWD})
    with pytest.raises(ValueError, match=r"layers \[3\], and .*config\.decoder_layers is 3"):
        bart(tokens())


def test_layers_need_numbers():
    register("exact", layers={0: sagesim.SAGEBWD})
    x = torch.randn(1, 2, N, 8)
    with pytest.raises(ValueError, match="SimpleNamespace has no layer_idx"):
        AttentionInterface()["exact"](SimpleNamespace(), x, x, x, None)
