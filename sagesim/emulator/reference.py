"""The reference: attention and its gradients in float64, independent of the emulator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, Unpack, runtime_checkable

import torch
from torch import Tensor

from sagesim.checks import check_type
from sagesim.problem import AttentionOptions, AttentionProblem
from sagesim.shapes import Float
from sagesim.short_repr import short_repr


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

    __repr__ = short_repr


@runtime_checkable
class SoftmaxOfForward(Protocol):
    """What a forward made of its logits, with the leading shape of q; see `Trace`."""

    @property
    def s(self) -> Tensor: ...
    @property
    def p(self) -> Tensor: ...
    @property
    def lse(self) -> Tensor: ...


def exact(
    q: Float[Tensor, "*heads n_q d"] | AttentionProblem,
    k: Float[Tensor, "*kv_heads n_k d"] | None = None,
    v: Float[Tensor, "*kv_heads n_k d_v"] | None = None,
    do: Float[Tensor, "*heads n_q d_v"] | None = None,
    **options: Unpack[AttentionOptions],
) -> Exact:
    """Compute attention and its gradients by their definitions in float64, with whole maps.

    Args: those of `sagesim.attention`, and do, the gradient of o. Or one `AttentionProblem`. Under
        autocast they are first cast, as `sagesim.trace` casts them.

    Raises:
        TypeError, ValueError: as `sagesim.trace`.

    >>> x = exact(*torch.randn(4, 1, 1, 8, 4))
    >>> bool(x.ds.sum(-1).abs().max() < 1e-12)
    True
    """
    return _exact(AttentionProblem.of(q, k, v, do, **options), None)


def exact_backward(problem: AttentionProblem, forward: SoftmaxOfForward) -> Exact:
    """Compute the exact gradients of the function that a quantized forward computes.

    S, P and L are the forward's: s, p and lse of a `Trace`, p before it is rounded for PV. All else
    follows from this P and the problem's unrounded q, k, v and do in float64: o = P V, dP, delta =
    rowsum(P o dP), dS, dq, dk and dv. Rounding in QK counts as having derivative 1
    (straight-through). A softcap and sinks enter as they do in the forward: with the slope at the
    forward's S, and with its L.

    `compare(trace, exact_backward(problem, trace))` is the error against the own forward. It holds
    what the other products and an inconsistent backward add, and not the error of QK itself.

    Raises:
        TypeError: if problem is not an AttentionProblem, or the forward has no s, p and lse.
        ValueError: if the forward is not one of this problem (its p has another shape); and as
            `exact`.

    Source: docs/numerics.md, "Two references".

    >>> from sagesim import SAGEBWD, compare, trace
    >>> q, k, v, do = torch.randn(4, 1, 1, 64, 16)
    >>> problem = AttentionProblem(q=q, k=k, v=v, do=do)
    >>> t = trace(problem, spec=SAGEBWD)
    >>> compare(t, exact_backward(problem, t)).overall["p"].rel_l2
    0.0
    """
    check_type("problem", problem, AttentionProblem, "a sagesim.AttentionProblem")
    check_type("forward", forward, SoftmaxOfForward, "a sagesim.Trace")
    problem = problem.autocast()
    shape = (*problem.q.shape[:-1], problem.k.shape[-2])
    if forward.p.shape != shape:
        raise ValueError(
            f"p of the forward has shape {tuple(forward.p.shape)}, that of the problem is {shape}"
        )
    return _exact(problem, forward)


def _exact(problem: AttentionProblem, forward: SoftmaxOfForward | None) -> Exact:
    """The gradients for the exact P, or for that of a forward."""
    groups = problem.check()
    problem.check_gradient()
    attends, scale = problem.attends, problem.logit_scale
    q, k, v, do = (x.detach().double() for x in problem.qkvdo)
    if groups > 1:
        k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    n_k = k.shape[-2]

    # Padding may hold anything. Without this, 0 * NaN would carry a NaN into the results.
    q, do = (x.masked_fill(~attends.any(-1)[..., None], 0.0) for x in (q, do))
    k, v = (x.masked_fill(~attends.any(-2)[..., None], 0.0) for x in (k, v))

    sinks = None if problem.sinks is None else problem.sinks.detach().double()[:, None]
    if forward is None:
        s = q @ k.transpose(-1, -2) * scale
        if problem.softcap is not None:
            s = problem.softcap * torch.tanh(s / problem.softcap)
        s = s.masked_fill(~attends, -math.inf)
        lse = torch.logsumexp(s, -1) if n_k else s.new_full(s.shape[:-1], -math.inf)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.where(lse != -math.inf, -math.inf))
        p = torch.exp(s - lse[..., None]).masked_fill(~attends, 0.0)
    else:
        s, p, lse = (x.detach().double() for x in (forward.s, forward.p, forward.lse))
    o = p @ v
    dv = p.transpose(-1, -2) @ do
    dp = (do @ v.transpose(-1, -2)).masked_fill(~attends, 0.0)
    delta = (p * dp).sum(-1)
    ds = p * (dp - delta[..., None])
    if problem.softcap is not None:  # the derivative of c tanh(x / c), from its value
        ds = ds * (1 - (s / problem.softcap).square()).masked_fill(~attends, 0.0)
    dq = ds @ k * scale
    dk = ds.transpose(-1, -2) @ q * scale
    dsinks = None
    if sinks is not None:
        p_sink = torch.exp(sinks - lse).where(lse != -math.inf, 0.0)
        *batch, heads, _, _ = q.shape
        dsinks = -(p_sink * delta).sum(-1).reshape(math.prod(batch), heads).sum(0)
    if groups > 1:
        dk, dv = (x.unflatten(-3, (-1, groups)).sum(-3) for x in (dk, dv))
    return Exact(s, p, o, lse, delta, dp, ds, dq, dk, dv, dsinks)
