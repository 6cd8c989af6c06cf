"""The emulator as operators of a compiled graph, as the kernels are.

The integrations call the emulator outside of compiled graphs. What is left of a model is then
compiled in parts, which round in other places than one graph does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sagesim import FACTORED_QK, emulator
from sagesim_kernels.integrations.attend import Options


def emulate(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """Compute attention as `attend` does, by the default spec, without a mask, sinks or a softcap.

    Nothing here ends a compiled graph.
    """
    assert options.spec is FACTORED_QK
    return _forward(q, k, v, options.scale)


@torch.library.custom_op("sagesim_tests::emulated_forward", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    return emulator.attention(q, k, v, spec=FACTORED_QK, scale=scale).contiguous()


@torch.library.custom_op("sagesim_tests::emulated_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        o = emulator.attention(*leaves, spec=FACTORED_QK, scale=scale)
    dq, dk, dv = torch.autograd.grad(o, leaves, do)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_forward.register_fake
def _(q, k, v, scale):
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@_backward.register_fake
def _(q, k, v, do, scale):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, do):
    return *_backward(*ctx.saved_tensors, do, ctx.scale), None


_forward.register_autograd(_gradients, setup_context=_save)
