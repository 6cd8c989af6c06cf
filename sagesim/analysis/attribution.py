"""Which of the seven products hurts: their shares of the error of o, ds, dq, dk and dv."""

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
"""The choices that belong to no site: each is measured by turning it the other way."""

_MAP_ENTRIES: Final = 2**24
"""Map entries held at once; heads are taken in groups of about that many."""

LOGITS: Final = "qk+qk_recompute"
"""The two products that compute S, taken together; see `Attribution.parts`."""

RUNS: Final = 2 + 2 * (len(SITES) + 1) + len(SWITCHES)
"""Emulations in one attribution of one group of heads."""

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
"""Each site in words."""


@dataclass(frozen=True, slots=True)
class SiteEffect:
    """What one site does to the error of each tensor of `OUTPUTS`.

    only, without: relative L2 error with every other site in FP32, and with this one in FP32.
    share: of the squared error under the base spec, beyond the error that is there with every
    site in FP32 (o and the gradients are rounded to the inputs' dtype); the mean of what the
    site adds when it comes first and when it comes last. This is its Shapley value where the
    errors of sites add up as vectors. Negative where they cancel.
    """

    site: str  #: one of `SITES`, or `LOGITS`
    only: Mapping[str, float]
    without: Mapping[str, float]
    share: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SwitchEffect:
    """Relative L2 errors with one of `SWITCHES` turned the other way than in the base spec."""

    switch: str
    spec: AttentionSpec
    error: Mapping[str, float]

    @property
    def title(self) -> str:
        """The switch as it is turned, in words."""
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
    """The error of the base spec, taken apart; prints as a table."""

    base: AttentionSpec
    error: Mapping[str, float]  #: relative L2 under the base spec
    sites: tuple[SiteEffect, ...]  #: in the order of `SITES`
    logits: SiteEffect  #: qk and qk_recompute together
    switches: tuple[SwitchEffect, ...]  #: in the order of `SWITCHES`

    @property
    def parts(self) -> tuple[SiteEffect, ...]:
        """Six effects that make up the whole: qk and qk_recompute as one, then the other sites.

        Rounded alike, the two products of Q and K make the same error in S, and most of it
        cancels in P = exp(S - L); rounded one without the other, it does not. Their separate
        shares are therefore large and of opposite sign, and only their sum means something.
        """
        pair = LOGITS.split("+")
        return (self.logits, *(effect for effect in self.sites if effect.site not in pair))

    def interaction(self, tensor: str) -> float:
        """The part of a tensor's squared error that no share of `parts` accounts for; 0 where
        there is nothing to account for."""
        shares = [effect.share[tensor] for effect in self.parts]
        return 1 - sum(shares) if any(shares) else 0.0

    @property
    def gradient_error(self) -> float:
        """The error of dQ, dK and dV in one number; see `sagesim.analysis.gradient_error`."""
        return gradient_error(self.error)

    def gradient_share(self, effect: SiteEffect) -> float:
        """An effect's share of the square of the `gradient_error`; 0 if that is 0 or infinite."""
        total = sum(self.error[t] ** 2 for t in GRADIENTS)
        part = sum(effect.share[t] * self.error[t] ** 2 for t in GRADIENTS)
        return part / total if total and math.isfinite(total) else 0.0

    def largest(self, tensor: str | None = None) -> SiteEffect:
        """Of `parts`, the one with the largest share of a tensor's error, or of the gradients'.

        Args:
            tensor: one of `OUTPUTS`; None for dQ, dK and dV together.
        """
        return max(self.parts, key=lambda effect: self._share(effect, tensor))

    def summary(self, tensor: str | None = None) -> str:
        """One sentence: which product carries most of the error of the gradients, or of a tensor.

        Args:
            tensor: one of `OUTPUTS`; None for dQ, dK and dV together.
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
        lines += ["", "error with only this site rounded"]
        lines += [row(f"  {e.site}", e.only, ".2e") for e in effects]
        lines += ["", "error with all but this site rounded"]
        lines += [row(f"  {e.site}", e.without, ".2e") for e in effects]
        lines += ["", "error with this switch turned"]
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
    """Split the error that `base` makes on these tensors into the shares of its products.

    Runs the emulator `RUNS` times (`base`, no site rounded, each site alone, each site left out,
    each switch turned) against float64. Heads are computed in groups, so that memory does not grow
    with their number.

    Args: as `sagesim.trace`; progress is called after each of the runs of each group of heads.

    Returns: errors, pooled over all heads by their squares.

    Raises: as `sagesim.trace`; ValueError if a tensor is not finite, with its name.

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
            raise ValueError(f"{name} holds NaN or Inf; errors of that have no shares")
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
        none, all_ = squares["none"], squares["base"]
        share = {
            t: (only[t] - none[t] + all_[t] - without[t]) / (2 * (all_[t] - none[t]))
            if all_[t] != none[t]
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
            SwitchEffect(s, specs[f"turn {s}"], relative[f"turn {s}"]) for s in SWITCHES
        ),
    )


def pool(attributions: Sequence[Attribution]) -> Attribution:
    """Several attributions of one base spec (layers, captures) as one.

    Errors are geometric means, shares arithmetic means: every layer counts alike, however large
    its gradients.
    """
    first, *others = attributions
    if any(a.base != first.base for a in others):
        raise ValueError("only attributions of one base spec can be pooled")

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
    specs = {"base": base, "none": with_precision(base, Precision.FP32)}
    for name in (*SITES, LOGITS):
        ours = name.split("+")
        others = [s for s in SITES if s not in ours]
        specs[f"only {name}"] = with_precision(base, Precision.FP32, *others)
        specs[f"without {name}"] = with_precision(base, Precision.FP32, *ours)
    smoothing = base.smoothing
    other_delta = Delta.FROM_P if base.delta is Delta.FROM_O else Delta.FROM_O
    specs["turn smooth_q"] = replace(base, smoothing=replace(smoothing, q=not smoothing.q))
    specs["turn smooth_k"] = replace(base, smoothing=replace(smoothing, k=not smoothing.k))
    specs["turn delta"] = replace(base, delta=other_delta)
    return specs


def _outputs(problem: AttentionProblem, spec: AttentionSpec) -> dict[str, Tensor]:
    """The tensors of `OUTPUTS` under the spec in float64, and nothing else held."""
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
