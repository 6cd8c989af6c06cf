"""Emulated attention with SDPA's arguments, differentiable through the emulated backward."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from sagesim._typing import Bool, Float
from sagesim.arguments import autocast
from sagesim.backward import backward
from sagesim.forward import forward
from sagesim.inputs import check
from sagesim.presets import FACTORED_QK
from sagesim.spec import AttentionSpec


def attention(
    q: Float[Tensor, "*heads n_q d"],
    k: Float[Tensor, "*kv_heads n_k d"],
    v: Float[Tensor, "*kv_heads n_k d_v"],
    *,
    spec: AttentionSpec = FACTORED_QK,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "*mask #n_q #n_k"] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Float[Tensor, "*heads n_q d_v"]:
    """softmax(q k^T * scale) v with each of its products, forward and backward, as `spec` says.

    The arguments mean what they mean in `torch.nn.functional.scaled_dot_product_attention`. A
    row that attends to nothing has o = 0 and contributes no gradient. Memory is linear in the
    number of tokens. Under autocast the inputs are cast as SDPA's are.

    Args:
        q, k, v: one floating dtype and device; any lengths, 0 and 1 included, any head size.
        spec: the numerics; see `sagesim.AttentionSpec` and the presets. The default is that of
            `sagesim_kernels`, INT8 in QK alone; the paper's scheme is SAGEBWD.
        is_causal: query i attends to keys 0..i (aligned top-left, also where n_q != n_k).
        attn_mask: boolean, broadcastable to [*heads, n_q, n_k]; True attends.
        scale: of the logits; 1/sqrt(d) by default.
        enable_gqa: repeat each head of k and v for a group of consecutive heads of q.

    Returns:
        o, in the dtype of q.

    Raises:
        TypeError: dtypes that differ or are not floating.
        ValueError: shapes that do not fit, naming them; a mask that is not boolean or comes
            together with is_causal.
        RuntimeError: when differentiated twice; the emulated gradients are not differentiable.

    Source: arXiv 2603.02170, Algorithms 1 and 2. Differs in: computes whole rows, not an online
    softmax, so that numbers depend on the spec's blocks only.

    >>> q, k, v = torch.randn(3, 1, 2, 100, 64).requires_grad_()
    >>> attention(q, k, v, is_causal=True).sum().backward()
    """
    q, k, v = autocast(q, k, v)
    out: Tensor = _Attention.apply(q, k, v, spec, is_causal, attn_mask, scale, enable_gqa)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *call: Any) -> Tensor:
        spec, is_causal, attn_mask, scale, enable_gqa = call
        x = check(
            q,
            k,
            v,
            spec=spec,
            is_causal=is_causal,
            attn_mask=attn_mask,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        with plain_float32(q.device.type):
            result = forward(x)
        o = x.query_heads(result.o).to(x.dtype)
        ctx.save_for_backward(q, k, v, attn_mask, o, result.lse_smoothed)
        ctx.spec, ctx.is_causal, ctx.scale, ctx.enable_gqa = spec, is_causal, scale, enable_gqa
        return o

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, do: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, attn_mask, o, lse_smoothed = ctx.saved_tensors
        x = check(
            q,
            k,
            v,
            spec=ctx.spec,
            is_causal=ctx.is_causal,
            attn_mask=attn_mask,
            scale=ctx.scale,
            enable_gqa=ctx.enable_gqa,
        )
        with torch.no_grad(), plain_float32(q.device.type):
            grads = backward(x, x.widen(do), x.widen(o), lse_smoothed)
            dq = x.query_heads(grads.dq).to(x.dtype)
            dk, dv = x.key_heads(grads.dk).to(x.dtype), x.key_heads(grads.dv).to(x.dtype)
        return *_Once.apply(dq, dk, dv, q, k, v, do), None, None, None, None, None


class _Once(torch.autograd.Function):
    """Passes gradients on, and raises where somebody differentiates them: their second
    derivatives would otherwise be dropped without a word."""

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


@contextlib.contextmanager
def plain_float32(device: str) -> Generator[None]:
    """Float32 products in float32: no autocast, no TF32, whatever the caller has switched on.

    PyTorch has this setting once for all threads: a thread that computes attention at the same
    time as another should leave TF32 off altogether.
    """
    cpu: Any = torch.backends.mkldnn  # torch leaves its settings unannotated
    settings = (torch.backends.cuda.matmul, cpu.matmul)
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision
