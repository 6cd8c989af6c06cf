"""diffusers: the attention backend "sagebwd" of chosen models, after `register()`.

The library has a closed list of backends and no public function that adds one. Everything that
this needs of its private names is in this module; the tests run it with the tested version.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,  # pyright: ignore[reportPrivateUsage]
    _templated_context_parallel_attention,  # pyright: ignore[reportPrivateUsage]
)
from diffusers.utils.constants import DIFFUSERS_ATTN_BACKEND
from torch import Tensor, nn

from sagesim.checks import check_type
from sagesim.problem import NO_WINDOW, check_is_tensor, check_spec
from sagesim.spec import FACTORED_QK, AttentionSpec
from sagesim_kernels.integrations.attend import (
    Options,
    attend,
    attend_padded,
    check_name,
    key_padding,
    softcap_of,
    window_of,
)

_Names: Any = AttentionBackendName
_Registry: Any = _AttentionBackendRegistry
_TABLES = ("_backends", "_constraints", "_supported_arg_names")


def register(name: str = "sagebwd", *, spec: AttentionSpec = FACTORED_QK) -> None:
    """Add a backend to the list of diffusers. No model uses it before `set_attention_backend`.

    Registering a name again replaces its spec.

    Args:
        name: lower case, and no name of diffusers.
        spec: the numerics.

    Raises:
        ValueError: if the name is diffusers' own, not lower case, or empty.
        TypeError: if the name is not a str, or spec not an AttentionSpec.

    Of diffusers' context parallelism, Ulysses is supported. A call raises a ValueError that names
    the argument for masks other than of padded keys, for dropout, for a returned logsumexp, for
    ring context parallelism, and for unknown names in `attention_kwargs`. Of these,
    `window_size=(left, right)` and `softcap` are those of FlashAttention, and `deterministic` has
    no effect: the result always is.

    >>> register()
    >>> unregister()
    """
    check_name(name)
    check_spec(spec)
    if name != name.lower():
        raise ValueError(f"name is {name!r}; diffusers converts names to lower case")
    member = _Names._value2member_map_.get(name)
    if member is not None and not _is_ours(member):
        raise ValueError(f"{name!r} is another backend of diffusers; choose another name")
    if member is None:
        member = str.__new__(AttentionBackendName, name)
        member._name_, member._value_ = name.upper(), name
        _Names._value2member_map_[name] = member
        _Names._member_map_[name.upper()] = member
        _Names._member_names_.append(name.upper())
    _Registry.register(member, supports_context_parallel=True)(_backend(member, spec))
    _Registry._supported_arg_names[member] = _EveryName()


def unregister(name: str = "sagebwd") -> None:
    """Take back `register(name)`. Models that still use the name raise an error when called.

    If the backend has become that of every model, diffusers' default becomes it again.

    Raises:
        ValueError: if nothing of ours is registered under the name.
    """
    member = _Names._value2member_map_.get(name)
    if member is None or not _is_ours(member):
        raise ValueError(f"{name!r} is not registered by sagesim_kernels")
    if _Registry._active_backend == member:
        _Registry.set_active_backend(_default())
    for table in _TABLES:
        del getattr(_Registry, table)[member]
    _Registry._supports_context_parallel.remove(name)
    del _Names._value2member_map_[name]
    del _Names._member_map_[name.upper()]
    _Names._member_names_.remove(name.upper())


def set_attention_backend(model: nn.Module, name: str = "sagebwd") -> None:
    """Let one model use a registered backend, and no other model.

    `model.set_attention_backend(name)` of diffusers also makes the backend that of every model
    without one, such as the pipeline's VAE. After it, a call raises a ValueError, until this
    function puts back diffusers' default. `model.reset_attention_backend()` undoes this function.

    UNets, VAEs and others whose processors call `scaled_dot_product_attention` have no backend;
    `sagesim_kernels.integrations.torch.apply(model)` changes their attention.

    Args:
        model: a model of diffusers, for example `pipeline.transformer`.

    Raises:
        TypeError: if the model is no torch.nn.Module, or the name no str.
        ValueError: if the name is not registered, or if no module of the model has a backend.
    """
    check_name(name)
    check_type("model", model, nn.Module, "a torch.nn.Module")
    before = _Registry._active_backend
    model_: Any = model
    try:
        if hasattr(model, "set_attention_backend"):
            model_.set_attention_backend(name)
    finally:
        _Registry.set_active_backend(_default() if _is_ours(before) else before)
    processors = (getattr(module, "processor", None) for module in model.modules())
    if not any(getattr(x, "_attention_backend", None) == name.lower() for x in processors):
        raise ValueError(
            f"no module of {type(model).__name__} has an attention backend of diffusers; use "
            "sagesim_kernels.integrations.torch.apply(model), which replaces its calls of "
            "scaled_dot_product_attention"
        )


def _default() -> Any:
    """The backend of models without one, before anything changes it."""
    return AttentionBackendName(DIFFUSERS_ATTN_BACKEND)


def _is_ours(member: Any) -> bool:
    return getattr(_Registry._backends.get(member), "__module__", None) == __name__


class _EveryName:
    """Contains every name.

    diffusers drops arguments whose names are not among those of the backend, so that this backend
    could not refuse them.
    """

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())


def _backend(member: Any, spec: AttentionSpec) -> Any:
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        window_size: tuple[int, int] = NO_WINDOW,
        softcap: float = 0.0,
        deterministic: bool = False,
        return_lse: bool = False,
        return_attn_probs: bool = False,
        _parallel_config: Any = None,
        **others: Any,
    ) -> Tensor:
        """Tensors are [batch, tokens, heads, d]. Heads are grouped as their numbers say."""
        if _Registry._active_backend == member:
            raise ValueError(
                f"{member.value!r} has become the backend of every model; call "
                "sagesim_kernels.integrations.diffusers.set_attention_backend(model) in place of "
                "model.set_attention_backend, and not attention_backend"
            )
        if dropout_p:
            raise ValueError(
                f"dropout_p={dropout_p} is not supported; set the model's dropout to 0"
            )
        others |= {"return_lse": return_lse, "return_attn_probs": return_attn_probs}
        for name, other in others.items():
            if other is not None and other is not False:
                raise ValueError(f"{name} is given; it is not supported by this backend")
        if key.shape[2] != query.shape[2] and not enable_gqa:
            raise ValueError(
                f"query has {query.shape[2]} heads and key {key.shape[2]}; enable_gqa is False"
            )
        options = Options(
            spec=spec,
            scale=scale,
            is_causal=is_causal,
            lower_right=False,
            window=window_of(window_size),
            softcap=softcap_of(softcap),
        )
        if attn_mask is not None and is_causal:
            raise ValueError("attn_mask and is_causal=True are given; pass one of them")
        if attn_mask is not None and options.window != NO_WINDOW:
            raise ValueError(f"attn_mask and window_size={window_size} are given; pass one of them")
        if _parallel_config is None:
            return _attend(query, key, value, attn_mask, options)
        return _ulysses(query, key, value, attn_mask, options, _parallel_config)

    return attention


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Options
) -> Tensor:
    if mask is None:
        return attend(query, key, value, options, tokens_first=True)
    check_is_tensor("attn_mask", mask)
    # To diffusers, two axes are those of the batch and of the keys.
    mask = mask[:, None, None] if mask.ndim == 2 else mask
    keys = key_padding(mask, query, key.shape[1])
    return attend_padded(query, key, value, keys, options, pads_queries=False)


def _ulysses(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: Options,
    parallel: Any,
) -> Tensor:
    """Attention of the tokens of all processes: each computes some of the heads.

    diffusers exchanges tokens and heads, and calls the two functions here in its own backward.
    """
    context = parallel.context_parallel_config
    if context is None or context.ring_degree > 1 or context.ulysses_anything:
        raise ValueError(
            "only Ulysses context parallelism is supported; use ContextParallelConfig("
            "ulysses_degree=...) without ring_degree and ulysses_anything"
        )

    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *_: Any, **__: Any
    ) -> Tensor:
        # diffusers calls this without gradients; the backward needs the graph of the attention.
        leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            o = _attend(*leaves, mask, options)
        ctx.attention = o, leaves
        return o.detach()

    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, ...]:
        o, leaves = ctx.attention
        return torch.autograd.grad(o, leaves, grad)

    o: Any = _templated_context_parallel_attention(
        query,
        key,
        value,
        mask,
        0.0,
        options.is_causal,
        options.scale,
        key.shape[2] != query.shape[2],
        False,
        forward_op=forward,
        backward_op=backward,
        _parallel_config=parallel,
    )
    return o
