"""Measurements of `theory.int8_dp`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from sagesim import FACTORED, SAGEBWD, AttentionSpec, Delta, Precision, with_precision
from theory.checks.check import Check, bounded, estimated
from theory.checks.ds_error import SMOOTHED_FPA, Anatomy, in_float32, operand, relative, tolerance
from theory.checks.samples import Sample, captured, gaussian
from theory.int8_dp import (
    cancellation,
    ds_moments_from_dp,
    ds_moments_from_pv_and_dp,
    gaussian_dp_error,
)
from theory.rounding import Moments

TOPIC = "int8_dp"
SCALES = {"per block": SAGEBWD, "per token": FACTORED}


def checks() -> Iterator[Check]:
    """INT8 dP as the only rounding, the closed forms, smoothed V, then the whole scheme."""
    capture = [in_float32(s) for s in captured()]
    for sample in (gaussian(1.0), gaussian(5.0), outlier_rows(), large_mean(), capture[4]):
        for scales, spec in SCALES.items():
            for delta in Delta:
                yield estimated(
                    TOPIC,
                    f"error of dS from INT8 dP, {scales}, delta from {delta.value.upper()}",
                    sample.name,
                    predicted=predicted(sample, spec, delta),
                    measured=measured(sample, spec, delta),
                    within=tolerance(moments(sample, spec, delta)),
                )

    for sigma in (1.0, 3.0, 5.0, 8.0):
        sample = gaussian(sigma)
        rows = sample.do.double().norm(dim=-1)
        plain = gaussian_dp_error(SAGEBWD.block_q * sample.do.shape[-1])
        for delta, factor in (
            (Delta.FROM_O, cancellation(sample.exact().p, rows)),
            (Delta.FROM_P, 1.0),
        ):
            name = {Delta.FROM_O: "crest error x |P| / |J|", Delta.FROM_P: "crest error"}[delta]
            yield estimated(
                TOPIC,
                f"closed form, delta from {delta.value.upper()}: {name}",
                sample.name,
                predicted=plain * factor,
                measured=measured(sample, SAGEBWD, delta),
                within=0.10,
            )

    sample = large_mean()
    smoothed = replace(sample, v=sample.v - sample.v.mean(-2, keepdim=True))
    x, y = sample.exact(), smoothed.exact()
    # An element of dP is a float64 sum of d_v products; delta is a sum of n_k such elements.
    terms = sample.v.shape[-1] + sample.v.shape[-2] + 16
    size = sample.do.double().abs() @ sample.v.double().abs().mT
    yield bounded(
        TOPIC,
        "smoothing V does not change exact dS (up to float64)",
        sample.name,
        bound=2 * terms * 2.0**-53 * x.p * size.amax(-1, keepdim=True),
        measured=(x.ds - y.ds).abs(),
    )
    for delta in Delta:
        gain = predicted(sample, SAGEBWD, delta) / predicted(smoothed, SAGEBWD, delta)
        yield estimated(
            TOPIC,
            f"gain of smoothing V, delta from {delta.value.upper()}",
            sample.name,
            predicted=gain,
            measured=measured(sample, SAGEBWD, delta) / measured(smoothed, SAGEBWD, delta),
            within=0.10,
        )

    for sample in (gaussian(1.0), gaussian(3.0), *capture[:3]):
        for name, spec in (("SageBwd", SAGEBWD), ("factored", FACTORED)):
            exact = sample.exact().ds
            with_dp = sample.trace(with_precision(spec, Precision.INT8, "dp")).ds
            yield estimated(
                TOPIC,
                f"{name}: error of dS with INT8 dP over that without",
                sample.name,
                predicted=expected(sample, spec, int8_dp=True) / expected(sample, spec),
                measured=relative(with_dp, exact) / relative(sample.trace(spec).ds, exact),
                within=0.10,
            )


def predicted(sample: Sample, spec: AttentionSpec, delta: Delta) -> float:
    """The expected relative error of dS if only dP is INT8, with the spec's scales."""
    return moments(sample, spec, delta).relative_to(sample.exact().ds)


def moments(sample: Sample, spec: AttentionSpec, delta: Delta) -> Moments:
    """The moments of the error of dS if only dP is INT8, with the spec's scales."""
    v, do = sample.v.double(), sample.do.double()
    do_error, v_error = operand(do, spec.dp.lhs, spec), operand(v, spec.dp.rhs, spec)
    return ds_moments_from_dp(sample.exact().p, v, do, do_error, v_error, delta)


def measured(sample: Sample, spec: AttentionSpec, delta: Delta) -> float:
    """The relative error of dS in the emulator if only dP is INT8, with the spec's scales."""
    dp = replace(spec.dp, precision=Precision.INT8)
    trace = sample.trace(replace(SMOOTHED_FPA, dp=dp, delta=delta))
    return relative(trace.ds, sample.exact().ds)


def expected(sample: Sample, spec: AttentionSpec, *, int8_dp: bool = False) -> float:
    """The expected relative error of dS under SAGEBWD or FACTORED, with dP in 16 bits or INT8."""
    x, parts = sample.exact(), Anatomy.of(sample, spec)
    if spec.delta is Delta.FROM_P:
        others = predicted(sample, spec, spec.delta) if int8_dp else 0.0
    elif not int8_dp:
        others = parts.pv.relative_to(x.ds)
    else:
        assert spec.pv.rhs is spec.dp.rhs  # PV and dP round V alike
        v, do = sample.v.double(), sample.do.double()
        others = ds_moments_from_pv_and_dp(
            x.p,
            v,
            do,
            operand(x.p, spec.pv.lhs, spec),
            operand(v, spec.pv.rhs, spec),
            operand(do, spec.dp.lhs, spec),
        ).relative_to(x.ds)
    return math.hypot(parts.qk.relative_to(x.ds), others)


def outlier_rows(tokens: int = 512, d: int = 64) -> Sample:
    """Gaussian inputs; one row of dO in each block of 64 is 16 times larger."""
    x = gaussian(1.0, tokens, d)
    do = x.do.clone()
    do[..., ::64, :] *= 16
    return replace(x, name=f"outlier rows of dO, N {tokens}, d {d}", do=do)


def large_mean(tokens: int = 512, d: int = 64) -> Sample:
    """Gaussian inputs; V has a mean of 8."""
    x = gaussian(1.0, tokens, d)
    return replace(x, name=f"V with mean 8, N {tokens}, d {d}", v=x.v + 8)
