"""Emulated attention with SDPA's arguments, differentiable through the emulated backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sagesim.emulator.layout import FlatProblem, flatten
from sagesim.emulator.passes import run_backward, run_forward
from sagesim.problem import NO_WINDOW, AttentionProblem, CausalAlignment, changed_options
from sagesim.shapes import Bool, Float
from sagesim.spec import FACTORED_QK, AttentionSpec


def attention(
    q: Float[Tensor, "*heads n_q d"] | AttentionProblem,
    k: Float[Tensor, "*kv_heads n_k d"] | None = None,
    v: Float[Tensor, "*kv_heads n_k d_v"] | None = None,
    *,
    spec: AttentionSpec = FACTORED_QK,
    is_causal: bool = False,
    causal_alignment: CausalAlignment | None = None,
    window: tuple[int, int] = NO_WINDOW,
    attn_mask: Bool[Tensor, "*mask #n_q #n_k"] | None = None,
    key_mask: Bool[Tensor, "*batch n_k"] | None = None,
    seqused_k: Tensor | None = None,
    sinks: Float[Tensor, " h"] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Float[Tensor, "*heads n_q d_v"]:
    """Compute softmax(q k^T * scale) v with each product, forward and backward, as `spec` says.

    The arguments are those of `torch.nn.functional.scaled_dot_product_attention`, and those of
    FlashAttention for windows, padding, sinks and softcaps. A query that attends to no key has
    o = 0 and contributes no gradient. Memory is linear in the number of tokens. Under autocast the
    inputs are cast as SDPA casts them. Differentiable once in q, k, v and sinks.

    Args:
        q, k, v: tensors of one floating dtype on one device, with any number of tokens (0 and 1
            included) and any head size. Or q is an `AttentionProblem`, whose do is not used, and
            the other arguments but spec are omitted.
        spec: the numerics; see `sagesim.AttentionSpec` and the presets. The default, INT8 only in
            QK and its recomputation, is also that of `sagesim_kernels`. The paper's scheme is
            SAGEBWD.
        is_causal to enable_gqa: see `sagesim.AttentionOptions`.

    Returns:
        o, in the dtype of q.

    Raises:
        TypeError: if dtypes differ or are not floating, spec is not an AttentionSpec, or scale is
            not a number.
        ValueError: if shapes or devices do not fit each other, or an option does not fit the
            tensors or the other options. The message names it.
        RuntimeError: if differentiated twice; the emulated gradients are not differentiable. Also
            inside transforms of torch.func.

    Source: arXiv 2603.02170, Algorithms 1 and 2. Differs in: the softmax is that of whole rows, not
    online, so that results depend on no block sizes but the spec's.

    >>> q, k, v = torch.randn(3, 1, 2, 100, 64).requires_grad_()
    >>> attention(q, k, v, is_causal=True).sum().backward()
    """
    _refuse_transforms()
    options: dict[str, Any] = {
        "is_causal": is_causal,
        "causal_alignment": causal_alignment,
        "window": window,
        "attn_mask": attn_mask,
        "key_mask": key_mask,
        "seqused_k": seqused_k,
        "sinks": sinks,
        "softcap": softcap,
        "scale": scale,
        "enable_gqa": enable_gqa,
    }
    if isinstance(q, AttentionProblem):  # which has options of its own
        options = changed_options(options)
    problem = AttentionProblem.of(q, k, v, None, **options)
    tensors = (problem.q, problem.k, problem.v, problem.sinks)
    out: Tensor = _Attention.apply(*tensors, problem, spec)
    return out


def _refuse_transforms() -> None:
    """Raise RuntimeError inside transforms of torch.func, for which `_Attention` has no rules."""
    is_active = torch._C._are_functorch_transforms_active  # pyright: ignore[reportPrivateUsage]
    if not torch.compiler.is_compiling() and is_active():
        raise RuntimeError(
            "sagesim.attention is called inside a transform of torch.func; grad, vjp, jvp and vmap "
            "are not supported, use torch.autograd.grad or backward()"
        )


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        problem: AttentionProblem,
        spec: AttentionSpec,
    ) -> Tensor:
        """problem: the options; its q, k and v are replaced by those that autograd passes."""
        masks = (problem.attn_mask, problem.key_mask)
        ctx.spec, ctx.options = spec, problem.options
        ctx.options.update(attn_mask=None, key_mask=None, sinks=None)
        o, result = run_forward(_flat(ctx, q, k, v, sinks, *masks))
        ctx.save_for_backward(q, k, v, sinks, *masks, o, result.lse_smoothed)
        return o

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, do: Tensor
    ) -> tuple[Tensor | None, ...]:
        *inputs, o, lse_smoothed = ctx.saved_tensors
        *grads, dsinks = run_backward(_flat(ctx, *inputs), do, o, lse_smoothed)
        q, k, v, sinks, *_ = inputs
        if dsinks is None:
            return *_DifferentiableOnce.apply(3, *grads, q, k, v, do), None, None, None
        grads = (*grads, dsinks.to(sinks.dtype))
        return *_DifferentiableOnce.apply(4, *grads, q, k, v, sinks, do), None, None


def _flat(
    ctx: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    attn_mask: Tensor | None,
    key_mask: Tensor | None,
) -> FlatProblem:
    options = ctx.options | {"sinks": sinks, "attn_mask": attn_mask, "key_mask": key_mask}
    return flatten(AttentionProblem(q=q, k=k, v=v, do=None, **options), ctx.spec)


class _DifferentiableOnce(Function):
    """Returns gradients unchanged, and raises RuntimeError if they are differentiated.

    Without it, autograd would silently drop their second derivatives.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The first `count` tensors are the gradients, the others what they depend on."""
        return tuple(gradient.view_as(gradient) for gradient in tensors[:count])

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "sagesim.attention cannot be differentiated twice: "
            "the emulated gradients are not differentiable"
        )
