"""Measurements of `theory.ds_bound`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sagesim import SAGEBWD
from theory.checks.check import Check, bounded, estimated
from theory.checks.samples import Sample, captured, gaussian, outlier_channels
from theory.ds_bound import (
    centred,
    ds_bound,
    ds_rms,
    expected_ds_rms,
    gaussian_crest,
    jacobian_bound,
    paper_bound,
    paper_flat_bound,
    value_bound,
)

TOPIC = "ds_bound"


def checks() -> Iterator[Check]:
    """Bounds on every row, closed forms, and the bound on the emulator's own dS."""
    capture = "capture, all layers"
    for name, samples in (
        *((s.name, (s,)) for s in (gaussian(1.0), gaussian(5.0, is_causal=True))),
        *((s.name, (s,)) for s in (outlier_channels(),)),
        (capture, captured()),
    ):
        rows = [_Rows(s) for s in samples]
        measured = torch.cat([r.measured for r in rows])
        for statement, bounds in (
            ("RMS(dS_i) <= N^-1/2 max|dP - delta| (the paper's)", [r.flat for r in rows]),
            ("RMS(dS_i) <= RMS(P_i) max|dP - delta| (the paper's)", [r.paper for r in rows]),
            ("RMS(dS_i) <= ds_bound", [r.ours for r in rows]),
            ("RMS(dS_i) <= value_bound (from dO, V and P)", [r.value for r in rows]),
        ):
            yield bounded(TOPIC, statement, name, bound=torch.cat(bounds), measured=measured)
        yield bounded(
            TOPIC,
            "ds_bound <= RMS(P_i) max|dP - delta|",
            name,
            bound=torch.cat([r.paper for r in rows]),
            measured=torch.cat([r.ours - r.off for r in rows]),
        )

    for s in (gaussian(1.0), gaussian(5.0)):
        x = s.exact()
        dp_std = s.do.double().norm(dim=-1)  # dP_i = dO_i V^T, and V has deviation 1
        yield estimated(
            TOPIC,
            "RMS(dS) = std(dP) |diag(P) - P P^T|_F / sqrt(N)",
            s.name,
            predicted=_pooled(expected_ds_rms(x.p, dp_std)),
            measured=_pooled(ds_rms(x.p, centred(x.p, x.dp))),
            # With few effective keys, the sum of squares over 512 rows varies by some percent.
            within=0.10,
        )

    s = gaussian(0.0)
    x = s.exact()
    c = centred(x.p, x.dp)
    ratio = paper_bound(x.p, c) / ds_rms(x.p, c)
    yield estimated(
        TOPIC,
        "uniform P: the paper's bound over RMS(dS_i), crest factor",
        s.name,
        predicted=gaussian_crest(x.p.shape[-1]),
        measured=float(ratio.median()),
        within=0.05,
    )
    yield bounded(
        TOPIC,
        "uniform P: jacobian_bound = RMS(dS_i)",
        s.name,
        bound=ds_rms(x.p, c) + rounding(x.p, x.dp),
        measured=jacobian_bound(x.p, c),
    )

    for s in (gaussian(3.0), captured()[2]):
        t = s.trace(SAGEBWD)
        c = t.dp.double() - t.delta.double()[..., None]
        # The emulator rounds dP - delta and its product with P to float32, once each.
        yield bounded(
            TOPIC,
            "emulated dS: RMS(dS_i) <= RMS(P_i) max|dP - delta|",
            s.name,
            bound=paper_bound(t.p_recompute, c) * (1 + 2.0**-24) ** 2 * (1 + 1e-12),
            measured=ds_rms(torch.ones(()), t.ds),
        )


def rounding(p: Tensor, dp: Tensor) -> Tensor:
    """Float64's error of a row of dS and of its bounds: n_k + 16 roundings of its largest |dP|."""
    return (p.shape[-1] + 16) * 2.0**-53 * dp.double().abs().amax(-1)


class _Rows:
    """The rows of a sample, flattened: RMS(dS_i) and its bounds, which include float64's error."""

    def __init__(self, sample: Sample) -> None:
        x = sample.exact()
        c, off = centred(x.p, x.dp), rounding(x.p, x.dp)
        self.measured = ds_rms(torch.ones(()), x.ds).flatten()
        self.off = off.flatten()
        self.flat = (paper_flat_bound(x.p, c) + off).flatten()
        self.paper = (paper_bound(x.p, c) + off).flatten()
        self.ours = (ds_bound(x.p, x.dp) + off).flatten()
        self.value = (value_bound(x.p, sample.v, sample.do) + off).flatten()


def _pooled(rms: Tensor) -> float:
    return float(rms.square().mean().sqrt())
