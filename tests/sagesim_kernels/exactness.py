"""Results of kernels that write no codes of P and dS, beside the emulator's."""

from typing import Any

from sagesim import AttentionProblem, AttentionSpec, Trace, exact, trace
from tests.support.assertions import assert_within_budget


def assert_as_exact_as_the_emulator(
    found: Any, problem: AttentionProblem, spec: AttentionSpec, what: str = "", factor: float = 1.0
) -> Trace:
    """Assert that errors are at most the emulator's and one rounding to the dtype of the inputs.

    Args:
        found: has the results o, dq, dk and dv.
        problem: the call.
        spec: its spec.
        what: describes the problem in the message.
        factor: of the emulator's largest error. Kernels may round P relative to another maximum of
            a row. Their rounding errors are then as large as the emulator's, but others, so that
            one of many drawn calls has a larger one.

    Returns:
        The emulator's trace.
    """
    emulated, reference = trace(problem, spec=spec), exact(problem)
    for name in ("o", "dq", "dk", "dv"):
        assert_within_budget(
            actual=getattr(found, name),
            exact=getattr(reference, name),
            yardstick=getattr(emulated, name),
            factor=factor,
            band=2.0**-5,
            what=f"{name} {what}".rstrip(),
        )
    return emulated
