"""The source of an infinite or NaN loss or gradient: the first module, and the site in attention.

Training itself has no hooks. A step with a non-finite loss or gradient does not change the weights,
so it can be repeated, then with a hook on every module. If an attention layer is the first to turn
finite inputs into non-finite outputs, the emulator finds the site.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from sagesim.emulator import Trace, trace
from sagesim.experiments.pretrain.model.attention import AttentionCore
from sagesim.experiments.pretrain.run.distributed import World, local_part
from sagesim.spec import FPA, AttentionSpec

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
"""Intermediates in the order of computation, with the site that computes each."""


def locate_nonfinite(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    micro_batches: Iterable[int],
    world: World,
) -> str:
    """Repeat the micro-batches of a step and describe the first value that is not finite.

    Args:
        loss: computes the loss of a micro-batch with `model`, not with its DDP wrapper.
        micro_batches: the indices of the micro-batches.

    Returns:
        A phrase such as "layers.1.attention.core: site qk of the forward, sequence 0, head 0".
    """
    for name, parameter in model.named_parameters():
        if world.sum(_count_bad(parameter)).item():
            return f"weight {name}, before the step"
    for index in micro_batches:
        first = _First()
        with _hooks(model, first):
            value = loss(index)
            # Sharded weights need all processes in every forward, so all decide together.
            if found := _in_any_process(first, world):
                return found
            if world.sum(_count_bad(value)).item():
                return "the loss itself: the logits are finite"
            value.backward()
        if found := _in_any_process(first, world):
            return found
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient is not None and world.sum(_count_bad(gradient)).item():
                return f"gradient of weight {name}; the gradients of all outputs are finite"
            parameter.grad = None
    return "nothing: every number was finite when the step was repeated"


def nonfinite_site(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor | None, spec: AttentionSpec
) -> str | None:
    """The first site of the emulator with a non-finite result, for finite inputs [n, d] of a head.

    Args:
        do: the gradient of o; None looks at the forward only.

    Returns:
        The site, or None if all results of the emulator are finite.
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
class _First:
    """The first place with a non-finite value. It is empty before one is found."""

    where: str = ""

    def note(self, where: Callable[[], str]) -> None:
        if not self.where:
            self.where = where()


def _in_any_process(first: _First, world: World) -> str:
    """The place that the process with the lowest rank found; empty if no process found one."""
    return next((where for where in world.gather(first.where) if where), "")


@contextlib.contextmanager
def _hooks(model: nn.Module, first: _First) -> Generator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in model.named_modules():
            check = _check_core if isinstance(module, AttentionCore) else _check_leaf
            if isinstance(module, AttentionCore) or not any(module.children()):
                handle = module.register_forward_hook(check(name, first))
                stack.callback(handle.remove)
        yield


def _check_leaf(name: str, first: _First) -> Callable[..., None]:
    """A forward hook for a module without submodules."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        for x in output if isinstance(output, tuple) else (output,):
            if _is_bad(x):
                first.note(lambda: f"{name}: its output in the forward")
            elif x.requires_grad:
                x.register_hook(back)

    def back(gradient: Tensor) -> None:
        if _is_bad(gradient):
            first.note(lambda: f"{name}: the gradient of its output")

    return hook


def _check_core(name: str, first: _First) -> Callable[..., None]:
    """A forward hook for an attention core, which also reports the site."""

    def hook(core: AttentionCore, inputs: tuple[Tensor, Tensor, Tensor], o: Tensor) -> None:
        if _is_bad(o):
            first.note(lambda: f"{name}: {_site(core, inputs, None, o)}")
            return
        arrived: list[Tensor] = []
        if o.requires_grad:
            o.register_hook(arrived.append)
        for x in inputs:
            if x.requires_grad:
                x.register_hook(back(core, inputs, arrived))

    def back(
        core: AttentionCore, inputs: tuple[Tensor, Tensor, Tensor], arrived: list[Tensor]
    ) -> Callable[[Tensor], None]:
        def receive(gradient: Tensor) -> None:
            if not _is_bad(gradient):
                return
            if _is_bad(arrived[0]):
                first.note(lambda: f"{name}: the gradient of its output")
            else:
                first.note(lambda: f"{name}: {_site(core, inputs, arrived[0], gradient)}")

        return receive

    return hook


def _site(
    core: AttentionCore, inputs: tuple[Tensor, Tensor, Tensor], do: Tensor | None, result: Tensor
) -> str:
    """Describes the site, for the first head of the first sequence with a non-finite result."""
    batch, head = (int(i[0]) for i in torch.where(~result.isfinite().flatten(2).all(-1)))
    q, k, v = (x[batch, head] for x in inputs)
    place = f"of the {'forward' if do is None else 'backward'}, sequence {batch}, head {head}"
    if not all(x.isfinite().all() for x in (q, k, v)):
        return f"its inputs {place}"
    spec = core.attention.spec or FPA
    site = nonfinite_site(q, k, v, None if do is None else do[batch, head], spec)
    if site is None:
        return f"{core.attention.name} {place}; the emulator gives finite numbers for these inputs"
    return f"site {site} {place}"


def _is_bad(x: Tensor) -> bool:
    return x.is_floating_point() and not bool(x.isfinite().all())


def _count_bad(x: Tensor) -> Tensor:
    return (~local_part(x).isfinite()).sum()
