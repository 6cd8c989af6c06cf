"""An error budget: predict the errors of low-bit attention from the exact tensors alone.

No product is emulated. The rounding error of every operand is replaced by its expected mean and
variance, which follow from format and scale. `theory.ds_error`, `theory.qk_error` and
`theory.int8_dp` give the resulting errors of the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Unpack

import torch
from torch import Tensor

from sagesim import AttentionProblem, AttentionSpec
from sagesim.analysis import LOGITS, OUTPUTS, TITLES
from sagesim.problem import AttentionOptions, resolve_input16
from theory.head_budget import HeadErrors
from theory.heads import Heads
from theory.rounding import Moments

PARTS: Final = (LOGITS, "pv", "dv", "dp", "dq", "dk")
"""The sites (matmuls) with a share of the error; qk and qk_recompute have one share together."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The predicted errors of a spec and the shares of its sites; prints as a table."""

    spec: AttentionSpec
    error: Mapping[str, float]  #: relative L2 of o, ds, dq, dk, dv
    own_error: Mapping[str, float]
    """The same against the exact gradients of the spec's own forward (`sagesim.exact_backward`)."""
    share: Mapping[str, Mapping[str, float]]
    """By site of `PARTS`, its share of each tensor's squared error; 0 if a tensor has no error."""

    def largest(self, tensor: str) -> str:
        """The site of `PARTS` with the largest share of a tensor's error."""
        return max(PARTS, key=lambda site: self.share[site][tensor])

    def __str__(self) -> str:
        lines = [f"{self.spec.label():18}" + "".join(f"{TITLES[t]:>10}" for t in OUTPUTS)]
        lines.append(f"{'relative L2':18}" + "".join(f"{self.error[t]:10.2e}" for t in OUTPUTS))
        own = "".join(f"{self.own_error[t]:10.2e}" for t in OUTPUTS)
        lines.append(f"{'to own forward':18}{own}")
        for site in PARTS:
            shares = "".join(f"{self.share[site][t]:10.1%}" for t in OUTPUTS)
            lines.append(f"{site:18}{shares}")
        return "\n".join(lines)


def error_budget(
    q: Tensor | AttentionProblem,
    k: Tensor | None = None,
    v: Tensor | None = None,
    do: Tensor | None = None,
    *,
    spec: AttentionSpec,
    **options: Unpack[AttentionOptions],
) -> Budget:
    """Predict the errors of `spec` from the exact tensors, without emulating a product.

    Each output's error is predicted to within 25% on the inputs of `theory.checks.budget`, if no
    single row dominates the error: Gaussian inputs with Q and K of standard deviations from 1 to
    10, inputs with outlier channels, and those of a trained model. The prediction is an
    expectation. If a few large rows dominate, the actual error can be further away.

    The error against the own forward lacks the part of QK and its recomputation. They are rounded
    alike, so that both passes have the same P. Its reference has the P of the rounded logits; the
    prediction takes the exact P instead, of which the rounded one is a small change.

    Limits: the errors of different sites are assumed independent. PV and dP both round V. If they
    round it alike and delta comes from O, much of this common error cancels, and the budget counts
    it twice. They do if both have the same format and, in a format with scales, the same
    granularity of V: in INT8, and also in 16 bit, as in FPA_FP16 or FACTORED_QK with float32
    inputs.

    The errors of dS through dP are assumed independent from key to key, and from query to query. An
    error of a row of dO changes all dP of the row alike, as far as V has a mean. With delta from O,
    the error of dQ is then larger than predicted if the K that dQ multiplies has a mean: K without
    smoothing, or any K under a softcap. With delta from P, errors of a row of dS sum to 0. With
    such a K, the error of dQ is then smaller than predicted. An error of a row of V changes all dP
    of the key alike, as far as dO has a mean, and the error of dK is larger than predicted.

    Errors of logits much above 1 are outside the two-key model of `theory.qk_error`. From an RMS
    error of about 3 on, the errors of dS, dQ and dK can be predicted more than 25% too large; this
    is so for Gaussian inputs of a deviation far above 10 (docs/theory/budget.md). Float32 sums,
    overflow, and the relative error of outputs in 16 bits are not modelled. Underflow is, of
    operands, of P and dS in float32, and of outputs: a sink far above the logits makes all of them
    small. An estimate is no bound; for one, see `theory.attention_bound`.

    Args:
        q, k, v, do, options: as for `sagesim.trace`; or an `AttentionProblem` alone, such as a
            recorded call.
        spec: the spec.

    Raises:
        TypeError: if dtypes differ.
        ValueError: if qk and qk_recompute round differently, because the prediction assumes that
            most of their errors cancel (see `sagesim.analysis.Attribution.parts`); if shapes do
            not fit each other or an option does not fit the tensors.

    Source: ours.

    >>> from sagesim import SAGEBWD
    >>> error_budget(*torch.randn(4, 1, 64, 16), spec=SAGEBWD).largest("dv")
    'dv'
    """
    problem = AttentionProblem.of(q, k, v, do, **options)
    if spec.qk != spec.qk_recompute:
        raise ValueError(f"qk and qk_recompute round differently under {spec.label()!r}")
    heads = Heads.of(problem)
    resolved = resolve_input16(spec, problem.q.dtype)
    squares: dict[str, dict[str, float]] = {
        name: dict.fromkeys(OUTPUTS, 0.0) for name in (*PARTS, "all", "own", "exact")
    }
    sinks: list[Tensor | None] = [None] * len(parts := list(heads.split()))
    if problem.sinks is not None:
        sinks = list(problem.sinks.detach().double().expand(problem.q.shape[:-2]).flatten())
    each = [
        HeadErrors(part, resolved, problem.logit_scale, sink, problem.softcap, problem.q.dtype)
        for part, sink in zip(parts, sinks, strict=True)
    ]
    for first in range(0, len(each), heads.groups):
        _add_group(squares, each[first : first + heads.groups])
    sums = {t: sum(squares[site][t] for site in PARTS) for t in OUTPUTS}
    return Budget(
        spec=spec,
        error={t: _relative(squares["all"][t], squares["exact"][t]) for t in OUTPUTS},
        own_error={t: _relative(squares["own"][t], squares["exact"][t]) for t in OUTPUTS},
        share={
            site: {t: squares[site][t] / sums[t] if sums[t] else 0.0 for t in OUTPUTS}
            for site in PARTS
        },
    )


def _add_group(squares: dict[str, dict[str, float]], group: list[HeadErrors]) -> None:
    """Add the squared errors of the query heads that share a head of K and V.

    O, dS and dQ belong to a query head. dK and dV are sums over the group.
    """
    by_head = [head.errors_by_site() for head in group]
    for t in OUTPUTS:
        parts = [slice(None)] if t in ("dk", "dv") else [slice(i, i + 1) for i in range(len(group))]
        for part in parts:
            heads, one = group[part], by_head[part]
            by_site = {
                site: _sum([errors[site][t] for errors in one])
                for site in PARTS
                if t in one[0][site]
            }
            for site, moments in by_site.items():
                squares[site][t] += float(moments.mean_square.sum())
            exactly = torch.stack([getattr(head.exact, t) for head in heads]).sum(0)
            own = {site: moments for site, moments in by_site.items() if site != LOGITS}
            for name, errors in (("all", by_site), ("own", own)):
                error = heads[0].stored(t, exactly, _sum(list(errors.values())))
                squares[name][t] += float(error.mean_square.sum())
            squares["exact"][t] += float(exactly.square().sum())


def _sum(moments: list[Moments]) -> Moments:
    """The moments of a sum of independent errors."""
    return sum(moments[1:], moments[0])


def _relative(square: float, norm: float) -> float:
    if norm == 0:
        return math.inf if square else 0.0
    return math.sqrt(square / norm)
