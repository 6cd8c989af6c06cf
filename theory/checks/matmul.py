"""Measurements of `theory.matmul`: each product alone, on exact operands in float64."""

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
from theory.checks.check import Check, bounded, estimated
from theory.checks.samples import Sample, captured, gaussian, outlier_channels
from theory.rounding import Moments, region_amax, rounding_bound, rounding_moments

TOPIC = "matmul"
OUTPUT = {"qk": "s", "pv": "o", "qk_recompute": "s_recompute"} | {
    s: s for s in ("dv", "dp", "dq", "dk")
}
"""The tensor of a trace that each site computes."""


def checks() -> Iterator[Check]:
    """Every pair of granularities at every site, then the float32 error of the sums."""
    for sample in (gaussian(1.0, 192, 32), gaussian(3.0, 192, 32), outlier_channels(192, 32)):
        for site in SITES:
            yield from _site(site, converted(sample, torch.float64))
    for sample in (gaussian(1.0), captured()[3].unmasked):
        yield from _accumulation(sample)


@dataclass(frozen=True, slots=True)
class Site:
    """One product that rounds, with every other site in FP32.

    On float64 inputs an FP32 site computes in float64.
    """

    site: str
    sample: Sample
    spec: AttentionSpec
    left: Tensor  #: the exact left operand as it is stored: the rows of a map are queries
    right: Tensor  #: the exact right operand as it is stored

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
        q, k, v, do = sample.qkvdo
        tensors = {"q": q, "k": k, "v": v, "do": do, "p": x.p, "ds": x.ds}
        left, right = (tensors[name] for name in OPERANDS[site])
        alone = sagesim.MatmulSpec(precision, lhs, rhs)
        # With delta from O, the error of O would reach dS.
        spec = replace(FPA, delta=Delta.FROM_P, **{site: alone})
        return cls(site, sample, spec, left, right)

    @property
    def scale(self) -> float:
        """The softmax scale if the site multiplies its product by it, else 1."""
        scaled = self.site in ("qk", "qk_recompute", "dq", "dk")
        return self.sample.q.shape[-1] ** -0.5 if scaled else 1.0

    def arranged(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Both operands as the site multiplies them, [..., m, n] and [..., n, d]."""
        if OPERANDS[self.site][0] not in MAPS:
            return left, right.mT
        return (left.mT if self.site in ("dv", "dk") else left), right

    def error(self) -> Tensor:
        """The error of the site's output in the emulator."""
        name = OUTPUT[self.site]
        computed = getattr(self.sample.trace(self.spec), name)
        error = computed - getattr(self.sample.exact(), name.removesuffix("_recompute"))
        return error.nan_to_num(0.0)  # masked elements of S: -inf - -inf

    def amax(self) -> tuple[Tensor, Tensor]:
        """The amax of each element's region, of both operands.

        PV rounds P before it is normalised, so its regions are those of P over its row's maximum.
        """
        spec, matmul = self.spec, self.spec.site(self.site)
        left_name, right_name = OPERANDS[self.site]
        columns = spec.block_k if left_name in MAPS else self.left.shape[-1]
        unit = self.left.amax(-1, keepdim=True) if self.site == "pv" else torch.ones(())
        left = unit * region_amax(self.left / unit, matmul.lhs, spec.block_q, columns)
        rows = spec.block_k if right_name in ("k", "v") else spec.block_q
        return left, region_amax(self.right, matmul.rhs, rows, self.right.shape[-1])

    def bound(self) -> Tensor:
        """The upper bound on |error|."""
        precision = self.spec.site(self.site).precision
        off = (
            rounding_bound(x, amax, precision)
            for x, amax in zip((self.left, self.right), self.amax(), strict=True)
        )
        operands, off = self.arranged(self.left, self.right), self.arranged(*off)
        return self.scale * matmul.product_bound(*operands, *off)

    def rounding(self) -> tuple[Moments, Moments]:
        """The moments of the INT8 rounding errors of both operands, `arranged`."""
        pairs = zip((self.left, self.right), self.amax(), strict=True)
        left, right = (rounding_moments(x, amax / 127) for x, amax in pairs)
        means = self.arranged(left.mean, right.mean)
        variances = self.arranged(left.variance, right.variance)
        return Moments(means[0], variances[0]), Moments(means[1], variances[1])

    def moments(self) -> Moments:
        """The moments of the site's error in INT8."""
        found = matmul.product_moments(*self.arranged(self.left, self.right), *self.rounding())
        return Moments(self.scale * found.mean, self.scale**2 * found.variance)

    def chance(self) -> float:
        """The relative standard deviation of one measurement of the RMS error, under `moments`.

        The error of a row is a B with independent uniform a, and its square a (B B^T) a^T has the
        variance 2 sum_jl v_j v_l G_jl^2 - 6 / 5 sum_j v_j^2 G_jj^2 with G = B B^T. If one channel
        of B outweighs the others, a row is a single random number. The same holds for the columns
        of A b. Twice the product of a B and A b has a variance of 4 sum (v_a B^2) (A^2 v_b).
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
    """The sample in another dtype. In float64, FP32 sites compute in float64."""
    return x.map(lambda t: t.to(dtype))


def granularities(site: str) -> list[tuple[Granularity, Granularity]]:
    """Every pair of granularities of a site whose scales follow from the operands' elements."""
    left, right = (Granularity.of(site, tensor) for tensor in OPERANDS[site])
    return [pair for pair in product(left, right) if Granularity.PerRowBound not in pair]


def float64_slack(site: Site) -> Tensor:
    """An upper bound on float64's part in a site's error: its sum, and the steps to P and dS."""
    x, left = site.sample.exact(), site.left.abs()
    if OPERANDS[site.site][0] == "ds":  # dS is P times a difference, so its terms count
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
        ratios.append((ratio, 0.05 + 4 * site.chance()))  # error of the model, and chance
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
        f"{name}: RMS error over its estimate, worst pair of granularities",
        sample.name,
        predicted=1.0,
        measured=ratio,
        within=within,
    )


def _accumulation(sample: Sample) -> Iterator[Check]:
    """A trace's float32 products compared with float64 products of its own operands."""
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
                bound = bound + left.shape[-2] * 2.0**-53 * sizes  # the float64 reference
            else:
                kind, bound = "float32", matmul.float32_error(left.shape[-2]) * sizes
            scale = 1.0 if site == "dv" else sample.q.shape[-1] ** -0.5
            made = getattr(t, OUTPUT[site]).double()
            yield bounded(
                TOPIC,
                f"{site}: float32 error of {kind} sums",
                sample.name,
                bound=scale * bound,
                measured=(made - scale * parts.sum(-3)).abs(),
            )


def _tiles(left: Tensor, right: Tensor, block: int) -> Tensor:
    """The terms of left^T right for each block of rows: [..., blocks, m, d]."""
    pairs = zip(left.split(block, -2), right.split(block, -2), strict=True)
    return torch.stack([a.mT @ b for a, b in pairs], -3)
