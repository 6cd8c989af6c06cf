"""The squared errors of the runs that an attribution consists of, against both references."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from torch import Tensor

from sagesim.analysis.metrics import CACHED, GRADIENTS, LOGITS, Comparison, compare
from sagesim.analysis.number_range import RangeLoss, map_range_losses
from sagesim.analysis.sampling import Sample
from sagesim.emulator import (
    Exact,
    ForwardSoftmax,
    Recorder,
    exact,
    exact_backward,
    flatten,
    run_backward,
    run_forward,
    trace,
)
from sagesim.problem import AttentionProblem
from sagesim.spec import FORWARD_SITES, SITES, AttentionSpec, Delta, Precision, with_precision

OUTPUTS: Final = ("o", "ds", "dq", "dk", "dv")
"""The tensors whose errors are attributed."""

SWITCHES: Final = ("smooth_q", "smooth_k", "delta")
"""The options of a spec that belong to no site. Each is measured by changing it alone."""

_MAP_ENTRIES: Final = 2**22
"""Elements of S in a group of heads; groups are computed one after the other to save memory."""

_BYTES_PER_ENTRY: Final = 200
"""Memory for each element of S in a group: 194 to 197 bytes are measured, by spec."""

RUNS: Final = 2 + 2 * (len(SITES) + 1) + len(SWITCHES)
"""Number of emulations that an attribution runs per group of heads."""


def split(
    problem: AttentionProblem, base: AttentionSpec, sample: Sample | None
) -> list[AttentionProblem]:
    """The parts of a problem that `attribute` measures one after the other."""
    if sample is None:
        return list(problem.head_groups(_MAP_ENTRIES))
    return sample.parts(problem, base)


def halves(
    problem: AttentionProblem, base: AttentionSpec, sample: Sample | None
) -> list[AttentionProblem]:
    """The parts that `attribute` measures after those, for the error of sampling."""
    return [] if sample is None else sample.halves(problem, base)


def run_count(problem: AttentionProblem, base: AttentionSpec, sample: Sample | None) -> int:
    """How often `attribute` calls `progress`."""
    return RUNS * (len(split(problem, base, sample)) + len(halves(problem, base, sample)))


def memory(problem: AttentionProblem, base: AttentionSpec, sample: Sample | None) -> int:
    """About how many bytes `attribute` needs."""
    largest = max(math.prod(x.q.shape[:-1]) * x.k.shape[-2] for x in split(problem, base, sample))
    return largest * _BYTES_PER_ENTRY


@dataclass(frozen=True, slots=True)
class Sums:
    """The squared errors and norms of one part of a problem, against one reference."""

    squares: Mapping[str, Mapping[str, float]]  #: by run, see `specs_of_runs`, and by `OUTPUTS`
    norms: Mapping[str, Mapping[str, float]]  #: squared norms of the reference, by the same
    comparison: Comparison  #: of the base spec


class Measured(NamedTuple):
    """The runs on one part of a problem."""

    exact: Sums  #: against full precision
    own_forward: Sums  #: each run against the exact gradients of its own forward
    range_losses: Sequence[RangeLoss]  #: of the backward's P and dS


def measure(
    part: AttentionProblem, base: AttentionSpec, progress: Callable[[], None] | None
) -> Measured:
    """Run the emulator `RUNS` times on a part of a problem, and measure each run."""
    exactly, traced = exact(part), trace(part, spec=base)
    exact_outputs, own = _outputs(exactly), exact_backward(part, traced)
    runs = Runs(part)
    found = [(compare(traced, each), _Rows({}, {})) for each in (exactly, own)]
    for name, spec in specs_of_runs(base).items():
        outputs = runs.outputs(spec) if name != "base" else {t: getattr(traced, t) for t in OUTPUTS}
        references = (exact_outputs, runs.exact_backward(spec))
        for (_, rows), reference in zip(found, references, strict=True):
            rows.squares[name] = {t: _square(reference[t], outputs[t]) for t in OUTPUTS}
            rows.norms[name] = {t: _square(reference[t]) for t in OUTPUTS}
        if progress is not None:
            progress()
    return Measured(
        *(Sums(rows.squares, rows.norms, comparison) for comparison, rows in found),
        range_losses=list(map_range_losses(traced)),
    )


class _Rows(NamedTuple):
    squares: dict[str, Mapping[str, float]]
    norms: dict[str, Mapping[str, float]]


class Runs:
    """Emulates one problem under many specs; specs with the same forward share one."""

    def __init__(self, problem: AttentionProblem) -> None:
        self._problem = problem
        self._forwards: dict[AttentionSpec, tuple[Tensor, Tensor]] = {}
        self._exact_backwards: dict[AttentionSpec, dict[str, Tensor]] = {}

    def outputs(self, spec: AttentionSpec) -> dict[str, Tensor]:
        """The tensors of `OUTPUTS` under a spec. Other intermediates are not kept."""
        x, do = flatten(self._problem, spec), self._problem.gradient
        recorder = Recorder(x, maps=frozenset({"ds"}), operands=False)
        key = _only_rounded(spec, *FORWARD_SITES)
        if key not in self._forwards:
            o, result = run_forward(x)
            self._forwards[key] = o, result.lse_smoothed
        o, lse = self._forwards[key]
        dq, dk, dv, _ = run_backward(x, do, o, lse, recorder)
        ds = x.query_heads(recorder.maps["ds"])
        return {"o": o, "ds": ds, "dq": dq, "dk": dk, "dv": dv}

    def exact_backward(self, spec: AttentionSpec) -> dict[str, Tensor]:
        """The exact tensors of `OUTPUTS` for the P of the spec's forward, in float64."""
        key = _only_rounded(spec, "qk")
        if key not in self._exact_backwards:
            x = flatten(self._problem, key)
            recorder = Recorder(x, maps=frozenset({"s"}), operands=False)
            _, result = run_forward(x, recorder)
            softmax = ForwardSoftmax.of(x, recorder.maps["s"], result.lse_smoothed, result.lse)
            self._exact_backwards[key] = _outputs(exact_backward(self._problem, softmax))
        return self._exact_backwards[key]


def _only_rounded(spec: AttentionSpec, *sites: str) -> AttentionSpec:
    """The spec with all other sites in FP32, and delta from O: equal if these sites are."""
    others = [site for site in SITES if site not in sites]
    return replace(with_precision(spec, Precision.FP32, *others), delta=Delta.FROM_O)


def _outputs(reference: Exact) -> dict[str, Tensor]:
    return {t: getattr(reference, t) for t in OUTPUTS}


class Total:
    """Errors and shares of several parts together."""

    def __init__(self, sums: Sequence[Sums]) -> None:
        names = sums[0].squares if sums else ()
        self._squares, self._norms = (
            {
                name: {t: sum(getattr(x, what)[name][t] for x in sums) for t in OUTPUTS}
                for name in names
            }
            for what in ("squares", "norms")
        )

    def errors(self, name: str) -> dict[str, float]:
        """The relative L2 errors of a run."""
        return {t: _ratio(self._squares[name][t], self._norms[name][t]) for t in OUTPUTS}

    def share(self, site: str, tensor: str) -> float:
        """See `SiteEffect.share`."""
        only, without, unrounded, base = (
            self._squares[name][tensor] / (self._norms[name][tensor] or 1.0)
            for name in (f"only {site}", f"without {site}", "unrounded", "base")
        )
        if base == unrounded:
            return 0.0
        return (only - unrounded + base - without) / (2 * (base - unrounded))

    def gradient_share(self, site: str) -> float:
        """See `Attribution.gradient_share`."""
        return gradient_share_of({t: self.share(site, t) for t in GRADIENTS}, self.errors("base"))


def specs_of_runs(base: AttentionSpec) -> dict[str, AttentionSpec]:
    """The specs of the runs by name: "base", "unrounded", "only SITE", "without SITE", "change
    SWITCH"."""
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


def _square(reference: Tensor, got: Tensor | None = None) -> float:
    """The squared L2 norm of a float64 tensor, or of its difference from another tensor.

    The difference is computed in parts that fit into a processor's cache.
    """
    total, flat = 0.0, reference.reshape(-1)
    other = None if got is None else got.reshape(-1)
    for first in range(0, flat.numel(), CACHED):
        part = flat[first : first + CACHED]
        if other is not None:
            part = part - other[first : first + CACHED]
        total += float(part.dot(part))
    return total


def gradient_share_of(share: Mapping[str, float], error: Mapping[str, float]) -> float:
    """The share of dQ, dK and dV together, from their shares and relative errors."""
    largest = max(error[t] for t in GRADIENTS)
    if largest == 0 or not all(math.isfinite(error[t]) for t in GRADIENTS):
        return 0.0
    weight = {t: (error[t] / largest) ** 2 for t in GRADIENTS}
    return sum(share[t] * weight[t] for t in GRADIENTS) / sum(weight.values())


def _ratio(square: float, norm: float) -> float:
    if square == 0:
        return 0.0
    return math.sqrt(square) / math.sqrt(norm) if norm else math.inf
