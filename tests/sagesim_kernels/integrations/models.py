"""Tiny models with random weights, and their outputs and gradients under an attention."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
)

from tests.support.assertions import assert_within_budget

WORDS, TOKENS, WINDOW = 50, 14, 5

_SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_GQA = _SIZES | {"num_key_value_heads": 2, "head_dim": 8}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

MODELS: dict[str, Callable[[], tuple[type[nn.Module], Any]]] = {
    "llama": lambda: (LlamaForCausalLM, LlamaConfig(**_GQA)),
    "bert": lambda: (BertForMaskedLM, BertConfig(**_SIZES, **_NO_DROPOUT)),
    "mistral": lambda: (MistralForCausalLM, MistralConfig(**_GQA, sliding_window=WINDOW)),
    "modernbert": lambda: (
        ModernBertForMaskedLM,
        ModernBertConfig(
            **_SIZES,
            local_attention=2 * WINDOW,
            layer_types=["full_attention", "sliding_attention"],
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
        ),
    ),
    "gemma2": lambda: (
        Gemma2ForCausalLM,
        # The logits must be large enough for the cap to matter.
        Gemma2Config(**_GQA, sliding_window=WINDOW, attn_logit_softcapping=0.05),
    ),
    "gpt_oss": lambda: (
        GptOssForCausalLM,
        GptOssConfig(**_GQA, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1),
    ),
}


def model(kind: str, attention: str, **changes: Any) -> nn.Module:
    """A model of two layers; the same weights for each `kind`."""
    make, config = MODELS[kind]()
    for name, value in changes.items():
        setattr(config, name, value)
    config._attn_implementation = attention
    config._experts_implementation = "eager"  # the others have no float64
    torch.manual_seed(0)
    made = make(config)
    for name, parameter in made.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter)
    return made


def tokens(batch: int = 2, n: int = TOKENS) -> Tensor:
    return torch.randint(1, WORDS, (batch, n), generator=torch.Generator().manual_seed(1))


def results(run: nn.Module, **inputs: Any) -> dict[str, Tensor]:
    """The logits, by "logits", and the gradients of the loss, by the names of the parameters."""
    run.zero_grad()
    out = run(**inputs)
    out.loss.backward()
    gradients = {n: p.grad for n, p in run.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), **gradients}


@contextmanager
def softmax_in_float64() -> Iterator[None]:
    """Let eager attention of a float64 model compute its softmax in float64.

    It asks for float32, in which the mask's lowest float64 is -inf: a row without keys is NaN."""
    softmax = F.softmax
    try:
        F.softmax = lambda x, dim, dtype=None: softmax(x, dim=dim)
        yield
    finally:
        F.softmax = softmax


def exact_results(kind: str, **inputs: Any) -> dict[str, Tensor]:
    """The results of eager attention in float64."""
    with softmax_in_float64():
        return results(model(kind, "eager").double(), **inputs)


def assert_equals_eager(
    kind: str, attention: str, *, kept: Tensor | None = None, eager: Any = None, **inputs: Any
) -> None:
    """Assert that the attention's results are those of eager attention, up to float32 rounding.

    kept: the tokens whose logits are compared, bool [batch, tokens].
    eager: what the eager model gets in place of `inputs`.
    """
    expected = inputs if eager is None else eager
    exact = exact_results(kind, **expected)
    yardstick = results(model(kind, "eager"), **expected)
    actual = results(model(kind, attention), **inputs)
    assert actual.keys() == exact.keys()
    for name in exact:
        pick = kept if name == "logits" and kept is not None else ...
        assert_within_budget(
            actual=actual[name][pick],
            exact=exact[name][pick],
            yardstick=yardstick[name][pick],
            factor=4.0,  # other orders of summation
            band=2.0**-20,
            what=name,
        )
