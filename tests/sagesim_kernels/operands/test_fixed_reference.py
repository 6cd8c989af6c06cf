"""Rows that fail with a fixed reference are computed again, and no others."""

import math

import pytest
import torch
from torch import Tensor

from sagesim import AttentionSpec
from sagesim.problem import resolve_input16
from sagesim_kernels import portable
from sagesim_kernels.operands import (
    KernelProblem,
    OperandCache,
    Packing,
    allows_fixed_reference,
    logit_scale,
)
from sagesim_kernels.operands.kernel_problem import Extras
from tests.support.assertions import assert_bitwise
from tests.support.kernels import DEVICE, HERE

pytestmark = HERE

OTHER = 7.0
"""What stands in results of rows that have not failed."""


def problem_of(
    n_q: int, n_k: int, spec: str = "factored_qk", packing: Packing | None = None, **extras: float
) -> KernelProblem:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, tokens: int) -> Tensor:
        x = torch.randn(1, heads, tokens, 16, generator=generator)
        return x.to(DEVICE, torch.bfloat16)

    q, k, v = draw(2, n_q), draw(1, n_k), draw(1, n_k)
    return KernelProblem.of(
        q,
        k,
        v,
        spec=resolve_input16(AttentionSpec.parse(spec), torch.bfloat16),
        scale=logit_scale(q, None),
        is_causal=True,
        lower_right=False,
        packing=packing,
        extras=Extras(**extras),
    )


def check_rows(problem: KernelProblem, failed: Tensor) -> None:
    """Check that only the failed rows, [1, heads, n_q], are computed, and as in a forward."""
    operands = OperandCache(problem)
    operands.quantize("qk", "pv")
    o = torch.empty_like(problem.q)
    lse2 = torch.empty(failed.shape, device=DEVICE)
    portable.launch_forward(problem, operands, o, lse2)
    failed = failed.to(DEVICE)
    found = torch.where(failed[..., None], torch.nan, OTHER).expand_as(o).to(o.dtype).contiguous()
    found_lse2 = torch.where(failed, -math.inf, OTHER)
    portable.compute_failed_rows(problem, operands, found, found_lse2)
    expected = torch.where(failed[..., None], o, OTHER)
    assert_bitwise(actual=found, expected=expected, what="o")
    assert_bitwise(actual=found_lse2, expected=torch.where(failed, lse2, OTHER), what="lse2")


def test_failed_rows_alone_are_computed() -> None:
    """More rows than a program looks through, of which some programs have none that failed."""
    problem = problem_of(1100, 40)
    failed = torch.zeros(1, 2, 1100, dtype=torch.bool)
    failed[0, 0, [0, 63, 64, 1023, 1024, 1099]] = True
    failed[0, 1, 1050:1070] = True
    check_rows(problem, failed)


def test_failed_rows_of_packed_sequences() -> None:
    cu = torch.tensor([0, 70, 70, 150], dtype=torch.int32, device=DEVICE)
    problem = problem_of(150, 150, packing=Packing(cu, cu, 80, 80))
    failed = torch.zeros(1, 2, 150, dtype=torch.bool)
    failed[0, 1, [69, 70, 149]] = True
    check_rows(problem, failed)


@pytest.mark.parametrize(
    ("spec", "extras", "expected"),
    [
        ("factored_qk", {}, True),
        ("factored_qk qk=fp8_e4m3", {}, True),
        ("fpa_bf16", {}, False),
        ("factored_qk", {"softcap": 3.0}, False),
        ("fpa_fp16", {}, False),
        ("sagebwd", {}, False),
    ],
)
def test_which_calls_have_a_fixed_reference(
    spec: str, extras: dict[str, float], expected: bool
) -> None:
    assert allows_fixed_reference(problem_of(4, 4, spec, **extras)) is expected
