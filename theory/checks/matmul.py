"""Statements of `theory.matmul`: each product alone, on exact operands in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

import sagesim
from sagesim import FACTORED, FPA, AttentionSpec, Delta, Granularity, Precision
from sagesim.spec import MAPS, OPERANDS, SITES
from theory import matmul
from theory.check import Check, bounded, estimated
from theory.rounding import Moments, region_amax, rounding_bound, rounding_moments
from theory.samples import Sample, captured, gaussian, outlier_channels

TOPIC = "matmul"
OUTPUT = {"qk": "s", "pv": "o", "qk_recompute": "s_recompute"} | {
    s: s for s in ("dv", "dp", "dq", "dk")
}
"""Which tensor of a trace each site makes."""


def checks() -> Iterator[Check]:
    """Every pair of granularities at every site, then how sums are accumulated."""
    for sample in (gaussian(1.0, 192, 32), gaussian(3.0, 192, 32), outlier_channels(192, 32)):
        for site in SITES:
            yield from _site(site, converted(sample, torch.float64))
    for sample in (gaussian(1.0), captured()[3].unmasked):
        yield from _accumulation(sample)


@dataclass(frozen=True, slots=True)
class Site:
    """A product alone: every other site in FP32, which for float64 inputs is float64."""

    site: str
    sample: Sample
    spec: AttentionSpec
    left: Tensor  #: exact, as it is stored: a map's rows are queries
    right: Tensor

    @classmethod
    def of(
        cls,
        site: str,
        sample: Sample,
        lhs: Granularity,
        rhs: Granularity,
        precision: Precision = Precision.INT8,
    ) -> Site:
        x = sample.exact()
        q, k, v, do = sample.tensors
        tensors = {"q": q, "k": k, "v": v, "do": do, "p": x.p, "ds": x.ds}
        left, right = (tensors[name] for name in OPERANDS[site])
        alone = sagesim.MatmulSpec(precision, lhs, rhs)
        # O's error would reach dS through a delta from O.
        spec = replace(FPA, delta=Delta.FROM_P, **{site: alone})
        return cls(site, sample, spec, left, right)

    @property
    def scale(self) -> float:
        """What multiplies the product."""
        scaled = self.site in ("qk", "qk_recompute", "dq", "dk")
        return self.sample.q.shape[-1] ** -0.5 if scaled else 1.0

    def arranged(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Both as the site multiplies them."""
        if OPERANDS[self.site][0] not in MAPS:
            return left, right.mT
        return (left.mT if self.site in ("dv", "dk") else left), right

    def error(self) -> Tensor:
        """Of what the site makes, by the emulator."""
        name = OUTPUT[self.site]
        computed = getattr(self.sample.trace(self.spec), name)
        error = computed - getattr(self.sample.exact(), name.removesuffix("_recompute"))
        return error.nan_to_num(0.0)  # S where masked: -inf less -inf

    def amax(self) -> tuple[Tensor, Tensor]:
        """Of the region of each element. At PV regions are of P over its row's largest element."""
        spec, matmul = self.spec, self.spec.site(self.site)
        left_name, right_name = OPERANDS[self.site]
        columns = spec.block_k if left_name in MAPS else self.left.shape[-1]
        unit = self.left.amax(-1, keepdim=True) if self.site == "pv" else torch.ones(())
        left = unit * region_amax(self.left / unit, matmul.lhs, spec.block_q, columns)
        rows = spec.block_k if right_name in ("k", "v") else spec.block_q
        return left, region_amax(self.right, matmul.rhs, rows, self.right.shape[-1])

    def bound(self) -> Tensor:
        """On the site's error."""
        precision = self.spec.site(self.site).precision
        off = (
            rounding_bound(x, amax, precision)
            for x, amax in zip((self.left, self.right), self.amax(), strict=True)
        )
        operands, off = self.arranged(self.left, self.right), self.arranged(*off)
        return self.scale * matmul.product_bound(*operands, *off)

    def rounding(self) -> tuple[Moments, Moments]:
        """Of both operands under INT8, as the site multiplies them."""
        pairs = zip((self.left, self.right), self.amax(), strict=True)
        left, right = (rounding_moments(x, amax / 127) for x, amax in pairs)
        means = self.arranged(left.mean, right.mean)
        variances = self.arranged(left.variance, right.variance)
        return Moments(means[0], variances[0]), Moments(means[1], variances[1])

    def moments(self) -> Moments:
        """Of the site's error under INT8."""
        found = matmul.product_moments(*self.arranged(self.left, self.right), *self.rounding())
        return Moments(self.scale * found.mean, self.scale**2 * found.variance)

    def chance(self) -> float:
        """The relative deviation of the RMS error for errors as `moments` has them.

        The error of a row is a B, its square a (B B^T) a^T for independent uniform a: of variance
        2 sum_jl v_j v_l G_jl^2 - 6 / 5 sum_j v_j^2 G_jj^2. Where one channel of B outweighs the
        others, a row is one random number. Likewise for the columns of A b, and twice the product
        of a B and A b has a variance of 4 sum (v_a B^2) (A^2 v_b).
        """
        a, b = self.arranged(self.left, self.right)
        left, right = (error.variance for error in self.rounding())
        total = float(4 * ((left @ b.square()) * (a.square() @ right)).sum())
        for v, other in ((left, b.mT), (right.mT, a)):  # [rows, n] and [d, n]
            square = (other.mT @ other).square()
            total += float(2 * ((v @ square) * v).sum())
            total -= float(
                1.2 * (v.square() * square.diagonal(dim1=-2, dim2=-1)[..., None, :]).sum()
            )
        found = self.moments().mean_square.sum() / self.scale**2
        return math.sqrt(max(total, 0.0)) / 2 / float(found)


def converted(x: Sample, dtype: torch.dtype) -> Sample:
    """The same numbers; in float64 FP32 sites compute in float64, too."""
    return Sample(x.name, *(t.to(dtype) for t in x.tensors), is_causal=x.is_causal)


def granularities(site: str) -> list[tuple[Granularity, Granularity]]:
    """Every pair that a site admits."""
    left, right = ([g for g in Granularity if g.is_map == (t in MAPS)] for t in OPERANDS[site])
    return list(product(left, right))


def float64_slack(site: Site) -> Tensor:
    """What float64 adds to the error of a site: sums, and of P and dS what they come from."""
    x, left = site.sample.exact(), site.left.abs()
    if OPERANDS[site.site][0] == "ds":  # a difference
        left = x.p * (x.dp.abs() + x.delta.abs()[..., None])
    a, b = site.arranged(left, site.right.abs())
    logits = x.s.masked_fill(x.s.isneginf(), 0.0).abs().max()
    terms = sum(site.sample.k.shape[-2:]) + site.sample.q.shape[-2] + site.sample.v.shape[-1]
    return (terms + 8 + 4 * logits) * 2.0**-52 * site.scale * (a @ b).max()


def _site(name: str, sample: Sample) -> Iterator[Check]:
    bounds, errors, ratios = [], [], []
    for lhs, rhs in granularities(name):
        site = Site.of(name, sample, lhs, rhs)
        error = site.error()
        bounds.append(site.bound() + float64_slack(site))
        errors.append(error.abs())
        ratio = float((error.square().mean() / site.moments().mean_square.mean()).sqrt())
        ratios.append((ratio, 0.05 + 4 * site.chance()))  # the model's part and chance's
    yield bounded(
        TOPIC,
        f"{name}: |error|, {len(errors)} pairs of granularities",
        sample.name,
        bound=torch.stack(bounds),
        measured=torch.stack(errors),
    )
    _, ratio, within = max((abs(ratio - 1) / within, ratio, within) for ratio, within in ratios)
    yield estimated(
        TOPIC,
        f"{name}: RMS error over predicted, the worst pair",
        sample.name,
        predicted=1.0,
        measured=ratio,
        within=within,
    )


def _accumulation(sample: Sample) -> Iterator[Check]:
    """A trace's own operands, multiplied in float64, against what it made of them in float32."""
    sample = converted(sample, torch.float32)
    unfactored = replace(
        FACTORED,
        qk=replace(FACTORED.qk, rhs=Granularity.PerChannel),
        dv=replace(FACTORED.dv, rhs=Granularity.PerToken),
        dq=replace(FACTORED.dq, lhs=Granularity.PerTileColumn),
        dk=replace(FACTORED.dk, lhs=Granularity.PerTileRow),
    )
    for spec in (FACTORED, unfactored):
        spec = replace(spec, smoothing=FPA.smoothing)
        t = sample.trace(spec)
        for site in ("qk", "dv", "dq", "dk"):
            left, right = (t.operands[f"{site}.{x}"] for x in OPERANDS[site])
            left, right = (x.codes.double() * x.scale.double() for x in (left, right))
            if site == "qk":
                left, right, block = left.mT, right.mT, sample.q.shape[-1]
            elif site == "dq":
                left, block = left.mT, spec.block_k
            else:
                block = spec.block_q
            parts, sizes = _tiles(left, right, block), left.mT.abs() @ right.abs()
            if matmul.sums_integers(spec, site):
                kind, bound = "integer", matmul.integer_sum_bound(parts)
                bound = bound + left.shape[-2] * 2.0**-53 * sizes  # of this float64 sum
            else:
                kind, bound = "float32", matmul.float32_error(left.shape[-2]) * sizes
            scale = 1.0 if site == "dv" else sample.q.shape[-1] ** -0.5
            made = getattr(t, OUTPUT[site]).double()
            yield bounded(
                TOPIC,
                f"{site}: what float32 adds to {kind} sums",
                sample.name,
                bound=scale * bound,
                measured=(made - scale * parts.sum(-3)).abs(),
            )


def _tiles(left: Tensor, right: Tensor, block: int) -> Tensor:
    """left^T right as a sum over blocks of rows: [..., blocks, m, d]."""
    pairs = zip(left.split(block, -2), right.split(block, -2), strict=True)
    return torch.stack([a.mT @ b for a, b in pairs], -3)
