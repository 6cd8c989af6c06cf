"""What Hopper's backward in codes prepares for each query, beside what the portable kernels do.

The backward ends before its main kernel, which runs on Hopper alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sagesim import AttentionSpec
from sagesim_kernels import hopper, portable
from sagesim_kernels.hopper import codes_backward, fp8_rows, tile_scheduler
from sagesim_kernels.operands import (
    DqSums,
    KernelProblem,
    OperandCache,
    Rows,
    RowStatistics,
    Softcap,
)
from sagesim_kernels.operands.quantization import quantize
from sagesim_kernels.portable import backward as portable_backward
from tests.support.assertions import assert_bitwise
from tests.support.inputs import Case
from tests.support.kernels import HERE, kernel_case, run_kernels

pytestmark = [
    *HERE,
    # numpy warns of the logarithm of 0 in rows behind the last query, and of NaN.
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),
]

SPECS = {
    "sagebwd": "sagebwd smooth=none",
    "factored": "factored smooth=none",
    "fp8_gradients": "fp8_gradients smooth=none block=64x64",
}
N, D = 150, 40

Units = Callable[[Case, str], Tensor]


class Prepared(Exception):
    """The main kernel would run next."""


def sum_rows(
    problem: KernelProblem,
    operands: OperandCache,
    statistics: RowStatistics,
    d_lse: Rows | None,
    p_sums: Rows | None,
    p_bound: Rows | None = None,
) -> None:
    """Do what Hopper's kernel of row sums does, which Triton does not interpret."""
    softcap = Softcap.of(problem, None)
    portable.launch_p_rows(problem, operands, statistics, d_lse, softcap, p_bound, p_sums)


@pytest.fixture
def hopper_units(unplanned: None, monkeypatch: pytest.MonkeyPatch) -> Units:
    """Returns the units of dQ of a case and a spec, [heads, tokens]."""

    def units(case: Case, spec: str) -> Tensor:
        found: list[DqSums] = []
        by_tma = DqSums.by_tma

        def recorded(problem: KernelProblem, channels: int) -> DqSums:
            found.append(by_tma(problem, channels))
            return found[-1]

        def stop(*_args: object, **_options: object) -> None:
            raise Prepared

        with monkeypatch.context() as patch:
            patch.setattr(hopper, "serves_codes", lambda _problem: True)
            patch.setattr(DqSums, "by_tma", recorded)
            patch.setattr(codes_backward, "quantize", quantize)
            patch.setattr(codes_backward, "launch_p_rows", sum_rows)
            patch.setattr(fp8_rows, "launch_p_rows", sum_rows)
            patch.setattr(tile_scheduler, "multiprocessor_count", lambda: 132)
            patch.setattr(codes_backward, "launch", stop)
            with pytest.raises(Prepared):
                run_kernels(case, AttentionSpec.parse(spec))
        (sums,) = found
        return sums.unit[:, :N]

    return units


@pytest.fixture
def portable_units(unplanned: None, monkeypatch: pytest.MonkeyPatch) -> Units:
    """The same of the portable kernels."""
    found: list[Tensor] = []
    finish = portable_backward.finish_dq

    def finish_dq(problem: KernelProblem, sums: DqSums, *rest: object) -> None:
        found.append(sums.unit[:, :N].clone())
        finish(problem, sums, *rest)

    def units(case: Case, spec: str) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(portable_backward, "finish_dq", finish_dq)
            run_kernels(case, AttentionSpec.parse(spec))
        return found.pop()

    return units


def case_of() -> Case:
    return kernel_case(torch.bfloat16, seed=1, n_q=N, n_k=N, d=D, heads=(1, 1), is_causal=True)


@pytest.mark.parametrize("spec", SPECS)
def test_units_are_those_of_the_portable_kernels(
    spec: str, hopper_units: Units, portable_units: Units
) -> None:
    case = case_of()
    assert_bitwise(
        actual=hopper_units(case, SPECS[spec]),
        expected=portable_units(case, SPECS[spec]),
        what="units",
    )


@pytest.mark.parametrize("spec", SPECS)
def test_a_nan_of_a_key_reaches_all_queries_of_its_tile(
    spec: str, hopper_units: Units, portable_units: Units
) -> None:
    """A part of dQ is one of 128 keys there. As an integer it would not be NaN."""
    case = case_of()
    case.k[0, 0, 100, 3] = math.nan
    assert not portable_units(case, SPECS[spec])[:, :64].isnan().any()
    assert hopper_units(case, SPECS[spec]).isnan().all()
