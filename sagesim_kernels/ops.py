"""The kernels as operators of PyTorch: `flash_attn_forward` and `flash_attn_backward`.

Their namespace is `sagesim_kernels`. Selective activation checkpointing keeps the results of
operators by name: TRL's rule keeps those with "flash_attn" in their names, and axolotl's excludes
those with "bwd".

They take q, k and v as [sequences, heads, tokens, channels] with any strides, and the spec as a
label. Packed sequences are a batch of one. Each operator has a fake implementation, so that
torch.compile traces it without running it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from sagesim.problem import resolve_input16
from sagesim.spec import AttentionSpec, Delta
from sagesim_kernels.dispatch import backward, forward
from sagesim_kernels.labels import parse
from sagesim_kernels.launching import Tensors, planned
from sagesim_kernels.operands import (
    Extras,
    ForwardResult,
    Gradients,
    KernelProblem,
    Packing,
    natural_lse,
)


@lru_cache(maxsize=256)
def _resolve(label: str, dtype: torch.dtype) -> AttentionSpec:
    return resolve_input16(parse(label), dtype)


class Call(NamedTuple):
    """The arguments of both operators besides tensors of tokens, in the operators' order."""

    sinks: Tensor | None
    key_mask: Tensor | None
    seqused_k: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None  #: None with cu_q: the same
    softcap_tensor: Tensor | None  #: float64 [] on the CPU, in place of softcap
    longest_q: int | None
    longest_k: int | None
    spec: str  #: a label
    scale: float
    is_causal: bool
    lower_right: bool
    left: int  #: of the window; -1: no limit
    right: int
    softcap: float | None

    def split(self) -> tuple[Call, tuple[Tensor | None, ...]]:
        """Return this call without tensors, which is hashable, and the fields that are tensors.

        Those are the first fields; none are returned if all are None.
        """
        tensors = self[:_TENSORS]
        for x in tensors:
            if x is not None:
                return Call(*_NO_TENSORS, *self[_TENSORS:]), tensors
        return self, ()

    def with_tensors(self, *tensors: Tensor | None) -> Call:
        """Return this call, which has no tensors, with those that `split` returned."""
        return Call(*tensors, *self[_TENSORS:]) if tensors else self

    def with_constant_softcap(self) -> Call:
        """This call without softcap_tensor. Plans of launches are kept for each constant."""
        if self.softcap_tensor is None:
            return self
        return self._replace(softcap=self.softcap_tensor.item(), softcap_tensor=None)

    def problem(self, q: Tensor, k: Tensor, v: Tensor) -> KernelProblem:
        return KernelProblem.of(
            q,
            k,
            v,
            spec=_resolve(self.spec, q.dtype),
            scale=self.scale,
            is_causal=self.is_causal,
            lower_right=self.lower_right,
            packing=Packing(self.cu_q, self.cu_k, self.longest_q, self.longest_k),
            extras=Extras(
                (self.left, self.right), self.key_mask, self.seqused_k, self.sinks, self.softcap
            ),
        )


_TENSORS: Final = 6
_NO_TENSORS: Final = (None,) * _TENSORS


def _empty_like(x: Tensor, channels: int) -> Tensor:
    """Return new dense memory with the dtype and shape of x but for its channels.

    x: [sequences, heads, tokens, channels]. Heads and tokens have the order in memory that they
    have in x. So no copy is made where a model transposes them before attention, and back after it.
    """
    b, h, n, _ = x.shape
    heads, tokens = (channels, h * channels) if _has_tokens_first(x) else (n * channels, channels)
    return x.new_empty_strided((b, h, n, channels), (h * n * channels, heads, tokens, 1))


def _has_tokens_first(x: Tensor) -> bool:
    """Return whether x [sequences, heads, tokens, channels] has tokens before heads in memory."""
    heads, tokens = x.stride(1), x.stride(2)
    if not (isinstance(heads, torch.SymInt) or isinstance(tokens, torch.SymInt)):
        return 0 < heads < tokens
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    # A number of heads or tokens that only the data decide: if it is 1, either order will do.
    return guard_or_false(heads < tokens) or not guard_or_true(tokens < heads)


def _nothing(like: Tensor) -> Tensor:
    """Return a tensor without elements, as an operator cannot return None."""
    return like.new_empty((0,), dtype=torch.float32)


def _launch_forward(tensors: Tensors, options: tuple[Call, bool]) -> Tensors:
    q, k, v, *others = tensors
    call, with_lse = options
    assert q is not None and k is not None and v is not None
    problem = call.with_tensors(*others).problem(q, k, v)
    o = _empty_like(q, v.shape[3])
    result = forward(problem, o)
    lse = natural_lse(problem, result) if with_lse else None
    return o, lse, result.lse2, result.k_mean


def _launch_backward(tensors: Tensors, call: Call) -> Tensors:
    do, d_lse, q, k, v, o, lse2, k_mean, *others = tensors
    assert do is not None and q is not None and k is not None and v is not None
    assert lse2 is not None
    problem = call.with_tensors(*others).problem(q, k, v)
    grads = Gradients(*(_empty_like(x, x.shape[3]) for x in (q, k, v)))
    d_sinks, _ = backward(problem, do, d_lse, o, ForwardResult(lse2, k_mean), grads)
    return (*grads, d_sinks)


def run_forward(tensors: Tensors, call: Call, *, with_lse: bool) -> Tensors:
    """Return o, its logsumexp (None unless with_lse), and the tensors of a `ForwardResult`.

    tensors: q, k, v, and those that `Call.split` returns. call: without tensors.
    """
    return planned(_launch_forward, tensors, (call, with_lse))


def run_backward(tensors: Tensors, call: Call) -> Tensors:
    """Return dq, dk, dv and the gradient of the sinks, which is None without sinks.

    tensors: do, the gradient of the logsumexp or None, q, k, v, o (None if the spec's delta comes
        from P), the tensors of a `ForwardResult`, and those that `Call.split` returns.
    call: without tensors.
    """
    do, d_lse, q, k, v, o, lse2, k_mean, *others = tensors
    assert lse2 is not None
    # Hooks of saved tensors may return other strides.
    lse2, k_mean = lse2.contiguous(), None if k_mean is None else k_mean.contiguous()
    return planned(_launch_backward, (do, d_lse, q, k, v, o, lse2, k_mean, *others), call)


@torch.library.custom_op("sagesim_kernels::flash_attn_forward", mutates_args=())
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    key_mask: Tensor | None,
    seqused_k: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    softcap_tensor: Tensor | None,
    longest_q: int | None,
    longest_k: int | None,
    spec: str,
    scale: float,
    is_causal: bool,
    lower_right: bool,
    left: int,
    right: int,
    softcap: float | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `run_forward` does, with a tensor without elements in place of None."""
    call = Call(
        sinks,
        key_mask,
        seqused_k,
        cu_q,
        cu_k,
        softcap_tensor,
        longest_q,
        longest_k,
        spec,
        scale,
        is_causal,
        lower_right,
        left,
        right,
        softcap,
    ).with_constant_softcap()
    call, others = call.split()
    o, lse, lse2, k_mean = run_forward((q, k, v, *others), call, with_lse=with_lse)
    assert o is not None and lse2 is not None
    return (
        o,
        _nothing(q) if lse is None else lse,
        lse2,
        _nothing(q) if k_mean is None else k_mean,
    )


@forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call, with_lse = Call(*rest[:-1]), rest[-1]
    lse2 = q.new_empty(q.shape[:3], dtype=torch.float32)
    lse = torch.empty_like(lse2) if with_lse else _nothing(q)
    k_mean = _nothing(q)
    if parse(call.spec).smoothing.k:
        sequences = q.shape[0] if call.cu_q is None else call.cu_q.shape[0] - 1
        k_mean = q.new_empty((sequences, k.shape[1], 1, k.shape[3]), dtype=torch.float32)
    return _empty_like(q, v.shape[3]), lse, lse2, k_mean


@torch.library.custom_op("sagesim_kernels::flash_attn_backward", mutates_args=())
def backward_op(
    do: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor | None,
    lse2: Tensor,
    k_mean: Tensor,
    sinks: Tensor | None,
    key_mask: Tensor | None,
    seqused_k: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    softcap_tensor: Tensor | None,
    longest_q: int | None,
    longest_k: int | None,
    spec: str,
    scale: float,
    is_causal: bool,
    lower_right: bool,
    left: int,
    right: int,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `run_backward` does; None is a tensor without elements, also as k_mean."""
    call = Call(
        sinks,
        key_mask,
        seqused_k,
        cu_q,
        cu_k,
        softcap_tensor,
        longest_q,
        longest_k,
        spec,
        scale,
        is_causal,
        lower_right,
        left,
        right,
        softcap,
    ).with_constant_softcap()
    call, others = call.split()
    mean = k_mean if parse(spec).smoothing.k else None
    given = (do, d_lse, q, k, v, o, lse2, mean, *others)
    dq, dk, dv, d_sinks = run_backward(given, call)
    assert dq is not None and dk is not None and dv is not None
    return dq, dk, dv, _nothing(q) if d_sinks is None else d_sinks


@backward_op.register_fake
def _(
    do: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = Call(*rest[3:])  # after o, lse2 and k_mean
    dq, dk, dv = (_empty_like(x, x.shape[3]) for x in (q, k, v))
    return dq, dk, dv, _nothing(q) if call.sinks is None else torch.empty_like(call.sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *call, with_lse = inputs
    call = Call(*call)
    o, lse, lse2, k_mean = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse2, k_mean, *([] if with_lse else [lse]))
    o_for_delta = o if parse(call.spec).delta is Delta.FROM_O else None
    ctx.call, tensors = call.split()
    ctx.save_for_backward(q, k, v, o_for_delta, lse2, k_mean, *tensors)


def _differentiate(
    ctx: Any, do: Tensor | None, d_lse: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, o, lse2, k_mean, *tensors = ctx.saved_tensors
    nothing: Sequence[None] = (None,) * len(Call._fields)  # without sinks, and with with_lse
    if do is None and d_lse is None:
        return (None, None, None, None, *nothing)
    if do is None:
        do = v.new_zeros((*q.shape[:3], v.shape[3]))
    call = ctx.call.with_tensors(*tensors)
    *grads, d_sinks = backward_op(do, d_lse, q, k, v, o, lse2, k_mean, *call)
    return (*grads, None if call.sinks is None else d_sinks, *nothing)


forward_op.register_autograd(_differentiate, setup_context=_save)


def _raise_at_second_derivative(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    raise RuntimeError(
        "attention was differentiated twice; its quantized gradients have no derivative"
    )


backward_op.register_autograd(_raise_at_second_derivative)
