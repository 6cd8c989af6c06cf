"""Run the emulator: the forward, the rounding of o to the caller's dtype, and the backward."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from sagesim.emulator.backward import backward
from sagesim.emulator.forward import ForwardResult, forward
from sagesim.emulator.hooks import NO_HOOKS, Hooks
from sagesim.emulator.layout import FlatProblem
from sagesim.emulator.tf32 import WITHOUT_TF32


@dataclass(frozen=True, slots=True)
class Passes:
    """The results of one forward and backward.

    o, dq, dk, dv: in the caller's shapes and dtype. dsinks: as `run_backward` returns it.
    lse, lse_smoothed: [Z, n_q] in the computing dtype, of the logits before and after smoothing.
    """

    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None
    lse: Tensor
    lse_smoothed: Tensor


def run(x: FlatProblem, do: Tensor, hooks: Hooks = NO_HOOKS) -> Passes:
    """Compute o and the gradients for the gradient do of o, as `attention` and its backward do.

    do: of the shape and dtype of o.
    """
    o, result = run_forward(x, hooks)
    grads = run_backward(x, do, o, result.lse_smoothed, hooks)
    return Passes(o, *grads, result.lse, result.lse_smoothed)


def run_forward(x: FlatProblem, hooks: Hooks = NO_HOOKS) -> tuple[Tensor, ForwardResult]:
    """Return o in the caller's shape and dtype, and the result of `forward`."""
    with torch.no_grad(), plain_float32(x.q.device.type):
        result = forward(x, hooks)
        return x.query_heads(hooks.output(result.o)).to(x.dtype), result


def run_backward(
    x: FlatProblem, do: Tensor, o: Tensor, lse_smoothed: Tensor, hooks: Hooks = NO_HOOKS
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return dq, dk and dv in the caller's shapes and dtype, and dsinks.

    do and o have the caller's shape. dsinks is [heads], summed over the batch, in float64: the
    caller rounds it to the dtype of the sinks. None without sinks.
    """
    with torch.no_grad(), plain_float32(x.q.device.type):
        grads = backward(x, x.flatten_queries(do), x.flatten_queries(o), lse_smoothed, hooks)
        dq = x.query_heads(grads.dq).to(x.dtype)
        dk, dv = x.key_heads(grads.dk).to(x.dtype), x.key_heads(grads.dv).to(x.dtype)
        dsinks = grads.dsinks
        if dsinks is not None:
            *batch, heads = x.heads
            dsinks = dsinks.reshape(math.prod(batch), heads).sum(0)
        return dq, dk, dv, dsinks


@contextlib.contextmanager
def plain_float32(device: str) -> Generator[None]:
    """Compute float32 products in float32, without TF32 and autocast that the caller enabled.

    PyTorch has one TF32 setting for all threads. It is off while any thread is inside, and
    afterwards as it was before the first thread entered. A setting that followed another follows it
    again.
    """
    with WITHOUT_TF32, contextlib.ExitStack() as stack:
        if torch.amp.is_autocast_available(device):  # the meta device has none
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
