"""The errors of an attention problem under a spec, and their averages over layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sagesim.analysis.metrics import TENSORS, Comparison, Error, compare, geometric_mean, mean
from sagesim.emulator import Exact, exact, trace
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


def pool_errors(measured: Sequence[Mapping[str, Error]]) -> dict[str, Error]:
    """Average the errors of several layers. Every layer has the same weight.

    Takes the geometric mean of rel_l2, the mean of cosine and sqnr_db, and the largest max_error.
    """

    def pooled(several: Sequence[Error]) -> Error:
        return Error(
            cosine=mean([e.cosine for e in several]),
            rel_l2=geometric_mean([e.rel_l2 for e in several]),
            sqnr_db=mean([e.sqnr_db for e in several]),
            max_error=max(e.max_error for e in several),
        )

    return {t: pooled([by[t] for by in measured]) for t in TENSORS}
