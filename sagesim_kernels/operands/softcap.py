"""The softcap: c tanh(S / c) in place of each logit S, and its derivative."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.interpreter import INTERPRETED
from sagesim_kernels.operands.delta import load_rows
from sagesim_kernels.operands.kernel_problem import KernelProblem
from sagesim_kernels.operands.layout import Rows
from sagesim_kernels.operands.rounding import LOG2_E

# The coefficients of x^3 to x^11 in `tanh`; that of x is 1.
_SINH_3 = tl.constexpr(0.16666725)
_SINH_5 = tl.constexpr(0.008332053)
_SINH_7 = tl.constexpr(0.00019911512)
_SINH_9 = tl.constexpr(2.6240173e-06)
_SINH_11 = tl.constexpr(3.387193e-08)


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
    """Return tanh(x), odd, at most 1 in magnitude, with a relative error below 2^-21.

    tanh(x) is u / sqrt(1 + u^2) with u = sinh(x). A relative error of u changes it by 1 / (1 + u^2)
    of that error. A polynomial of x that is near sinh where u is small, and large where u is large,
    is therefore enough for every x. Its coefficients minimize the largest relative error of tanh,
    which is 0.98 * 2^-24: operands/test_tanh.py, of the tests, derives them. Roundings add at most
    2.5 * 2^-24, and rsqrt, which is within 2 units in the last place (as CUDA's rsqrtf), 4 * 2^-24.

    From u = 2^13 on, 1 + u^2 is rounded to 2^26, and the result is 1. For the smallest x, u is x
    and 1 + u^2 is 1. On GPUs, rsqrt of powers of 4 is exact: the tests would fail otherwise.
    """
    if INTERPRETED:  # numpy would warn of an overflow; the result is the same
        x = tl.minimum(x, 1024.0, propagate_nan=tl.PropagateNan.ALL)
        x = tl.maximum(x, -1024.0, propagate_nan=tl.PropagateNan.ALL)
    square = x * x
    series = tl.fma(square, _SINH_11, _SINH_9)
    series = tl.fma(series, square, _SINH_7)
    series = tl.fma(series, square, _SINH_5)
    series = tl.fma(series, square, _SINH_3)
    u = tl.abs(tl.fma(x, series * square, x))
    u = tl.minimum(u, 8192.0, propagate_nan=tl.PropagateNan.ALL)
    size = u * tl.rsqrt(tl.fma(u, u, 1.0))
    size = tl.minimum(size, 1.0, propagate_nan=tl.PropagateNan.ALL)
    sign = x.to(tl.uint32, bitcast=True) & 0x80000000
    return (size.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def load_shift(softcap, cu, b, h, queries, n):
    """Return what smoothing K subtracted from the logits of these queries, divided by c."""
    if softcap.shift is None:
        return tl.zeros(queries.shape, tl.float32)
    else:
        shift = Rows(softcap.shift, softcap.shift_stride_b, softcap.shift_stride_h)
        return load_rows(shift, cu, b, h, queries, n, 0.0) * softcap.inverse
