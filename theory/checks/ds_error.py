"""Measurements of `theory.ds_error`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sagesim import FACTORED, FPA, SAGEBWD, AttentionSpec, Granularity, Smoothing
from theory.checks.check import Check, bounded, estimated
from theory.checks.samples import Sample, captured, gaussian, outlier_channels
from theory.ds_bound import centred
from theory.ds_error import (
    dispersion,
    ds_error,
    ds_moments_from_pv,
    ds_moments_from_qk,
    scale_gain,
    through_delta_bound,
)
from theory.matmul import product_moments
from theory.rounding import Moments, region_amax, rounding_moments

TOPIC = "ds_error"
SMOOTHED_FPA = replace(FPA, smoothing=Smoothing(k=True))
"""Smoothing without rounding. Replacing one site by a preset's site rounds at that site only."""


def checks() -> Iterator[Check]:
    """The identity and the bound through delta, then the estimates of dS, dQ, dK and dV."""
    capture = [in_float32(s) for s in captured()]
    for sample in (gaussian(3.0), capture[3]):
        yield from _exact_statements(sample)
    for sample in (gaussian(1.0), gaussian(3.0), capture[2], capture[5]):
        yield from _ds(sample)
    for sample in (gaussian(1.0), gaussian(5.0), outlier_channels(), capture[5]):
        yield from _products(sample)


def _exact_statements(sample: Sample) -> Iterator[Check]:
    x, t = sample.exact(), sample.trace(SAGEBWD)
    parts = ds_error(
        x.p,
        x.dp,
        x.delta,
        computed_p=t.p_recompute,
        computed_dp=t.dp,
        computed_delta=t.delta,
    )
    unit = 2.0**-24
    # The emulator rounds dP - delta and its product with P to float32, once each.
    yield bounded(
        TOPIC,
        "error of dS = sum of its four parts (up to float32)",
        sample.name,
        bound=2 * unit * t.ds.double().abs() * (1 + unit) + 1e-12 * float(x.dp.abs().max()),
        measured=(t.ds.double() - x.ds - parts.total).abs(),
    )
    # delta is a float32 sum of d_v products.
    size = (sample.do.double() * t.o.double()).abs().sum(-1)
    slack = (sample.do.shape[-1] + 1) * unit * size * x.p.square().mean(-1).sqrt()
    yield bounded(
        TOPIC,
        "error of dS through delta: RMS <= RMS(P_i) |dO_i| |error of O_i|",
        sample.name,
        bound=through_delta_bound(x.p, sample.do, t.o - x.o) + slack,
        measured=parts.through_delta.square().mean(-1).sqrt(),
    )


def _ds(sample: Sample) -> Iterator[Check]:
    x, a = sample.exact(), Anatomy.of(sample, SAGEBWD)
    for statement, moments, spec in (
        (
            "error of dS through QK",
            (a.qk,),
            {"qk": SAGEBWD.qk, "qk_recompute": SAGEBWD.qk_recompute},
        ),
        ("error of dS through PV and delta", (a.pv,), {"pv": SAGEBWD.pv}),
        ("error of dS, SageBwd: root of the sum of both squares", (a.qk, a.pv), None),
    ):
        trace = sample.trace(replace(SMOOTHED_FPA, **spec) if spec else SAGEBWD)
        yield estimated(
            TOPIC,
            statement,
            sample.name,
            predicted=math.hypot(*(m.relative_to(x.ds) for m in moments)),
            measured=relative(trace.ds, x.ds),
            within=tolerance(*moments),
        )


def _products(sample: Sample) -> Iterator[Check]:
    for product in products(sample):
        errors = {spec: product.predicted(spec) for spec in (SAGEBWD, FACTORED)}
        measured = {spec: product.measured(spec) for spec in (SAGEBWD, FACTORED)}
        yield estimated(
            TOPIC,
            f"{product.site}: error from its own rounding, shared scales",
            sample.name,
            predicted=errors[SAGEBWD],
            measured=measured[SAGEBWD],
            within=0.10,
        )
        yield estimated(
            TOPIC,
            f"{product.site}: gain of factored scales",
            sample.name,
            predicted=errors[SAGEBWD] / errors[FACTORED],
            measured=measured[SAGEBWD] / measured[FACTORED],
            within=0.10,
        )
        if sample.name.startswith("Gaussian, sigma 1,"):
            yield estimated(
                TOPIC,
                f"{product.site}: gain of factored scales, from dispersions alone",
                sample.name,
                predicted=product.gain_of_dispersions(),
                measured=measured[SAGEBWD] / measured[FACTORED],
                within=0.10,
            )


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The predicted errors of dS from rounding in QK and in PV, under a spec with delta from O."""

    qk: Moments
    pv: Moments

    @classmethod
    def of(cls, sample: Sample, spec: AttentionSpec) -> Anatomy:
        x = sample.exact()
        q, k, v, do = (t.double() for t in sample.qkvdo)
        k = k - k.mean(-2, keepdim=True)
        return cls(
            ds_moments_from_qk(
                x.p,
                centred(x.p, x.dp),
                q,
                k,
                operand(q, spec.qk.lhs, spec),
                operand(k, spec.qk.rhs, spec),
                q.shape[-1] ** -0.5,
            ),
            ds_moments_from_pv(
                x.p, v, do, operand(x.p, spec.pv.lhs, spec), operand(v, spec.pv.rhs, spec)
            ),
        )


@dataclass(frozen=True, slots=True)
class Product:
    """dQ, dK or dV computed from exact operands; all other sites are FP32."""

    site: str
    sample: Sample
    left: Tensor  #: the map as the site multiplies it, transposed for dk and dv
    right: Tensor

    def _amax(self, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        how = spec.site(self.site)
        if self.site == "dq":
            return amax(self.left, how.lhs, spec), amax(self.right, how.rhs, spec)
        return amax(self.left.mT, how.lhs, spec).mT, amax(self.right, how.rhs, spec)

    def errors(self, spec: AttentionSpec) -> tuple[Moments, Moments]:
        """The moments of the operands' rounding errors, with the spec's scales of this site."""
        left, right = self._amax(spec)
        return rounding_moments(self.left, left / 127), rounding_moments(self.right, right / 127)

    def predicted(self, spec: AttentionSpec) -> float:
        """The expected relative L2 error of the product."""
        moments = product_moments(self.left, self.right, *self.errors(spec))
        return moments.relative_to(self.left @ self.right)

    def measured(self, spec: AttentionSpec) -> float:
        """The relative L2 error of the product in the emulator."""
        trace = self.sample.trace(replace(SMOOTHED_FPA, **{self.site: spec.site(self.site)}))
        exact = getattr(self.sample.exact(), self.site)
        return relative(getattr(trace, self.site), exact)

    def dispersions(self) -> tuple[float, float, float]:
        """The arguments of `scale_gain` for a change from SAGEBWD's scales to FACTORED's."""
        (left, right), (left_fine, right_fine) = self._amax(SAGEBWD), self._amax(FACTORED)
        left_weight = self.right.square().sum(-1)[..., None, :].expand_as(self.left)
        right_weight = self.left.square().sum(-2)[..., None].expand_as(self.right)
        from_left = float((left_weight * left.square()).sum())
        from_right = float((right_weight * right.square()).sum())
        return (
            from_left / (from_left + from_right),
            dispersion(left_fine, left, left_weight),
            dispersion(right_fine, right, right_weight),
        )

    def gain_of_dispersions(self) -> float:
        """The gain of FACTORED's scales over SAGEBWD's that the dispersions predict."""
        return scale_gain(*self.dispersions())


def products(sample: Sample) -> tuple[Product, ...]:
    """dQ, dK and dV of a sample, in this order."""
    x = sample.exact()
    q, k, _, do = (t.double() for t in sample.qkvdo)
    return (
        Product("dq", sample, x.ds, k - k.mean(-2, keepdim=True)),
        Product("dk", sample, x.ds.mT, q),
        Product("dv", sample, x.p.mT, do),
    )


def common_gradient(tokens: int = 512, d: int = 64) -> Sample:
    """Gaussian inputs whose rows of dO point in similar directions.

    A loss of the mean over tokens gives such a dO.
    """
    x = gaussian(1.5, tokens, d)
    direction = torch.randn(d, generator=torch.Generator().manual_seed(1))
    return replace(x, name=f"common dO, sigma 1.5, N {tokens}, d {d}", do=direction + x.do / 5)


def tolerance(*parts: Moments) -> float:
    """How far a measured relative error of dS may be from the expected one.

    At least a tenth, at most three tenths; in between, two standard deviations of a measurement.

    A row of Q, dO or P is rounded once. A row of K or V is rounded once for all queries. If a few
    such rows carry most of the squared error, a measurement rests on few random draws. The first
    queries of a causal mask and a token that all queries attend to are such rows. The square of a
    Gaussian draw has a variance of twice its squared mean. A sum of draws with shares w has a
    relative variance of 2 sum w^2, and its root half that relative deviation. This overestimates
    the deviation: rows and columns are both counted as if each carried the whole error, and
    averaging within a row is ignored.
    """
    square = sum(m.variance for m in parts)
    assert isinstance(square, Tensor)
    shares = (square.sum(axis).flatten() / square.sum() for axis in (-1, -2))
    chance = 2 * math.sqrt(sum(float(w.square().sum()) for w in shares) / 2)
    return min(0.3, max(0.1, chance))


def in_float32(sample: Sample) -> Sample:
    """The sample in float32, whose outputs are not rounded to 16 bits."""
    q, k, v, do = (t.float() for t in sample.qkvdo)
    return replace(sample, q=q, k=k, v=v, do=do)


def amax(x: Tensor, how: Granularity, spec: AttentionSpec) -> Tensor:
    """The largest magnitude in each element's region; a block has as many queries as keys."""
    return region_amax(x, how, spec.block_q, spec.block_k if how.is_map else x.shape[-1])


def operand(x: Tensor, how: Granularity, spec: AttentionSpec) -> Moments:
    """The moments of the error of rounding x to INT8."""
    return rounding_moments(x, amax(x, how, spec) / 127)


def relative(computed: Tensor, exact: Tensor) -> float:
    """The relative L2 error |computed - exact| / |exact|."""
    return float(torch.linalg.vector_norm(computed.double() - exact) / exact.norm())
