"""How far a trace is from the exact computation, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sagesim.checks import check_type
from sagesim.emulator import Exact, Trace

_PEAK: Final = 4
"""The index of max |a-r| among the moments."""

CACHED: Final = 2**16
"""Elements of a tensor that are measured at once."""

TENSORS: Final = ("s", "p", "o", "lse", "delta", "dp", "ds", "dq", "dk", "dv")
"""The intermediates that a trace and the exact computation share, in the order of computation."""


GRADIENTS: Final = ("dq", "dk", "dv")
"""The gradients of the inputs, which training uses."""

TITLES: Final = {
    "s": "S",
    "p": "P",
    "o": "O",
    "lse": "L",
    "delta": "delta",
    "dp": "dP",
    "ds": "dS",
    "dq": "dQ",
    "dk": "dK",
    "dv": "dV",
}
"""Each of `TENSORS` in the notation of the paper."""

LOGITS: Final = "qk+qk_recompute"
"""The two sites that compute S, measured together; see `Attribution.parts`."""

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
class Error:
    """The distance of a tensor a from its reference r.

    If a equals r, the cosine is 1, rel_l2 and max_error are 0, and sqnr_db is inf, also for tensors
    of zeros. If r is zero and a is not, or if an element is infinite in only one of them, rel_l2
    and max_error are inf. What a NaN or an infinity leaves without a value is NaN.
    """

    cosine: float  #: <a, r> / (|a| |r|)
    rel_l2: float  #: |a - r| / |r|
    sqnr_db: float  #: 20 log10(|r| / |a - r|), the signal to quantization noise ratio
    max_error: float  #: max |a - r| in units of the root mean square of r
    norm: float  #: |r|

    @property
    def is_of_zeros(self) -> bool:
        """Whether a and r are zero: then there is nothing to measure, and pooling leaves it out."""
        return self.norm == 0 and self.rel_l2 == 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The errors of every tensor of `TENSORS`; prints as a table."""

    moments: Mapping[str, Tensor]
    """For each tensor, [heads, 6]: <a,r>, <a,a>, <r,r>, <a-r,a-r>, max |a-r| and the number of
    elements of each head. The heads are the flattened leading axes: for dk and dv the heads of k
    and v, otherwise those of q."""

    @property
    def overall(self) -> dict[str, Error]:
        """The error of each tensor over all heads together."""
        return {name: _error(moments) for name, moments in self.moments.items()}

    @property
    def per_head(self) -> dict[str, tuple[Error, ...]]:
        """The error of each head of each tensor."""
        return {
            name: tuple(_error(head[None]) for head in moments)
            for name, moments in self.moments.items()
        }

    @classmethod
    def joined(cls, comparisons: Sequence[Comparison]) -> Comparison:
        """Concatenate the heads of several comparisons."""
        return cls({name: torch.cat([c.moments[name] for c in comparisons]) for name in TENSORS})

    def __str__(self) -> str:
        lines = [f"{'':8}{'cosine':>10}{'rel L2':>10}{'SQNR dB':>10}{'max/RMS':>10}"]
        for name, e in self.overall.items():
            lines.append(
                f"{name:8}{e.cosine:10.5f}{e.rel_l2:10.2e}{e.sqnr_db:10.1f}{e.max_error:10.2e}"
            )
        return "\n".join(lines)


def compare(trace: Trace, exact: Exact) -> Comparison:
    """Measure the error of every intermediate of `trace` against `exact`, per head and overall.

    exact: full precision, from `sagesim.exact`; or the exact gradients of the forward that the
        trace computed, from `sagesim.exact_backward`. The first says how far attention is from full
        precision, the second how far the backward is from the gradient of its forward.

    Elements that are -inf in both (masked logits, L of rows that attend to no key) are left out.

    Raises:
        TypeError: if they are not a `sagesim.Trace` and a `sagesim.Exact`, in this order.
        ValueError: if a tensor has different shapes in the two; the message names it.

    >>> from sagesim import FPA, exact, trace
    >>> x = torch.randn(4, 1, 2, 16, 8)
    >>> compare(trace(*x, spec=FPA), exact(*x)).overall["dq"].rel_l2 < 1e-5
    True
    """
    for name, x, kind in (("trace", trace, Trace), ("exact", exact, Exact)):
        check_type(name, x, kind, f"a sagesim.{kind.__name__}")
    moments: dict[str, Tensor] = {}
    for name in TENSORS:
        a: Tensor = getattr(trace, name)
        r: Tensor = getattr(exact, name)
        if a.shape != r.shape:
            raise ValueError(
                f"{name} of the trace has shape {tuple(a.shape)}, that of the exact computation "
                f"{tuple(r.shape)}: they are not of the same inputs"
            )
        axes = 1 if name in ("lse", "delta") else 2
        heads, size = math.prod(a.shape[:-axes]), math.prod(a.shape[-axes:])
        moments[name] = _moments(a.reshape(heads, size), r.reshape(heads, size))
    return Comparison(moments)


def error(actual: Tensor, reference: Tensor) -> Error:
    """Measure the error of a tensor against a reference of the same shape."""
    if actual.shape != reference.shape:
        raise ValueError(f"shapes {tuple(actual.shape)} and {tuple(reference.shape)} differ")
    return _error(_moments(actual.reshape(1, -1), reference.reshape(1, -1)))


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of non-negative numbers; 0 if there are none.

    NaN if one of them is NaN; else infinite if one is infinite; else 0 if one is 0.

    >>> geometric_mean([1.0, 4.0])
    2.0
    """
    if not all(map(math.isfinite, values)):
        return sum(values)  # NaN or infinity
    if not all(values) or not values:
        return 0.0
    return math.exp(mean([math.log(x) for x in values]))


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def gradient_error(rel_l2: Mapping[str, float]) -> float:
    """The error of the gradients as one number: the RMS of the relative L2 errors of `GRADIENTS`.

    >>> round(gradient_error({"dq": 0.03, "dk": 0.04, "dv": 0.0}), 4)
    0.0289
    """
    return math.hypot(*(rel_l2[t] for t in GRADIENTS)) / math.sqrt(len(GRADIENTS))


def pool_errors(measured: Sequence[Mapping[str, Error]]) -> dict[str, Error]:
    """Average the errors of several layers. Every layer has the same weight.

    Takes the geometric mean of rel_l2, the mean of cosine and sqnr_db, the largest max_error, or
    NaN if one is NaN, and the smallest norm. A tensor that is zero in a layer, as its gradients are
    if dO is zero, has no error there: the layer is left out for this tensor, unless it is zero in
    all layers.

    Raises:
        ValueError: if there is none.
    """
    if not measured:
        raise ValueError("there are no errors to pool")

    def pooled(every: Sequence[Error]) -> Error:
        several = [e for e in every if not e.is_of_zeros] or every
        largest = [e.max_error for e in several]
        return Error(
            cosine=mean([e.cosine for e in several]),
            rel_l2=geometric_mean([e.rel_l2 for e in several]),
            sqnr_db=mean([e.sqnr_db for e in several]),
            max_error=math.nan if any(map(math.isnan, largest)) else max(largest),
            norm=min(e.norm for e in several),
        )

    return {t: pooled([by[t] for by in measured]) for t in TENSORS}


def _moments(a: Tensor, r: Tensor) -> Tensor:
    """The moments [heads, 6] of a and r [heads, n] in float64; see `Comparison.moments`.

    They are computed in parts that fit into a processor's cache.
    """
    heads, n = r.shape
    step = max(1, CACHED // max(1, heads))
    total = r.new_zeros(heads, 6, dtype=torch.float64)
    for first in range(0, n, step):
        part = slice(first, first + step)
        of_part = _moments_of_part(a[:, part].double(), r[:, part].double())
        peak = torch.maximum(total[:, _PEAK], of_part[:, _PEAK])
        total += of_part
        total[:, _PEAK] = peak
    return total


def _moments_of_part(a: Tensor, r: Tensor) -> Tensor:
    counts = ~((a == -torch.inf) & (r == -torch.inf))
    diff = (a - r).where(counts, 0.0)
    a, r = a.where(counts, 0.0), r.where(r != -torch.inf, 0.0)
    peak = diff.abs().amax(1)
    sums = [(x * y).sum(1) for x, y in ((a, r), (a, a), (r, r), (diff, diff))]
    return torch.stack([*sums, peak, counts.sum(1).double()], 1)


def _error(moments: Tensor) -> Error:
    dot, aa, rr, dd, _, count = (float(x) for x in moments.sum(0))
    peak = float(moments[:, _PEAK].max()) if len(moments) else 0.0
    norm = math.sqrt(rr)  # products and quotients of squares may overflow or underflow
    if dd == 0:
        return Error(cosine=1.0, rel_l2=0.0, sqnr_db=math.inf, max_error=0.0, norm=norm)
    if rr == 0:
        return Error(cosine=0.0, rel_l2=math.inf, sqnr_db=-math.inf, max_error=math.inf, norm=0.0)
    return Error(
        cosine=dot / (math.sqrt(aa) * norm) if aa else 0.0,
        rel_l2=math.sqrt(dd) / norm,
        sqnr_db=-math.inf if math.isinf(dd) else 10 * (math.log10(rr) - math.log10(dd)),
        max_error=peak / (norm / math.sqrt(count)),
        norm=norm,
    )
