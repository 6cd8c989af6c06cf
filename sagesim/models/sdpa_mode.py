"""Intercept the `scaled_dot_product_attention` calls of any model.

Nothing is patched. A `TorchFunctionMode` receives each call, and global module hooks record which
module makes it. Both are removed at the end of the context.

A context belongs to the thread and the asyncio task that enter it. Tasks that this task creates
inside the context belong to it too. Calls of other threads (`nn.DataParallel`) and of other tasks
are not intercepted, and neither is attention that is computed without SDPA.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,  # pyright: ignore[reportPrivateUsage]
    _pop_mode,  # pyright: ignore[reportPrivateUsage]
    _push_mode,  # pyright: ignore[reportPrivateUsage]
)

from sagesim.models.call_location import Locator
from sagesim.problem import AttentionProblem, boolean_mask
from sagesim.process_wide import ProcessWide


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SdpaCall(AttentionProblem):
    """The arguments of one SDPA call and the module that makes it. `do` is None.

    index: number of the call, in the order in which the calls are first made. A later forward
        repeats the calls with the same indices. For this, a call is identified by two things: the
        innermost module that makes it, and the number of calls that this module has made since the
        outermost module was entered. Calls outside of modules all have different indices.
        The index is None if activation checkpointing recomputes a call of a module that makes
        several calls, because PyTorch does not say which of them it is.
    name: name of the innermost module, relative to the outermost one; "" outside of modules.
    recomputed: whether activation checkpointing repeats the call in a backward.
    """

    dropout_p: float
    index: int | None
    name: str
    recomputed: bool

    def matches(self, key: int | str) -> bool:
        """Whether `key` is the call's index, or the name of its module or of an enclosing one."""
        if isinstance(key, int):
            return key == self.index
        return f"{self.name}.".startswith(f"{key}." if key else "")

    def supported(self) -> SdpaCall:
        """The call with a boolean mask in place of one of 0 and -inf.

        Raises:
            ValueError: for dropout, any other mask that is not boolean, a mask on another device,
                or nested tensors.
        """
        if self.dropout_p > 0:
            raise ValueError(
                f"{self}: dropout_p={self.dropout_p}; random dropout of P is not supported, "
                "set the model's attention dropout to 0"
            )
        mask = self.attn_mask
        if mask is not None and mask.device != self.q.device:
            raise ValueError(f"{self}: attn_mask is on {mask.device}, query on {self.q.device}")
        mask = None if mask is None else boolean_mask(mask)
        if mask is not None and mask.dtype is not torch.bool:
            raise ValueError(f"{self}: {_unsupported(mask)}")
        for name, x in (("query", self.q), ("key", self.k), ("value", self.v)):
            if x.is_nested:
                raise ValueError(f"{self}: {name} is a nested tensor; pad it and pass a mask")
        return replace(self, attn_mask=mask)

    def __str__(self) -> str:
        index = "?" if self.index is None else self.index
        return f"SDPA call {index}" + (f" in {self.name}" if self.name else "")


Handler = Callable[[SdpaCall, Callable[[], Tensor]], Tensor]
"""Returns the result of a call. Its second argument is a function that runs the original call."""


def _unsupported(mask: Tensor) -> str:
    """Why a mask that is not boolean is refused, with one of its numbers."""
    if not mask.is_floating_point():
        return f"attn_mask is {mask.dtype}; it must be boolean (True attends) or floating"
    if mask.requires_grad:
        return "attn_mask requires a gradient; only masks that attend or do not are supported"
    other = mask[(mask != 0) & (mask != -math.inf)][0].item()
    return (
        f"attn_mask is {mask.dtype} with other numbers than 0 and -inf, such as {other:g}; only "
        "masks that attend or do not are supported: 0 and -inf, or boolean (True attends)"
    )


@contextlib.contextmanager
def sdpa_calls(handler: Handler, model: nn.Module | None = None) -> Generator[None]:
    """Context manager that replaces the result of every SDPA call by that of `handler`.

    Contexts nest: the handler of the innermost context is called first, and the calls that it
    makes are passed to the next context. Threads and asyncio tasks may enter contexts of their own
    at the same time. While any context is entered, compiled code of all threads runs uncompiled,
    because calls in compiled code cannot be intercepted.

    Args:
        handler: called with each call; autograd differentiates what it returns.
        model: if given, only the calls of its modules are intercepted, and names are relative to
            it.

    Raises:
        ValueError: at an `nn.MultiheadAttention` with need_weights=True, which does not use SDPA.
        RuntimeError: if a backward recomputes a call whose forward ran outside the context. At the
            end, if another thread entered the context.
    """
    mode = _Mode(Locator(model), handler)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_UNCOMPILED)
        stack.callback(register_module_forward_pre_hook(mode.enter_module).remove)
        stack.callback(register_module_forward_hook(mode.leave_module, always_call=True).remove)
        stack.enter_context(mode.entered())
        yield


_UNCOMPILED: Final = ProcessWide(lambda: torch.compiler.set_stance("force_eager"))


class _Mode(TorchFunctionMode):
    """Passes SDPA calls to a handler, in the task that has entered the mode.

    PyTorch has one stack of modes a thread, which all asyncio tasks of the thread share. A mode
    therefore also receives the calls of tasks that have not entered it. It runs them unchanged,
    which passes them to the next mode of the stack.
    """

    def __init__(self, locator: Locator, handler: Handler) -> None:
        super().__init__()
        self._locator, self._handler = locator, handler
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def entered(self) -> Generator[None]:
        """Put the mode on the stack of the thread. Other tasks may change the stack meanwhile."""
        _push_mode(self)
        _ENTERED.set((*_ENTERED.get(), self))
        try:
            yield
        finally:
            _ENTERED.set(tuple(mode for mode in _ENTERED.get() if mode is not self))
            modes = _get_current_function_mode_stack()
            if self not in modes:
                raise RuntimeError(
                    "the context was entered in another thread; enter and leave it in one thread"
                )
            _set_modes([mode for mode in modes if mode is not self])

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # PyTorch has taken the mode off the stack of a thread of its autograd engine.
        if not (self._is_in_engine() or self._is_in_task()):
            return func(*args, **kwargs)
        if func in _SDPA:
            location = self._locator.locate()
            if location is None:
                return func(*args, **kwargs)
            return self._handler(_bind(location, *args, **kwargs), lambda: func(*args, **kwargs))
        if func is F.multi_head_attention_forward:
            _refuse_weights(*args, **kwargs)
        if func in _CALLERS:
            with _without_other_tasks(), self:
                return _CALLERS[func](*args, **kwargs)
        return func(*args, **kwargs)

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """Global hook before the forward of each module of the process."""
        if self.applies():
            self._locator.enter(module, args)

    def leave_module(self, module: nn.Module, args: Any, result: Any) -> None:
        """Global hook after the forward of each module of the process."""
        if self.applies():
            self._locator.leave(module, args, result)

    def applies(self) -> bool:
        """Whether the code that runs belongs to the context. Not for use in the mode itself."""
        if self._is_in_engine():
            return self in _get_current_function_mode_stack()
        return self._is_in_task()

    def _is_in_task(self) -> bool:
        return self in _ENTERED.get()

    def _is_in_engine(self) -> bool:
        """Whether this is another thread, to which PyTorch may have copied the stack of modes.

        It does so for the threads of its autograd engine. They know nothing of tasks.
        """
        return threading.get_ident() != self._thread


_ENTERED: Final[ContextVar[tuple[_Mode, ...]]] = ContextVar("modes of this task", default=())


@contextlib.contextmanager
def _without_other_tasks() -> Generator[None]:
    """Take the modes of other tasks off the stack during a backward.

    The threads of the autograd engine get a copy of the stack.
    """
    before = _get_current_function_mode_stack()
    mine = [mode for mode in before if not isinstance(mode, _Mode) or mode.applies()]
    if len(mine) == len(before):
        yield
        return
    _set_modes(mine)
    try:
        yield
    finally:
        _set_modes(before)


def _set_modes(modes: Sequence[TorchFunctionMode]) -> None:
    """Replace the stack of modes of the thread. The last mode is the innermost."""
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def _bind(
    location: tuple[int | None, str, bool],
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
    """Bind the arguments of SDPA. The signature is SDPA's, so unknown ones raise TypeError."""
    index, name, recomputed = location
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
    """A copy of `func` that does not pass itself to the active modes.

    PyTorch disables a mode while the mode handles a function, so the mode misses the SDPA calls
    that the function makes. With the mode enabled again, `func` itself would recurse forever.
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
"""Copies of the PyTorch functions that make SDPA calls inside, by the original function.

PyTorch passes such a function to a mode as a whole, so the mode would miss the SDPA calls in it;
see `_without_dispatch`. The backward functions make SDPA calls under activation checkpointing.
"""
