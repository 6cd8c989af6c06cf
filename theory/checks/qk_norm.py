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
from theory.checks.samples import captured, gaussian
from theory.qk_norm import PowerSums

QK_ONLY = AttentionSpec.parse("fpa smooth=k qk=int8@block,block qk_recompute=int8@block,block")
"""QK and its recomputation in INT8 as in the paper; everything else in FP32."""

SETTING = Setting(tokens=1024, head_dim=64, draws=2)
REGION = SAGEBWD.block_q * SETTING.head_dim
"""The number of elements of a block of queries or keys, which share one scale."""

FLOAT32 = 1 + 2.0**-20
"""A bound on the relative float32 error of QKNorm, for up to some hundred channels."""


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
        d = x.q.shape[-1]
        norm = _norm(d)
        gamma_q, gamma_k = norm.gamma_q.detach().double(), norm.gamma_k.detach().double()
        with torch.no_grad():
            q, k = norm(x.q.float(), x.k.float())  # QKNorm returns the dtype of its inputs
        plain = (q / norm.gamma_q.detach()).double()
        mean_square = x.q.double().square().mean(-1)
        yield bounded(
            "qk_norm",
            "|x|_2 = sqrt(d m / (m + eps)) before gamma",
            x.name,
            bound=qk_norm.normalised_norm(mean_square, d, norm.eps) * FLOAT32,
            measured=plain.norm(dim=-1),
        )
        yield bounded(
            "qk_norm",
            "|q_c| <= sqrt(d) |gamma_c|",
            x.name,
            bound=qk_norm.channel_bound(gamma_q) * FLOAT32,
            measured=q.double().abs(),
        )
        step = quantize(q, Granularity.PerBlock).scale.double()
        yield bounded(
            "qk_norm",
            "INT8 step <= sqrt(d) max|gamma| / 127",
            x.name,
            bound=torch.tensor(qk_norm.step_bound(gamma_q) * FLOAT32),
            measured=step,
        )
        largest = qk_norm.logit_bound(gamma_q, gamma_k) * FLOAT32
        normed = replace(x, q=q.double(), k=k.double(), v=x.v.double(), do=x.do.double())
        exact = normed.exact()
        yield bounded(
            "qk_norm",
            "|S| <= scale * d * max|gamma_q gamma_k|",
            x.name,
            bound=torch.tensor(largest, dtype=torch.float64),
            measured=exact.s.abs(),
        )
        weight = qk_norm.weight_bounds(largest, k.shape[-2])[1]
        yield bounded(
            "qk_norm",
            "largest P from the bound on S",
            x.name,
            bound=torch.tensor(weight, dtype=torch.float64),
            measured=exact.p,
        )
        emulated = normed.trace(AttentionSpec.parse("fpa qk=int8@block,block"))
        yield bounded(
            "qk_norm",
            "|error of S| from gamma alone",
            x.name,
            bound=torch.tensor(qk_norm.logit_error_bound(gamma_q, gamma_k), dtype=torch.float64),
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
