"""PyTorch: functions with the signatures that scripts assign, and attention of chosen modules.

On CUDA devices the kernels compute, elsewhere the emulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, Final, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils.checkpoint import checkpoint

from sagesim.checks import check_type
from sagesim.problem import autocast, check_is_tensor, check_spec, check_tensors, with_four_axes
from sagesim.spec import FACTORED_QK, AttentionSpec
from sagesim_kernels.integrations.attend import (
    Options,
    attend,
    attend_packed,
    attend_padded,
    key_padding,
    softcap_of,
    window_of,
)


@dataclass(frozen=True)
class Functions:
    """Attention under one spec, as functions with other libraries' signatures.

    Each function raises a ValueError that names the argument for whatever it does not compute.

    >>> q = k = v = torch.randn(1, 10, 2, 16)
    >>> Functions().flash_attn_func(q, k, v, causal=True).shape
    torch.Size([1, 10, 2, 16])
    """

    spec: AttentionSpec = FACTORED_QK

    def __post_init__(self) -> None:
        check_spec(self.spec)

    def sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """`torch.nn.functional.scaled_dot_product_attention`.

        attn_mask: a boolean mask of padded keys, broadcastable to [batch, 1, 1, n_k], or None.
        """
        _refuse(dropout_p=(dropout_p, 0.0))
        query, key, value = autocast(query, key, value)
        check_tensors(query, key, value, enable_gqa=enable_gqa)
        shape = (*query.shape[:-1], value.shape[-1])
        query, key, value = (with_four_axes(x) for x in (query, key, value))
        options = Options(spec=self.spec, scale=scale, is_causal=is_causal, lower_right=False)
        if attn_mask is None:
            return attend(query, key, value, options).reshape(shape)
        if is_causal:
            raise ValueError("attn_mask and is_causal=True are given; pass one of them")
        keys = key_padding(attn_mask, query, key.shape[2])
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        o = attend_padded(q, k, v, keys, options, pads_queries=False)
        return o.transpose(1, 2).reshape(shape)

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        s_aux: Tensor | None = None,
    ) -> Tensor:
        """`flash_attn.flash_attn_func` of flash-attn 2: q, k and v are [batch, tokens, heads, d].

        deterministic has no effect: the result always is. flash-attn 2 has no s_aux: these are the
        attention sinks [heads], as transformers passes them to hub kernels.
        """
        _refuse(
            dropout_p=(dropout_p, 0.0),
            alibi_slopes=(alibi_slopes, None),
            return_attn_probs=(return_attn_probs, False),
        )
        _check_axes("flash_attn_func", "[batch, tokens, heads, head size]", q=q, k=k, v=v)
        options = self._flash(softmax_scale, causal, window_size, softcap, s_aux)
        return attend(q, k, v, options, tokens_first=True)

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
        s_aux: Tensor | None = None,
    ) -> Tensor:
        """`flash_attn.flash_attn_varlen_func` of flash-attn 2: q, k, v are [tokens, heads, d].

        s_aux: as in `flash_attn_func`.
        """
        _refuse(
            dropout_p=(dropout_p, 0.0),
            alibi_slopes=(alibi_slopes, None),
            return_attn_probs=(return_attn_probs, False),
            block_table=(block_table, None),
        )
        _check_axes("flash_attn_varlen_func", "[tokens, heads, head size]", q=q, k=k, v=v)
        options = self._flash(softmax_scale, causal, window_size, softcap, s_aux)
        cu_q, cu_k = cu_seqlens_q, cu_seqlens_k
        return attend_packed(q, k, v, cu_q, cu_k, max_seqlen_q, max_seqlen_k, options)

    def _flash(
        self,
        scale: float | None,
        causal: bool,
        window: tuple[int, int],
        softcap: float,
        sinks: Tensor | None,
    ) -> Options:
        return Options(
            spec=self.spec,
            scale=scale,
            is_causal=causal,
            window=window_of(window),
            softcap=softcap_of(softcap),
            sinks=sinks,
        )


def _refuse(**arguments: tuple[object, object]) -> None:
    """Raise ValueError for each argument (value, default) whose value is not the default."""
    for name, (value, default) in arguments.items():
        if value is not default and (isinstance(value, Tensor) or value != default):
            found = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name} is {found}; it is not supported, only {default} is")


def _check_axes(function: str, axes: str, **tensors: Tensor) -> None:
    """Raise TypeError or ValueError unless all are tensors with these axes, as "[tokens, d]"."""
    for name, x in tensors.items():
        check_is_tensor(name, x)
        if x.ndim != axes.count(",") + 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; {function} needs {axes}")


def apply(
    model: nn.Module,
    spec: AttentionSpec = FACTORED_QK,
    filter: Callable[[str, nn.Module], bool] = lambda name, module: True,
) -> Applied:
    """Let chosen modules of a model compute `scaled_dot_product_attention` under a spec.

    The calls of SDPA that run inside the forward of a chosen module are replaced, also in modules
    inside it. Nothing else in the process changes. Unlike `sagesim.emulate`, this is no context of
    a thread: it stays until `remove`, and the modules may be compiled and checkpointed. (With
    fullgraph=True, PyTorch 2.13 cannot trace `Tensor.unflatten` in a chosen module; `view` works.
    A call of SDPA with an attn_mask ends a graph, and raises an error with fullgraph=True.)

    A model that is copied by `copy.deepcopy`, or saved as a whole by `torch.save` and loaded,
    computes with its own weights under the spec, until `remove` is called with it. So do the
    replicas of `nn.DataParallel`.

    A checkpoint inside a chosen module must be of a module: one of a function that itself calls
    SDPA computes PyTorch's in the backward. With fullgraph=True, PyTorch cannot trace a checkpoint
    around or inside a chosen module; choose the checkpointed modules, and compile each of them.

    Args:
        model: its forwards are wrapped; parameters, names and state_dict do not change.
        spec: the numerics.
        filter: called with the name and the module of each that calls SDPA or contains one that
            does. By default the whole model is chosen.

    Returns:
        A handle, also a context manager, whose `remove` puts back the forwards of this model.

    Raises:
        ValueError: if the filter chooses no module; at a call, for whatever `Functions.sdpa`
            refuses, and for `nn.MultiheadAttention`, which hides its call.
        RuntimeError: at a forward of a chosen module in which SDPA is not called.

    >>> layer = nn.Sequential(nn.Linear(8, 8))
    >>> apply(layer, filter=lambda name, module: name == "attention")
    Traceback (most recent call last):
    ValueError: filter chooses none of the 2 modules: '', '0'
    """
    check_spec(spec)
    check_type("model", model, nn.Module, "a torch.nn.Module")
    modules = dict(model.named_modules())
    chosen = {name: module for name, module in modules.items() if filter(name, module)}
    outermost = {
        name: module
        for name, module in chosen.items()
        if not any(name != other and _contains(other, name) for other in chosen)
    }
    if not outermost:
        names = ", ".join(map(repr, list(modules)[:10]))
        raise ValueError(f"filter chooses none of the {len(modules)} modules: {names}")
    # A checkpoint computes a module inside them again on its own, so that it is wrapped as well.
    wrapped = {
        name: module
        for name, module in modules.items()
        if name in outermost
        or (any(_contains(outer, name) for outer in outermost) and not _is_of_torch(module))
    }
    for name, module in wrapped.items():
        if "forward" in vars(module):
            raise ValueError(f"the forward of {name!r} is already replaced; remove that first")
    for name, module in wrapped.items():
        label = name or type(module).__name__
        forward = _Forward(module, label, spec, must_call=name in outermost)
        module.forward = forward
        setattr(module, _REPLICATE, forward.replicate)
    return Applied(tuple(wrapped.values()))


_REPLICATE: Final = "_replicate_for_data_parallel"
"""The method of a module that makes a replica for `nn.DataParallel`, without its parameters."""


def _contains(outer: str, inner: str) -> bool:
    return not outer or inner.startswith(f"{outer}.")


def _is_of_torch(module: nn.Module) -> bool:
    """Whether the class is one of torch.nn, none of which calls SDPA by its public name."""
    return type(module).__module__.startswith("torch.nn.")


def remove(model: nn.Module) -> None:
    """Put back the forwards that `apply` has replaced in a model, or in the one it is a copy of.

    A model without such forwards does not change. What has wrapped such a forward since, such as a
    hook of accelerate, stays.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    for module in model.modules():
        _put_back(module)


def _put_back(module: nn.Module) -> None:
    ours = getattr(vars(module).get(_REPLICATE), "__self__", None)
    if isinstance(ours, _Forward):
        ours.is_active = False  # something may have wrapped it
        delattr(module, _REPLICATE)
    forward = vars(module).get("forward")
    if isinstance(getattr(forward, "__func__", forward), _Forward):
        del module.forward


@dataclass(frozen=True)
class Applied:
    """What `apply` has changed."""

    modules: tuple[nn.Module, ...]

    def remove(self) -> None:
        """Put back the forwards of the modules; once is enough, and more has no effect."""
        for module in self.modules:
            _put_back(module)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


@dataclass(eq=False)
class _Forward:
    """The forward of a module, in which the calls of SDPA are replaced while it is active.

    It is an attribute of the module that it holds, so that a copy of the module, by deepcopy or
    pickle, gets a copy of this that holds the copied module.
    """

    module: nn.Module
    name: str
    spec: AttentionSpec
    must_call: bool
    is_active: bool = True

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward of the module's class, which `inspect.signature` looks for here."""
        return MethodType(type(self.module).forward, self.module)

    def replicate(self) -> nn.Module:
        """A replica of the module for `nn.DataParallel`, whose forward holds the replica."""
        replica = getattr(type(self.module), _REPLICATE)(self.module)
        if vars(replica)["forward"] is self:
            replica.forward = replace(self, module=replica)
        return replica

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = bool(args) and isinstance(args[0], nn.Module) and self._is_bound_to(args[0])
        module, *rest = args if bound else (self.module, *args)
        if not self.is_active or _active_spec() == self.spec:
            return type(module).forward(module, *rest, **kwargs)
        mode = _Replace(self.name, self.spec)
        with mode:
            result = type(module).forward(module, *rest, **kwargs)
        if self.must_call and not mode.calls:
            raise RuntimeError(
                f"scaled_dot_product_attention was not called in {self.name}; choose another "
                "module with filter, or set its attention implementation to 'sdpa'"
            )
        return result

    def _is_bound_to(self, module: nn.Module) -> bool:
        """Whether this is called as a method of a module, as by accelerate after `unwrap_model`.

        Then a copy of the module has this forward too.
        """
        method = vars(module).get("forward")
        return module is self.module or getattr(method, "__func__", None) is self


def _active_spec() -> AttentionSpec | None:
    """The spec under which the calls of SDPA are replaced at present."""
    modes = reversed(_get_current_function_mode_stack())
    return next((mode.spec for mode in modes if isinstance(mode, _Replace)), None)


class _Replace(TorchFunctionMode):
    """Computes each call of SDPA under a spec."""

    def __init__(self, name: str, spec: AttentionSpec) -> None:
        super().__init__()
        self.name, self.spec, self.calls = name, spec, 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return Functions(self.spec).sdpa(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            raise ValueError(
                f"{self.name} contains nn.MultiheadAttention, whose call of attention cannot be "
                "replaced here; use sagesim.emulate, or a module that calls "
                "scaled_dot_product_attention itself"
            )
        if func is checkpoint:  # by Dynamo alone
            # Dynamo traces what it calls without this mode.
            torch._dynamo.graph_break(  # pyright: ignore[reportPrivateUsage]
                msg=f"{self.name} contains a checkpoint, which cannot be compiled with "
                "fullgraph=True while its attention is replaced; compile without fullgraph, or "
                "choose the checkpointed modules with filter and compile each of them"
            )
        return func(*args, **(kwargs or {}))
