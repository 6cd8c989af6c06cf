"""Comparison of prepared codes and scales."""

from __future__ import annotations

from sagesim_kernels.operands import KernelProblem, Operand
from tests.sagesim_kernels.layouts import stored_rows
from tests.support.assertions import assert_bitwise
from tests.support.ptx_worker import PreparedBackward, PreparedRun


def assert_same_codes(
    found: PreparedRun | PreparedBackward, expected: Operand, name: str, problem: KernelProblem
) -> None:
    """Compare the codes and scales of a tensor, but not those of blocks without tokens.

    name: "q" or "k".
    """
    tensor = getattr(problem, name)
    written = stored_rows(tensor, getattr(problem, f"cu_{name}"))
    codes, scale = getattr(found, name), getattr(found, f"{name}_scale")
    actual, codes = (
        x.view(tensor.shape[1], -1, expected.stride_n)[:, written] for x in (codes, expected.ptr)
    )
    assert_bitwise(actual=actual, expected=codes, what=f"codes of {name}")
    scales = written[:: expected.TOKENS.value] // expected.TOKENS.value
    assert_bitwise(
        actual=scale[:, scales], expected=expected.scale[:, scales], what=f"scales of {name}"
    )
