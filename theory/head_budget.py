"""The expected errors of one query head, by site.

The rounding error of every operand is replaced by its expected mean and variance, which follow from
format and scale. `theory.budget` adds up the heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from sagesim import AttentionSpec, Delta, Precision, RoundingMode, exact
from sagesim.analysis import LOGITS
from sagesim.emulator import CODE_MAX, fold, from_tiles
from sagesim.spec import MAPS, OPERANDS, Granularity
from theory import row_bounds
from theory.ds_bound import centred
from theory.ds_error import cap_of, ds_moments_from_pv
from theory.heads import Heads
from theory.int8_dp import ds_moments_from_dp
from theory.matmul import product_moments
from theory.qk_error import qk_moments
from theory.rounding import GRIDS, Moments, region_amax, rounding_moments, spacing

FOLDED: Final = ("dv", "dk")
"""The sites that contract queries. Their right operand takes the scales that follow from bounds."""


class HeadErrors:
    """The expected errors of one query head, whose tensors are [tokens, d].

    A sink is one key more, of which K and V are 0 and have no error: its logit is that of no
    product. `_with_sink` appends it. Without sinks it does nothing.
    """

    def __init__(
        self,
        head: Heads,
        spec: AttentionSpec,
        scale: float,
        sink: Tensor | None,
        softcap: float | None,
        dtype: torch.dtype,
    ) -> None:
        q, k, v, do = head.q, head.k, head.v, head.do
        self.spec, self.scale, self.dtype = spec, scale, dtype
        sinks = None if sink is None else sink[None]
        found = exact(
            *(x[None] for x in (q, k, v, do)),
            attn_mask=head.attends,
            scale=scale,
            sinks=sinks,
            softcap=softcap,
        )
        self.exact = replace(
            found,
            **{t: getattr(found, t)[0] for t in ("s", "p", "dp", "o", "ds", "dq", "dk", "dv")},
        )
        self.q, self.v, self.do = q, v, do
        self.k = k - head.key_means() if spec.smoothing.k else k
        self.q_rounded = q - head.query_block_means(spec.block_q) if spec.smoothing.q else q
        self.values = {"q": self.q_rounded, "k": self.k, "v": v, "do": do}
        self.values |= {"p": self.exact.p, "ds": self.exact.ds}
        # P and dS in float32, where P may be below the normal numbers.
        p = self._computed(self.exact.p)
        share = (p / self.exact.p).where(self.exact.p > 0, 1.0)
        self.computed = {"p": p, "ds": self._computed(self.exact.ds * share)}

        self.has_sink = sink is not None
        p = self.exact.p
        self.p = torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1) if self.has_sink else p
        self.p = self.p.where(head.attends.any(-1, keepdim=True), 0.0)
        self.cap = None
        # dS of the smoothed K, and what is added for the mean: docs/numerics.md.
        mean = (k - self.k).sum(-2, keepdim=True) / head.attends.any(-2).sum().clamp(min=1)
        self.k_right = torch.cat([self.k, -mean], -2) if self.has_sink else self.k
        if softcap is not None:
            self.k_right = self._with_sink(k, -2)
            s = self._with_sink(self.exact.s.masked_fill(~head.attends, 0.0), -1)
            self.cap = cap_of(s, softcap)
            if self.has_sink:
                self.cap.slope[:, -1], self.cap.bend[:, -1] = 1.0, 0.0

    def errors_by_site(self) -> dict[str, dict[str, Moments]]:
        """By site of `PARTS`, the error of each output that the site can reach."""
        p, ds, k, v, do = self.exact.p, self.exact.ds, self.k, self.v, self.do
        p_error, v_error = self.error("pv", "p"), self.error("pv", "v")
        pv = {"o": product_moments(p, v, p_error, v_error)}
        if self.spec.delta is Delta.FROM_O:
            of_keys = ds_moments_from_pv(
                self.p,
                self._with_sink(v, -2),
                do,
                self._error_with_sink(p_error, -1),
                self._error_with_sink(v_error, -2),
            )
            o = self.exact.o + pv["o"].mean
            lost = (do * (_underflowed(o, self.dtype) - o)).sum(-1, keepdim=True)
            of_keys = Moments(of_keys.mean - self.p * lost, of_keys.variance)
            pv |= self._through_delta(of_keys)
        of_dp = ds_moments_from_dp(
            self.p,
            self._with_sink(v, -2),
            do,
            self.error("dp", "do"),
            self._error_with_sink(self.error("dp", "v"), -2),
            self.spec.delta,
        )
        if self.spec.delta is Delta.FROM_P:
            terms = self._computed(self.computed["p"] * self.exact.dp)
            lost = (terms - p * self.exact.dp).sum(-1, keepdim=True)
            of_dp = Moments(of_dp.mean - self.p * lost, of_dp.variance)
        dq = product_moments(ds, k, self.error("dq", "ds"), self.error("dq", "k"))
        dk_left, dv_left = self.error("dk", "ds").mT, self.error("dv", "p").mT
        dk = product_moments(ds.mT, self.q_rounded, dk_left, self.error("dk", "q"))
        dv = product_moments(p.mT, do, dv_left, self.error("dv", "do"))
        dq, dk, dv = (
            Moments(x.mean, x.variance + self._of_products(site, map))
            for site, map, x in (("dq", ds, dq), ("dk", ds.mT, dk), ("dv", p.mT, dv))
        )
        return {
            LOGITS: self._through_logits(),
            "pv": pv,
            "dv": {"dv": dv},
            "dp": self._through_ds(self._capped(of_dp)),
            "dq": {"dq": self._scaled(dq.mean, dq.variance)},
            "dk": {"dk": self._scaled(dk.mean, dk.variance)},
        }

    def _through_logits(self) -> dict[str, Moments]:
        """The errors of all outputs from QK and its recomputation."""
        found = qk_moments(
            self.p,
            centred(self.p, self._with_sink(self.exact.dp, -1)),
            self.q,
            self._with_sink(self.k, -2),
            self._with_sink(self.v, -2),
            self.do,
            self.error("qk", "q"),
            self._error_with_sink(self.error("qk", "k"), -2),
            q_rounded=self.q_rounded,
            scale=self.scale,
            k_right=self.k_right,
            cap=self.cap,
        )
        of_keys = {"ds": self._without_sink(found["ds"], -1)}
        of_keys |= {t: self._without_sink(found[t], -2) for t in ("dk", "dv")}
        return found | of_keys

    def _through_delta(self, ds: Moments) -> dict[str, Moments]:
        """The errors of dS, dQ and dK from the error of delta.

        An error e of delta changes a row of dS by -e P_i, and so the row of dQ by -e P_i K.
        """
        weight = self.p.square().sum(-1, keepdim=True)
        delta_variance = ds.variance.sum(-1, keepdim=True) / weight.where(weight > 0, 1.0)
        ds = self._capped(ds)
        slope = 1.0 if self.cap is None else self.cap.slope
        pull = (slope * self.p) @ self.k_right
        found = self._through_ds(ds)
        dq = self._scaled(ds.mean @ self.k_right, delta_variance * pull.square())
        return found | {"dq": dq}

    def _through_ds(self, ds: Moments) -> dict[str, Moments]:
        """The errors of dS, dQ and dK from an error of dS that is independent from key to key."""
        dq = self._scaled(ds.mean @ self.k_right, ds.variance @ self.k_right.square())
        ds = self._without_sink(ds, -1)
        dk = self._scaled(ds.mean.mT @ self.q, ds.variance.mT @ self.q.square())
        return {"ds": ds, "dq": dq, "dk": dk}

    def _capped(self, ds: Moments) -> Moments:
        """The error of the gradient of logits before the cap, from that of the capped ones."""
        if self.cap is None:
            return ds
        return Moments(ds.mean * self.cap.slope, ds.variance * self.cap.slope.square())

    def _with_sink(self, x: Tensor, axis: int) -> Tensor:
        if not self.has_sink:
            return x
        return torch.cat([x, torch.zeros_like(x.narrow(axis, 0, 1))], axis)

    def _error_with_sink(self, x: Moments, axis: int) -> Moments:
        return Moments(self._with_sink(x.mean, axis), self._with_sink(x.variance, axis))

    def _without_sink(self, x: Moments, axis: int) -> Moments:
        if not self.has_sink:
            return x
        keys = x.mean.shape[axis] - 1
        return Moments(x.mean.narrow(axis, 0, keys), x.variance.narrow(axis, 0, keys))

    def _scaled(self, mean: Tensor, variance: Tensor) -> Moments:
        return Moments(self.scale * mean, self.scale**2 * variance)

    def stored(self, output: str, exactly: Tensor, error: Moments) -> Moments:
        """The error of an output with its underflow: in float32 of dS, and in its dtype of others.

        The relative error of rounding other numbers to the dtype is left out.
        """
        if output == "ds":
            return Moments(error.mean + self.computed["ds"] - exactly, error.variance)
        found = exactly + error.mean
        return Moments(error.mean + _underflowed(found, self.dtype) - found, error.variance)

    def _computed(self, x: Tensor) -> Tensor:
        """x with its underflow in the dtype that the emulator computes in."""
        return _underflowed(x, torch.promote_types(self.dtype, torch.float32))

    def error(self, site: str, tensor: str) -> Moments:
        """The expected error of an operand of a site: of rounding it, and of underflow before."""
        x = self.values[tensor]
        if site == "pv" and tensor == "p":
            # PV rounds exp(S - row maximum). The largest P of the row is a factor of O afterwards.
            top = x.amax(-1, keepdim=True)
            weights, factor = x / top.where(top > 0, 1.0), self._computed(top)
            of_weights = self._rounding(site, tensor, weights)
            mean = of_weights.mean * factor + weights * (factor - top)
            return Moments(mean, of_weights.variance * factor.square())
        computed = self.computed.get(tensor, x)
        found = self._rounding(site, tensor, computed)
        return Moments(found.mean + computed - x, found.variance)

    def _of_products(self, site: str, map: Tensor) -> Tensor:
        """The variance that rounding the products of a float32 sum adds, where they underflow.

        map: the left operand. A product with a number below the normal ones counts as one that
        underflows. It is rounded to a multiple of the smallest number.
        """
        if self.spec.site(site).precision is not Precision.FP32 or self.dtype is torch.float64:
            return torch.zeros((), dtype=map.dtype)
        info = torch.finfo(torch.float32)
        count = ((map != 0) & (map.abs() < info.smallest_normal)).sum(-1, keepdim=True)
        return count.double() * (info.smallest_normal * info.eps) ** 2 / 12

    def _rounding(self, site: str, tensor: str, x: Tensor) -> Moments:
        """The expected error of rounding x, an operand of a site."""
        matmul = self.spec.site(site)
        if matmul.precision.is_scaled and matmul.lhs is Granularity.PerRowBound:
            if tensor in MAPS:
                return self._error_within_bound(site, tensor, x)
            if site in FOLDED:
                return self._fold(site)[1]
        how = matmul.lhs if OPERANDS[site][0] == tensor else matmul.rhs
        precision = matmul.precision
        if precision is Precision.FP32:
            return Moments.none(x)
        if not precision.is_scaled:
            return _float_noise(x, torch.ones(()), precision)
        block = self.spec.block_k if tensor in ("k", "v") else self.spec.block_q
        columns = self.spec.block_k if tensor in MAPS else x.shape[-1]
        step = region_amax(x, how, block, columns) / CODE_MAX[precision]
        return self._scaled_error(x, step, precision)

    def _scaled_error(self, x: Tensor, step: Tensor, precision: Precision) -> Moments:
        """The error of rounding x to codes. step: the scale of each element, 0 for zeros."""
        step = step.where(step > 0, 1.0)
        found = (
            self._int8_error(x, step)
            if precision is Precision.INT8
            else _float_noise(x, step, precision, self.spec.rounding.mode)
        )
        lost = step < 2.0**-128  # the inverse overflows, and the region becomes 0
        return Moments(torch.where(lost, -x, found.mean), found.variance.masked_fill(lost, 0.0))

    def _int8_error(self, x: Tensor, step: Tensor) -> Moments:
        if self.spec.rounding.mode is RoundingMode.STOCHASTIC:
            fraction = x / step % 1
            return Moments(torch.zeros_like(x), step.square() * fraction * (1 - fraction))
        return rounding_moments(x, step)

    def _bound(self, tensor: str) -> Tensor:
        """The bound on the rows of P or dS, [n_q, 1]."""
        if tensor == "p":
            return row_bounds.p_bound(self.exact.p)
        delta = (self.exact.p * self.exact.dp).sum(-1)
        return row_bounds.ds_bound(self.exact.p, self.do, self.v, delta)

    def _fold(self, site: str) -> tuple[Tensor, Moments]:
        """The scale of each row of a map, [n_q, 1], and the error of dO or Q.

        The top codes follow from dO or Q, so these are rounded. Their error is taken as noise of
        the size that it has.
        """
        left, right = OPERANDS[site]
        matmul, x, bound = self.spec.site(site), self.values[right], self._bound(left)
        rounded, of_rows = fold(
            x[None].float(),
            bound[None, :, 0].float(),
            matmul,
            min(self.spec.block_q, x.shape[0]),
            self.spec.rounding,
            right,
        )
        top = of_rows.top_of(matmul.precision)[0, :, None].double()
        scale = bound / top
        codes = from_tiles(rounded.dequantize()[0], *x.shape).double()
        error = (codes / scale.where(scale > 0, 1.0) - x).where(bound > 0, 0.0)
        return scale, Moments(torch.zeros_like(error), error.square())

    def _error_within_bound(self, site: str, tensor: str, x: Tensor) -> Moments:
        """The error of x, a map whose scales follow from bounds."""
        matmul = self.spec.site(site)
        of_dk = self.spec.dk
        if site in FOLDED:
            scale, _ = self._fold(site)
        elif (of_dk.precision, of_dk.lhs) == (matmul.precision, matmul.lhs):
            scale, _ = self._fold("dk")  # dQ and dK share the codes of dS
        else:
            scale = self._bound(tensor) / CODE_MAX[matmul.precision]
        found = self._scaled_error(x, scale, matmul.precision)
        if tensor == "p" and matmul.precision is not Precision.INT8:
            # The largest element of a row is a code.
            variance = found.variance.where(x < self._bound("p"), 0.0)
            found = Moments(found.mean, variance)
        return found


def _underflowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to a dtype where it is below the normal numbers of the dtype, and x elsewhere.

    There the dtype's numbers are equally spaced, and a number below half their distance becomes 0.
    """
    return x.to(dtype).double().where(x.abs() < torch.finfo(dtype).smallest_normal, x)


def _float_noise(
    x: Tensor, scale: Tensor, precision: Precision, mode: RoundingMode = RoundingMode.HALF_EVEN
) -> Moments:
    """The error of rounding to a float format; to nearest, if the format has no scale.

    It is uniform noise over the distance between two numbers, and 0 if x is one of them. To
    nearest, numbers next to the format's 0 have a known error, as in `rounding_moments`: they
    become 0 or the smallest number.
    """
    distance = spacing(x, scale, precision)
    noise = (distance.square() / 12).masked_fill(x % distance == 0, 0.0)
    codes = (x / distance).round()
    smallest = GRIDS[precision].smallest * scale
    known = (codes.abs() <= 1) & (distance <= smallest)
    if precision.is_scaled and mode is RoundingMode.STOCHASTIC:
        known = torch.zeros_like(known)
    mean = (codes * distance - x).where(known, 0.0)
    return Moments(mean, noise.masked_fill(known, 0.0))
