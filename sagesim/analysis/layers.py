"""The errors of an attention problem under a spec."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from sagesim.analysis.metrics import Comparison, Error, compare
from sagesim.analysis.number_range import (
    RangeLoss,
    largest_losses,
    map_range_losses,
    token_range_losses,
)
from sagesim.emulator import Exact, Vanished, exact, exact_backward, trace
from sagesim.problem import AttentionProblem
from sagesim.spec import AttentionSpec


def errors(
    problem: AttentionProblem,
    spec: AttentionSpec,
    reference: Callable[[AttentionProblem], Exact] = exact,
) -> Mapping[str, Error]:
    """Measure the error of each of `TENSORS` under a spec, over all heads of a problem.

    Heads are computed in groups, so that memory does not grow with their number.

    Args:
        problem: the attention problem, with do.
        spec: the spec to emulate.
        reference: computes a problem exactly; it is called for each group of heads.
    """
    return Comparison.joined(
        [compare(trace(group, spec=spec), reference(group)) for group in problem.head_groups()]
    ).overall


class Measured(NamedTuple):
    """What one run of the emulator says about a problem, over all of its heads."""

    errors: Mapping[str, Error]  #: against full precision
    own: Mapping[str, Error]  #: against the exact gradients of the spec's own forward
    vanished: Mapping[str, Vanished]
    """By "site.tensor", the shares that become 0 as codes; means over heads if several groups of
    heads are computed."""
    range_losses: Sequence[RangeLoss]  #: operands that a 16-bit format cannot hold


def errors_of_both(
    problem: AttentionProblem, spec: AttentionSpec
) -> tuple[Mapping[str, Error], Mapping[str, Error]]:
    """The errors against full precision, and those against the spec's own forward.

    Args and memory: as `errors`. The second reference is `sagesim.exact_backward`.
    """
    found = measure(problem, spec)
    return found.errors, found.own


def measure(problem: AttentionProblem, spec: AttentionSpec) -> Measured:
    """The errors of `errors_of_both`, and which operands lose more than rounding errors."""
    of_exact: list[Comparison] = []
    of_own: list[Comparison] = []
    vanished: list[Mapping[str, Vanished]] = []
    heads: list[int] = []
    losses = [*token_range_losses(problem, spec)]
    for group in problem.head_groups():
        traced = trace(group, spec=spec)
        of_exact.append(compare(traced, exact(group)))
        of_own.append(compare(traced, exact_backward(group, traced)))
        vanished.append(traced.vanished)
        losses += map_range_losses(traced)
        heads.append(math.prod(group.q.shape[:-2]))
    shares = {key: _mean([each[key] for each in vanished], heads) for key in vanished[0]}
    return Measured(
        errors=Comparison.joined(of_exact).overall,
        own=Comparison.joined(of_own).overall,
        vanished=shares,
        range_losses=largest_losses(losses),
    )


def _mean(shares: Sequence[Vanished], heads: Sequence[int]) -> Vanished:
    """The mean of shares of groups of heads, by the number of heads."""
    return Vanished(
        *(
            sum(share * count for share, count in zip(part, heads, strict=True))
            / max(sum(heads), 1)
            for part in zip(*shares, strict=True)
        )
    )
