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

from sagesim._quantize import SHARED, from_tiles, to_tiles
from sagesim.arguments import resolve_input16
from sagesim.spec import MAPS, OPERANDS, AttentionSpec, Delta, Granularity, Precision, RoundingMode

_U: Final = 2.0**-24
"""Unit roundoff of float32."""

_OPERATIONS: Final = 16
"""Roundings an element goes through beside those of its sums: scales, exponential, differences."""

_UNSCALED: Final = {Precision.FP16: (2.0**-11, 2.0**-25), Precision.BF16: (2.0**-8, 2.0**-134)}
"""Unit roundoff and half the smallest number of each 16-bit format."""

_OUTPUT: Final = {
    torch.float16: _UNSCALED[Precision.FP16],
    torch.bfloat16: _UNSCALED[Precision.BF16],
    torch.float32: (_U, 2.0**-150),
}


@dataclass(frozen=True, slots=True)
class AttentionBound:
    """Bounds on |computed - exact| of each output, float64, shaped as the outputs."""

    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def attention_bound(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    spec: AttentionSpec,
    is_causal: bool = False,
    scale: float | None = None,
) -> AttentionBound:
    """Bounds for one spec on one input [..., n, d], as many heads of K and V as of Q.

    Holds for emulator and kernels alike: they differ in the order of float32 sums only. Inputs
    that overflow a 16-bit site are outside of it.

    Raises:
        ValueError: for a site in FP8, or under a causal mask n_q != n_k.

    Source: ours. The first-order terms are those of Higham, "Accuracy and Stability of Numerical
    Algorithms", 2nd ed., section 3.1.
    """
    if is_causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(f"a causal mask over {q.shape[-2]} queries and {k.shape[-2]} keys")
    return _Analysis(q, k, v, do, spec, is_causal, scale).bound()


class _Analysis:
    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        do: Tensor,
        spec: AttentionSpec,
        is_causal: bool,
        scale: float | None,
    ) -> None:
        self.spec, self.dtype = resolve_input16(spec, q.dtype), q.dtype
        self.q, self.k, self.v, self.do = (x.double() for x in (q, k, v, do))
        self.scale = abs(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        self.q_mean = torch.zeros_like(self.q)
        if spec.smoothing.k:
            self.k = self.k - self.k.mean(-2, keepdim=True)
        if spec.smoothing.q:
            blocks = self.q.split(spec.block_q, -2)
            self.q_mean = torch.cat([b.mean(-2, keepdim=True).expand_as(b) for b in blocks], -2)
        self.q_smoothed = self.q - self.q_mean
        signed = self.scale if scale is None or scale >= 0 else -self.scale
        s = signed * self.q @ self.k.mT
        self.live = torch.ones(s.shape[-2:], dtype=torch.bool)
        if is_causal:
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
        rounded = p_off + self._map_off("pv", p + p_off)
        v_off = self._off("pv", "v")
        o_off = rounded @ (v + v_off) + p @ v_off + _float32(n_k) * ((p + rounded) @ (v + v_off))
        o_off = self._output(o, o_off)

        p_off = self._p_off(s_off_again + row_off)
        do_off = self._off("dv", "do")
        rounded = p_off + self._map_off("dv", p + p_off)
        dv = (p.mT @ self.do).abs()
        dv_off = rounded.mT @ (do + do_off) + p.mT @ do_off
        dv_off += _float32(n_q) * ((p + rounded).mT @ (do + do_off))

        left, right = self._off("dp", "do"), self._off("dp", "v")
        dp = self.do @ self.v.mT
        dp_off = left @ v.mT + (do + left) @ right.mT
        dp_off += _float32(v.shape[-1]) * ((do + left) @ (v + right).mT)
        delta = (p * dp).sum(-1, keepdim=True)
        if spec.delta is Delta.FROM_O:
            delta_off = (do * o_off).sum(-1, keepdim=True)
            delta_off += _float32(v.shape[-1]) * (do * (o + o_off)).sum(-1, keepdim=True)
        else:
            grown = (p + p_off) * (dp.abs() + dp_off)
            delta_off = (p_off * dp.abs() + (p + p_off) * dp_off).sum(-1, keepdim=True)
            delta_off += _float32(n_k) * grown.sum(-1, keepdim=True)
        ds = (p * (dp - delta)).abs()
        inner_off = dp_off + delta_off + _float32(1) * (dp.abs() + delta.abs())
        ds_off = p_off * ((dp - delta).abs() + inner_off) + p * inner_off
        ds_off += _float32(1) * (ds + ds_off)
        ds_off = ds_off.masked_fill(~self.live, 0.0)

        k, k_off = self.k.abs(), self._off("dq", "k")
        rounded = ds_off + self._map_off("dq", ds + ds_off)
        dq_off = rounded @ (k + k_off) + ds @ k_off
        dq_off += _float32(n_k) * ((ds + rounded) @ (k + k_off))
        dq = self.scale * ((p * (dp - delta)) @ self.k).abs()

        q, q_off = self.q_smoothed.abs(), self._off("dk", "q")
        rounded = ds_off + self._map_off("dk", ds + ds_off)
        dk_off = rounded.mT @ (q + q_off) + ds.mT @ q_off + ds_off.mT @ self.q_mean.abs()
        dk_off += _float32(n_q) * ((ds + rounded).mT @ (q + q_off + self.q_mean.abs()))
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
        smoothing = _float32(1) * (x + (self.q_mean.abs() if tensor == "q" else 0))
        block = self.spec.block_k if tensor in ("k", "v") else self.spec.block_q
        return smoothing + self._rounded_off(site, tensor, x + smoothing, block, x.shape[-1])

    def _map_off(self, site: str, largest: Tensor) -> Tensor:
        """The same of P or dS, which are at most `largest`; nothing where masked."""
        off = self._rounded_off(site, "map", largest, self.spec.block_q, self.spec.block_k)
        return off.masked_fill(~self.live, 0.0)

    def _rounded_off(self, site: str, tensor: str, x: Tensor, rows: int, columns: int) -> Tensor:
        matmul = self.spec.site(site)
        left = OPERANDS[site][0]
        how = matmul.lhs if tensor == left or (tensor == "map" and left in MAPS) else matmul.rhs
        match matmul.precision:
            case Precision.FP32:
                return torch.zeros_like(x)
            case Precision.FP16 | Precision.BF16:
                unit, smallest = _UNSCALED[matmul.precision]
                return unit * x + smallest
            case Precision.INT8:
                codes = 1.0 if self.spec.rounding.mode is RoundingMode.STOCHASTIC else 0.5
                return (codes + 127 * 4 * _U) / 127 * region_amax(x, how, rows, columns)
            case _:
                raise ValueError(f"site {site}: no bound for {matmul.precision.value}")

    def _logits_off(self, site: str) -> Tensor:
        """|S computed - S|, at most; 0 where masked."""
        q, k = self.q_smoothed.abs(), self.k.abs()
        q_off, k_off = self._off(site, "q"), self._off(site, "k")
        off = q_off @ (k + k_off).mT + q @ k_off.mT
        size = (q + q_off + self.q_mean.abs()) @ (k + k_off).mT
        off = self.scale * (off + _float32(q.shape[-1]) * size)
        return off.masked_fill(~self.live, 0.0)

    def _p_off(self, exponent_off: Tensor) -> Tensor:
        """|P computed - P|, where its exponent is off by at most this, and P by less than 1."""
        size = self.s.abs().masked_fill(~self.live, 0.0).amax(-1, keepdim=True)
        off = exponent_off + _float32(1) * (1 + size) + _float32(self.p.shape[-1])
        return (self.p * torch.expm1(off)).clamp(max=1.0)

    def _output(self, value: Tensor, off: Tensor) -> Tensor:
        """The bound after rounding to the outputs' dtype."""
        unit, smallest = _OUTPUT[self.dtype]
        return off + unit * (value + off) + smallest


def _float32(terms: int) -> float:
    """The relative error of a float32 sum of this many products, at most."""
    return (terms + _OPERATIONS) * _U


def region_amax(x: Tensor, how: Granularity, rows: int, columns: int) -> Tensor:
    """The largest magnitude among those that each element of x [..., n, m] shares a scale with."""
    tiles = to_tiles(x.abs(), min(rows, x.shape[-2]), min(columns, x.shape[-1]))
    amax = tiles.amax(SHARED[how], keepdim=True).expand_as(tiles)
    return from_tiles(amax, x.shape[-2], x.shape[-1])
