"""See every `scaled_dot_product_attention` call of any model, and answer in its place.

Nothing is patched. PyTorch offers each call to the `TorchFunctionMode`s of its thread, and hooks
that all modules run tell in which module it is made; both are gone when the context is left.
Not seen: calls of other threads (`nn.DataParallel`), and attention computed by other means.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from sagesim.problem import AttentionProblem


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SdpaCall(AttentionProblem):
    """The arguments of one SDPA call, and the module that makes it. do is not known yet.

    index: number of the call among those of the model, in the order in which they are first made.
        A later forward makes the same calls again, and each has the index it had. A call is
        identified by the innermost module that makes it and by the number of calls that this module
        made before it, since the outermost module was entered. Calls outside of any module are all
        different. None where a backward recomputes one of several calls of a module (activation
        checkpointing): PyTorch does not say which.
    name: of the innermost module, relative to the outermost module; "" outside of any module.
    recomputed: whether a backward makes the call again.
    """

    dropout_p: float
    index: int | None
    name: str
    recomputed: bool

    def is_at(self, place: int | str) -> bool:
        """Whether `place` is this call's index, its module's name, or that of a module around."""
        if isinstance(place, int):
            return place == self.index
        return f"{self.name}.".startswith(f"{place}." if place else "")

    def refuse_unsupported(self) -> None:
        """Raise ValueError, naming the reason, for what is no plain attention problem."""
        if self.dropout_p > 0:
            raise ValueError(
                f"{self}: dropout_p={self.dropout_p}; random dropout of P is not supported, "
                "set the model's attention dropout to 0"
            )
        if self.attn_mask is not None and self.attn_mask.dtype is not torch.bool:
            raise ValueError(
                f"{self}: attn_mask is {self.attn_mask.dtype}; only boolean masks (True attends) "
                "are supported (nn.MultiheadAttention makes its masks float)"
            )
        for name, x in (("query", self.q), ("key", self.k), ("value", self.v)):
            if x.is_nested:
                raise ValueError(f"{self}: {name} is a nested tensor; pad it and pass a mask")

    def __str__(self) -> str:
        index = "?" if self.index is None else self.index
        return f"SDPA call {index}" + (f" in {self.name}" if self.name else "")


Answer = Callable[[SdpaCall, Callable[[], Tensor]], Tensor]
"""Gives a call's result. The second argument makes the call as if nobody had seen it."""


@contextlib.contextmanager
def sdpa_calls(answer: Answer, model: nn.Module | None = None) -> Generator[None]:
    """Have `answer` give the result of every SDPA call made inside, its backward included.

    With a `model`, of every call that is made in one of its modules; names are relative to it,
    and other calls go their way.

    Contexts nest: the innermost sees a call first, the next one the calls made to answer it.
    What torch.compile has compiled runs uncompiled inside, as its calls could not be seen.

    Raises:
        ValueError: at an `nn.MultiheadAttention` that computes attention without SDPA, because
            of need_weights=True.
        RuntimeError: when a backward inside recomputes a call whose forward ran outside.
    """
    places = _Places(model)
    with contextlib.ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(places.enter).remove)
        stack.callback(register_module_forward_hook(places.leave, always_call=True).remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_Mode(places, answer))
        yield


class _Here(threading.local):
    """Where this thread is; hooks run in every thread, and a backward may run in one of its own."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []  # entered and not left, outermost first
        self.calls: Counter[nn.Module | None] = Counter()  # made since the outermost was entered


class _Places:
    """Indices and names of calls, from the modules that are entered and left."""

    def __init__(self, model: nn.Module | None) -> None:
        self._here = _Here()
        self._model = model
        self._names = {part: name for name, part in model.named_modules()} if model else {}
        self._indices: dict[tuple[nn.Module | None, int], int] = {}

    def enter(self, module: nn.Module, _args: Any) -> None:
        here = self._here
        if not here.modules:
            here.calls = Counter({None: here.calls[None]})
            # A part of a model that was seen whole keeps its name when it is called by itself,
            # as activation checkpointing does.
            if self._model is None and module not in self._names:
                self._names.update({part: name for name, part in module.named_modules()})
        here.modules.append(module)

    def leave(self, module: nn.Module, _args: Any, _result: Any) -> None:
        modules = self._here.modules
        # A context that was entered inside a module's forward sees it leave only.
        if module in modules:
            while modules.pop() is not module:
                pass

    def locate(self) -> tuple[int | None, str, bool] | None:
        """Index, name and whether it is recomputed, of the call that is being made; None where
        that is not in the model."""
        here = self._here
        module = here.modules[-1] if here.modules else None
        name = next((self._names[m] for m in reversed(here.modules) if m in self._names), None)
        if name is None:
            if self._model is not None:
                return None
            name = ""
        if torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateUsage]
            return self._recomputed(module, name), name, True
        key = (module, here.calls[module])
        here.calls[module] += 1
        return self._indices.setdefault(key, len(self._indices)), name, False

    def _recomputed(self, module: nn.Module | None, name: str) -> int | None:
        known = [index for (other, _), index in self._indices.items() if other is module]
        if not known:
            raise RuntimeError(
                f"a backward recomputes an SDPA call of {name or 'no module'} whose forward ran "
                "outside this context; run both inside"
            )
        return known[0] if len(known) == 1 else None


class _Mode(TorchFunctionMode):
    def __init__(self, places: _Places, answer: Answer) -> None:
        super().__init__()
        self._places, self._answer = places, answer

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SDPA:
            place = self._places.locate()
            if place is None:
                return func(*args, **kwargs)
            return self._answer(_bind(place, *args, **kwargs), lambda: func(*args, **kwargs))
        if func is F.multi_head_attention_forward:
            _refuse_weights(*args, **kwargs)
        if func in _CALLERS:
            with self:
                return _CALLERS[func](*args, **kwargs)
        return func(*args, **kwargs)


def _bind(
    place: tuple[int | None, str, bool],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> SdpaCall:
    """SDPA's own signature: Python binds the arguments, and refuses unknown ones."""
    index, name, recomputed = place
    return SdpaCall(
        q=query,
        k=key,
        v=value,
        do=None,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        index=index,
        name=name,
        recomputed=recomputed,
    )


def _refuse_weights(*args: Any, **kwargs: Any) -> None:
    bound = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    if bound.arguments.get("need_weights", True):
        raise ValueError(
            "nn.MultiheadAttention with need_weights=True (its default) computes attention "
            "without scaled_dot_product_attention; pass need_weights=False"
        )


def _without_dispatch(func: Any) -> Any:
    """`func`, less the check at its top that would offer it to the modes.

    PyTorch switches a mode off while the mode handles a function, and with it all that the
    function calls. Switched on again, the mode would be offered the same function forever.
    """
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    plain = {**func.__globals__, **dict.fromkeys(checks, _no)}
    copy = FunctionType(func.__code__, plain, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _no(*_: Any) -> bool:
    return False


_SDPA: Final = {
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}

_CALLERS: Final = {
    func: _without_dispatch(func)
    for func in (
        F.multi_head_attention_forward,
        Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
    )
}
"""PyTorch functions offered to modes that make SDPA calls themselves; backward, by recomputing."""
