"""Record the attention calls of a model and the gradients of their outputs."""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor, nn

from sagesim.checks import check_type
from sagesim.models.call_list import CallList
from sagesim.models.captures import Call, Capture, check_loss_scale, json_copy
from sagesim.models.sdpa_mode import SdpaCall, sdpa_calls
from sagesim.problem import check_tensors, recognised


class Recording:
    """The calls that `capture` records. `result` needs the backward of every recorded call."""

    def __init__(self, loss_scale: float, source: Mapping[str, Any]) -> None:
        self._loss_scale, self._source = loss_scale, source
        self._pending: list[_Pending] = []

    def result(self) -> Capture:
        """The recorded calls with their gradients.

        Raises:
            RuntimeError: if the backward of a call has not run; the message names the calls.
            ValueError: if a tensor holds NaN or Inf; the message names call and tensor.
        """
        if missing := [str(p.call) for p in self._pending if p.do is None]:
            raise RuntimeError(f"no backward has run through {', '.join(missing)}; dO is missing")
        return Capture(
            calls=tuple(pending.finished() for pending in self._pending),
            loss_scale=self._loss_scale,
            source=self._source,
            torch_version=torch.__version__,
        )

    def add(self, pending: _Pending) -> None:
        """Add a call. Raise RuntimeError if a call with its index is already recorded."""
        for other in self._pending:
            if other.call.index == pending.call.index:
                raise RuntimeError(
                    f"{pending.call}: made a second time; capture one forward at a time"
                )
        self._pending.append(pending)


@contextlib.contextmanager
def capture(
    model: nn.Module | None = None,
    *,
    layers: Collection[int | str] | None = None,
    batch: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    tokens: int | None = None,
    loss_scale: float = 1.0,
    source: Mapping[str, Any] | None = None,
) -> Generator[Recording]:
    """Context manager that records q, k, v and dO of every SDPA call of one forward.

    The model computes the same bits as without it. Its backward may run inside the context or
    later. What is recorded are copies on the model's device, in the dtype that SDPA computes in
    (under autocast, autocast's dtype). To record an emulated model, enter `capture` inside
    `emulate`. Threads and asyncio tasks: as `emulate`.

    `batch`, `heads` and `tokens` record a part of each call. O and dQ of that part are those of the
    model's call. dK and dV are the sums over the recorded queries only.

    Args:
        model: if given, only calls made in this module are recorded, and their names are relative
            to it. By default every call is recorded, and its name is relative to the outermost
            module that is called.
        layers: the calls to record, by index or name as in `sagesim.emulate`; default: all.
        batch: the items of the batch to record; default: all.
        heads: the heads of k and v to record, each with the heads of q that share it; default: all.
        tokens: number of queries to record, from the first. With is_causal, the same number of keys
            is recorded, otherwise all keys. Default: all.
        loss_scale: the power of two by which the caller multiplies the loss. Recorded, not applied.
        source: provenance as JSON values. Recorded.

    Raises:
        TypeError: at once, if an argument has another type.
        ValueError: at once, if loss_scale is not a power of two, source is not JSON, or a limit
            selects nothing. At a call that is not supported (dropout, a mask of numbers other than
            0 and -inf, nested tensors, need_weights=True, other than four axes, a broadcast batch)
            or has no such item of `batch` or `heads`; the message names the call. At the end of the
            context, if an item of `layers` matched no call.
        RuntimeError: at a call whose output needs no gradient, a call that is made a second time,
            or a second backward. At the end of the context, if no call was made or another thread
            entered it.

    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True)
    >>> with capture(tokens=5) as recording:
    ...     layer(torch.randn(1, 10, 32)).square().mean().backward()
    >>> call = recording.result().calls[0]
    >>> call.name, call.q.shape, call.k.shape
    ('self_attn', torch.Size([1, 4, 5, 8]), torch.Size([1, 4, 10, 8]))
    """
    check_type("model", model, nn.Module | None, "a torch.nn.Module or None")
    _check_items("layers", layers, Collection, int | str, "a collection of indices and names")
    selection = _Selection(batch, heads, tokens)
    check_loss_scale(loss_scale)
    recording = Recording(loss_scale, json_copy(source or {}))
    calls = CallList()
    matched: set[int | str] = set()

    def recorded(call: SdpaCall, run: Callable[[], Tensor]) -> Tensor:
        if call.recomputed:
            return run()
        calls.add(call)
        if layers is not None:
            keys = [key for key in layers if call.matches(key)]
            matched.update(keys)
            if not keys:
                return run()
        call = call.supported()
        pending = _Pending(call, selection)
        o = run()
        if not o.requires_grad:
            raise RuntimeError(f"{call}: its output needs no gradient, so there is no dO to record")
        recording.add(pending)
        o.register_hook(pending.receive)
        return o

    with sdpa_calls(recorded, model):
        yield recording
    if not calls:
        raise RuntimeError(
            "nothing was recorded: scaled_dot_product_attention was not called inside the context "
            "(does the model use another attention implementation, such as eager, was emulate "
            "entered after capture, or was the call not in the given model?)"
        )
    if unknown := [repr(key) for key in layers or () if key not in matched]:
        raise ValueError(
            f"layers: no SDPA call matches {', '.join(unknown)}; the calls were {calls}"
        )


@dataclass(frozen=True, slots=True)
class _Selection:
    """The part of a call's tensors to record; None selects everything."""

    batch: Sequence[int] | None
    heads: Sequence[int] | None
    tokens: int | None

    def __post_init__(self) -> None:
        for name, wanted in (("batch", self.batch), ("heads", self.heads)):
            _check_items(name, wanted, Sequence, Integral, "a sequence of integers")
            if wanted is not None and len(wanted) == 0:
                raise ValueError(f"{name}={wanted} selects nothing")
        check_type("tokens", self.tokens, int | None, "an integer or None")
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"tokens={self.tokens} is not a positive number of tokens")

    def check(self, call: SdpaCall) -> None:
        """Raise ValueError unless the tensors fit and have four axes and all selected items."""
        for name, x in (("query", call.q), ("key", call.k), ("value", call.v)):
            if x.ndim != 4:
                raise ValueError(f"{call}: {name} has shape {tuple(x.shape)}, not [b, h, n, d]")
        try:
            check_tensors(call.q, call.k, call.v, enable_gqa=call.enable_gqa)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{call}: {error}") from None
        for name, wanted, size in (
            ("batch", self.batch, call.q.shape[0]),
            ("heads", self.heads, call.k.shape[1]),
        ):
            if wanted is not None and not all(0 <= i < size for i in wanted):
                raise ValueError(f"{call}: {name}={wanted} is out of range for size {size}")

    def queries(self, x: Tensor, groups: int) -> Tensor:
        """Select from q or do [b, h, n_q, d], or from a mask with four axes."""
        heads = self.heads and [h * groups + i for h in self.heads for i in range(groups)]
        return _take(_take(x, 0, self.batch), 1, heads)[:, :, : self.tokens]

    def keys(self, x: Tensor, is_causal: bool) -> Tensor:
        """Select from k or v [b, h_kv, n_k, d]."""
        tokens = self.tokens if is_causal else None
        return _take(_take(x, 0, self.batch), 1, self.heads)[:, :, :tokens]


class _Pending:
    """A recorded call that waits for the gradient of its output."""

    def __init__(self, call: SdpaCall, selection: _Selection) -> None:
        call = call.autocast()
        selection.check(call)
        self._groups = call.q.shape[1] // max(call.k.shape[1], 1)
        self._selection = selection
        mask = call.attn_mask
        if mask is not None:
            mask = _copy(selection.queries(mask[(None,) * (4 - mask.ndim)], self._groups))
        selected = replace(
            call,
            q=_copy(selection.queries(call.q, self._groups)),
            k=_copy(selection.keys(call.k, call.is_causal)),
            v=_copy(selection.keys(call.v, call.is_causal)),
            attn_mask=mask,
        )
        self.call = recognised(selected)
        self.do: Tensor | None = None

    def receive(self, do: Tensor) -> None:
        """Hook of the call's output. PyTorch passes the gradient summed over all its uses."""
        if self.do is not None:
            raise RuntimeError(f"{self.call}: ran backward a second time; capture records one")
        self.do = _copy(self._selection.queries(do, self._groups))

    def finished(self) -> Call:
        """The recorded call. The gradient must have been received."""
        call = self.call
        assert self.do is not None and call.index is not None
        return Call(
            q=call.q,
            k=call.k,
            v=call.v,
            do=self.do,
            **call.options,
            index=call.index,
            name=call.name,
        )


def _check_items(name: str, value: Any, kind: type, item: Any, needed: str) -> None:
    """Raise TypeError unless value is None or a collection of such items. A string is none."""
    if value is None:
        return
    is_one = isinstance(value, kind) and not isinstance(value, str)
    if not (is_one and all(isinstance(each, item) for each in cast("Collection[Any]", value))):
        raise TypeError(f"{name} is {reprlib.repr(value)}; it must be {needed}, or None")


def _take(x: Tensor, axis: int, indices: Sequence[int] | None) -> Tensor:
    """Select items of an axis. An axis of size 1 is kept, because it is broadcast."""
    if indices is None or x.shape[axis] == 1:
        return x
    return x.index_select(axis, torch.tensor(indices, device=x.device))


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)
