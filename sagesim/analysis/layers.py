"""The errors of an attention problem under a spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sagesim.analysis.metrics import Comparison, Error, compare
from sagesim.emulator import Exact, exact, exact_backward, trace
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


def errors_of_both(
    problem: AttentionProblem, spec: AttentionSpec
) -> tuple[Mapping[str, Error], Mapping[str, Error]]:
    """The errors against full precision, and those against the spec's own forward.

    Args and memory: as `errors`. The second reference is `sagesim.exact_backward`.
    """
    found: tuple[list[Comparison], list[Comparison]] = ([], [])
    for group in problem.head_groups():
        traced = trace(group, spec=spec)
        found[0].append(compare(traced, exact(group)))
        found[1].append(compare(traced, exact_backward(group, traced)))
    of_exact, of_own = (Comparison.joined(each).overall for each in found)
    return of_exact, of_own
