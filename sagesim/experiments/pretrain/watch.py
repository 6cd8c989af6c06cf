"""Where the first number went bad that made a loss or a gradient infinite or NaN.

Nothing is watched while all goes well. A step that ends badly has not changed the weights: its
forwards and backwards are made again with every module's output looked at. Where attention is the
first to turn finite inputs into others, the emulator says which of its products does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from sagesim._trace import Trace, trace
from sagesim.experiments.pretrain.attention import Core
from sagesim.experiments.pretrain.distributed import World, part
from sagesim.presets import FPA
from sagesim.spec import AttentionSpec

_FORWARD: Final = (("s", "qk"), ("p", "softmax"), ("o", "pv"))
_BACKWARD: Final = (
    ("s_recompute", "qk_recompute"),
    ("p_recompute", "softmax again"),
    ("delta", "delta"),
    ("dp", "dp"),
    ("ds", "dS = P o (dP - delta)"),
    ("dv", "dv"),
    ("dq", "dq"),
    ("dk", "dk"),
)
"""Intermediates in the order of computation, and the site that makes each."""


def locate(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    micro_batches: Iterable[int],
    here: World,
) -> str:
    """Repeat a step's micro-batches until something is not finite, and say what it is first.

    Args:
        loss: the loss of a micro-batch, made by `model` and not by what distributes it.

    Returns: a phrase such as "layers.1.attention.core: site qk of the forward, ...".
    """
    for name, parameter in model.named_parameters():
        if here.sum(_count_bad(parameter)).item():
            return f"weight {name}, before the step"
    for index in micro_batches:
        seen = _Seen()
        with _hooks(model, seen):
            value = loss(index)
            # All processes go on or none: sharded weights are gathered by all together.
            if found := _first(seen, here):
                return found
            if here.sum(_count_bad(value)).item():
                return "the loss itself: the logits are finite"
            value.backward()
        if found := _first(seen, here):
            return found
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient is not None and here.sum(_count_bad(gradient)).item():
                return f"gradient of weight {name}; those of all outputs are finite"
            parameter.grad = None
    return "nothing: every number was finite when the step was repeated"


def bad_site(q: Tensor, k: Tensor, v: Tensor, do: Tensor | None, spec: AttentionSpec) -> str | None:
    """The first site that gives a number that is not finite, for one head's finite inputs [n, d].

    Without do, of the forward. None where the emulator computes only finite numbers.
    """
    inputs = (x[None, None].detach() for x in (q, k, v, torch.zeros_like(v) if do is None else do))
    found: Trace = trace(*inputs, spec=spec, is_causal=True)
    attends = torch.ones(found.s.shape[-2:], dtype=torch.bool, device=q.device).tril()
    for tensor, site in _FORWARD if do is None else _BACKWARD:
        x: Tensor = getattr(found, tensor)
        x = x[..., attends] if tensor.startswith("s") else x
        if not x.isfinite().all():
            return site
    return None


@dataclass(slots=True)
class _Seen:
    """The first place at which something was not finite."""

    where: str = ""
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def note(self, where: Callable[[], str]) -> None:
        if not self.where:
            self.where = where()


def _first(seen: _Seen, here: World) -> str:
    """What the first process saw that saw something."""
    return next((where for where in here.gather(seen.where) if where), "")


@contextlib.contextmanager
def _hooks(model: nn.Module, seen: _Seen) -> Generator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in model.named_modules():
            watch = _watch_core if isinstance(module, Core) else _watch_leaf
            if isinstance(module, Core) or not any(module.children()):
                handle = module.register_forward_hook(watch(name, seen))
                stack.callback(handle.remove)
        yield


def _watch_leaf(name: str, seen: _Seen) -> Callable[..., None]:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        for x in output if isinstance(output, tuple) else (output,):
            if _is_bad(x):
                seen.note(lambda: f"{name}: its output in the forward")
            elif x.requires_grad:
                x.register_hook(back)

    def back(gradient: Tensor) -> None:
        if _is_bad(gradient):
            seen.note(lambda: f"{name}: the gradient that comes to its output")

    return hook


def _watch_core(name: str, seen: _Seen) -> Callable[..., None]:
    def hook(core: Core, inputs: tuple[Tensor, Tensor, Tensor], o: Tensor) -> None:
        if _is_bad(o):
            seen.note(lambda: f"{name}: {_site(core, inputs, None, o)}")
            return
        arrived: list[Tensor] = []
        if o.requires_grad:
            o.register_hook(arrived.append)
        for which, x in zip(("dq", "dk", "dv"), inputs, strict=True):
            if x.requires_grad:
                x.register_hook(back(core, inputs, arrived, which))

    def back(
        core: Core, inputs: tuple[Tensor, Tensor, Tensor], arrived: list[Tensor], which: str
    ) -> Callable[[Tensor], None]:
        def receive(gradient: Tensor) -> None:
            if not _is_bad(gradient):
                return
            if _is_bad(arrived[0]):
                seen.note(lambda: f"{name}: the gradient that comes to its output")
            else:
                seen.note(lambda: f"{name}: {_site(core, inputs, arrived[0], gradient)}")

        return receive

    return hook


def _site(
    core: Core, inputs: tuple[Tensor, Tensor, Tensor], do: Tensor | None, result: Tensor
) -> str:
    """In words, for the first head of the first sequence whose result is not finite."""
    batch, head = (int(i[0]) for i in torch.where(~result.isfinite().flatten(2).all(-1)))
    q, k, v = (x[batch, head] for x in inputs)
    place = f"of the {'forward' if do is None else 'backward'}, sequence {batch}, head {head}"
    if not all(x.isfinite().all() for x in (q, k, v)):
        return f"its inputs {place}"
    spec = core.attention.spec or FPA
    site = bad_site(q, k, v, None if do is None else do[batch, head], spec)
    if site is None:
        return f"{core.attention.name} {place}; emulated, the same inputs give finite numbers"
    return f"site {site} {place}"


def _is_bad(x: Tensor) -> bool:
    return x.is_floating_point() and not bool(x.isfinite().all())


def _count_bad(x: Tensor) -> Tensor:
    return (~part(x).isfinite()).sum()
