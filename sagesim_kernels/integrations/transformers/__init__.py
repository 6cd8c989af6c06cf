"""transformers: `attn_implementation="sagebwd"`, after `register()`.

The model's own code calls the attention function that is registered under its
`attn_implementation`, and before that the mask function of the same name. The mask function here
returns padding and packing in a form that needs no n_q x n_k mask. The attention function computes
them, and raises an error for whatever else it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from sagesim.checks import check_type, is_number
from sagesim.problem import check_spec
from sagesim.spec import FACTORED_QK, AttentionSpec
from sagesim_kernels.integrations.attend import check_name
from sagesim_kernels.integrations.transformers.attention import LayerAttention
from sagesim_kernels.integrations.transformers.masks import (
    calls_the_attention,
    compact_mask,
    masks_by_itself,
    says_what_is_causal,
)

__all__ = ["register", "unregister", "uses"]

_MEANINGS: Final = {
    "/": "a repository of kernels",
    "|": "a paged attention",
    "flash": "a FlashAttention",
}
"""A part of a name -> what transformers takes the name for."""


def register(
    name: str = "sagebwd",
    *,
    spec: AttentionSpec = FACTORED_QK,
    layers: Mapping[int, AttentionSpec] | None = None,
) -> None:
    """Make the attention available to every model as `attn_implementation=name`.

    On a CUDA device the kernels compute it, elsewhere the emulator. No model changes until it is
    loaded with `attn_implementation=name` or `model.set_attn_implementation(name)` is called.
    Checkpoints hold nothing of this attention. Registering a name again replaces its specs.

    Args:
        name: any name that transformers does not use itself, without "/", "|" and "flash", by which
            it recognizes its kernels.
        spec: the numerics of every layer that is not in `layers`.
        layers: the numerics of single layers, by `layer_idx`.

    Raises:
        ValueError: if another attention is registered under the name, transformers would not look
            the name up, the name is empty, or a layer is negative.
        TypeError: if the name is not a str, a spec not an AttentionSpec, or a layer not an integer.

    A call of the model raises a ValueError that names the argument, and the config field to change,
    for everything that is not computed: dropout, position biases, masks per query (4D), custom,
    chunked and blockwise mask functions, returned attention weights, static and paged caches.

    Some models compute their attention in their own code and ignore the name: see `uses`.

    Padding may be on either side. Packed sequences come as `cu_seq_lens_q` and `cu_seq_lens_k`, or
    as `position_ids` that restart between tokens that are not padding, if the model passes them to
    its attention; each sequence is computed as if it were alone. If a cache makes
    n_q smaller than n_k, the causal mask is aligned lower-right. The output of a padded query is 0
    in causal attention.

    >>> from sagesim_kernels.integrations.transformers import register, unregister
    >>> register("sagebwd")
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=10)
    >>> config = LlamaConfig(**sizes, num_attention_heads=2, attn_implementation="sagebwd")
    >>> tokens = torch.arange(8)[None]
    >>> LlamaForCausalLM(config)(tokens, labels=tokens).loss.backward()
    >>> unregister("sagebwd")
    """
    check_name(name)
    check_spec(spec)
    check_type("layers", layers, Mapping | None, "a mapping from layer numbers to specs")
    layers = dict(layers or {})
    for layer, each in layers.items():
        if not is_number(layer, int):
            raise TypeError(f"layers has the key {layer!r}; the keys are layer numbers")
        check_spec(each, f"layers[{layer}]")
        if layer < 0:
            raise ValueError(f"layers has the key {layer}; layers are numbered from 0")
    known = _functions(AttentionInterface).get(name)
    if name == "eager" or (known is not None and not isinstance(known, LayerAttention)):
        raise ValueError(f"{name!r} is another attention of transformers; choose another name")
    for part, meaning in _MEANINGS.items():
        if part in name:
            raise ValueError(
                f"name is {name!r}; transformers takes a name with {part!r} for {meaning}, and "
                "would not use this attention"
            )
    AttentionInterface.register(name, LayerAttention(name, spec, layers))
    AttentionMaskInterface.register(name, compact_mask)


def unregister(name: str = "sagebwd") -> None:
    """Take back `register(name)`. Models that still use the name raise an error when called.

    Raises:
        ValueError: if nothing of ours is registered under the name.
    """
    _check_registered(name)
    del _functions(AttentionInterface)[name]
    del _functions(AttentionMaskInterface)[name]


def uses(model: nn.Module, name: str = "sagebwd") -> bool:
    """Whether a model, or a part of it, calls the attention that is registered under a name.

    transformers accepts `attn_implementation=name` for every model. DeBERTa, XLNet and others
    compute their attention in their own code and ignore it. Models that this attention refuses do
    not use it either: layers that do not say whether they are causal, and Doge's own mask.

    Args:
        model: a model of transformers, or a module that contains some.

    Raises:
        ValueError: if nothing of ours is registered under the name.

    >>> from transformers import DebertaV2Config, DebertaV2Model
    >>> register("sagebwd")
    >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, vocab_size=10)
    >>> config = DebertaV2Config(**sizes, num_attention_heads=2, attn_implementation="sagebwd")
    >>> uses(DebertaV2Model(config))
    False
    >>> unregister("sagebwd")
    """
    _check_registered(name)
    check_type("model", model, nn.Module, "a torch.nn.Module")
    parts: list[Any] = [x for x in model.modules() if isinstance(x, PreTrainedModel)]
    return any(
        x.config._attn_implementation == name
        and calls_the_attention(type(x))
        and says_what_is_causal(type(x))
        and not masks_by_itself(type(x.config))
        for x in parts
    )


def _check_registered(name: str) -> None:
    check_name(name)
    if not isinstance(_functions(AttentionInterface).get(name), LayerAttention):
        raise ValueError(f"{name!r} is not registered by sagesim_kernels")


def _functions(interface: Any) -> dict[str, Callable[..., Any]]:
    """The library's table of functions by name. It has no public function that removes one."""
    return interface._global_mapping
