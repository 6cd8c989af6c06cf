"""Attention and its gradients in float64, the reference. Shares no code with the emulator."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sagesim._typing import Bool, Float


@dataclass(frozen=True, slots=True)
class Exact:
    """Every intermediate of attention in float64; maps are [*heads, n_q, n_k].

    Entries that take no part (masked) are -inf in s and 0 in p, dp and ds.
    """

    s: Tensor
    p: Tensor
    o: Tensor
    lse: Tensor
    delta: Tensor
    dp: Tensor
    ds: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def exact(
    q: Float[Tensor, "*heads n_q d"],
    k: Float[Tensor, "*kv_heads n_k d"],
    v: Float[Tensor, "*kv_heads n_k d_v"],
    do: Float[Tensor, "*heads n_q d_v"],
    *,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "*mask #n_q #n_k"] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Exact:
    """Attention and its gradients by their definitions in float64, maps held whole.

    Args: as `sagesim.attention`; do is the gradient of o.

    Raises:
        ValueError: a mask that is not boolean or comes with is_causal; unequal heads.
        RuntimeError: where PyTorch cannot multiply or broadcast the shapes.

    >>> x = exact(*torch.randn(4, 1, 1, 8, 4))
    >>> bool(x.ds.sum(-1).abs().max() < 1e-12)
    True
    """
    if attn_mask is not None and (is_causal or attn_mask.dtype is not torch.bool):
        raise ValueError(f"attn_mask is {attn_mask.dtype} with is_causal={is_causal}")
    q, k, v, do = (x.detach().double() for x in (q, k, v, do))
    key_heads = k.shape[-3] if k.ndim > 2 else 1
    groups = q.shape[-3] // key_heads if enable_gqa else 1
    if groups > 1:
        k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    if q.shape[:-2] != k.shape[:-2]:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} differ in heads")
    n_q, n_k, d = q.shape[-2], k.shape[-2], q.shape[-1]
    scale = 1 / math.sqrt(d) if scale is None else scale

    attends = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device)
    if is_causal:
        attends = attends.tril()
    if attn_mask is not None:
        attends = attends & attn_mask

    # Tokens that no other attends to, or that attend to none, are no part of the problem,
    # whatever they hold; 0 * NaN would make them one.
    q, do = (x.masked_fill(~attends.any(-1)[..., None], 0.0) for x in (q, do))
    k, v = (x.masked_fill(~attends.any(-2)[..., None], 0.0) for x in (k, v))

    s = (q @ k.transpose(-1, -2) * scale).masked_fill(~attends, -math.inf)
    lse = torch.logsumexp(s, -1) if n_k else s.new_full(s.shape[:-1], -math.inf)
    p = torch.exp(s - lse[..., None]).masked_fill(~attends, 0.0)
    o = p @ v
    dv = p.transpose(-1, -2) @ do
    dp = (do @ v.transpose(-1, -2)).masked_fill(~attends, 0.0)
    delta = (p * dp).sum(-1)
    ds = p * (dp - delta[..., None])
    dq = ds @ k * scale
    dk = ds.transpose(-1, -2) @ q * scale
    if groups > 1:
        dk, dv = (x.unflatten(-3, (key_heads, groups)).sum(-3) for x in (dk, dv))
    return Exact(s, p, o, lse, delta, dp, ds, dq, dk, dv)
