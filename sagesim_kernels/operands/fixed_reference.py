"""A fixed reference for the exponentials of a forward.

P of a row is exp(S - r). Any reference r gives the same O and logsumexp. With a running maximum as
r, a kernel looks for the maximum of each block of keys, and rescales its sums at each block. So the
kernels for PV in BF16 and QK in 8 bit keep one reference for most blocks: the largest logit of the
blocks that they visit first. P may then exceed 1, which BF16 represents with the same relative
error. But the largest P of a row is rounded, too. With a running maximum it is 1, without an error.
With QK in 16 bit, the error of O would be far larger in rows of which one key has nearly all of P.

If later logits are far larger, sums are too large or overflow. The row has then failed. Its
logsumexp is stored as `FAILED`, and `portable.compute_failed_rows` computes it again with a running
maximum. Which rows fail depends on their own logits and values alone.
"""

from __future__ import annotations

import triton
from triton import language as tl

from sagesim.spec import Precision
from sagesim_kernels.operands.kernel_problem import KernelProblem

FAILED = tl.constexpr(-float("inf"))
"""Stands for the logsumexp of a row that has failed. No other row has it."""

_MOST_SUM = tl.constexpr(2.0**40)
"""The largest sum of P of a row that has not failed."""


def allows_fixed_reference(problem: KernelProblem) -> bool:
    """Whether PV is in BF16, QK is in 8 bit, and there is no softcap."""
    spec = problem.spec
    is_accurate = spec.pv.precision is Precision.BF16 and spec.qk.precision.is_scaled
    return is_accurate and problem.extras.softcap is None


@triton.jit
def fits_reference(row_sum, size):
    """Return which rows have not failed.

    row_sum: the sums of P. size: the sums of the magnitudes of P V over all channels, each of which
    is infinite or NaN if one of them is.
    """
    return (row_sum <= _MOST_SUM) & (size < float("inf"))
