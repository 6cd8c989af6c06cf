"""The steps of `theory.attention_bound`: from the errors of the operands to those of the outputs.

The absolute errors matter where a sink takes nearly all weight of a row. If the sink is more than
87 above the logits of the row, each P is below 2**-126, and its relative error is unbounded. P, and
each product after it, then has the error of `theory.matmul.underflow_error`. Logits need no such
term: 2**-126 is far below the float32 error of S - L.

Names that end in `_error` are bounds on the absolute error of that tensor.

A 16-bit operand that overflows has an infinite error. An infinite number times 0 is NaN, in the
computation as in its bound, so such a bound is infinite too: see `theory.matmul.unbounded`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sagesim.problem import AttentionProblem, resolve_input16
from sagesim.spec import (
    MAPS,
    OPERANDS,
    AttentionSpec,
    Delta,
    Granularity,
    Precision,
    RoundingMode,
)
from theory.fp8_sums import Instruction
from theory.heads import Heads
from theory.matmul import UNDERFLOW, float32_error, product_bound, unbounded, underflow_error
from theory.rounding import GRIDS, output_rounding_bound, region_amax, rounding_bound
from theory.row_bounds import RowBound, folded_sum_bound, truncated_sum_bound, widest
from theory.softmax import exponential_error

DROPPED: Final = 2.0**-118
"""An INT8 PV may take a smaller exp(S - row maximum) as 0: docs/numerics.md, "Between
implementations"."""


@dataclass(frozen=True, slots=True)
class AttentionBound:
    """Bounds on |computed - exact| of each output, in float64 and the output's shape."""

    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class BoundPropagation:
    """The bounds of one problem under one spec. Names that end in `_error` are bounds.

    Args:
        problem: tensors of a dtype of `theory.rounding.OUTPUT_GRIDS`.
        spec, instruction: as for `theory.attention_bound`.
    """

    def __init__(
        self, problem: AttentionProblem, spec: AttentionSpec, instruction: Instruction | None
    ) -> None:
        self.dtype = problem.q.dtype
        self.instruction = instruction
        self.spec = resolve_input16(spec, self.dtype)
        heads = Heads.of(problem)
        self.heads = heads
        self.q, self.k, self.v, self.do = heads.q, heads.k, heads.v, heads.do
        self.scale = abs(problem.logit_scale)
        self.q_mean, self.k_mean = torch.zeros_like(self.q), torch.zeros_like(self.k)
        if spec.smoothing.k:
            self.k_mean = heads.key_means()
            self.k = self.k - self.k_mean
        if spec.smoothing.q:
            self.q_mean = heads.query_block_means(spec.block_q)
        self.q_smoothed = self.q - self.q_mean
        self.live = heads.attends
        self.softcap = problem.softcap
        # What smoothing subtracts from each row of logits, and the magnitude of its terms.
        keys = heads.attends.any(-2).sum(-1).clamp(min=1)[..., None, None]
        self.mean = self.k_mean.sum(-2, keepdim=True) / keys  # k_mean is 0 at padding
        self.shift = problem.logit_scale * (self.q * self.mean).sum(-1, keepdim=True)
        self.shift_size = self.scale * (self.q * self.mean).abs().sum(-1, keepdim=True)
        s = problem.logit_scale * self.q @ self.k.mT
        if self.softcap is not None:
            s = self.softcap * torch.tanh((s + self.shift) / self.softcap)
        self.s = s.masked_fill(~self.live, -math.inf)
        self.sink = None
        if problem.sinks is not None:
            self.sink = problem.sinks.double()[:, None, None]
            if self.softcap is None:
                self.sink = self.sink - self.shift
        self.log_p, self.log_p_sink = self._log_softmax()
        self.p = self.log_p.exp()
        self.tensors = {"q": self.q_smoothed, "k": self.k, "v": self.v, "do": self.do}

    def _log_softmax(self) -> tuple[Tensor, Tensor | None]:
        """log P, and the log of the share of the sinks in each row; -inf where nothing is attended.

        P itself underflows in float64 where a logit is 745 below the largest of its row.
        """
        if self.sink is None:
            # The softmax of a row that attends to no key is NaN.
            return self.s.log_softmax(-1).masked_fill(~self.live, -math.inf), None
        sink = self.sink.expand(*self.s.shape[:-1], 1)
        p = torch.cat([self.s, sink], -1).log_softmax(-1)
        alone = ~self.live.any(-1, keepdim=True)
        return (
            p[..., :-1].masked_fill(~self.live, -math.inf),
            p[..., -1:].masked_fill(alone, -math.inf),
        )

    def bound(self) -> AttentionBound:
        """The bounds of o, dv, dq and dk, in the order of the computation."""
        spec, p, v, do = self.spec, self.p, self.v.abs(), self.do.abs()
        n_q, n_k = p.shape[-2:]
        s_error, s_recompute_error = self._logits_error("qk"), self._logits_error("qk_recompute")
        row_error = s_error.amax(-1, keepdim=True)  # of the logsumexp
        if self.sink is not None and self.softcap is None:
            row_error = torch.maximum(row_error, self._shift_error())
        o = (p @ self.v).abs()

        p_error = self._p_error(s_error + row_error)
        rounded = p_error + self._weights_error(p_error, s_error + row_error)
        o_error = product_bound(p, v, rounded, self._operand_error("pv", "v"), terms=n_k)
        o_error = o_error + self._underflow("pv", n_k)
        o_error = self._output(o, o_error)

        same = spec.qk_recompute == spec.qk
        p_error = self._p_error(s_recompute_error + row_error, normalised=same)
        of_p = RowBound(
            (p - p_error).amax(-1, keepdim=True).clamp(min=0.0),
            (p + p_error).amax(-1, keepdim=True) * (1 + float32_error(1)),
        )
        rounded = p_error + self._map_error("dv", p + p_error, of_p)
        dv = p.mT @ self.do
        dv_error = self._query_sum_error("dv", p, rounded, "do", of_p)
        dv_error = dv_error + self._underflow("dv", n_q)

        left, right = self._operand_error("dp", "do"), self._operand_error("dp", "v")
        dp = self.do @ self.v.mT
        dp_error = product_bound(do, v.mT, left, right.mT, terms=v.shape[-1])
        dp_error = dp_error + self._underflow("dp", v.shape[-1])
        delta = (p * dp).sum(-1, keepdim=True)
        if spec.delta is Delta.FROM_O:
            delta_error = (do * o_error).sum(-1, keepdim=True)
            delta_error += float32_error(v.shape[-1]) * (do * (o + o_error)).sum(-1, keepdim=True)
        else:
            grown = (p + p_error) * (dp.abs() + dp_error)
            delta_error = (p_error * dp.abs() + (p + p_error) * dp_error).sum(-1, keepdim=True)
            delta_error += float32_error(n_k) * grown.sum(-1, keepdim=True)
        delta_error += underflow_error(max(n_k, v.shape[-1]))
        ds = (p * (dp - delta)).abs()
        inner_error = dp_error + delta_error + float32_error(1) * (dp.abs() + delta.abs())
        ds_error = p_error * ((dp - delta).abs() + inner_error) + p * inner_error
        ds_error += float32_error(1) * (ds + ds_error) + underflow_error(1)
        slope = torch.ones((), dtype=ds.dtype)
        if self.softcap is not None:
            # The derivative of the cap, from the S of qk_recompute.
            s = self.s.masked_fill(~self.live, 0.0)
            slope = 1 - (s / self.softcap).square()
            moved = s_recompute_error / self.softcap
            slope_error = moved * (2 * s.abs() / self.softcap + moved) + float32_error(4)
            ds_error = ds_error * (slope + slope_error) + ds * slope_error
            ds = ds * slope
            ds_error += float32_error(1) * (ds + ds_error) + underflow_error(1)
        ds_error = ds_error.masked_fill(~self.live, 0.0)
        of_ds = RowBound.of_ds(of_p, (self.do, left), (self.v, right), (delta, delta_error))

        rounded = ds_error + self._map_error("dq", ds + ds_error, of_ds)
        k_error = self._operand_error("dq", "k")
        dq_error = product_bound(ds, self.k, rounded, k_error, terms=n_k)
        dq_error = dq_error + self._underflow("dq", n_k)
        dq_error = dq_error + self._dq_instruction_error(ds + rounded, k_error, of_ds)
        exact_ds = p * (dp - delta) * slope
        dq_error = dq_error + self._mean_error(exact_ds, ds_error, delta, delta_error, row_error)
        of_dp = do.norm(dim=-1) * v.norm(dim=-1).amax(-1, keepdim=True)
        row_sum = (p + p_error).sum(-1).clamp(min=1.0)
        ds_sum = row_sum * (of_dp + (delta.abs() + delta_error).squeeze(-1))
        dq_error = dq_error + self._unit_error(ds_sum, of_ds)[..., None]
        dq = self.scale * (exact_ds @ (self.k + self.k_mean)).abs()

        rounded, mean = ds_error + self._map_error("dk", ds + ds_error, of_ds), self.q_mean.abs()
        dk_error = self._query_sum_error("dk", ds, rounded, "q", of_ds)
        dk_error = dk_error + self._underflow("dk", n_q) + underflow_error(n_q)
        dk_error += ds_error.mT @ mean + float32_error(n_q) * ((ds + rounded).mT @ mean)
        dk = self.scale * (exact_ds.mT @ self.q)
        return AttentionBound(
            o=o_error,
            dq=self._output(dq, self.scale * dq_error + UNDERFLOW),
            dk=self._key_output(dk, self.scale * dk_error + UNDERFLOW),
            dv=self._key_output(dv, dv_error),
        )

    def _has_row_bound(self, site: str) -> bool:
        matmul = self.spec.site(site)
        return matmul.precision.is_scaled and matmul.lhs is Granularity.PerRowBound

    def _underflow(self, site: str, terms: int) -> float:
        """Bound on what underflow in float32 adds to a product of a site."""
        precision = self.spec.site(site).precision
        return underflow_error(terms, GRIDS[precision].largest ** 2 if precision.is_scaled else 1.0)

    def _query_sum_error(
        self, site: str, map: Tensor, rounded: Tensor, tensor: str, bound: RowBound
    ) -> Tensor:
        """Bound on the error of map^T @ tensor, dV or dK. rounded: that of the map's error."""
        x = self.tensors[tensor]
        if not self._has_row_bound(site):
            off = self._operand_error(site, tensor)
            return product_bound(map.mT, x, rounded.mT, off, terms=map.shape[-2])
        return folded_sum_bound(
            map,
            x,
            rounded,
            self._smoothing_error(tensor),
            bound,
            self.spec.site(site),
            self.spec.block_q,
            self.spec.rounding.mode,
            self.instruction,
        )

    def _dq_instruction_error(self, ds: Tensor, k_error: Tensor, bound: RowBound) -> Tensor:
        """Bound on what tensor cores lose in the FP8 sums of dQ. ds: a bound on it, rounded."""
        if self.instruction is None or not self._has_row_bound("dq"):
            return torch.zeros((), dtype=ds.dtype)
        k, matmul, block = self.k.abs() + k_error, self.spec.dq, self.spec.block_k
        amax = region_amax(k, matmul.rhs, block, k.shape[-1])
        lost = truncated_sum_bound(
            bound.share(ds), k, amax, matmul.precision, block, self.instruction
        )
        return bound.high * lost

    def _unit_error(self, ds_sum: Tensor, of_ds: RowBound) -> Tensor:
        """Bound on the error of adding parts of a row of dQ as integers, as kernels do.

        Half a unit for each key block; a unit is at most 2^-29 times the bound on the sum of the
        row's magnitudes (docs/numerics.md, "Sums of dQ"), or twice the largest of its lower limits:
        2^-150 max |K|, 2^-126, 2^-126 m and 2^-126 m max |K|. ds_sum: a bound on |dS| of each row.
        """
        spec, growth = self.spec, 2.0
        if spec.rounding.mode is RoundingMode.STOCHASTIC and self._has_row_bound("dq"):
            grid = GRIDS[spec.dq.precision]
            code = grid.smallest / grid.largest * widest(spec.dq.precision) * of_ds.high.squeeze(-1)
            ds_sum = ds_sum + self.k.shape[-2] * code
        elif spec.rounding.mode is RoundingMode.STOCHASTIC:
            growth = 1 + spec.block_k / 127 * spec.block_q
            ds_sum = ds_sum.amax(-1, keepdim=True).expand_as(ds_sum)
        k_amax = self.k.abs().amax((-2, -1))[..., None]
        if self.softcap is not None:
            k_amax = k_amax + self.mean.abs().amax((-2, -1))[..., None]
        blocks = -(-self.k.shape[-2] // spec.block_k)
        b = 1.1 * growth * ds_sum + 2.0**-120
        m = torch.maximum(b, of_ds.high.squeeze(-1)).amax(-1, keepdim=True)
        return blocks * (2.0**-30 * b * k_amax + UNDERFLOW * (1 + m * (1 + k_amax)))

    def _shift_error(self) -> Tensor:
        """Bound on the float32 error of what smoothing subtracts from a row's logits."""
        return float32_error(self.q.shape[-1] + 2) * self.shift_size

    def _mean_error(
        self, ds: Tensor, ds_error: Tensor, delta: Tensor, delta_error: Tensor, row_error: Tensor
    ) -> Tensor:
        """Bound on the error of dQ from rows of dS that do not sum to 0, times the mean of K."""
        mean = self.mean.abs()
        if self.softcap is not None:
            error = ds_error.sum(-1, keepdim=True)
            error += float32_error(ds.shape[-1] + 1) * (ds.abs() + ds_error).sum(-1, keepdim=True)
        elif self.log_p_sink is not None:
            assert self.sink is not None
            size = float32_error(2) * self.sink.abs() + self._shift_error()
            moved = row_error + size + self._float32_error()
            share = exponential_error(self.log_p_sink, moved) + UNDERFLOW
            # L contains the sink. So the share is at most 1, up to float32 errors, if L is finite.
            most = torch.exp(2 * size + self._float32_error())
            share = torch.minimum(share, most.masked_fill(row_error.isinf(), math.inf))
            p_sink = self.log_p_sink.exp()
            error = share * delta.abs() + (p_sink + share) * delta_error
            error += float32_error(2) * (p_sink + share) * (delta.abs() + delta_error)
            error += underflow_error(1)
        else:
            return torch.zeros((), dtype=ds.dtype)
        total = ds.sum(-1, keepdim=True).abs() + error
        return error * mean + float32_error(2) * total * mean + UNDERFLOW

    def _operand_error(self, site: str, tensor: str) -> Tensor:
        """Bound on |rounded - exact| of q, k, v or do as an operand of a site."""
        x, smoothing = self.tensors[tensor].abs(), self._smoothing_error(tensor)
        block = self.spec.block_k if tensor in ("k", "v") else self.spec.block_q
        return smoothing + self._rounded_error(site, tensor, x + smoothing, block, x.shape[-1])

    def _smoothing_error(self, tensor: str) -> Tensor:
        """Bound on the float32 error of a subtracted mean.

        It matters if tokens are nearly equal.
        """
        mean = {"q": self.q_mean, "k": self.k_mean}.get(tensor, torch.zeros(())).abs()
        return float32_error(1) * (self.tensors[tensor].abs() + mean)

    def _map_error(self, site: str, largest: Tensor, bound: RowBound | None = None) -> Tensor:
        """Bound on the rounding error of P or dS, where |P| or |dS| <= `largest`; 0 if masked.

        bound: from which a scale per row bound follows.
        """
        matmul = self.spec.site(site)
        if bound is not None and self._has_row_bound(site):
            amax = bound.high * widest(matmul.precision)
            error = rounding_bound(largest, amax, matmul.precision, self.spec.rounding.mode)
            if not self.spec.qk_recompute.precision.is_scaled:
                # The largest logit may come from a sum in another order. A larger P, or dS, then
                # becomes the bound.
                moved = 2 * self._logits_error("qk_recompute").amax(-1, keepdim=True)
                error = error + exponential_error(bound.high.log(), moved)
        else:
            error = self._rounded_error(site, "map", largest, self.spec.block_q, self.spec.block_k)
        return error.masked_fill(~self.live, 0.0)

    def _weights_error(self, p_error: Tensor, exponent_error: Tensor) -> Tensor:
        """Bound on the rounding error of P at PV.

        At PV, w = exp(S - row maximum) is rounded, and o is divided by the row sum afterwards.
        A scale that several rows share is computed from w = P / T, with T the largest P of the row,
        and not from P. A row with T = 0.01 then has the same scale as a row with T = 1.

        In INT8, it includes the weights that an implementation may take as 0.
        """
        top = self.p.amax(-1, keepdim=True)
        error = exponent_error.amax(-1, keepdim=True) + self._float32_error()
        least = (top * torch.exp(-error)).clamp(min=torch.finfo(top.dtype).tiny)
        weights = ((self.p + p_error) / least).clamp(max=1.0)
        error = self._map_error("pv", weights)
        if self.spec.pv.precision is Precision.INT8:
            error = error + weights.clamp(max=DROPPED).masked_fill(~self.live, 0.0)
        return (self.p + p_error).amax(-1, keepdim=True) * error

    def _rounded_error(self, site: str, tensor: str, x: Tensor, rows: int, columns: int) -> Tensor:
        matmul = self.spec.site(site)
        left = OPERANDS[site][0]
        how = matmul.lhs if tensor == left or (tensor == "map" and left in MAPS) else matmul.rhs
        amax = region_amax(x, how, rows, columns)
        return rounding_bound(x, amax, matmul.precision, self.spec.rounding.mode)

    def _logits_error(self, site: str) -> Tensor:
        """Bound on the error of S; 0 if masked."""
        q, k, terms = self.q_smoothed, self.k.mT, self.q.shape[-1]
        q_error, k_error = self._operand_error(site, "q"), self._operand_error(site, "k").mT
        error = product_bound(q, k, q_error, k_error, terms=terms)
        error = error + float32_error(terms) * (self.q_mean.abs() @ (k.abs() + k_error))
        error = unbounded(self.scale * error)
        if self.softcap is not None:
            # tanh raises no error. Before it, scales, shift and c are six roundings; its own error,
            # and that of the factors after it, is at most 2^-20 of the capped logit.
            size = self.scale * (q.abs() @ k.abs()) + self.shift_size
            error = error + self._shift_error() + float32_error(6) * size
            error = error + 2.0**-20 * self.s.masked_fill(~self.live, 0.0).abs()
        return error.masked_fill(~self.live, 0.0)

    def _float32_error(self) -> Tensor:
        """Bound on the float32 error of S - L."""
        size = self.s.abs().masked_fill(~self.live, 0.0).amax(-1, keepdim=True)
        if self.sink is not None:
            size = torch.maximum(size, self.sink.abs())
        return float32_error(1) * (1 + size) + float32_error(self.p.shape[-1])

    def _p_error(self, error: Tensor, *, normalised: bool = True) -> Tensor:
        """Bound on the error of P, given a bound on the error of S - L.

        normalised: whether L is computed from the same S. Then P <= 1, up to float32 errors, if S
            is finite. If S overflows, P is NaN. Otherwise P itself may overflow.
        """
        float32_part = self._float32_error()
        p_error = exponential_error(self.log_p, error + float32_part) + UNDERFLOW
        if normalised:
            most = torch.exp(float32_part).masked_fill(error.isinf(), math.inf)
            p_error = torch.minimum(p_error, most)
        else:
            overflows = self.p + p_error > torch.finfo(torch.float32).max
            p_error = p_error.masked_fill(overflows, math.inf)
        return p_error.masked_fill(~self.live, 0.0)

    def _key_output(self, value: Tensor, error: Tensor) -> Tensor:
        """The bound of dk or dv after the sum over the query heads of a group."""
        terms = float32_error(self.heads.groups) * self.heads.sum_groups(value.abs() + error)
        total = self.heads.sum_groups(value).abs()
        return self._output(total, self.heads.sum_groups(error) + terms)

    def _output(self, value: Tensor, error: Tensor) -> Tensor:
        """The bound after the output is rounded to its dtype."""
        error = unbounded(error)
        return error + output_rounding_bound(value + error, self.dtype)
