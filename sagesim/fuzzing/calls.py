"""Call a function on an attention problem, and note what it does wrong besides its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from sagesim.problem import AttentionProblem

INPUTS: Final = ("q", "k", "v", "do")

_BITS: Final = {2: torch.int16, 4: torch.int32}
"""Integer dtypes by their size in bytes. Bits are compared, so that a NaN equals itself."""


class Outputs(NamedTuple):
    """The results of a call: o and the gradients of q, k, v and the sinks."""

    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor  #: [heads]; zeros without sinks


@dataclass(frozen=True, slots=True)
class Called:
    """What a call of a function and of its backward gave."""

    outputs: dict[str, Tensor]  #: by name; without the missing and invalid ones
    problems: dict[str, str]
    """By tensor: an input that was overwritten, an invalid o, or a missing gradient."""


def call(
    attention: Callable[..., Tensor],
    problem: AttentionProblem,
    *,
    seqused_k: Tensor | None = None,
    **options: Any,
) -> Called:
    """Call `attention` and its backward through autograd.

    If o is invalid, the backward is not run.

    Args:
        attention: called as `fn(q, k, v, is_causal=..., scale=..., enable_gqa=...)`, and with those
            of causal_alignment, window, key_mask, sinks and softcap that the problem has.
        problem: its q, k, v and sinks must be leaves of autograd.
        seqused_k: the lengths of which the problem's key_mask is the mask; `attention` gets them in
            place of the mask.
        options: further arguments for `attention`.

    Raises:
        Exception: what `attention` or its backward raises.
    """
    inputs = _Inputs(problem)
    inputs_of = {"dq": problem.q, "dk": problem.k, "dv": problem.v}
    if problem.sinks is not None:
        inputs_of["dsinks"] = problem.sinks
    leaves = [x.requires_grad_() for x in inputs_of.values()]
    of_sdpa = {name: getattr(problem, name) for name in ("is_causal", "scale", "enable_gqa")}
    given = of_sdpa | problem.given_options
    if seqused_k is not None:
        del given["key_mask"]
        given["seqused_k"] = seqused_k
    o: Any = attention(*leaves[:3], **given, **options)
    problems = inputs.overwritten("forward")
    if invalid := _invalid(o, problem.gradient):
        return Called({}, problems | {"o": invalid})
    # torch's annotation does not say that a gradient may be missing.
    gradients: Any = torch.autograd.grad(o, leaves, problem.gradient, allow_unused=True)
    problems = inputs.overwritten("backward") | problems
    outputs = {"o": o.detach()}
    for name, gradient in zip(inputs_of, gradients, strict=True):
        if gradient is None:
            problems[name] = "no gradient; to autograd, o does not depend on " + name[1:]
        else:
            outputs[name] = gradient
    return Called(outputs, problems)


def _invalid(o: object, do: Tensor) -> str:
    """Why the backward cannot be run from o; "" if it can. do has the shape and type of o."""
    if not isinstance(o, Tensor):
        return f"the function returned a {type(o).__name__}, not a tensor"
    if o.shape != do.shape:
        return f"shape {tuple(o.shape)}, not {tuple(do.shape)}"
    if o.dtype != do.dtype:
        return f"dtype {o.dtype}, not {do.dtype}"
    if o.device != do.device:
        return f"device {o.device}, not {do.device}"
    if not o.requires_grad:
        return "requires_grad is False; the function must support autograd"
    return ""


class _Inputs:
    """The inputs of a call as they were before it, with all of the memory that they are part of."""

    def __init__(self, problem: AttentionProblem) -> None:
        self._tensors = dict(zip(INPUTS, problem.qkvdo, strict=True))
        self._before = {name: _memory(x).clone() for name, x in self._tensors.items()}

    def overwritten(self, phase: str) -> dict[str, str]:
        """The inputs whose memory has changed, and in words how. phase: "forward" or "backward"."""
        found: dict[str, str] = {}
        for name, x in self._tensors.items():
            if x.device.type == "cuda":
                torch.cuda.synchronize(x.device)  # raises the errors of asynchronous launches
            before = self._before[name]
            if torch.equal(before, _memory(x)):
                continue
            old = torch.empty(0, dtype=x.dtype, device=x.device)
            old.set_(before.untyped_storage(), x.storage_offset(), x.shape, x.stride())
            bits = _BITS[x.element_size()]
            if torch.equal(old.view(bits), x.detach().view(bits)):
                found[name] = f"the kernel overwrote the memory around it in the {phase}"
            else:
                found[name] = f"the kernel overwrote it in the {phase}"
        return found


def _memory(x: Tensor) -> Tensor:
    """The bytes of the whole storage of x, as a view."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
