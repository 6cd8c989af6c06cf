"""Run every SDPA call of a model under a spec."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Mapping

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from sagesim.emulator import attention
from sagesim.models.sdpa_mode import SdpaCall, sdpa_calls
from sagesim.problem import check_spec
from sagesim.spec import AttentionSpec


@contextlib.contextmanager
def emulate(
    spec: AttentionSpec, *, layers: Mapping[int | str, AttentionSpec] | None = None
) -> Generator[None]:
    """Compute every `scaled_dot_product_attention` made inside by `sagesim.attention`.

    No code of the model changes. A call made inside keeps its spec: its backward is emulated
    wherever it runs. Only under activation checkpointing, which makes the calls a second time in
    the backward, the backward belongs inside as well.

    Args:
        spec: of every call that `layers` does not name.
        layers: other specs, by index or by name. An index counts calls in the order in which
            they are first made: 0 is the first of the model, and of each later forward (see
            `SdpaCall`). A name is that of the module a call is made in, or of
            one around it, among the `named_modules()` of the outermost module called:
            "encoder.layer.3".

    Raises:
        ValueError: at a call that is not emulated, naming the call and the reason (dropout, a
            mask that is not boolean, nested tensors, need_weights=True) or two keys of `layers`
            that name it; when left, naming each key of `layers` that named no call.
        TypeError, ValueError: as `sagesim.attention`, with a note of the call.
        RuntimeError: at a call inside a checkpoint with use_reentrant=True, or one recomputed of
            which cannot be told which of `layers` it is; when left, if no call was made.

    >>> import sagesim
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True)
    >>> with emulate(sagesim.SAGEBWD, layers={"self_attn": sagesim.FPA}):
    ...     layer(torch.randn(1, 10, 32)).sum().backward()
    """
    layers = dict(layers or {})
    for each in (spec, *layers.values()):
        check_spec(each)
    named: set[int | str] = set()
    made: dict[str, None] = {}

    def answer(call: SdpaCall, _run: Callable[[], Tensor]) -> Tensor:
        call.refuse_unsupported()
        _refuse_reentrant(call)
        if layers and call.index is None:
            raise RuntimeError(
                f"{call}: its module makes several SDPA calls, and this is one of them, made "
                "again by activation checkpointing; `layers` cannot tell which"
            )
        keys = [key for key in layers if call.is_at(key)]
        if len(keys) > 1:
            raise ValueError(f"{call}: several keys of layers name it: {_join(keys)}")
        named.update(keys)
        made[str(call)] = None
        try:
            return attention(call, spec=layers[keys[0]] if keys else spec)
        except (TypeError, ValueError) as error:
            error.add_note(f"at {call}")
            raise

    with sdpa_calls(answer):
        yield
    if not made:
        raise RuntimeError(
            "nothing was emulated: no scaled_dot_product_attention was called inside (is the "
            "model's attention implementation another one, such as eager?)"
        )
    if unknown := [key for key in layers if key not in named]:
        raise ValueError(f"layers: no call is at {_join(unknown)}; seen were {', '.join(made)}")


def _join(keys: list[int | str]) -> str:
    return ", ".join(map(repr, keys))


def _refuse_reentrant(call: SdpaCall) -> None:
    """Reentrant checkpointing discards the emulated call, and makes it again in the backward:
    outside the context that would be plain attention, and nobody would tell."""
    if torch.is_grad_enabled():
        return
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame := frame.f_back:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise RuntimeError(
                f"{call}: made inside torch.utils.checkpoint with use_reentrant=True; "
                "pass use_reentrant=False"
            )
