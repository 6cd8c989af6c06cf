"""Run the kernels on a case: on a GPU, or in Triton's interpreter on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sagesim import (
    FACTORED,
    FACTORED_PV16,
    FACTORED_QK,
    FP8_GRADIENTS,
    FPA_BF16,
    FPA_FP16,
    SAGEBWD,
    AttentionSpec,
    Precision,
    Smoothing,
    with_precision,
)
from sagesim_kernels import attention
from sagesim_kernels.interpreter import IS_INTERPRETED
from tests.support.assertions import assert_bitwise
from tests.support.inputs import Case, case

DEVICE = "cpu" if IS_INTERPRETED or not torch.cuda.is_available() else "cuda"
"""The CPU also where the kernels run from their PTX, see `ptx_device`."""

HERE = [] if IS_INTERPRETED else [pytest.mark.gpu]
"""Marks of tests that run on a GPU, and in the interpreter if there is none."""

DTYPES = (torch.float16, torch.float32, torch.bfloat16)

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
    "fpa_bf16": FPA_BF16,
    "factored_qk": FACTORED_QK,
    "fp8_gradients": FP8_GRADIENTS,
}
"""Specs that cover every feature of the kernels.

Scales per block and per token, delta from O and from P, smoothed Q, means subtracted from 16-bit
operands, products in INT8, FP8 and 16 bit, scales from bounds, and the Hopper kernels.
"""

FEW: dict[str, AttentionSpec] = {
    name: SPECS[name] for name in ("sagebwd", "q_smoothed", "fpa_fp16", "factored_qk")
}
"""A smaller selection that covers each feature once."""


class _NoPlans(dict[Any, Any]):
    """Keeps nothing."""

    def __setitem__(self, key: Any, plan: Any) -> None: ...


UNPLANNED: dict[str, Any] = {
    "_plans": _NoPlans(),
    "_record": lambda function, tensors, options: (function(tensors, options), None),
}
"""Members of `launching.plans` with which a call launches its kernels at once, without a plan."""


class Results(NamedTuple):
    """The results of attention and its backward."""

    o: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def kernel_case(dtype: torch.dtype = torch.float32, **arguments: Any) -> Case:
    """A case on the device of the kernels."""
    return case(**arguments).map(lambda x: x.to(DEVICE, dtype))


def run_kernels(
    case: Case, spec: AttentionSpec, *, d_lse: Tensor | None = None, **options: Any
) -> Results:
    """Return o, lse and the gradients, computed through autograd.

    d_lse: the gradient of lse; None if the loss does not depend on lse.
    """
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    o, lse = attention(*leaves, spec=spec, return_lse=True, **(case.kernel_options | options))
    outputs, gradients = ([o], [case.do]) if d_lse is None else ([o, lse], [case.do, d_lse])
    return Results(o.detach(), lse.detach(), *torch.autograd.grad(outputs, leaves, gradients))


def assert_same(actual: Results, expected: Results, *names: str) -> None:
    """Assert that the named results, or all, have the same bytes."""
    for name in names or Results._fields:
        assert_bitwise(actual=getattr(actual, name), expected=getattr(expected, name), what=name)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill new memory with NaN, or with the largest integer."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # this fills new memory
    try:
        assert bool(torch.empty(8, device=DEVICE).isnan().all())
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@contextmanager
def all_served(monkeypatch: pytest.MonkeyPatch, package: ModuleType, serves: str) -> Iterator[None]:
    """Require that a package's function, by its name, is asked and says of every problem yes."""
    served: list[bool] = []
    answer = getattr(package, serves)

    def watched(problem: Any) -> bool:
        served.append(answer(problem))
        return served[-1]

    monkeypatch.setattr(package, serves, watched)
    yield
    assert served and all(served)
