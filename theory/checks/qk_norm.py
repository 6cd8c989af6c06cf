"""Measurements of `theory.qk_norm`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch

from sagesim import SAGEBWD, AttentionSpec, Granularity, QKNorm, quantize
from sagesim.analysis import TITLES, Comparison, Setting, gaussian_errors
from theory import qk_norm
from theory.checks.check import Check, bounded, estimated
from theory.checks.samples import Sample, captured, gaussian
from theory.qk_norm import PowerSums

QK_ONLY = AttentionSpec.parse("fpa smooth=k qk=int8@block,block qk_recompute=int8@block,block")
"""QK and its recomputation in INT8 as in the paper; everything else in FP32."""

SETTING = Setting(tokens=1024, head_dim=64, draws=2)
REGION = SAGEBWD.block_q * SETTING.head_dim
"""The number of elements of a block of queries or keys, which share one scale."""

FLOAT32 = 1 + 2.0**-20
"""A bound on the relative error of QKNorm's float32 arithmetic, for up to some hundred channels."""


def checks() -> Iterator[Check]:
    """The bounds from gamma, then the growth of errors with sigma."""
    yield from _limits()
    yield from _growth()


def logit_square(sigma: float) -> float:
    """The expected square of the error of S at `SETTING`."""
    d = SETTING.head_dim
    return qk_norm.logit_mean_square(sigma, sigma, d, region_q=REGION, region_k=REGION)


@cache
def errors(sigma: float, label: str = QK_ONLY.label()) -> Comparison:
    """The errors measured at `SETTING` under a spec's label, for q and k of deviation sigma."""
    return gaussian_errors(sigma, AttentionSpec.parse(label), SETTING)


def _limits() -> Iterator[Check]:
    for x in (gaussian(3.0, tokens=256), captured()[3].unmasked):
        yield _norms(x)
        for dtype in (torch.float32, torch.bfloat16):
            yield from _limits_in(x, dtype)


def _norms(x: Sample) -> Check:
    d = x.q.shape[-1]
    norm = _norm(d)
    with torch.no_grad():
        plain = (norm(x.q.float(), x.k.float())[0] / norm.gamma_q).double()
    return bounded(
        "qk_norm",
        "|x|_2 = sqrt(d m / (m + eps)) before gamma",
        x.name,
        bound=qk_norm.normalised_norm(x.q.double().square().mean(-1), d, norm.eps) * FLOAT32,
        measured=plain.norm(dim=-1),
    )


def _limits_in(x: Sample, dtype: torch.dtype) -> Iterator[Check]:
    """The bounds times 1 + u or its square, for q and k that are rounded to this dtype."""
    inputs = f"{x.name}, {str(dtype).removeprefix('torch.')}"
    norm = _norm(x.q.shape[-1])
    gamma_q, gamma_k = norm.gamma_q.detach().double(), norm.gamma_k.detach().double()
    with torch.no_grad():
        q, k = norm(x.q.to(dtype), x.k.to(dtype))  # QKNorm returns the dtype of its inputs
    rounded = (1 + torch.finfo(dtype).eps / 2) * FLOAT32
    yield bounded(
        "qk_norm",
        "|q_c| <= sqrt(d) |gamma_c|",
        inputs,
        bound=qk_norm.channel_bound(gamma_q) * rounded,
        measured=q.double().abs(),
    )
    yield bounded(
        "qk_norm",
        "INT8 step <= sqrt(d) max|gamma| / 127",
        inputs,
        bound=torch.tensor(qk_norm.step_bound(gamma_q) * rounded),
        measured=quantize(q, Granularity.PerBlock).scale.double(),
    )
    largest = qk_norm.logit_bound(gamma_q, gamma_k) * rounded**2
    normed = replace(x, q=q.double(), k=k.double(), v=x.v.double(), do=x.do.double())
    exact = normed.exact()
    yield bounded(
        "qk_norm",
        "|S| <= scale * d * max|gamma_q gamma_k|",
        inputs,
        bound=torch.tensor(largest, dtype=torch.float64),
        measured=exact.s.abs(),
    )
    weight = qk_norm.weight_bounds(largest, k.shape[-2])[1]
    yield bounded(
        "qk_norm",
        "largest P from the bound on S",
        inputs,
        bound=torch.tensor(weight, dtype=torch.float64),
        measured=exact.p,
    )
    emulated = normed.trace(AttentionSpec.parse("fpa qk=int8@block,block"))
    off = qk_norm.logit_error_bound(gamma_q, gamma_k) * rounded**2
    yield bounded(
        "qk_norm",
        "|error of S| from gamma alone",
        inputs,
        bound=torch.tensor(off, dtype=torch.float64),
        measured=(emulated.s - exact.s).abs(),
    )


def _growth() -> Iterator[Check]:
    n, d = SETTING.tokens, SETTING.head_dim
    for sigma in (0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 10.0):
        inputs = f"Gaussian, sigma {sigma:g}, N {n}, d {d}"
        measured = {name: e.rel_l2 for name, e in errors(sigma).overall.items()}
        moments = errors(sigma).moments["s"].sum(0)
        square, sums = logit_square(sigma), PowerSums(sigma**2, n)
        yield estimated(
            "qk_norm",
            "RMS error of S",
            inputs,
            predicted=math.sqrt(square),
            measured=math.sqrt(float(moments[3] / moments[5])),
            within=0.05,
        )
        # The estimates are of first order; the relative size of the next order is the error of S.
        within = 0.05 + 0.2 * math.sqrt(square)
        if sigma > 5:
            continue
        if sigma >= 3:
            # Corrections to the limit decrease only as 1 / log N.
            frozen = qk_norm.frozen_softmax_error(square, sigma**2, n)
            yield estimated(
                "qk_norm",
                "relative error of O, limit sqrt(m/3)",
                inputs,
                predicted=frozen,
                measured=measured["o"],
                within=0.15,
            )
            yield estimated(
                "qk_norm",
                "relative error of dQ, limit sqrt(2/5)",
                inputs,
                predicted=qk_norm.frozen_score_gradient_error(square),
                measured=measured["dq"],
                within=0.15,
            )
        for name, error in _GROWTH.items():
            # If P is nearly uniform, every row of O is about the mean of V: few numbers, whose
            # size varies from draw to draw.
            if sigma >= 1 or name in ("p", "ds"):
                yield estimated(
                    "qk_norm",
                    f"relative error of {TITLES[name]}, from QK alone",
                    inputs,
                    predicted=error(square, sums),
                    measured=measured[name],
                    within=within,
                )


_GROWTH = {
    "p": qk_norm.softmax_error,
    "o": qk_norm.softmax_error,
    "ds": qk_norm.score_gradient_error,
    "dq": qk_norm.score_gradient_error,
}


def _norm(d: int) -> QKNorm:
    """A QKNorm with gammas that differ between channels and between q and k."""
    norm = QKNorm(d)
    generator = torch.Generator().manual_seed(d)
    with torch.no_grad():
        norm.gamma_q.copy_(torch.randn(d, generator=generator).exp())
        norm.gamma_k.copy_(torch.randn(d, generator=generator).exp())
    return norm
