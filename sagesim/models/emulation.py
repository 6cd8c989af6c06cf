"""Run every SDPA call of a model under a spec."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Mapping
from contextvars import ContextVar
from typing import Final

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from sagesim.checks import check_type
from sagesim.emulator import attention
from sagesim.models.call_list import CallList
from sagesim.models.sdpa_mode import SdpaCall, sdpa_calls
from sagesim.problem import check_spec, recognised
from sagesim.spec import AttentionSpec


@contextlib.contextmanager
def emulate(
    spec: AttentionSpec, *, layers: Mapping[int | str, AttentionSpec] | None = None
) -> Generator[None]:
    """Context manager that runs every `scaled_dot_product_attention` call as `sagesim.attention`.

    The model needs no changes. The backward of a call made inside the context is emulated too, and
    may run after the context has ended. Exception: activation checkpointing repeats the calls in
    the backward, which must then run inside the context.

    The context applies to the thread and the asyncio task that enter it, and to tasks that are
    created inside it. Others may enter contexts of their own at the same time. While any is
    entered, `torch.compile` is off in all threads, because compiled calls cannot be replaced.
    Of nested contexts, the innermost emulates a call.

    Args:
        spec: the spec of every call that no key of `layers` matches.
        layers: specs of single calls, by index or by module name. An index is the number of the
            call in the forward, from 0; later forwards number their calls alike (see `SdpaCall`).
            A name matches the calls of the module that has it and of all modules inside that
            module. Names are those of `named_modules()` of the outermost module that is called,
            for example "encoder.layer.3".

    Raises:
        ValueError: at a call that cannot be emulated (dropout, a mask of numbers other than 0 and
            -inf, nested tensors, need_weights=True), or that several keys of `layers` match; the
            message names the call. At the end of the context, if a key of `layers` matched no call.
        TypeError, ValueError: as `sagesim.attention`, with a note that names the call.
        RuntimeError: at a call inside a checkpoint with use_reentrant=True; at a call that a
            checkpoint recomputes, if `layers` is given and the call's index is not known. At the
            end of the context, if it emulated no call or another thread entered it.

    >>> import sagesim
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True)
    >>> with emulate(sagesim.SAGEBWD, layers={"self_attn": sagesim.FPA}):
    ...     layer(torch.randn(1, 10, 32)).sum().backward()
    """
    needed = "a mapping from the index or the name of a call to a spec"
    check_type("layers", layers, Mapping | None, needed)
    layers = dict(layers or {})
    check_spec(spec)
    for key, each in layers.items():
        check_spec(each, f"layers[{key!r}]")
    matched: set[int | str] = set()
    calls, outer = CallList(), _ENTERED.get()

    def emulated(call: SdpaCall, _run: Callable[[], Tensor]) -> Tensor:
        call = recognised(call.supported())
        _refuse_reentrant(call)
        if layers and call.index is None:
            raise RuntimeError(
                f"{call}: activation checkpointing recomputes one of several SDPA calls of its "
                "module, and PyTorch does not say which, so `layers` cannot be applied"
            )
        keys = [key for key in layers if call.matches(key)]
        if len(keys) > 1:
            raise ValueError(f"{call}: several keys of layers match it: {_join(keys)}")
        matched.update(keys)
        calls.add(call)
        for each in outer:
            each.are_inside = True
        try:
            return attention(call, spec=layers[keys[0]] if keys else spec)
        except (TypeError, ValueError) as error:
            error.add_note(f"at {call}")
            raise

    _ENTERED.set((*outer, calls))
    try:
        with sdpa_calls(emulated):
            yield
    finally:
        _ENTERED.set(tuple(each for each in _ENTERED.get() if each is not calls))
    if not calls:
        why = (
            "scaled_dot_product_attention was not called inside the context "
            "(does the model use another attention implementation, such as eager?)"
        )
        if calls.are_inside:
            why = "another `emulate` inside the context took every call"
        raise RuntimeError(f"nothing was emulated: {why}")
    if unknown := [key for key in layers if key not in matched]:
        raise ValueError(f"layers: no SDPA call matches {_join(unknown)}; the calls were {calls}")


_ENTERED: Final[ContextVar[tuple[CallList, ...]]] = ContextVar("calls by context", default=())
"""The calls of each context that this task has entered, the outermost first."""


def _join(keys: list[int | str]) -> str:
    return ", ".join(map(repr, keys))


def _refuse_reentrant(call: SdpaCall) -> None:
    """Raise RuntimeError if the call is made inside a reentrant checkpoint.

    A reentrant checkpoint discards the emulated call and repeats it in the backward. Outside the
    context the repeated call would silently be plain SDPA.
    """
    if torch.is_grad_enabled():
        return
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame := frame.f_back:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise RuntimeError(
                f"{call}: made inside torch.utils.checkpoint with use_reentrant=True; "
                "pass use_reentrant=False"
            )
