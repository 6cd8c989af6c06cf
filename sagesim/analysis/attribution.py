"""How much of the error of o, ds, dq, dk and dv each of the seven matmuls causes.

A *site* is one of the seven matmuls of attention, two in the forward and five in the backward.
`sagesim.SITES` lists their names, and `SITE_NAMES` their formulas. A spec sets the precision of
each site. The *share* of a site is the part of a tensor's squared error that its rounding causes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from sagesim.analysis.metrics import GRADIENTS, TITLES, geometric_mean, gradient_error, mean
from sagesim.emulator import Recorder, exact, flatten, run
from sagesim.problem import AttentionProblem
from sagesim.shapes import Bool, Float
from sagesim.spec import SAGEBWD, SITES, AttentionSpec, Delta, Precision, with_precision

OUTPUTS: Final = ("o", "ds", "dq", "dk", "dv")
"""The tensors whose errors are attributed."""

SWITCHES: Final = ("smooth_q", "smooth_k", "delta")
"""The options of a spec that belong to no site. Each is measured by changing it alone."""

_MAP_ENTRIES: Final = 2**24
"""Elements of S in a group of heads; groups are computed one after the other to save memory."""

LOGITS: Final = "qk+qk_recompute"
"""The two sites that compute S, measured together; see `Attribution.parts`."""

RUNS: Final = 2 + 2 * (len(SITES) + 1) + len(SWITCHES)
"""Number of emulations that an attribution runs per group of heads."""

SITE_NAMES: Final = {
    LOGITS: "S = QKᵀ",
    "qk": "S = QKᵀ in the forward",
    "pv": "O = PV in the forward",
    "qk_recompute": "S = QKᵀ recomputed in the backward",
    "dv": "dV = Pᵀ dO",
    "dp": "dP = dO Vᵀ",
    "dq": "dQ = dS K",
    "dk": "dK = dSᵀ Q",
}
"""The formula of each site, and the pass if there are two sites of the same product."""


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
    """

    site: str  #: one of `SITES`, or `LOGITS`
    only: Mapping[str, float]
    without: Mapping[str, float]
    share: Mapping[str, float]


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
    sites: tuple[SiteEffect, ...]  #: in the order of `SITES`
    logits: SiteEffect  #: qk and qk_recompute together
    switches: tuple[SwitchEffect, ...]  #: in the order of `SWITCHES`

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
        total = sum(self.error[t] ** 2 for t in GRADIENTS)
        caused = sum(effect.share[t] * self.error[t] ** 2 for t in GRADIENTS)
        return caused / total if total and math.isfinite(total) else 0.0

    def largest(self, tensor: str | None = None) -> SiteEffect:
        """The effect among `parts` with the largest share of an error.

        Args:
            tensor: one of `OUTPUTS`; None for the gradients, dQ, dK and dV together.
        """
        return max(self.parts, key=lambda effect: self._share(effect, tensor))

    def summary(self, tensor: str | None = None) -> str:
        """One sentence that names the matmul with the largest share of an error.

        Args:
            tensor: one of `OUTPUTS`; None for the gradients, dQ, dK and dV together.
        """
        top = self.largest(tensor)
        share = self._share(top, tensor)
        what = "the gradients' error" if tensor is None else f"the {TITLES[tensor]} error"
        if share <= 0:
            return f"No product adds to {what} under {self.base.label()!r}."
        return f"{share:.0%} of {what} comes from {SITE_NAMES[top.site]}."

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
        return "\n".join(lines)


def attribute(
    q: Float[Tensor, "*heads n_q d"] | AttentionProblem,
    k: Float[Tensor, "*kv_heads n_k d"] | None = None,
    v: Float[Tensor, "*kv_heads n_k d_v"] | None = None,
    do: Float[Tensor, "*heads n_q d_v"] | None = None,
    *,
    base: AttentionSpec = SAGEBWD,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "*mask #n_q #n_k"] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    progress: Callable[[], None] | None = None,
) -> Attribution:
    """Measure how much of the error of a spec each of the seven matmuls causes.

    Runs the emulator `RUNS` times and compares each run with float64: the spec itself, no site
    rounded, each site alone rounded, each site alone not rounded, and each of three options
    changed. Heads are computed in groups, so that memory does not grow with their number.

    Args:
        q, k, v, do, is_causal, attn_mask, scale, enable_gqa: as for `sagesim.trace`.
        base: the spec.
        progress: called after each run of each group of heads.

    Returns:
        errors and shares. Squared errors are summed over all heads.

    Raises:
        TypeError, ValueError: as `sagesim.trace`; ValueError also if a tensor is not finite. The
            message names the tensor.

    >>> a = attribute(*torch.randn(4, 1, 1, 128, 32))
    >>> a.largest("dv").site
    'dv'
    """
    problem = AttentionProblem.of(
        q,
        k,
        v,
        do,
        is_causal=is_causal,
        attn_mask=attn_mask,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    flatten(problem, base).check_gradient(problem.gradient)
    for name, tensor in problem.tensors.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} holds NaN or Inf; attribution needs finite tensors")
    specs = _specs(base)
    squares: dict[str, dict[str, float]] = {name: dict.fromkeys(OUTPUTS, 0.0) for name in specs}
    norms: dict[str, float] = dict.fromkeys(OUTPUTS, 0.0)
    for group in problem.head_groups(_MAP_ENTRIES):
        reference = exact(group)
        for t in OUTPUTS:
            norms[t] += float(getattr(reference, t).square().sum())
        for name, spec in specs.items():
            for t, got in _outputs(group, spec).items():
                squares[name][t] += float((got - getattr(reference, t)).square().sum())
            if progress is not None:
                progress()
    relative = {n: {t: _ratio(by[t], norms[t]) for t in OUTPUTS} for n, by in squares.items()}

    def effect(site: str) -> SiteEffect:
        only, without = squares[f"only {site}"], squares[f"without {site}"]
        unrounded, base_ = squares["unrounded"], squares["base"]
        share = {
            t: (only[t] - unrounded[t] + base_[t] - without[t]) / (2 * (base_[t] - unrounded[t]))
            if base_[t] != unrounded[t]
            else 0.0
            for t in OUTPUTS
        }
        return SiteEffect(site, relative[f"only {site}"], relative[f"without {site}"], share)

    return Attribution(
        base=base,
        error=relative["base"],
        sites=tuple(effect(site) for site in SITES),
        logits=effect(LOGITS),
        switches=tuple(
            SwitchEffect(s, specs[f"change {s}"], relative[f"change {s}"]) for s in SWITCHES
        ),
    )


def pool(attributions: Sequence[Attribution]) -> Attribution:
    """Average several attributions of the same base spec, for example of all layers of a model.

    Errors are averaged geometrically, shares arithmetically. Every attribution has the same weight,
    however large its gradients.

    Raises:
        ValueError: if the base specs differ.
    """
    first, *others = attributions
    if any(a.base != first.base for a in others):
        raise ValueError("attributions to be pooled need one base spec; theirs differ")

    def pooled(effects: Sequence[SiteEffect]) -> SiteEffect:
        return SiteEffect(
            effects[0].site,
            {t: geometric_mean([e.only[t] for e in effects]) for t in OUTPUTS},
            {t: geometric_mean([e.without[t] for e in effects]) for t in OUTPUTS},
            {t: mean([e.share[t] for e in effects]) for t in OUTPUTS},
        )

    return Attribution(
        base=first.base,
        error={t: geometric_mean([a.error[t] for a in attributions]) for t in OUTPUTS},
        sites=tuple(
            pooled(effects) for effects in zip(*(a.sites for a in attributions), strict=True)
        ),
        logits=pooled([a.logits for a in attributions]),
        switches=tuple(
            SwitchEffect(
                effects[0].switch,
                effects[0].spec,
                {t: geometric_mean([e.error[t] for e in effects]) for t in OUTPUTS},
            )
            for effects in zip(*(a.switches for a in attributions), strict=True)
        ),
    )


def _specs(base: AttentionSpec) -> dict[str, AttentionSpec]:
    specs = {"base": base, "unrounded": with_precision(base, Precision.FP32)}
    for name in (*SITES, LOGITS):
        measured = name.split("+")
        others = [s for s in SITES if s not in measured]
        specs[f"only {name}"] = with_precision(base, Precision.FP32, *others)
        specs[f"without {name}"] = with_precision(base, Precision.FP32, *measured)
    smoothing = base.smoothing
    other_delta = Delta.FROM_P if base.delta is Delta.FROM_O else Delta.FROM_O
    specs["change smooth_q"] = replace(base, smoothing=replace(smoothing, q=not smoothing.q))
    specs["change smooth_k"] = replace(base, smoothing=replace(smoothing, k=not smoothing.k))
    specs["change delta"] = replace(base, delta=other_delta)
    return specs


def _outputs(problem: AttentionProblem, spec: AttentionSpec) -> dict[str, Tensor]:
    """The tensors of `OUTPUTS` under the spec, in float64. Other intermediates are not kept."""
    x = flatten(problem, spec)
    recorder = Recorder(x, maps=frozenset({"ds"}), operands=False)
    passes = run(x, problem.gradient, recorder)
    ds = x.query_heads(recorder.maps["ds"])
    out = {"o": passes.o, "ds": ds, "dq": passes.dq, "dk": passes.dk, "dv": passes.dv}
    return {t: tensor.double() for t, tensor in out.items()}


def _ratio(square: float, norm: float) -> float:
    if square == 0:
        return 0.0
    return math.sqrt(square / norm) if norm else math.inf
