"""The softcap: c tanh(S / c) in place of each logit S, and its derivative."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.operands.delta import load_rows
from sagesim_kernels.operands.kernel_problem import KernelProblem
from sagesim_kernels.operands.layout import Rows
from sagesim_kernels.operands.rounding import LOG2_E

_MINUS_TWO_LOG2_E = tl.constexpr(-2.0 * LOG2_E)


class Softcap(NamedTuple):
    """A softcap c as a kernel argument; the kernel computes with logits divided by c.

    All fields are None without a softcap. Kernels ask for `base2`: Triton 3.6 cannot compare a
    tuple that has None in it with None.
    """

    inverse: Any  #: 1 / c
    base2: Any  #: c log2(e), for logits whose exponential is exp2
    shift: Any  #: of a `Rows`: what smoothing K subtracted from the logits; None if nothing
    shift_stride_b: Any
    shift_stride_h: Any

    @classmethod
    def of(cls, problem: KernelProblem, shift: Tensor | None) -> Softcap:
        """The softcap of a problem."""
        cap = problem.extras.softcap
        if cap is None:
            return cls(None, None, None, None, None)
        return cls(1 / cap, cap * LOG2_E, *((None,) * 3 if shift is None else Rows.of(shift)))


@triton.jit
def tanh(x):
    """Return tanh(x), odd, with a relative error of a few units in the last place.

    Small arguments take the first terms of the Taylor series: 1 - e would cancel there.
    """
    size = tl.abs(x)
    e = tl.exp2(size * _MINUS_TWO_LOG2_E)
    of_large = (1.0 - e) / (1.0 + e)
    small = tl.minimum(size, 1.0)  # what is not used does not overflow
    square = small * small
    series = 0.0035921280 * square - 0.0088632355
    series = series * square + 0.0218694885
    series = series * square - 0.0539682540
    series = series * square + 0.1333333333
    series = series * square - 0.3333333333
    of_small = small + small * square * series
    result = tl.where(size < 0.375, of_small, of_large)
    return tl.where(x < 0, -result, result)


@triton.jit
def load_shift(softcap, cu, b, h, queries, n):
    """Return what smoothing K subtracted from the logits of these queries, divided by c."""
    if softcap.shift is None:
        return tl.zeros(queries.shape, tl.float32)
    else:
        shift = Rows(softcap.shift, softcap.shift_stride_b, softcap.shift_stride_h)
        return load_rows(shift, cu, b, h, queries, n, 0.0) * softcap.inverse
