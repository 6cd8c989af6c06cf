"""The attention function that transformers calls in each layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor, nn

from sagesim.spec import AttentionSpec
from sagesim_kernels.integrations.attend import (
    Options,
    attend,
    attend_packed,
    attend_padded,
    longest_of,
)
from sagesim_kernels.integrations.per_tensor import once_per_tensor
from sagesim_kernels.integrations.transformers.masks import (
    has_padding_inside,
    packing_in_padding,
    packing_of,
    refuse_model,
    supports_sdpa,
)

NO_EFFECT: Final = frozenset(
    {
        "cache_position",
        "deterministic",  # the kernels always are
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "return_dict",
        "seq_idx",  # of layers without attention; cu_seq_lens says the same
        "use_cache",
    }
)
"""Arguments of a model's forward that reach the attention and do not concern it."""

_PAGED: Final = "a paged cache is not supported; call generate with cache_implementation='dynamic'"

REFUSED: Final = {
    "block_indices": "attention to chosen blocks of keys is not supported; use "
    "attn_implementation='eager'",
    "block_table": "continuous batching is not supported; call generate with cache_implementation="
    "'dynamic'",
    "cache": _PAGED,
    "cache_seqlens": _PAGED,
    "head_mask": "leave head_mask out",
    "indices": "attention to chosen keys is not supported; use attn_implementation='eager'",
    "k_cache": _PAGED,
    "output_attentions": "attention weights are never formed; set config.output_attentions=False "
    "or use attn_implementation='eager'",
    "position_bias": "biases are not supported; use attn_implementation='eager' or a model with "
    "rotary positions (in config.position_embedding_type, if it has one)",
    "sinks": "sinks that differ between queries are not supported; use attn_implementation='eager'",
    "v_cache": _PAGED,
}
"""Arguments that are not computed, and what to do."""

_DEPTHS: Final = ("num_hidden_layers", "encoder_layers", "decoder_layers")
"""Fields of a config. In an encoder-decoder, the first may be that of the encoder alone."""

_DROPOUTS: Final = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout")


@dataclass(frozen=True)
class LayerAttention:
    """The attention function that is registered under a name."""

    name: str
    spec: AttentionSpec
    layers: dict[int, AttentionSpec] = field(default_factory=dict)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | Tensor | None = None,
        max_length_k: int | Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Return contiguous o [batch, n_q, heads, d_v]; query is [batch, heads, n_q, d]."""
        config = getattr(module, "config", None)
        if config is not None:
            refuse_model(type(config))
        _refuse_dropout(module, dropout)
        _refuse_others(others)
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 4:
            sliding_window = None  # as in 'sdpa', a mask of four axes alone says what is masked
        elif sliding_window is None:
            _refuse_unseen_window(module, key.shape[2])
        if _is_of_all_queries(attention_mask):
            is_causal, attention_mask = False, keys_of(attention_mask)
        elif is_causal is None:
            is_causal = bool(getattr(module, "is_causal", True))
            if not is_causal and query.shape[2] > 1 and config is not None:
                _refuse_undeclared_decoder(module)
        options = Options(
            spec=self._spec(module),
            scale=scaling,
            is_causal=is_causal,
            window=_window(sliding_window, config, is_causal=is_causal),
            softcap=softcap,
            sinks=s_aux,
        )
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
            # A mask of one axis is the packing that position_ids show.
            if attention_mask is not None and attention_mask.ndim != 1:
                raise ValueError("cu_seq_lens_q and attention_mask are given; pass one of them")
            if cu_seq_lens_q is None or cu_seq_lens_k is None:
                raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be given together")
            if max_length_q is None or max_length_k is None:
                raise ValueError("max_length_q and max_length_k must be given with cu_seq_lens_q")
            cu_q, cu_k = cu_seq_lens_q, cu_seq_lens_k
            return _packed(q, k, v, cu_q, cu_k, max_length_q, max_length_k, options), None
        if attention_mask is None:
            attention_mask = _packing(position_ids, query, key)
        if attention_mask is None:
            return attend(q, k, v, options, tokens_first=True), None
        if attention_mask.ndim == 1:
            cu, longest = attention_mask, longest_of(attention_mask)
            return _packed(q, k, v, cu, cu, longest, longest, options), None
        # Attention without a causal mask or a window may be cross-attention, of which the mask says
        # nothing about the queries.
        is_self = options.is_causal or options.window != (-1, -1)
        keys = _padding(attention_mask, key)
        packing = None
        if _has_positions(position_ids, query, key):
            packing = packing_in_padding(keys, position_ids)
        if options.window != (-1, -1) and has_padding_inside(keys, packing):
            raise ValueError(
                "attention_mask has padding between tokens of a sequence, and the layer has a "
                "sliding window, in which padding counts; move the padding to the ends of the rows"
            )
        if packing is not None and not is_self:
            raise ValueError(
                "position_ids restart between tokens of a row, and attention_mask has padding; "
                "without a causal mask both together are not supported. Leave out the padding"
            )
        o = attend_padded(q, k, v, keys, options, pads_queries=is_self, packing=packing)
        return o, None

    def _spec(self, module: nn.Module) -> AttentionSpec:
        if not self.layers:
            return self.spec
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise ValueError(
                f"{type(module).__name__} has no layer_idx, so that `layers` of "
                f"register({self.name!r}, layers=...) cannot be applied"
            )
        config = getattr(module, "config", None)
        depths = {name: depth for name in _DEPTHS if (depth := getattr(config, name, None))}
        if depths and (unknown := [i for i in self.layers if i >= max(depths.values())]):
            found = " and ".join(f"config.{name} is {depth}" for name, depth in depths.items())
            raise ValueError(
                f"register({self.name!r}, layers=...) names the layers {unknown}, and {found}"
            )
        return self.layers.get(layer, self.spec)


def _is_of_all_queries(mask: object) -> TypeGuard[Tensor]:
    """Whether a mask is bool [batch, 1, n_k] or [batch, 1, 1, n_k]: of keys, and not causal.

    The mask function makes the first, and users the second.
    """
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        return False
    return mask.ndim in (3, 4) and math.prod(mask.shape[1:-1]) == 1


@torch.compiler.disable()  # pyright: ignore[reportUntypedFunctionDecorator]
@once_per_tensor
def keys_of(mask: Tensor) -> Tensor:
    """A mask of all queries as bool [batch, n_k], on a GPU the same tensor for all layers.

    It is a copy, because a view would keep the mask alive.
    """
    return mask.flatten(0, -2).clone()


def _refuse_undeclared_decoder(module: nn.Module) -> None:
    """Raise ValueError if a decoder's layer may be causal without saying so.

    transformers reads is_causal for 'sdpa'. A model that does not support it may have it wrong.
    """
    if getattr(module, "is_decoder", False) and not supports_sdpa(type(module.config)):
        raise ValueError(
            f"{type(module).__name__} belongs to a decoder, and its is_causal is False. Its model "
            "does not support 'sdpa', for which transformers reads is_causal, so it may be wrong; "
            "use attn_implementation='eager'"
        )


def _refuse_dropout(module: nn.Module, dropout: float) -> None:
    if not dropout:
        return
    config = getattr(module, "config", None)
    fields = [f"config.{x}" for x in _DROPOUTS if getattr(config, x, None)]
    raise ValueError(
        f"dropout={dropout} of attention weights is not supported; set "
        f"{' and '.join(fields) or 'the attention dropout of the config'} to 0"
    )


def _refuse_others(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if value is None or value is False or name in NO_EFFECT:
            continue
        if name in REFUSED:
            raise ValueError(f"{name} is given: {REFUSED[name]}")
        raise ValueError(
            f"{name} is given, an argument of attention that is not known here; use "
            "attn_implementation='eager' or 'sdpa', or pass None"
        )


def _refuse_unseen_window(module: nn.Module, n_k: int) -> None:
    """Raise ValueError if the layer's window is only in the mask that the model would make.

    Models that pass `sliding_window` pass None in layers without a window. `layer_types` says which
    layers have one; without it, all have.
    """
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if not isinstance(window, int) or n_k <= window:
        return
    if types is None and getattr(config, "use_sliding_window", True):
        what = f"config.sliding_window is {window}"
    elif (
        isinstance(types, (list, tuple))
        and isinstance(layer, int)
        and layer < len(types)
        and types[layer] == "sliding_attention"
    ):
        what = f"config.layer_types[{layer}] is 'sliding_attention'"
    else:
        return
    raise ValueError(
        f"{what}, and {type(module).__name__} does not pass sliding_window to the attention; set "
        "config.sliding_window=None, or use attn_implementation='sdpa'"
    )


def _window(size: int | None, config: Any, *, is_causal: bool) -> tuple[int, int]:
    """The window (left, right); the library's size counts the query's own position.

    Masks that are not causal have config.sliding_window keys on each side, without the own one.
    Some models pass that number, and others one more.
    """
    if size is None:
        return (-1, -1)
    if size < 1:
        raise ValueError(
            f"sliding_window={size}; the window includes the query's own position and is at least "
            "1. Set config.sliding_window=None for no window"
        )
    if is_causal:
        return (size - 1, 0)
    side = size if size == getattr(config, "sliding_window", None) else size - 1
    return (side, side)


def _padding(mask: Any, key: Tensor) -> Tensor:
    """The mask as bool [batch, n_k], or a ValueError."""
    batch, n_k = key.shape[0], key.shape[2]
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.ndim != 2:
        found = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask)
        raise ValueError(
            f"attention_mask is {found}; masks of single queries are not supported. Pass the "
            f"model a padding mask [batch, tokens] = {(batch, n_k)}, or None, and leave "
            "config.attn_implementation to make the mask"
        )
    if mask.shape != (batch, n_k):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, and there are {n_k} keys in "
            f"{batch} sequences; a static cache is not supported, call generate with "
            "cache_implementation='dynamic'"
        )
    return mask


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int | Tensor,
    longest_k: int | Tensor,
    options: Options,
) -> Tensor:
    """Attention of sequences packed along the tokens of the whole batch.

    q, k, v: [batch, tokens, heads, d].
    """
    tokens = (x.flatten(0, 1) for x in (q, k, v))
    o = attend_packed(*tokens, cu_q, cu_k, longest_q, longest_k, options)
    return o.unflatten(0, q.shape[:2])


def _packing(position_ids: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The cu_seqlens of positions that restart, for the whole batch; None if they do not."""
    if not _has_positions(position_ids, query, key):
        return None
    if torch.compiler.is_compiling():
        # The mask function has seen packed positions, unless the model fills a cache.
        torch._assert_async(  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
            (position_ids.diff() >= 1).all(),
            "position_ids restart; pass use_cache=False to the model, or cu_seq_lens_q",
        )
        return None
    return _restarts(position_ids, query.shape[0])


def _has_positions(position_ids: Tensor | None, query: Tensor, key: Tensor) -> TypeGuard[Tensor]:
    """Whether there are positions of all keys, in which another sequence may start."""
    n = query.shape[2]
    if position_ids is None or n == 1 or n != key.shape[2]:
        return False
    if position_ids.ndim != 2:
        raise ValueError(
            f"position_ids has shape {tuple(position_ids.shape)}; the attention needs those of the "
            "text, [batch, tokens]"
        )
    return True


@once_per_tensor
def _restarts(position_ids: Tensor, batch: int) -> Tensor | None:
    return packing_of(position_ids.expand(batch, -1).diff() < 1)
