"""How far quantized attention and its gradients may lie from attention, elementwise.

Every product is followed from its operands: an operand is off by at most half a code (a whole one
under stochastic rounding, half a unit in the last place in 16 bit), a logit by the sum of what its
operands are off, an element of P by the exponential of that, and so on to the gradients. No term is
estimated, none is dropped; what float32 adds is bounded with n operations of relative error 2**-24
each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sagesim.problem import AttentionProblem, resolve_input16
from sagesim.spec import MAPS, OPERANDS, AttentionSpec, Delta, Precision
from theory.matmul import float32_error, product_bound
from theory.rounding import GRIDS, UNIT, region_amax, rounding_bound

_OUTPUT: Final = {
    torch.float16: (GRIDS[Precision.FP16].unit, GRIDS[Precision.FP16].smallest),
    torch.bfloat16: (GRIDS[Precision.BF16].unit, GRIDS[Precision.BF16].smallest),
    torch.float32: (UNIT, 2.0**-149),
}
"""Unit roundoff and the smallest number of each dtype."""


@dataclass(frozen=True, slots=True)
class AttentionBound:
    """Bounds on |computed - exact| of each output, float64, shaped as the outputs."""

    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def attention_bound(
    q: Tensor | AttentionProblem,
    k: Tensor | None = None,
    v: Tensor | None = None,
    do: Tensor | None = None,
    *,
    spec: AttentionSpec,
    is_causal: bool = False,
    scale: float | None = None,
) -> AttentionBound:
    """Bound the error of each output elementwise, for one spec on one input.

    Holds for the emulator and for the kernels: they differ only in the order of float32 sums. A
    bound is infinite where it cannot exclude that a 16-bit site overflows.

    Args:
        q, k, v, do: [..., n, d], as many heads of K and V as of Q; or an `AttentionProblem` alone.

    Raises:
        ValueError: for a site in FP8; if heads differ, there is a mask other than is_causal, or n_q
            differs from n_k under a causal mask.

    Source: ours. The first-order terms are those of Higham, "Accuracy and Stability of Numerical
    Algorithms", 2nd ed., section 3.1.
    """
    problem = AttentionProblem.of(q, k, v, do, is_causal=is_causal, scale=scale)
    check_plain(problem)
    return _Analysis(problem, spec).bound()


def check_plain(problem: AttentionProblem) -> None:
    """Raise ValueError unless heads are equal in number and the mask is none or square causal."""
    n_q, n_k = problem.q.shape[-2], problem.k.shape[-2]
    if problem.q.shape[:-2] != problem.k.shape[:-2]:
        q, k = tuple(problem.q.shape), tuple(problem.k.shape)
        raise ValueError(f"q {q} and k {k} differ in heads")
    if problem.attn_mask is not None:
        raise ValueError("attn_mask is given; only is_causal is supported")
    if problem.is_causal and n_q != n_k:
        raise ValueError(f"a causal mask over {n_q} queries and {n_k} keys")


class _Analysis:
    def __init__(self, problem: AttentionProblem, spec: AttentionSpec) -> None:
        self.dtype = problem.q.dtype
        self.spec = resolve_input16(spec, self.dtype)
        self.q, self.k, self.v, self.do = (x.double() for x in problem.qkvdo)
        self.scale = abs(problem.logit_scale)
        self.q_mean, self.k_mean = torch.zeros_like(self.q), torch.zeros_like(self.k)
        if spec.smoothing.k:
            self.k_mean = self.k.mean(-2, keepdim=True)
            self.k = self.k - self.k_mean
        if spec.smoothing.q:
            blocks = self.q.split(spec.block_q, -2)
            self.q_mean = torch.cat([b.mean(-2, keepdim=True).expand_as(b) for b in blocks], -2)
        self.q_smoothed = self.q - self.q_mean
        s = problem.logit_scale * self.q @ self.k.mT
        self.live = torch.ones(s.shape[-2:], dtype=torch.bool)
        if problem.is_causal:
            self.live = self.live.tril()
        self.s = s.masked_fill(~self.live, -math.inf)
        self.p = self.s.softmax(-1)
        self.tensors = {"q": self.q_smoothed, "k": self.k, "v": self.v, "do": self.do}

    def bound(self) -> AttentionBound:
        """The four bounds, in the order in which errors arise."""
        spec, p, v, do = self.spec, self.p, self.v.abs(), self.do.abs()
        n_q, n_k = p.shape[-2:]
        s_off, s_off_again = self._logits_off("qk"), self._logits_off("qk_recompute")
        row_off = s_off.amax(-1, keepdim=True)  # of the logsumexp
        o = (p @ self.v).abs()

        p_off = self._p_off(s_off + row_off)
        rounded = p_off + self._weights_off(p_off, s_off + row_off)
        o_off = product_bound(p, v, rounded, self._off("pv", "v"), terms=n_k)
        o_off = self._output(o, o_off)

        same = spec.qk_recompute == spec.qk
        p_off = self._p_off(s_off_again + row_off, normalised=same)
        rounded = p_off + self._map_off("dv", p + p_off)
        dv = (p.mT @ self.do).abs()
        dv_off = product_bound(p.mT, do, rounded.mT, self._off("dv", "do"), terms=n_q)

        left, right = self._off("dp", "do"), self._off("dp", "v")
        dp = self.do @ self.v.mT
        dp_off = product_bound(do, v.mT, left, right.mT, terms=v.shape[-1])
        delta = (p * dp).sum(-1, keepdim=True)
        if spec.delta is Delta.FROM_O:
            delta_off = (do * o_off).sum(-1, keepdim=True)
            delta_off += float32_error(v.shape[-1]) * (do * (o + o_off)).sum(-1, keepdim=True)
        else:
            grown = (p + p_off) * (dp.abs() + dp_off)
            delta_off = (p_off * dp.abs() + (p + p_off) * dp_off).sum(-1, keepdim=True)
            delta_off += float32_error(n_k) * grown.sum(-1, keepdim=True)
        ds = (p * (dp - delta)).abs()
        inner_off = dp_off + delta_off + float32_error(1) * (dp.abs() + delta.abs())
        ds_off = p_off * ((dp - delta).abs() + inner_off) + p * inner_off
        ds_off += float32_error(1) * (ds + ds_off)
        ds_off = ds_off.masked_fill(~self.live, 0.0)

        rounded = ds_off + self._map_off("dq", ds + ds_off)
        dq_off = product_bound(ds, self.k, rounded, self._off("dq", "k"), terms=n_k)
        dq = self.scale * ((p * (dp - delta)) @ self.k).abs()

        rounded, mean = ds_off + self._map_off("dk", ds + ds_off), self.q_mean.abs()
        dk_off = product_bound(ds.mT, self.q_smoothed, rounded.mT, self._off("dk", "q"), terms=n_q)
        dk_off += ds_off.mT @ mean + float32_error(n_q) * ((ds + rounded).mT @ mean)
        dk = self.scale * ((p * (dp - delta)).mT @ self.q).abs()
        return AttentionBound(
            o=o_off,
            dq=self._output(dq, self.scale * dq_off),
            dk=self._output(dk, self.scale * dk_off),
            dv=self._output(dv, dv_off),
        )

    def _off(self, site: str, tensor: str) -> Tensor:
        """|rounded - given| of an operand with tokens, at most."""
        x = self.tensors[tensor].abs()
        # The mean is rounded as well: where tokens are nearly equal, by as much as they differ.
        mean = {"q": self.q_mean, "k": self.k_mean}.get(tensor, torch.zeros(())).abs()
        smoothing = float32_error(1) * (x + mean)
        block = self.spec.block_k if tensor in ("k", "v") else self.spec.block_q
        return smoothing + self._rounded_off(site, tensor, x + smoothing, block, x.shape[-1])

    def _map_off(self, site: str, largest: Tensor) -> Tensor:
        """The same of P or dS, which are at most `largest`; nothing where masked."""
        off = self._rounded_off(site, "map", largest, self.spec.block_q, self.spec.block_k)
        return off.masked_fill(~self.live, 0.0)

    def _weights_off(self, p_off: Tensor, exponent_off: Tensor) -> Tensor:
        """The same of P at PV, which is rounded as exp(S - row's largest), and divided afterwards.

        So rows that share a scale share it before the division: a row whose largest P is 1 may
        owe its scale to one whose largest is 0.01. With T a row's largest P, the weight is P / T.
        """
        top = self.p.amax(-1, keepdim=True)
        off = exponent_off.amax(-1, keepdim=True) + self._float32_off()
        least = (top * torch.exp(-off)).clamp(min=torch.finfo(top.dtype).tiny)
        weights = ((self.p + p_off) / least).clamp(max=1.0)
        return (self.p + p_off).amax(-1, keepdim=True) * self._map_off("pv", weights)

    def _rounded_off(self, site: str, tensor: str, x: Tensor, rows: int, columns: int) -> Tensor:
        matmul = self.spec.site(site)
        if matmul.precision in (Precision.FP8_E4M3, Precision.FP8_E5M2):
            raise ValueError(f"site {site}: no bound for {matmul.precision.value}")
        left = OPERANDS[site][0]
        how = matmul.lhs if tensor == left or (tensor == "map" and left in MAPS) else matmul.rhs
        amax = region_amax(x, how, rows, columns)
        return rounding_bound(x, amax, matmul.precision, self.spec.rounding.mode)

    def _logits_off(self, site: str) -> Tensor:
        """|S computed - S|, at most; 0 where masked."""
        q, k, terms = self.q_smoothed, self.k.mT, self.q.shape[-1]
        q_off, k_off = self._off(site, "q"), self._off(site, "k").mT
        off = product_bound(q, k, q_off, k_off, terms=terms)
        off = off + float32_error(terms) * (self.q_mean.abs() @ (k.abs() + k_off))
        off = self.scale * off
        return off.masked_fill(~self.live, 0.0)

    def _float32_off(self) -> Tensor:
        """What float32 adds to the error of S - L."""
        size = self.s.abs().masked_fill(~self.live, 0.0).amax(-1, keepdim=True)
        return float32_error(1) * (1 + size) + float32_error(self.p.shape[-1])

    def _p_off(self, off: Tensor, *, normalised: bool = True) -> Tensor:
        """|P computed - P|, where S - L is off by at most this.

        normalised: L is that of the same S, so that P is at most 1 but for float32.
        """
        float32_off = self._float32_off()
        p_off = self.p * torch.expm1(off + float32_off)
        return torch.minimum(p_off, torch.exp(float32_off)) if normalised else p_off

    def _output(self, value: Tensor, off: Tensor) -> Tensor:
        """The bound after rounding to the outputs' dtype."""
        unit, smallest = _OUTPUT[self.dtype]
        return off + unit * (value + off) + smallest / 2
