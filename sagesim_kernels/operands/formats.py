"""The formats of codes in a kernel: integers, and FP8.

FP8 codes lie in memory as their bits, in int8. A GPU whose tensor cores do not multiply FP8 gets
the same codes as float16 numbers, which hold every one of them: its products are exact as well.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from sagesim.spec import Precision
from sagesim_kernels.interpreter import INTERPRETED, IS_INTERPRETED
from sagesim_kernels.target import compute_capability

VALUES = tl.constexpr(0)
"""No codes: numbers of 16 bit."""
INT8 = tl.constexpr(1)
E4M3 = tl.constexpr(2)
E5M2 = tl.constexpr(3)
E4M3_IN_FP16 = tl.constexpr(4)
E5M2_IN_FP16 = tl.constexpr(5)

CODE_MAX: Final = {Precision.INT8: 127.0, Precision.FP8_E4M3: 448.0, Precision.FP8_E5M2: 57344.0}
"""The largest code of each scaled precision."""

FP8: Final = {
    Precision.FP8_E4M3: torch.float8_e4m3fn,
    Precision.FP8_E5M2: torch.float8_e5m2,
}
"""The FP8 precisions of a spec and their dtypes."""

_NATIVE: Final = {Precision.INT8: INT8, Precision.FP8_E4M3: E4M3, Precision.FP8_E5M2: E5M2}
_IN_FP16: Final = {E4M3.value: E4M3_IN_FP16, E5M2.value: E5M2_IN_FP16}


def multiplies_fp8() -> bool:
    """Return whether tensor cores multiply FP8: from Ada on, and in Triton's interpreter."""
    return IS_INTERPRETED or compute_capability() >= 89


def format_of(precision: Precision) -> tl.constexpr:
    """Return the format in which the current device multiplies a precision of a spec."""
    found = _NATIVE.get(precision, VALUES)
    if found.value in _IN_FP16 and not multiplies_fp8():
        return _IN_FP16[found.value]
    return found


def memory_dtype(FORMAT: tl.constexpr) -> torch.dtype:
    """Return the dtype in which codes of a format lie in memory."""
    is_wide = FORMAT.value in (E4M3_IN_FP16.value, E5M2_IN_FP16.value)
    return torch.float16 if is_wide else torch.int8


@triton.constexpr_function
def code_max(FORMAT) -> Any:
    """Return the largest code of a format."""
    if FORMAT == INT8:
        return 127.0
    return 448.0 if FORMAT in (E4M3, E4M3_IN_FP16) else 57344.0


@triton.constexpr_function
def count_of_tops(FORMAT) -> Any:
    """Return how many codes the bound of a row may get: see `top_code`."""
    if FORMAT == INT8:
        return 1
    return 8 if FORMAT in (E4M3, E4M3_IN_FP16) else 4


@triton.constexpr_function
def top_code(FORMAT, index) -> Any:
    """Return one of the codes that the bound of a row may get, from the largest to the smallest.

    In FP8 they are the largest ones, over one power of two.
    """
    if FORMAT == INT8:
        return 127.0
    if FORMAT in (E4M3, E4M3_IN_FP16):
        return 448.0 - 32.0 * index if index < 7 else 240.0
    return 57344.0 - 8192.0 * index


@triton.jit
def loaded_codes(x, FORMAT: tl.constexpr):
    """Return codes as a product takes them, from what lies in memory."""
    if FORMAT == E4M3:
        return x.to(tl.float8e4nv, bitcast=True)
    elif FORMAT == E5M2:
        return x.to(tl.float8e5, bitcast=True)
    else:
        return x


@triton.jit
def stored_codes(codes):
    """Return codes as they lie in memory."""
    if codes.dtype.is_fp8():
        return codes.to(tl.int8, bitcast=True)
    else:
        return codes


@triton.jit
def _exponent_of_step(y, FORMAT: tl.constexpr):
    """Return the exponent, biased by 127, of the distance between the FP8 codes around y."""
    exponent = (y.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> 23
    if code_max(FORMAT) == 448.0:
        return tl.maximum(exponent, 127 - 6) - 3
    else:
        return tl.maximum(exponent, 127 - 14) - 2


@triton.jit
def step_of(y, FORMAT: tl.constexpr):
    """Return the distance between the FP8 codes around y, a power of two, and its inverse."""
    exponent = _exponent_of_step(y, FORMAT)
    step = (exponent << 23).to(tl.float32, bitcast=True)
    return step, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def nearest_number(y, FORMAT: tl.constexpr):
    """Return the FP8 number that is nearest to y, ties to even, float32; no number is too large."""
    exponent = _exponent_of_step(y, FORMAT)
    # After adding 1.5 * 2**23 steps, the low bits of a float32 count steps.
    grid = (((exponent + 23) << 23) | 0x400000).to(tl.float32, bitcast=True)
    nearest = (y + grid) - grid
    sign = y.to(tl.int32, bitcast=True) & -2147483648  # of y, also where the difference is 0
    return (nearest.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


# One instruction rounds two numbers, and saturates. Triton's own conversion is not used for two
# reasons. Triton 3.6 rounds twice on Ada GPUs, to float16 first. And if several instructions read
# the result, ptxas 12.8 and 12.9 may give some of them an unrelated register. In this assembly one
# instruction reads it. The assembly adds instructions that rearrange bytes to a loop.
_CONVERT: Final = (
    "{.reg .b16 x, y; cvt.rn.satfinite.FORMATx2.f32 x, $2, $1; "
    "cvt.rn.satfinite.FORMATx2.f32 y, $4, $3; mov.b32 $0, {x, y};}"
)
_TO_E4M3 = tl.constexpr(_CONVERT.replace("FORMAT", "e4m3"))
_TO_E5M2 = tl.constexpr(_CONVERT.replace("FORMAT", "e5m2"))


@triton.jit
def nearest_code(y, FORMAT: tl.constexpr):
    """Round y to FP8 codes, ties to even. Numbers beyond the largest code become that code."""
    if FORMAT == E4M3:
        if INTERPRETED:
            return y.to(tl.float8e4nv)
        else:
            bits = tl.inline_asm_elementwise(
                _TO_E4M3, "=r,r,r,r,r", [y], dtype=tl.int8, is_pure=True, pack=4
            )
            return bits.to(tl.float8e4nv, bitcast=True)
    elif FORMAT == E5M2:
        if INTERPRETED:
            return y.to(tl.float8e5)
        else:
            bits = tl.inline_asm_elementwise(
                _TO_E5M2, "=r,r,r,r,r", [y], dtype=tl.int8, is_pure=True, pack=4
            )
            return bits.to(tl.float8e5, bitcast=True)
    else:
        MOST: tl.constexpr = code_max(FORMAT)
        return tl.minimum(tl.maximum(nearest_number(y, FORMAT), -MOST), MOST).to(tl.float16)
