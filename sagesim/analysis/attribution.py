"""How much of the error of o, ds, dq, dk and dv each of the seven matmuls causes.

A *site* is one of the seven matmuls of attention, two in the forward and five in the backward.
`sagesim.SITES` lists their names, and `SITE_NAMES` their formulas. A spec sets the precision of
each site. The *share* of a site is the part of a tensor's squared error that its rounding causes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

from torch import Tensor

from sagesim.analysis.metrics import (
    LOGITS,
    SITE_NAMES,
    TITLES,
    Comparison,
    Error,
    gradient_error,
)
from sagesim.analysis.number_range import (
    RangeLoss,
    largest_losses,
    range_warnings,
    token_range_losses,
)
from sagesim.analysis.runs import (
    OUTPUTS,
    SWITCHES,
    Measured,
    Sums,
    Total,
    gradient_share_of,
    halves,
    measure,
    specs_of_runs,
    split,
)
from sagesim.analysis.sampling import Sample, jackknife
from sagesim.checks import check_type
from sagesim.emulator import flatten
from sagesim.problem import AttentionOptions, AttentionProblem, check_spec
from sagesim.shapes import Float
from sagesim.spec import (
    SAGEBWD,
    SITES,
    AttentionSpec,
    Delta,
)


@dataclass(frozen=True, slots=True)
class SiteEffect:
    """The effect of rounding at one site on the error of each tensor of `OUTPUTS`.

    only: relative L2 error if this site is rounded and all other sites are in FP32.
    without: relative L2 error if this site is in FP32 and all others are as in the base spec.
    share: the part of the squared error that rounding at the site causes. Two increases of the
        squared error are measured: by rounding this site when no other site is rounded, and when
        all others are as in the base spec. The share is the mean of the two, divided by the
        increase that all sites cause together. It equals the site's Shapley value if the errors of
        sites add up as vectors. It is negative if the site's error cancels errors of other sites.
        Some error remains with all sites in FP32, because o and the gradients are rounded to the
        inputs' dtype. That error belongs to no site.
    sampling_error: the standard error of the effect's `Attribution.gradient_share` that comes from
        measuring only some heads and queries; 0 if all were measured, NaN if it is unknown.
    """

    site: str  #: one of `SITES`, or `LOGITS`
    only: Mapping[str, float]
    without: Mapping[str, float]
    share: Mapping[str, float]
    sampling_error: float


@dataclass(frozen=True, slots=True)
class SwitchEffect:
    """Relative L2 errors if one of `SWITCHES` is changed in the base spec."""

    switch: str
    spec: AttentionSpec
    error: Mapping[str, float]

    @property
    def title(self) -> str:
        """The changed option in words, for example "smoothing of Q on"."""
        smoothing = self.spec.smoothing
        match self.switch:
            case "smooth_q":
                return f"smoothing of Q {'on' if smoothing.q else 'off'}"
            case "smooth_k":
                return f"smoothing of K {'on' if smoothing.k else 'off'}"
            case _:
                source = "P and dP" if self.spec.delta is Delta.FROM_P else "O and dO"
                return f"delta from {source}"


@dataclass(frozen=True, slots=True)
class Attribution:
    """The errors of a spec and the shares of its seven sites; prints as a table."""

    base: AttentionSpec
    error: Mapping[str, float]  #: relative L2 error of each of `OUTPUTS` under the base spec
    errors: Mapping[str, Error]  #: the error of each of `sagesim.analysis.TENSORS`
    sites: tuple[SiteEffect, ...]  #: in the order of `SITES`
    logits: SiteEffect  #: qk and qk_recompute together
    switches: tuple[SwitchEffect, ...]  #: in the order of `SWITCHES`
    range_losses: tuple[RangeLoss, ...]  #: operands that a 16-bit format cannot hold
    measured: float  #: the fraction of the entries of S that were measured; 1 without sampling
    own_forward: Attribution | None
    """The same against the exact gradients of the forward that each run computes, see
    `sagesim.exact_backward`; None in itself."""

    @property
    def parts(self) -> tuple[SiteEffect, ...]:
        """The six effects whose shares add up: qk and qk_recompute as one, then the other sites.

        qk and qk_recompute make the same error in S if they are rounded alike. Most of it then
        cancels in P = exp(S - L), where L comes from qk and the backward's S from qk_recompute. If
        only one of them is rounded, nothing cancels. Their separate shares are therefore large and
        of opposite sign, and only the share of both together is meaningful.
        """
        pair = LOGITS.split("+")
        return (self.logits, *(effect for effect in self.sites if effect.site not in pair))

    def interaction(self, tensor: str) -> float:
        """1 minus the sum of the shares of `parts`; 0 if all shares are 0.

        It is the part of a tensor's squared error that arises only if several sites are rounded.
        """
        shares = [effect.share[tensor] for effect in self.parts]
        return 1 - sum(shares) if any(shares) else 0.0

    @property
    def gradient_error(self) -> float:
        """The error of dQ, dK and dV as one number; see `sagesim.analysis.gradient_error`."""
        return gradient_error(self.error)

    def gradient_share(self, effect: SiteEffect) -> float:
        """An effect's share of the squared `gradient_error`; 0 if that is 0 or infinite."""
        return gradient_share_of(effect.share, self.error)

    @property
    def is_finite(self) -> bool:
        """Whether the errors of all `OUTPUTS` under the base spec are finite numbers."""
        return all(math.isfinite(x) for x in self.error.values())

    def largest(self, tensor: str | None = None) -> SiteEffect:
        """The effect among `parts` with the largest share of an error.

        Args:
            tensor: one of `OUTPUTS`; None for the gradients, dQ, dK and dV together.
        """
        return max(self.parts, key=lambda effect: self._share(effect, tensor))

    def summary(self, tensor: str | None = None) -> str:
        """`verdict`, and a sentence for each operand that a 16-bit format cannot hold."""
        return " ".join([self.verdict(tensor), *range_warnings(self.range_losses)])

    def verdict(self, tensor: str | None = None) -> str:
        """One sentence that names the matmul with the largest share of an error.

        If an output is not finite, the sentence names the products that make it so.

        Args:
            tensor: one of `OUTPUTS`; None for the gradients, dQ, dK and dV together.
        """
        if not self.is_finite:
            return self._not_finite()
        top = self.largest(tensor)
        share = self._share(top, tensor)
        what = "the gradients' error" if tensor is None else f"the {TITLES[tensor]} error"
        if share <= 0:
            return f"No product adds to {what} under {self.base.label()!r}."
        off = top.sampling_error if tensor is None else 0.0
        number = f"{share:.0%}"
        if off:
            number += " (with an unknown error of sampling)" if math.isnan(off) else f" ± {off:.0%}"
        return f"{number} of {what} comes from {SITE_NAMES[top.site]}."

    def _not_finite(self) -> str:
        zero = [t for t in OUTPUTS if math.isinf(self.error[t]) and self.errors[t].norm == 0]
        bad = [t for t in OUTPUTS if not math.isfinite(self.error[t]) and t not in zero]
        sentences = [self._not_finite_tensors(bad)] if bad else []
        if zero:
            sentences.append(
                f"The exact {_titles(zero)} {'is' if len(zero) == 1 else 'are'} zero, the computed "
                f"{'one is' if len(zero) == 1 else 'ones are'} not: the relative error is infinite."
            )
        return " ".join(sentences)

    def _not_finite_tensors(self, bad: Sequence[str]) -> str:
        alone = {e.site for e in self.sites if not all(math.isfinite(e.only[t]) for t in bad)}
        overflowing = {loss.site for loss in self.range_losses if loss.overflows}
        found = "no product does this alone"
        if sites := [site for site in SITES if site in alone & overflowing]:
            found = " and ".join(SITE_NAMES[site] for site in sites)
            found = f"{found} {'overflows' if len(sites) == 1 else 'overflow'}"
        elif self.base.qk != self.base.qk_recompute and not alone.isdisjoint(LOGITS.split("+")):
            found = (
                "P = exp(S - L) of the backward becomes too large, because the forward and the "
                "backward round S = QKᵀ differently"
            )
        elif sites := [site for site in SITES if site in alone]:
            names = " and ".join(SITE_NAMES[site] for site in sites)
            found = f"{names} {'does' if len(sites) == 1 else 'do'} this alone"
        return f"{_titles(bad)} {'is' if len(bad) == 1 else 'are'} not finite: {found}."

    def _share(self, effect: SiteEffect, tensor: str | None) -> float:
        return self.gradient_share(effect) if tensor is None else effect.share[tensor]

    def __str__(self) -> str:
        def row(name: str, values: Mapping[str, float], form: str) -> str:
            return f"{name:24}" + "".join(f"{values[t]:>10{form}}" for t in OUTPUTS)

        effects = (*self.sites, self.logits)

        lines = [
            f"{self.base.label()}: {self.summary()}",
            f"{'':24}" + "".join(f"{t:>10}" for t in OUTPUTS),
            row("relative L2 error", self.error, ".2e"),
        ]
        lines += ["", "share of the squared error"]
        lines += [row(f"  {e.site}", e.share, ".1%") for e in self.parts]
        lines += [row("  interaction", {t: self.interaction(t) for t in OUTPUTS}, ".1%")]
        lines += ["", "error with only this product rounded"]
        lines += [row(f"  {e.site}", e.only, ".2e") for e in effects]
        lines += ["", "error with all other products rounded"]
        lines += [row(f"  {e.site}", e.without, ".2e") for e in effects]
        lines += ["", "error with this option changed"]
        lines += [row(f"  {e.title}", e.error, ".2e") for e in self.switches]
        if self.own_forward is not None:
            own = self.own_forward
            lines += ["", "against the exact gradients of its own forward"]
            lines += [row("relative L2 error", own.error, ".2e")]
            lines += [row(f"  {e.site}", e.share, ".1%") for e in own.parts]
            lines += [row("  interaction", {t: own.interaction(t) for t in OUTPUTS}, ".1%")]
        return "\n".join(lines)


def attribute(
    q: Float[Tensor, "*heads n_q d"] | AttentionProblem,
    k: Float[Tensor, "*kv_heads n_k d"] | None = None,
    v: Float[Tensor, "*kv_heads n_k d_v"] | None = None,
    do: Float[Tensor, "*heads n_q d_v"] | None = None,
    *,
    base: AttentionSpec = SAGEBWD,
    sample: Sample | None = None,
    progress: Callable[[], None] | None = None,
    **options: Unpack[AttentionOptions],
) -> Attribution:
    """Measure how much of the error of a spec each of the seven matmuls causes.

    Runs the emulator `RUNS` times and compares each run with float64: the spec itself, no site
    rounded, each site alone rounded, each site alone not rounded, and each of three options
    changed. There are two references: full precision, and the exact gradients of the run's own
    forward. Heads are computed in groups, so that memory does not grow with their number.

    Args:
        q, k, v, do, options: as for `sagesim.trace`, which under autocast casts them.
        base: the spec.
        sample: measure only some heads and queries; see `sagesim.analysis.Sample`. Default: all.
        progress: called after each run of each part; see `run_count`.

    Returns:
        errors and shares. Squared errors are summed over all heads.

    Raises:
        TypeError, ValueError: as `sagesim.trace`; ValueError also if a tensor is not finite. The
            message names the tensor.

    >>> a = attribute(*torch.randn(4, 1, 1, 128, 32))
    >>> a.largest("dv").site
    'dv'
    """
    if "spec" in options:
        raise TypeError("attribute has no argument 'spec'; its spec is called base")
    check_spec(base, "base")
    check_type("sample", sample, Sample | None, "a sagesim.analysis.Sample or None")
    check_type("progress", progress, Callable | None, "a function or None")
    problem = AttentionProblem.of(q, k, v, do, **options)
    flatten(problem, base)
    problem.check_gradient()
    for name, tensor in problem.tensors.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} holds NaN or Inf; attribution needs finite tensors")
    parts = split(problem, base, sample)
    found = [measure(part, base, progress) for part in parts]
    of_halves = [measure(part, base, progress) for part in halves(problem, base, sample)]
    losses = [*token_range_losses(problem, base)]
    for each in found:
        losses += each.range_losses
    largest = largest_losses(losses)
    fraction = 1.0 if sample is None else sample.fraction(problem, base)
    shown = of_halves or found  # their differences show the error of sampling

    def result(of: Callable[[Measured], Sums], own_forward: Attribution | None) -> Attribution:
        sums, parts = ([of(each) for each in some] for some in (found, shown))
        return _result(base, sums, parts, largest, fraction, own_forward)

    return result(lambda each: each.exact, result(lambda each: each.own_forward, None))


def _result(
    base: AttentionSpec,
    sums: Sequence[Sums],
    parts: Sequence[Sums],
    losses: tuple[RangeLoss, ...],
    fraction: float,
    own_forward: Attribution | None,
) -> Attribution:
    """The result from the sums of all parts, and of the parts that show the error of sampling."""
    whole = Total(sums)
    # With sampling, the statistics without each part in turn give the error of sampling.
    others = range(len(parts)) if len(parts) > 1 else ()
    without_one = [Total([*parts[:i], *parts[i + 1 :]]) for i in others]
    specs = specs_of_runs(base)

    def effect(site: str) -> SiteEffect:
        values = [total.gradient_share(site) for total in without_one]
        return SiteEffect(
            site=site,
            only=whole.errors(f"only {site}"),
            without=whole.errors(f"without {site}"),
            share={t: whole.share(site, t) for t in OUTPUTS},
            sampling_error=jackknife(values, fraction) if fraction < 1 else 0.0,
        )

    return Attribution(
        base=base,
        error=whole.errors("base"),
        errors=Comparison.joined([each.comparison for each in sums]).overall,
        sites=tuple(effect(site) for site in SITES),
        logits=effect(LOGITS),
        switches=tuple(
            SwitchEffect(s, specs[f"change {s}"], whole.errors(f"change {s}")) for s in SWITCHES
        ),
        range_losses=losses,
        measured=fraction,
        own_forward=own_forward,
    )


def _titles(tensors: Sequence[str]) -> str:
    return ", ".join(TITLES[t] for t in tensors)
