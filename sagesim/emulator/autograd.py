"""Emulated attention with SDPA's arguments, differentiable through the emulated backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from sagesim.emulator.layout import FlatProblem, flatten
from sagesim.emulator.passes import run_backward, run_forward
from sagesim.problem import AttentionProblem, autocast
from sagesim.shapes import Bool, Float
from sagesim.spec import FACTORED_QK, AttentionSpec


def attention(
    q: Float[Tensor, "*heads n_q d"] | AttentionProblem,
    k: Float[Tensor, "*kv_heads n_k d"] | None = None,
    v: Float[Tensor, "*kv_heads n_k d_v"] | None = None,
    *,
    spec: AttentionSpec = FACTORED_QK,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "*mask #n_q #n_k"] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Float[Tensor, "*heads n_q d_v"]:
    """Compute softmax(q k^T * scale) v with each product, forward and backward, as `spec` says.

    The arguments are those of `torch.nn.functional.scaled_dot_product_attention`. A query that
    attends to no key has o = 0 and contributes no gradient. Memory is linear in the number of
    tokens. Under autocast the inputs are cast as SDPA casts them.

    Args:
        q, k, v: tensors of one floating dtype on one device, with any number of tokens (0 and 1
            included) and any head size. Or q is an `AttentionProblem`, whose do is not used, and
            the other arguments but spec are omitted.
        spec: the numerics; see `sagesim.AttentionSpec` and the presets. The default, INT8 only in
            QK and its recomputation, is also that of `sagesim_kernels`. The paper's scheme is
            SAGEBWD.
        is_causal: query i attends to keys 0..i, aligned top-left also if n_q differs from n_k.
        attn_mask: boolean, broadcastable to [*heads, n_q, n_k]; True attends.
        scale: factor of the logits; 1/sqrt(d) by default.
        enable_gqa: repeat each head of k and v for a group of consecutive heads of q.

    Returns:
        o, in the dtype of q.

    Raises:
        TypeError: if dtypes differ or are not floating, spec is not an AttentionSpec, or scale is
            not a number.
        ValueError: if shapes or devices do not fit each other, a mask is not boolean, or a mask
            comes with is_causal.
        RuntimeError: if differentiated twice; the emulated gradients are not differentiable.

    Source: arXiv 2603.02170, Algorithms 1 and 2. Differs in: the softmax is that of whole rows, not
    online, so that results depend on no block sizes but the spec's.

    >>> q, k, v = torch.randn(3, 1, 2, 100, 64).requires_grad_()
    >>> attention(q, k, v, is_causal=True).sum().backward()
    """
    problem = AttentionProblem.of(
        q,
        k,
        v,
        None,
        is_causal=is_causal,
        attn_mask=attn_mask,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    options = (problem.is_causal, problem.attn_mask, problem.scale, problem.enable_gqa)
    out: Tensor = _Attention.apply(*autocast(problem.q, problem.k, problem.v), spec, *options)
    return out


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
        is_causal: bool,
        attn_mask: Tensor | None,
        scale: float | None,
        enable_gqa: bool,
    ) -> Tensor:
        ctx.spec, ctx.is_causal, ctx.scale, ctx.enable_gqa = spec, is_causal, scale, enable_gqa
        o, result = run_forward(_flat(ctx, q, k, v, attn_mask))
        ctx.save_for_backward(q, k, v, attn_mask, o, result.lse_smoothed)
        return o

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, do: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, attn_mask, o, lse_smoothed = ctx.saved_tensors
        grads = run_backward(_flat(ctx, q, k, v, attn_mask), do, o, lse_smoothed)
        return *_DifferentiableOnce.apply(*grads, q, k, v, do), None, None, None, None, None


def _flat(ctx: Any, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> FlatProblem:
    problem = AttentionProblem(
        q=q,
        k=k,
        v=v,
        do=None,
        is_causal=ctx.is_causal,
        attn_mask=attn_mask,
        scale=ctx.scale,
        enable_gqa=ctx.enable_gqa,
    )
    return flatten(problem, ctx.spec)


class _DifferentiableOnce(Function):
    """Returns gradients unchanged, and raises RuntimeError if they are differentiated.

    Without it, autograd would silently drop their second derivatives.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.view_as(gradient) for gradient in tensors[:3])

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "sagesim.attention cannot be differentiated twice: "
            "the emulated gradients are not differentiable"
        )
