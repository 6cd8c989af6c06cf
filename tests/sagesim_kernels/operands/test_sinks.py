"""A sink is added to the sum and the maximum of a row, unless the row attends to no key."""

import math

import torch
import triton
import triton.language as tl

from sagesim_kernels.operands import LAUNCH, Rows, add_sink_of_rows
from tests.support.kernels import DEVICE, HERE

pytestmark = HERE

INF, NAN = math.inf, math.nan


@triton.jit
def add_sinks_kernel(sink2, lse2, row_sum, row_max, COUNT: tl.constexpr):
    row = tl.arange(0, COUNT)
    zero = tl.program_id(0)
    found_sum, found_max, _ = add_sink_of_rows(
        sink2, lse2, None, zero, zero, row, COUNT, tl.load(row_sum + row), tl.load(row_max + row)
    )
    tl.store(row_sum + row, found_sum)
    tl.store(row_max + row, found_max)


def add_sinks(rows: list[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """Return sum and maximum of each row with its sink. rows: sum, maximum and sink in base 2."""
    row_sum, row_max, sink2 = torch.tensor(rows).T.contiguous().to(DEVICE)
    lse2 = Rows.of(torch.empty(1, 1, len(rows), device=DEVICE))
    add_sinks_kernel[(1,)](sink2, lse2, row_sum, row_max, len(rows), **LAUNCH)
    return list(zip(row_sum.tolist(), row_max.tolist(), strict=True))


def test_sums_and_maxima() -> None:
    found = add_sinks([(2.0, 1.0, 3.0), (2.0, 3.0, 1.0), (2.0, 3.0, -INF), (0.0, 2.0**30, 1.0)])
    assert found == [(1.5, 3.0), (2.25, 3.0), (2.0, 3.0), (0.0, 2.0**30)]


def test_rows_without_keys_have_no_sink() -> None:
    """From a sum of 0 and a maximum of -inf, the forward stores that a row attends to no key."""
    assert add_sinks([(0.0, -INF, 1.0), (0.0, -INF, -INF)]) == [(0.0, -INF)] * 2


def test_nan_stays() -> None:
    (row_sum, _), _ = add_sinks([(NAN, 1.0, 2.0), (1.0, 0.0, 0.0)])
    assert math.isnan(row_sum)
