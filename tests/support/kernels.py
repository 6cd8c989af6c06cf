"""Run the kernels on a case, on the device they were imported for."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sagesim import (
    FACTORED,
    FACTORED_PV16,
    FACTORED_QK,
    FPA_BF16,
    FPA_FP16,
    SAGEBWD,
    AttentionSpec,
    Precision,
    Smoothing,
    with_precision,
)
from sagesim_kernels import attention
from sagesim_kernels.support import IS_INTERPRETED
from tests.support.assertions import assert_bitwise
from tests.support.inputs import Case, case

DEVICE = "cpu" if IS_INTERPRETED else "cuda"

HERE = [] if IS_INTERPRETED else [pytest.mark.gpu]
"""Marks of tests that run wherever the kernels do."""

BF16 = () if IS_INTERPRETED else (torch.bfloat16,)
DTYPES = (torch.float16, torch.float32, *BF16)

SPECS: dict[str, AttentionSpec] = {
    "sagebwd": SAGEBWD,
    "factored": FACTORED,
    "factored_pv16": FACTORED_PV16,
    "q_smoothed": replace(
        with_precision(FACTORED, Precision.INPUT16, "dq", "dk"),
        smoothing=Smoothing(q=True, k=True),
        block_q=32,
    ),
    "fpa_fp16": FPA_FP16,
} | ({} if IS_INTERPRETED else {"fpa_bf16": FPA_BF16, "factored_qk": FACTORED_QK})
"""Every way the kernels have: scales by block and by token, delta from O and from P, Q smoothed,
means subtracted from 16-bit operands, products in INT8 and in 16 bit, and Hopper's own kernels."""

FEW: dict[str, AttentionSpec] = {
    name: SPECS[name]
    for name in ("sagebwd", "q_smoothed", "fpa_fp16", "factored_qk")
    if name in SPECS
}
"""The same, each way once."""


class Results(NamedTuple):
    """What a caller of attention sees."""

    o: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def kernel_case(dtype: torch.dtype = torch.float32, **arguments: Any) -> Case:
    """A case where the kernels run."""
    return case(**arguments).map(lambda x: x.to(DEVICE, dtype))


def run_kernels(
    case: Case, spec: AttentionSpec, *, d_lse: Tensor | None = None, **options: Any
) -> Results:
    """o, lse and the gradients, through autograd.

    d_lse: the gradient of lse; lse takes no part in the loss where it is None.
    """
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    o, lse = attention(*leaves, spec=spec, return_lse=True, **(case.options | options))
    outputs, gradients = ([o], [case.do]) if d_lse is None else ([o, lse], [case.do, d_lse])
    return Results(o.detach(), lse.detach(), *torch.autograd.grad(outputs, leaves, gradients))


def assert_same(actual: Results, expected: Results, *names: str) -> None:
    """The same bytes in these results, or in all."""
    for name in names or Results._fields:
        assert_bitwise(actual=getattr(actual, name), expected=getattr(expected, name), what=name)


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory is full of NaN, or of the largest integer, until it is written."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # among other things, this
    try:
        assert bool(torch.empty(8, device=DEVICE).isnan().all())
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
