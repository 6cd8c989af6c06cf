"""The reference: attention and its gradients in float64, independent of the emulator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from sagesim.problem import AttentionOptions, AttentionProblem
from sagesim.shapes import Float


@dataclass(frozen=True, slots=True)
class Exact:
    """Every intermediate of attention in float64; maps are [*heads, n_q, n_k].

    Masked entries are -inf in s and 0 in p, dp and ds. With a softcap, s is the capped logits, and
    ds the gradient of the logits before the cap.
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
    dsinks: Tensor | None  #: [heads]; None without sinks


def exact(
    q: Float[Tensor, "*heads n_q d"] | AttentionProblem,
    k: Float[Tensor, "*kv_heads n_k d"] | None = None,
    v: Float[Tensor, "*kv_heads n_k d_v"] | None = None,
    do: Float[Tensor, "*heads n_q d_v"] | None = None,
    **options: Unpack[AttentionOptions],
) -> Exact:
    """Compute attention and its gradients by their definitions in float64, with whole maps.

    Args: those of `sagesim.attention`, and do, the gradient of o. Or one `AttentionProblem`.

    Raises:
        TypeError, ValueError: if an option does not fit the tensors or the others, heads differ, or
            do is None.
        RuntimeError: if PyTorch cannot multiply or broadcast the shapes.

    >>> x = exact(*torch.randn(4, 1, 1, 8, 4))
    >>> bool(x.ds.sum(-1).abs().max() < 1e-12)
    True
    """
    problem = AttentionProblem.of(q, k, v, do, **options)
    attends = problem.attends
    q, k, v, do = (x.detach().double() for x in problem.qkvdo)
    return _exact(q, k, v, do, attends, problem)


def _exact(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, attends: Tensor, problem: AttentionProblem
) -> Exact:
    """q, k, v and do are the problem's tensors in float64."""
    key_heads = k.shape[-3] if k.ndim > 2 else 1
    groups = q.shape[-3] // key_heads if problem.enable_gqa else 1
    if groups > 1:
        k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    if q.shape[:-2] != k.shape[:-2]:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} differ in heads")
    n_k = k.shape[-2]
    scale = 1 / math.sqrt(q.shape[-1]) if problem.scale is None else problem.scale

    # Padding may hold anything. Without this, 0 * NaN would carry a NaN into the results.
    q, do = (x.masked_fill(~attends.any(-1)[..., None], 0.0) for x in (q, do))
    k, v = (x.masked_fill(~attends.any(-2)[..., None], 0.0) for x in (k, v))

    s = q @ k.transpose(-1, -2) * scale
    slope = None
    if problem.softcap is not None:
        slope = 1 - torch.tanh(s / problem.softcap).square()
        s = problem.softcap * torch.tanh(s / problem.softcap)
    s = s.masked_fill(~attends, -math.inf)
    lse = torch.logsumexp(s, -1) if n_k else s.new_full(s.shape[:-1], -math.inf)
    p_sink = None
    if problem.sinks is not None:
        sinks = problem.sinks.detach().double()[:, None]
        lse = torch.logaddexp(lse, sinks.where(lse != -math.inf, -math.inf))
        p_sink = torch.exp(sinks - lse).where(lse != -math.inf, 0.0)
    p = torch.exp(s - lse[..., None]).masked_fill(~attends, 0.0)
    o = p @ v
    dv = p.transpose(-1, -2) @ do
    dp = (do @ v.transpose(-1, -2)).masked_fill(~attends, 0.0)
    delta = (p * dp).sum(-1)
    ds = p * (dp - delta[..., None])
    if slope is not None:
        ds = ds * slope
    dq = ds @ k * scale
    dk = ds.transpose(-1, -2) @ q * scale
    dsinks = None
    if p_sink is not None:
        dsinks = -(p_sink * delta).sum(-1).reshape(-1, q.shape[-3]).sum(0)
    if groups > 1:
        dk, dv = (x.unflatten(-3, (key_heads, groups)).sum(-3) for x in (dk, dv))
    return Exact(s, p, o, lse, delta, dp, ds, dq, dk, dv, dsinks)
