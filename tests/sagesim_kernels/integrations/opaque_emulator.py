"""The emulator as operators of a compiled graph, as the kernels are.

The integrations call the emulator outside of compiled graphs. What is left of a model is then
compiled in parts, which round in other places than one graph does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sagesim import AttentionSpec, emulator
from sagesim_kernels.integrations.attend import Options


def emulate(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """Compute attention as `attend` does, of options that have no mask, sinks or softcap."""
    spec, scale = options.spec, options.scale
    assert options == Options(spec=spec, scale=scale, lower_right=options.lower_right)
    return _forward(q, k, v, spec.label(), scale)


@torch.library.custom_op("sagesim_tests::emulated_forward", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, label: str, scale: float | None) -> Tensor:
    return emulator.attention(q, k, v, spec=AttentionSpec.parse(label), scale=scale).contiguous()


@torch.library.custom_op("sagesim_tests::emulated_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, label: str, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        o = emulator.attention(*leaves, spec=AttentionSpec.parse(label), scale=scale)
    dq, dk, dv = torch.autograd.grad(o, leaves, do)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_forward.register_fake
def _(q, k, v, label, scale):
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@_backward.register_fake
def _(q, k, v, do, label, scale):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.label, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, do):
    return *_backward(*ctx.saved_tensors, do, ctx.label, ctx.scale), None, None


_forward.register_autograd(_gradients, setup_context=_save)
