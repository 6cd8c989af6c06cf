"""Record the attention problems, gradients included, that a model really poses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sagesim.models.captures import Call, Capture, check_loss_scale, json_copy
from sagesim.models.sdpa_mode import SdpaCall, sdpa_calls
from sagesim.problem import autocast


class Recording:
    """What a `capture` records; its `result` is there once every recorded call had its backward."""

    def __init__(self, loss_scale: float, source: Mapping[str, Any]) -> None:
        self._loss_scale, self._source = loss_scale, source
        self._pending: list[_Pending] = []

    def result(self) -> Capture:
        """The capture.

        Raises:
            RuntimeError: naming the calls whose backward has not run.
            ValueError: naming the call and the tensor that holds NaN or Inf.
        """
        if missing := [str(p.call) for p in self._pending if p.do is None]:
            raise RuntimeError(f"no backward has run through {', '.join(missing)}: no dO recorded")
        return Capture(
            calls=tuple(pending.finished() for pending in self._pending),
            loss_scale=self._loss_scale,
            source=self._source,
            torch_version=torch.__version__,
        )

    def add(self, pending: _Pending) -> None:
        """Take in a call of this forward."""
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
    """Record q, k, v and the incoming dO of every SDPA call of one forward made inside.

    The model computes what it computes without, to the bit. Its backward may run inside or
    later. Copies are recorded, in the dtype that SDPA computes in (autocast's, under autocast),
    on the device of the model. To record an emulated model, enter `capture` inside `emulate`.

    Every limit leaves an attention problem whose O and dQ are those of the model's own call. dK
    and dV are the part of the model's that comes from the recorded queries.

    Args:
        model: record only the calls made in it, and name them relative to it. Without, every
            call is recorded, and named relative to the outermost module it is made in.
        layers: which calls, by index or name, as in `sagesim.emulate`; all by default.
        batch: which items of the batch; all by default.
        heads: which heads of k and v, each with the heads of q that share it; all by default.
        tokens: at most the first so many queries, and all the keys that they can attend to: as
            many if is_causal, all otherwise. All by default.
        loss_scale: the power of two by which the caller multiplies the loss. Recorded, not applied.
        source: provenance, in JSON values; recorded.

    Raises:
        ValueError: at a call that is no plain attention problem, naming it and the reason
            (dropout, a mask that is not boolean, nested tensors, need_weights=True, other than
            four axes), or that lacks an item of `batch` or `heads`; at once, for a loss_scale
            that is no power of two, a source that is not JSON, or tokens < 1; when left, naming
            each of `layers` at which no call was made.
        RuntimeError: at a call whose output needs no gradient; at a call that is made a second
            time; at a second backward; when left, if no call was made.

    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True)
    >>> with capture(tokens=5) as recording:
    ...     layer(torch.randn(1, 10, 32)).square().mean().backward()
    >>> call = recording.result().calls[0]
    >>> call.name, call.q.shape, call.k.shape
    ('self_attn', torch.Size([1, 4, 5, 8]), torch.Size([1, 4, 10, 8]))
    """
    limits = _Limits(batch, heads, tokens)
    check_loss_scale(loss_scale)
    recording = Recording(loss_scale, json_copy(source or {}))
    seen: dict[str, None] = {}
    named: set[int | str] = set()

    def answer(call: SdpaCall, run: Callable[[], Tensor]) -> Tensor:
        if call.recomputed:
            return run()
        seen[str(call)] = None
        if layers is not None:
            keys = [key for key in layers if call.is_at(key)]
            named.update(keys)
            if not keys:
                return run()
        call.refuse_unsupported()
        pending = _Pending(call, limits)
        o = run()
        if not o.requires_grad:
            raise RuntimeError(f"{call}: its output needs no gradient, so there is no dO to record")
        recording.add(pending)
        o.register_hook(pending.receive)
        return o

    with sdpa_calls(answer, model):
        yield recording
    if not seen:
        raise RuntimeError(
            "nothing was recorded: no scaled_dot_product_attention was called inside (is the "
            "model's attention implementation another one, such as eager, was emulate entered "
            "after capture, or is the call not in the given model?)"
        )
    if unknown := [repr(key) for key in layers or () if key not in named]:
        raise ValueError(f"layers: no call is at {', '.join(unknown)}; seen were {', '.join(seen)}")


@dataclass(frozen=True, slots=True)
class _Limits:
    """What is taken of a call's tensors; None takes everything."""

    batch: Sequence[int] | None
    heads: Sequence[int] | None
    tokens: int | None

    def __post_init__(self) -> None:
        for name, wanted in (("batch", self.batch), ("heads", self.heads)):
            if wanted is not None and len(wanted) == 0:
                raise ValueError(f"{name}={wanted} takes nothing")
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"tokens={self.tokens} is not a positive number of tokens")

    def check(self, call: SdpaCall) -> None:
        """Raise ValueError where the call has no four axes, or not the wanted items."""
        for name, x in (("query", call.q), ("key", call.k), ("value", call.v)):
            if x.ndim != 4:
                raise ValueError(f"{call}: {name} has shape {tuple(x.shape)}, not [b, h, n, d]")
        for name, wanted, size in (
            ("batch", self.batch, call.q.shape[0]),
            ("heads", self.heads, call.k.shape[1]),
        ):
            if wanted is not None and not all(0 <= i < size for i in wanted):
                raise ValueError(f"{call}: {name}={wanted}, of {size}")

    def queries(self, x: Tensor, groups: int) -> Tensor:
        """Of q or do [b, h, n_q, d], or of a mask of that rank."""
        heads = self.heads and [h * groups + i for h in self.heads for i in range(groups)]
        return _take(_take(x, 0, self.batch), 1, heads)[:, :, : self.tokens]

    def keys(self, x: Tensor, is_causal: bool) -> Tensor:
        """Of k or v [b, h_kv, n_k, d]."""
        tokens = self.tokens if is_causal else None
        return _take(_take(x, 0, self.batch), 1, self.heads)[:, :, :tokens]


class _Pending:
    """Copies of what is recorded of a call, which waits for its gradient."""

    def __init__(self, call: SdpaCall, limits: _Limits) -> None:
        limits.check(call)
        self._groups = call.q.shape[1] // max(call.k.shape[1], 1)
        self._limits = limits
        q, k, v = autocast(call.q, call.k, call.v)
        mask = call.attn_mask
        if mask is not None:
            mask = _copy(limits.queries(mask[(None,) * (4 - mask.ndim)], self._groups))
        self.call = replace(
            call,
            q=_copy(limits.queries(q, self._groups)),
            k=_copy(limits.keys(k, call.is_causal)),
            v=_copy(limits.keys(v, call.is_causal)),
            attn_mask=mask,
        )
        self.do: Tensor | None = None

    def receive(self, do: Tensor) -> None:
        """The hook of the call's output; PyTorch passes the sum over all uses of it."""
        if self.do is not None:
            raise RuntimeError(f"{self.call}: a second backward; capture one at a time")
        self.do = _copy(self._limits.queries(do, self._groups))

    def finished(self) -> Call:
        """The recorded problem; its gradient is there."""
        call = self.call
        assert self.do is not None and call.index is not None
        return Call(
            q=call.q,
            k=call.k,
            v=call.v,
            do=self.do,
            attn_mask=call.attn_mask,
            is_causal=call.is_causal,
            scale=call.scale,
            enable_gqa=call.enable_gqa,
            index=call.index,
            name=call.name,
        )


def _take(x: Tensor, axis: int, indices: Sequence[int] | None) -> Tensor:
    """The given items of an axis; an axis of 1 stays, it is broadcast."""
    if indices is None or x.shape[axis] == 1:
        return x
    return x.index_select(axis, torch.tensor(indices, device=x.device))


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)
