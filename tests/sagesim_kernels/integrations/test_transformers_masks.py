"""Layers of transformers that do not say what their masks are: right numbers, or an error."""

import gc
import weakref

import pytest
import torch
from transformers import (
    ClapTextConfig,
    ClapTextModel,
    DogeConfig,
    DogeModel,
    DynamicCache,
    MistralConfig,
    MistralForCausalLM,
    MistralModel,
    PegasusXConfig,
    PegasusXModel,
    PhimoeConfig,
    PhimoeModel,
    SplinterConfig,
    SplinterModel,
    T5GemmaConfig,
    T5GemmaEncoderModel,
    T5GemmaModuleConfig,
)
from transformers.masking_utils import bidirectional_mask_function

import sagesim
from sagesim_kernels.integrations.transformers import register, unregister, uses
from sagesim_kernels.integrations.transformers.attention import LayerAttention, keys_of
from sagesim_kernels.integrations.transformers.masks import compact_mask
from tests.support.assertions import assert_bitwise, assert_sqnr_at_least

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 100,
}
TOKENS = torch.randint(5, 90, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def registered():
    """ "exact" rounds nothing."""
    register("exact", spec=sagesim.FPA)
    yield
    unregister("exact")


ROUNDING = 80.0
"""Decibels. The rounding of float32 leaves more, and another mask far less."""


def assert_is_eager(model, *, kept=..., **inputs):
    """Assert that a model computes what it does with eager attention, up to float32's rounding.

    kept: the tokens that are compared.
    """
    model.eval()
    found = {}
    for name in ("eager", "exact"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            found[name] = model(**inputs).last_hidden_state[kept]
    assert_sqnr_at_least(
        actual=found["exact"], exact=found["eager"].double(), floor_db=ROUNDING, what="states"
    )


def pegasus_x():
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 100}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    feed = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    return PegasusXModel(PegasusXConfig(**sizes, **heads, **feed)), {"decoder_input_ids": TOKENS}


REFUSED = {
    "an encoder": lambda: (ClapTextModel(ClapTextConfig(**SMALL)), {}),
    "another encoder": lambda: (SplinterModel(SplinterConfig(**SMALL)), {}),
    "a decoder": pegasus_x,
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_do_not_say_what_is_causal_are_refused(name):
    """Their encoders would be causal, or their decoders would see later tokens."""
    model, inputs = REFUSED[name]()
    model.set_attn_implementation("exact")
    with pytest.raises(ValueError, match=r"'sdpa'.*causal|is_causal is False.*'sdpa'"):
        model(input_ids=TOKENS, **inputs)
    assert name == "a decoder" or not uses(model, "exact")


def phimoe(**options):
    experts = {"num_local_experts": 2, "num_key_value_heads": 2}
    return PhimoeModel(PhimoeConfig(**SMALL, **experts, **options))


def test_a_window_that_no_layer_tells_is_refused():
    model = phimoe(sliding_window=4)
    model.set_attn_implementation("exact")
    with pytest.raises(ValueError, match="sliding_window is 4, and PhimoeAttention does not pass"):
        model(input_ids=TOKENS)
    model(input_ids=TOKENS[:, :4])  # inside the window
    assert_is_eager(phimoe(sliding_window=None), input_ids=TOKENS)


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_a_window_on_both_sides_has_its_size_on_each(side):
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    sizes = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
    parts = {name: T5GemmaModuleConfig(**sizes, **layers) for name in ("encoder", "decoder")}
    config = T5GemmaConfig(**parts, is_encoder_decoder=False)
    mask = torch.ones_like(TOKENS)
    if side != "none":
        mask[0, slice(3) if side == "left" else slice(-3, None)] = 0
    model = T5GemmaEncoderModel(config)
    assert_is_eager(model, kept=mask > 0, input_ids=TOKENS, attention_mask=mask)


class Layer(torch.nn.Module):
    is_causal = True


@pytest.mark.parametrize("axes", [3, 4])
def test_a_mask_that_is_not_causal_counts_more_than_a_layer_that_says_it_is(axes):
    q, k, v = torch.randn(3, 2, 2, 6, 16, generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(6) < torch.tensor([[4], [6]])
    mask = compact_mask(2, 6, 6, 0, 0, bidirectional_mask_function, tokens)
    assert mask.shape == (2, 1, 6)
    mask = mask if axes == 3 else mask[:, None]
    o, _ = LayerAttention("exact", sagesim.FPA)(Layer(), q, k, v, mask)
    expected = sagesim.attention(q, k, v, spec=sagesim.FPA, key_mask=tokens).transpose(1, 2)
    assert_sqnr_at_least(actual=o, exact=expected.double(), floor_db=ROUNDING, what="o")


def results_of_a_mask(attention, *, new):
    """Logits of Mistral for the last `new` tokens, under a mask [batch, 1, 1, n_k] of a user."""
    sizes = {**SMALL, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=4)).eval()
    model.set_attn_implementation(attention)
    cache = DynamicCache()
    mask = torch.ones(2, 1, 1, 12, dtype=torch.bool)
    mask[0, ..., 1] = False
    with torch.no_grad():
        if new < 12:
            model(input_ids=TOKENS[:, :-new], past_key_values=cache)
        return model(TOKENS[:, -new:], mask, past_key_values=cache).logits


@pytest.mark.parametrize("new", [1, 3, 12])
def test_a_mask_of_four_axes_alone_says_what_is_masked(new):
    """In a layer with a window, for cached decoding and for a whole forward."""
    assert_sqnr_at_least(
        actual=results_of_a_mask("exact", new=new),
        exact=results_of_a_mask("sdpa", new=new).double(),
        floor_db=ROUNDING,
        what="logits",
    )


@pytest.mark.parametrize("use_cache", [False, True])
def test_doge_is_refused_also_with_packed_positions(use_cache):
    model = DogeModel(DogeConfig(**SMALL, num_key_value_heads=2))
    model.set_attn_implementation("exact")
    positions = torch.arange(12).remainder(5)[None].expand(2, -1)
    with pytest.raises(ValueError, match="DogeConfig adds values of its own to a mask"):
        model(input_ids=TOKENS, position_ids=positions, use_cache=use_cache)
    assert not uses(model, "exact")


def test_all_layers_get_one_tensor_of_the_keys():
    mask = torch.ones(2, 1, 6, dtype=torch.bool, device="meta")  # kept as a GPU's
    assert keys_of(mask) is keys_of(mask)
    known = weakref.ref(keys_of(mask))
    del mask
    gc.collect()
    assert known() is None


def test_a_mask_that_must_exist_is_one_of_all_keys():
    options = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = compact_mask(2, 6, 6, 0, 0, bidirectional_mask_function, None, **options)
    assert_bitwise(actual=mask, expected=torch.ones(2, 1, 6, dtype=torch.bool), what="mask")


def test_padding_inside_a_row_is_refused_with_a_window():
    """Eager attention counts padding in the window."""
    sizes = {**SMALL, "num_key_value_heads": 2}
    mask = torch.ones_like(TOKENS)
    mask[1, 4:8] = 0
    model = MistralModel(MistralConfig(**sizes, sliding_window=4))
    model.set_attn_implementation("exact")
    with pytest.raises(ValueError, match="padding between tokens of a sequence"):
        model(input_ids=TOKENS, attention_mask=mask)


@pytest.mark.parametrize("use_cache", [False, True])
def test_positions_that_jump_ahead_start_no_sequence(use_cache):
    sizes = {**SMALL, "num_key_value_heads": 2}
    positions = torch.tensor([[*range(6), *range(100, 106)]])
    model = MistralModel(MistralConfig(**sizes, sliding_window=None))
    mask = torch.ones_like(TOKENS)
    inputs = {"input_ids": TOKENS, "attention_mask": mask, "use_cache": use_cache}
    assert_is_eager(model, **inputs, position_ids=positions)
