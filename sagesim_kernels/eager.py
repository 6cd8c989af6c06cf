"""Attention as an autograd function, for eager mode.

PyTorch spends more time on a call of a custom operator than a GPU on a short sequence. So tensors
that nothing traces go to an autograd function, and all others to the operators: those of
torch.compile, of torch.jit.trace, of dispatch modes such as selective checkpointing, of function
transforms, and subclasses of Tensor. Both compute the same.
"""

# PyTorch has no public names for what traces a call:
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sagesim.spec import Delta
from sagesim_kernels.labels import parse
from sagesim_kernels.launching import Tensors
from sagesim_kernels.ops import Call, backward_op, forward_op, run_backward, run_forward
from sagesim_kernels.traced import is_traced


def attend(
    q: Tensor, k: Tensor, v: Tensor, call: Call, *, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return o and the logsumexp, which is None unless with_lse; see `ops.run_forward`."""
    if forward_ad._current_level >= 0:
        _refuse_tangents(q, k, v, call.sinks)
    if is_traced(q, k, v):
        if not torch.compiler.is_compiling():
            _refuse_differentiation_by_functions(q, k, v, call.sinks)
        traced = forward_op if call.softcap is None else _forward_with_softcap
        o, lse, _, _ = traced(q, k, v, *call, with_lse)
        return o, lse if with_lse else None
    sinks = call.sinks
    call, others = call.split()
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sinks is not None and sinks.requires_grad)
    ):
        return _apply(q, k, v, sinks, others, call, with_lse)
    o, lse, _, _ = run_forward((q, k, v, *others), call, with_lse=with_lse)
    assert o is not None
    return o, lse


def _refuse_tangents(*tensors: Tensor | None) -> None:
    """Raise RuntimeError if a tensor has a tangent, which the operators would lose."""
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(
            "attention has no forward-mode derivative, which torch.func.jvp, jacfwd and dual "
            "tensors need; use a reverse-mode one: torch.autograd.grad or backward()"
        )


def _refuse_differentiation_by_functions(*tensors: Tensor | None) -> None:
    """Raise RuntimeError if torch.func differentiates a tensor, which the operators do not allow.

    Several transforms wrap a tensor several times. A wrapper is dead when its transform has ended.
    """
    functorch = torch._C._functorch
    for tensor in tensors:
        while tensor is not None and functorch.is_functorch_wrapped_tensor(tensor):
            is_dead = functorch.is_dead_tensor_wrapper(tensor)
            if functorch.is_gradtrackingtensor(tensor) and not is_dead:
                raise RuntimeError(
                    "attention is differentiated by torch.func; grad, vjp and jacrev are not "
                    "supported, use torch.autograd.grad or backward()"
                )
            tensor = functorch.get_unwrapped(tensor)


@torch.compiler.allow_in_graph  # so that this code sees whether a number is symbolic
def _forward_with_softcap(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return forward_op(q, k, v, *rest) for a softcap that torch.compile may have made symbolic.

    PyTorch compiles an operator anew for each value of a number. So a softcap that changes becomes
    a tensor on the CPU. CUDA graphs take no such tensors; with them the number stays one.
    """
    call, with_lse = Call(*rest[:-1]), rest[-1]
    if isinstance(call.softcap, torch.SymFloat) and not torch._inductor.config.triton.cudagraphs:
        number = torch.ones((), dtype=torch.float64) * call.softcap
        call = call._replace(softcap=None, softcap_tensor=number)
    return forward_op(q, k, v, *call, with_lse)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        others: Tensors,
        call: Call,
        with_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """others, call: as `Call.split` returns them.

        The sinks are an input of their own, so that they can have a gradient.
        """
        o, lse, lse2, k_mean = run_forward((q, k, v, *others), call, with_lse=with_lse)
        assert o is not None
        ctx.set_materialize_grads(False)
        ctx.call = call
        o_for_delta = o if parse(call.spec).delta is Delta.FROM_O else None
        ctx.save_for_backward(q, k, v, o_for_delta, lse2, k_mean, *others)
        return o, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        do, d_lse = grads
        q, k, v, o, lse2, k_mean, *others = ctx.saved_tensors
        if do is None and d_lse is None:
            return (None,) * 7
        if do is None:
            do = v.new_zeros((*q.shape[:3], v.shape[3]))
        # With gradients enabled, for a second derivative: the operator raises at it.
        if torch.is_grad_enabled() or is_traced(do, d_lse):
            call = ctx.call.with_tensors(*others)
            mean = q.new_empty((0,), dtype=torch.float32) if k_mean is None else k_mean
            *found, d_sinks = backward_op(do, d_lse, q, k, v, o, lse2, mean, *call)
            found = (*found, None if call.sinks is None else d_sinks)
        else:
            found = run_backward((do, d_lse, q, k, v, o, lse2, k_mean, *others), ctx.call)
        return (*found, None, None, None)


_apply = super(torch.autograd.Function, _Attention).apply
"""`_Attention.apply` without the part for function transforms: `is_traced` has found none."""
