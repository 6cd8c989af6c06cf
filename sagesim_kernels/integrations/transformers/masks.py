"""The mask function of transformers: padding and packing without a mask of n_q x n_k."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function

from sagesim_kernels.integrations.attend import tokens_of
from sagesim_kernels.integrations.per_tensor import once_per_tensor


def compact_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """What the attention function gets as attention_mask, in place of a mask of n_q x n_k.

    Returns:
        None: no key is masked but by the causal mask and the window, which the attention gets as
        arguments. bool [batch, n_k]: True is a token, False padding. bool [batch, 1, n_k]: the
        same, and the mask is not causal. int32 [sequences + 1]: the batch is packed, and these are
        its cu_seqlens.

    Raises:
        ValueError: if the mask is none of these; the message names the config field.
    """
    config = options.get("config")
    if config is not None:
        refuse_model(type(config))
    is_plain = mask_function is causal_mask_function and q_length == kv_length
    if is_plain and attention_mask is None and options.get("allow_is_causal_skip", True):
        return None
    return _read_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        options,
    )


def refuse_model(config: type) -> None:
    """Raise ValueError if this attention would compute something else in models of a config.

    transformers makes masks for all models, and accepts every attention for them.
    """
    reason = _reason_against(config)
    if reason is not None:
        raise ValueError(f"the model of {config.__name__} {reason}")


@torch._dynamo.assume_constant_result  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
def _reason_against(config: type) -> str | None:
    """Why models of a config cannot use this attention; torch.compile sees a constant."""
    return _cached_reason(config)


@cache
def _cached_reason(config: type) -> str | None:
    """As `_reason_against`; None if a model can use it, or if no model is known."""
    if masks_by_itself(config):
        return (
            "adds values of its own to a mask of n_q x n_k, which is not supported; use "
            "attn_implementation='sdpa'"
        )
    models = _models_of(config)
    calling = [x for x in models if calls_the_attention(x)]
    if models and not calling:
        return (
            "computes its attention in its own code, which does not call attn_implementation "
            "and would misread this mask; use attn_implementation='eager' or 'sdpa'"
        )
    if models and not any(map(says_what_is_causal, calling)):
        return (
            "supports neither 'sdpa' nor 'flash_attention_2' in transformers. Its layers do "
            "not say whether they are causal, as only a mask of n_q x n_k does; use "
            "attn_implementation='eager'"
        )
    return None


@torch._dynamo.assume_constant_result  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
def supports_sdpa(config: type) -> bool:
    """Whether a model of the config supports 'sdpa'; True if no model is known."""
    models = _models_of(config)
    return not models or any(x._supports_sdpa for x in models)


@cache
def _models_of(config: type) -> tuple[Any, ...]:
    """The classes of models with a config, of the modules that are imported."""
    return tuple(x for x in _subclasses(PreTrainedModel) if x.config_class is config)


def calls_the_attention(model: Any) -> bool:
    """Whether a class of models calls the functions of AttentionInterface."""
    return model._supports_attention_backend or hasattr(
        sys.modules.get(model.__module__), "ALL_ATTENTION_FUNCTIONS"
    )


def masks_by_itself(config: type) -> bool:
    """Whether models of a config add values per query to the mask, before they pass it on."""
    return config.__name__ == "DogeConfig"


def says_what_is_causal(model: Any) -> bool:
    """Whether the layers of a class of models tell an attention without a mask what they are."""
    return model._supports_sdpa or model._supports_flash_attn


def _subclasses(of: Any) -> Iterator[Any]:
    for each in of.__subclasses__():
        yield each
        yield from _subclasses(each)


# Under torch.compile, the values of the mask are not known while the model is traced.
@torch.compiler.disable()  # pyright: ignore[reportUntypedFunctionDecorator]
def _read_mask(
    batch: int,
    n_q: int,
    n_k: int,
    q_offset: int,
    kv_offset: int,
    mask_function: Callable[..., Any],
    padding: Tensor | None,
    options: Mapping[str, Any],
) -> Tensor | None:
    if options.get("use_vmap"):
        raise ValueError(
            "or_mask_function or and_mask_function is given; custom masks are not supported, use "
            "attn_implementation='flex_attention' or 'sdpa'"
        )
    parts = set(_parts(mask_function))
    if unknown := parts - _KNOWN_PARTS:
        hint = "config.attention_chunk_size" if "chunked_overlay" in unknown else "the model's mask"
        raise ValueError(
            f"the mask is made with {', '.join(sorted(unknown))} ({hint}), which is not supported; "
            "use attn_implementation='sdpa'"
        )
    # In cross-attention the lengths differ as well, without a causal mask.
    is_partly_filled = isinstance(q_offset, Tensor) or q_offset + n_q != kv_offset + n_k
    if is_partly_filled and "causal_mask_function" in parts:
        raise ValueError(
            f"{n_q} queries from position {q_offset} on and {n_k} keys from {kv_offset} on: a "
            "static cache is not supported, call generate with cache_implementation='dynamic'"
        )
    is_packed = "packed_sequence_mask_function" in parts
    is_bidirectional = "bidirectional_mask_function" in parts
    can_skip = options.get("allow_is_causal_skip", True)
    can_skip = can_skip or options.get("allow_is_bidirectional_skip", False)
    if not (is_packed or is_bidirectional or can_skip or n_q == 1):
        raise ValueError(
            "the model needs its mask as a matrix (allow_is_causal_skip=False), which this "
            "attention does not make; use attn_implementation='sdpa'"
        )
    if is_packed:
        rows = torch.arange(batch)[:, None]
        token = torch.arange(1, n_q)[None]
        device = options.get("device", "cpu")
        joined = mask_function(*(x.to(device) for x in (rows, rows * 0, token, token - 1)))
        return packing_of(~joined.expand(batch, n_q - 1))
    if padding is not None:
        padding = F.pad(padding, (0, max(0, kv_offset + n_k - padding.shape[1])))
        padding = padding[:, kv_offset : kv_offset + n_k]
    elif not can_skip:
        padding = torch.ones(batch, n_k, dtype=torch.bool, device=options.get("device", "cpu"))
    if padding is None or (can_skip and bool(padding.all())):
        return None
    return padding[:, None] if is_bidirectional else padding


def packing_of(starts: Tensor) -> Tensor | None:
    """cu_seqlens of the batch, if sequences start at [batch, 1 + i]; None if there is no start."""
    if not bool(starts.any()):
        return None
    first = F.pad(starts, (1, 0), value=True).flatten().nonzero()[:, 0]
    return F.pad(first, (0, 1), value=starts.shape[0] * (starts.shape[1] + 1)).to(torch.int32)


@torch.compiler.disable()  # pyright: ignore[reportUntypedFunctionDecorator]
@once_per_tensor
def packing_in_padding(keys: Tensor, positions: Tensor) -> Tensor | None:
    """cu_seqlens of the tokens that are not padding, if their positions restart inside a row.

    A sequence may contain padding, over which its positions stand still or go on.

    Args:
        keys: bool [batch, n]; True is a token, False padding.
        positions: [batch or 1, n]; those of padding are not read.

    Returns:
        int32 [sequences + 1], or None if each row is one sequence.
    """
    tokens = tokens_of(keys, keys.shape[1]).positions
    goes_on = positions.expand_as(keys).flatten()[tokens].diff() >= 1
    same_row = (tokens // keys.shape[1]).diff() == 0
    if not bool((same_row & ~goes_on).any()):
        return None
    return packing_of(~(same_row & goes_on)[None])


@torch.compiler.disable()  # pyright: ignore[reportUntypedFunctionDecorator]
@once_per_tensor
def has_padding_inside(keys: Tensor, packing: Tensor | None) -> bool:
    """Whether padding is between two tokens of a sequence.

    Args:
        keys: bool [batch, n]; True is a token, False padding.
        packing: cu_seqlens of the tokens; None if each row is a sequence.
    """
    tokens = tokens_of(keys, keys.shape[1]).positions
    same_row = (tokens // keys.shape[1]).diff() == 0
    after_padding = (same_row & (tokens.diff() > 1)).nonzero()[:, 0] + 1
    if packing is None:
        return after_padding.numel() > 0
    return not bool(torch.isin(after_padding, packing).all())


_KNOWN_PARTS: Final = frozenset(
    {
        "and_masks",
        "bidirectional_mask_function",
        "causal_mask_function",
        "packed_sequence_mask_function",
        "remap_positions_for_packed_sequence",
        "sliding_window_bidirectional_overlay",
        "sliding_window_overlay",
    }
)
"""Functions of transformers.masking_utils whose masks the attention computes from its arguments."""


def _parts(mask_function: Callable[..., Any]) -> Iterator[str]:
    """The functions that a mask function is composed of, by name."""
    name = getattr(mask_function, "__qualname__", repr(mask_function)).partition(".")[0]
    at_home = getattr(mask_function, "__module__", "") == causal_mask_function.__module__
    yield name if at_home else repr(mask_function)
    for cell in getattr(mask_function, "__closure__", None) or ():
        inner = cell.cell_contents
        for part in inner if isinstance(inner, tuple) else (inner,):
            if callable(part):
                yield from _parts(part)
