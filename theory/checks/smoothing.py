"""Measurements of `theory.smoothing`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import sagesim
from sagesim import AttentionSpec
from theory import smoothing
from theory.checks.check import Check, bounded, estimated
from theory.checks.samples import Sample, captured, gaussian, outlier_channels

UNIT = 2.0**-53
"""Unit roundoff of float64. On the float64 inputs here, FP32 sites compute in float64."""


def checks() -> Iterator[Check]:
    """Invariance of P and L, steps, row sums of dS, the dropped term, gains, the bias branch."""
    for sample in (outlier_channels(tokens=256), captured()[3]):
        yield from _exactness(_double(sample))
    yield from _steps()
    for sample in (gaussian(1.0, tokens=256), outlier_channels(tokens=256), captured()[3]):
        yield from _row_sums(_double(sample))
    for sample in (outlier_channels(tokens=256), *captured()):
        yield _dropped_term(_double(sample))
    for sample in (gaussian(1.0, tokens=256), outlier_channels(tokens=256), captured()[3].unmasked):
        yield from _gains(_double(sample))
    for sample in (outlier_channels(tokens=256), captured()[3]):
        yield from _bias_branch(_double(sample))


def trace(x: Sample, label: str) -> sagesim.Trace:
    """The trace of a sample under the spec of this label."""
    return x.trace(AttentionSpec.parse(label))


def row_sum_slack(x: Sample, t: sagesim.Trace) -> Tensor:
    """An upper bound on float64's error of a row sum of dS and of dO . O; [..., n_q].

    It covers the sums over keys and channels, and P = exp(S - L). About six roundings of S and of L
    reach the row sum of P; after a mean is subtracted, each is at most twice the largest logit of
    any key.
    """
    size = (x.do.abs() * (t.p @ x.v.abs() + t.o.abs())).sum(-1)
    logits = _scale(x) * (x.q.abs() @ x.k.abs().mT).amax(-1)
    return (2 * (x.k.shape[-2] + x.v.shape[-1] + 16) + 2 * 12 * logits) * UNIT * size


def p_step(t: sagesim.Trace) -> Tensor:
    """The step of the normalised P. The emulator's step is that of P over its row's maximum."""
    return t.operands["pv.p"].scale.double() * t.p.amax(-1, keepdim=True)


def dropped_term_errors(x: Sample, label: str = "sagebwd") -> tuple[float, float, float]:
    """Relative L2 errors of dQ: without the dropped term, with it, and with it as predicted."""
    t, exact, scale = trace(x, label), x.exact(), _scale(x)
    row_sums, k_mean = t.ds.sum(-1), x.k.mean(-2, keepdim=True)
    error, size = t.dq - exact.dq, float(exact.dq.norm())
    added = error + smoothing.dropped_term(row_sums, k_mean, scale=scale)
    predicted = smoothing.with_dropped_term(
        error, exact.p, x.k, k_mean, delta_error=-row_sums, scale=scale
    )
    return float(error.norm()) / size, float(added.norm()) / size, predicted / size


def _double(x: Sample) -> Sample:
    return x.map(lambda t: t.double())


def _scale(x: Sample) -> float:
    return x.q.shape[-1] ** -0.5


def _exactness(x: Sample) -> Iterator[Check]:
    scale, exact, smoothed = _scale(x), x.exact(), trace(x, "fpa smooth=k")
    off = 2 * smoothing.logit_rounding(x.q, x.k, scale=scale, unit=UNIT).amax(-1, keepdim=True)
    yield bounded(
        "smoothing",
        "K-smoothing does not change P (up to float64)",
        x.name,
        bound=exact.p * torch.expm1(2 * off + x.k.shape[-2] * UNIT),
        measured=(smoothed.p - exact.p).abs(),
    )
    k_mean = x.k.mean(-2, keepdim=True)
    direct = sagesim.exact(x.q, x.k - k_mean, x.v, x.do, is_causal=x.is_causal).lse
    corrected = direct + smoothing.lse_shift(x.q, k_mean, scale=scale)
    yield bounded(
        "smoothing",
        "K-smoothing shifts L by q.mean(K)*scale (up to float64)",
        x.name,
        bound=off.squeeze(-1) + (x.k.shape[-2] + 4) * UNIT * (1 + exact.lse.abs()),
        measured=(corrected - exact.lse).abs(),
    )


def _steps() -> Iterator[Check]:
    for tokens in (2, 64):
        k = -torch.ones(tokens, 1, dtype=torch.float64)
        k[0] = 1
        grown = (k - k.mean(-2, keepdim=True)).abs().max() / k.abs().max()
        yield bounded(
            "smoothing",
            "amax(K - mean) <= (2 - 2/n) amax(K)",
            f"one token against {tokens - 1}",
            bound=torch.tensor(smoothing.amax_growth(tokens) * (1 + 4 * UNIT)),
            measured=grown,
        )


def _row_sums(x: Sample) -> Iterator[Check]:
    t = trace(x, "sagebwd dp=fp32")
    row_sums = t.ds.sum(-1)
    predicted = smoothing.row_sum(x.do, t.o - t.p @ x.v)
    slack = row_sum_slack(x, t)
    yield bounded(
        "smoothing",
        "rowsum(dS) = -dO . (error of PV) (up to float64)",
        x.name,
        bound=slack,
        measured=(row_sums - predicted).abs(),
    )
    exact = sagesim.exact_backward(x, t)
    yield bounded(
        "smoothing",
        "error of dS against its own forward = P rowsum(dS) (up to float64)",
        x.name,
        bound=4 * t.p * slack[..., None],
        measured=(t.ds - exact.ds - t.p * row_sums[..., None]).abs(),
    )
    steps = p_step(t), t.operands["pv.v"].scale.double()
    yield bounded(
        "smoothing",
        "|rowsum(dS)| from the steps of P and V",
        x.name,
        bound=smoothing.row_sum_bound(t.p, x.v, x.do, *steps) + slack,
        measured=row_sums.abs(),
    )
    yield estimated(
        "smoothing",
        "RMS of rowsum(dS) from the steps of P and V",
        x.name,
        predicted=_rms(smoothing.row_sum_mean_square(t.p, x.v, x.do, *steps)),
        measured=_rms(row_sums**2),
        within=0.2,
    )
    consistent = trace(x, "sagebwd delta=p dp=fp32")
    yield bounded(
        "smoothing",
        "rowsum(dS) = 0 with delta from P (up to float64)",
        x.name,
        bound=slack,
        measured=consistent.ds.sum(-1).abs(),
    )
    exact = sagesim.exact_backward(x, consistent)
    yield bounded(
        "smoothing",
        "no error of dS against its own forward with delta from P (up to float64)",
        x.name,
        bound=4 * consistent.p * slack[..., None],
        measured=(consistent.ds - exact.ds).abs(),
    )


def _dropped_term(x: Sample) -> Check:
    before, after, predicted = dropped_term_errors(x)
    return estimated(
        "smoothing",
        "dQ error with the term rowsum(dS) mean(K) over that without",
        x.name,
        predicted=predicted / before,
        measured=after / before,
        within=0.03,
    )


def _gains(x: Sample) -> Iterator[Check]:
    scale, exact = _scale(x), x.exact()
    k_smoothed = x.k - x.k.mean(-2, keepdim=True)
    for smooth, words in (("none", "unsmoothed"), ("k", "K smoothed"), ("qk", "Q, K smoothed")):
        t = trace(x, f"fpa smooth={smooth} qk=int8@block,block")
        q = x.q - smoothing.block_means(x.q, 64) if "q" in smooth else x.q
        k = k_smoothed if "k" in smooth else x.k
        steps = [t.operands[f"qk.{name}"].scale.double() for name in "qk"]
        error = t.s - exact.s
        yield estimated(
            "smoothing",
            f"RMS error of S, {words}",
            x.name,
            predicted=_rms(smoothing.logit_mean_square(q, k, *steps, scale=scale)),
            measured=_rms(error**2),
            within=0.1,
        )
        if smooth == "none":
            yield estimated(
                "smoothing",
                "RMS error of S less the error's row mean, unsmoothed",
                x.name,
                predicted=_rms(smoothing.logit_mean_square(q, k_smoothed, *steps, scale=scale)),
                measured=_rms((error - error.mean(-1, keepdim=True)) ** 2),
                within=0.1,
            )


def _bias_branch(x: Sample) -> Iterator[Check]:
    scale, exact = _scale(x), x.exact()
    q_mean = smoothing.block_means(x.q, 64)
    q_smoothed = x.q - q_mean
    rebuilt = scale * (exact.ds.mT @ q_smoothed)
    rebuilt += smoothing.bias_branch(exact.ds, q_mean, scale=scale)
    slack = exact.ds.abs().mT @ (x.q.abs() + 2 * q_mean.abs())
    yield bounded(
        "smoothing",
        "dS^T Q_smoothed + bias branch = dS^T Q (up to float64)",
        x.name,
        bound=scale * (x.q.shape[-2] + 8) * 2 * UNIT * slack,
        measured=(rebuilt - exact.dk).abs(),
    )
    t = trace(x, "sagebwd smooth=qk")
    ds_error = t.ds - exact.ds
    measured = smoothing.bias_branch(ds_error, q_mean, scale=scale)
    yield bounded(
        "smoothing",
        "|error of the bias branch| from |error of dS|",
        x.name,
        bound=smoothing.bias_branch_bound(ds_error.abs(), q_mean, scale=scale),
        measured=measured.abs(),
    )
    predicted = smoothing.bias_branch_mean_square(ds_error**2, q_mean, scale=scale)
    yield estimated(
        "smoothing",
        "RMS error of the bias branch from the error of dS",
        x.name,
        predicted=_rms(predicted),
        measured=_rms(measured**2),
        within=0.25,
    )
    for smooth in ("k", "qk"):
        t = trace(x, f"fpa smooth={smooth} dk=int8@tile,block")
        steps = (t.operands[f"dk.{name}"].scale.double() for name in ("ds", "q"))
        q = q_smoothed if "q" in smooth else x.q
        predicted = smoothing.dk_mean_square(exact.ds, q, *steps, scale=scale)
        yield estimated(
            "smoothing",
            f"RMS error of dK from rounding dS and Q, smooth={smooth}",
            x.name,
            predicted=_rms(predicted),
            measured=_rms((t.dk - exact.dk) ** 2),
            within=0.1,
        )
        t = trace(x, f"sagebwd smooth={smooth}")
        through_ds = scale * (t.ds - exact.ds).mT @ x.q
        steps = (t.operands[f"dk.{name}"].scale.double() for name in ("ds", "q"))
        own = smoothing.dk_mean_square(t.ds, q, *steps, scale=scale)
        yield estimated(
            "smoothing",
            f"RMS error of dK from the error of dS and rounding, smooth={smooth}",
            x.name,
            predicted=_rms(through_ds**2 + own),
            measured=_rms((t.dk - exact.dk) ** 2),
            within=0.1,
        )


def _rms(square: Tensor) -> float:
    return float(square.mean().sqrt())
