"""Device functions that all kernels share: scales, rounding to codes, sums and random numbers.

Kernels are compiled without fusing multiplications into additions (see `LAUNCH`). Every float32
operation is therefore rounded where it is written, on every GPU and by every compiler.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import triton
import triton.language as tl

from sagesim.spec import AttentionSpec, Precision, RoundingMode
from sagesim_kernels.interpreter import INTERPRETED
from sagesim_kernels.operands.formats import INT8, format_of, nearest_code, step_of

LAUNCH: Final[dict[str, Any]] = {"enable_fp_fusion": False}
"""Compiler options of every launch."""

LOG2_E: Final = 1.4426950408889634
LN_2: Final = 0.6931471805599453
LOG2_127: Final = 6.988684686772166


class Rounding(NamedTuple):
    """How a kernel rounds one tensor to codes."""

    MODE: Any  #: constexpr, a value of `ROUNDINGS`
    seed: Any  #: None unless rounding is stochastic
    STREAM: Any  #: constexpr, the tensor's value in `STREAMS`; None unless rounding is stochastic
    FORMAT: Any  #: constexpr, of the codes, see `formats`

    @classmethod
    def of(
        cls, spec: AttentionSpec, tensor: str, precision: Precision = Precision.INT8
    ) -> Rounding:
        """The spec's rounding of a tensor that is named as in `sagesim.spec.OPERANDS`."""
        mode, how = tl.constexpr(ROUNDINGS[spec.rounding.mode]), format_of(precision)
        if spec.rounding.seed is None:
            return cls(mode, None, None, how)
        return cls(mode, spec.rounding.seed, tl.constexpr(STREAMS[tensor]), how)


STREAMS: Final = {"q": 0, "k": 1, "v": 2, "do": 3, "p": 4, "ds": 5}
"""The random number stream of each tensor's stochastic rounding."""

ROUNDINGS: Final = {mode: index for index, mode in enumerate(RoundingMode)}
"""The number of each rounding mode in a kernel."""

_HALF_EVEN = tl.constexpr(ROUNDINGS[RoundingMode.HALF_EVEN])
_HALF_AWAY = tl.constexpr(ROUNDINGS[RoundingMode.HALF_AWAY])

# After adding 1.5 * 2**23, the low bits of a float32 hold the nearest integer, ties to even.
_INTEGER_GRID = tl.constexpr(12582912.0)

# The largest amax for which 127 / amax overflows to infinity.
_VANISHING = tl.constexpr(127.0 * 2.0**-128)


@triton.jit
def magnitude(x):
    """Return |x| as an int32 in the order of magnitudes; NaN is the largest, so a max keeps it."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest(x, AXIS: tl.constexpr) -> Any:
    """Return the maximum of int32 along an axis."""
    return tl.max(x, AXIS)


@triton.jit
def scale_and_inverse(amax, CODE_MAX: tl.constexpr = 127.0):
    """Return amax / CODE_MAX and CODE_MAX / amax, each from one correctly rounded division.

    amax: a maximum of `magnitude`. If CODE_MAX / amax overflows, the results are 1 and 0. If amax
    is NaN or infinite, the scale is NaN.
    """
    amax = amax.to(tl.float32, bitcast=True)
    vanishing = amax <= CODE_MAX * 2.0**-128
    amax = tl.where(vanishing, CODE_MAX, amax)
    code_max = tl.where(vanishing, CODE_MAX, CODE_MAX)  # has the layout of amax, in Gluon too
    scale = tl.math.div_rn(amax, code_max)
    inverse = tl.math.div_rn(code_max, amax)
    scale = tl.where(amax < float("inf"), scale, float("nan"))
    return scale, tl.where(vanishing, 0.0, inverse)


@triton.jit
def row_sums(x):
    """Return the sum of each row of x [m, n], float32, rounded once.

    The sum is in float64, because its order depends on the layout that the compiler chooses for x,
    and this layout depends on the strides that x was loaded with.
    """
    return row_sums64(x).to(tl.float32)


@triton.jit
def row_sums64(x):
    """Return the sum of each row of x, float64: over the last axis."""
    return tl.sum(x.to(tl.float64), len(x.shape) - 1)


@triton.jit
def to_codes(y, rows, columns, rounding):
    """Round y to codes of the format of a `Rounding`.

    y: in units of codes; its magnitude is at most that of the largest code, up to float32 rounding.
    rows, columns: indices of the elements in their head, broadcastable to y.
    """
    if rounding.MODE == _HALF_EVEN:
        if rounding.FORMAT == INT8:
            return (y + _INTEGER_GRID).to(tl.int32, bitcast=True).to(tl.int8)
        else:
            return nearest_code(y, rounding.FORMAT)
    elif rounding.FORMAT == INT8:
        return _to_integers(y, rows, columns, rounding).to(tl.int8)
    else:
        # Between two powers of two, FP8 numbers are multiples of a step.
        step, inverse = step_of(y, rounding.FORMAT)
        codes = _to_integers(y * inverse, rows, columns, rounding) * step
        # Changes no number but those beyond the largest code.
        return nearest_code(codes, rounding.FORMAT)


@triton.jit
def _to_integers(y, rows, columns, rounding):
    """Round y to integers up to 127, half away from zero or stochastically, float32."""
    if rounding.MODE == _HALF_AWAY:
        size = tl.abs(y)
        whole = tl.floor(size)
        whole += tl.where(size - whole >= 0.5, 1.0, 0.0)  # size - whole is exact
        # Triton before 3.9 computes -x as 0 - x, which has not the sign of a zero.
        return tl.where(y < 0, whole * -1.0, whole)
    else:
        below = tl.floor(y)
        up = y - below > uniform(rounding, rows, columns)
        return tl.minimum(tl.maximum(below + tl.where(up, 1.0, 0.0), -127.0), 127.0)


@triton.jit
def code_product(left, right):
    """Return the product of codes left [m, k] and right [k, n], k at most 256, float32 and exact.

    The sums start at the bits of 12582912.0, so that the bits of a sum are those of a float32,
    which is 12582912 more. |sum| <= 127**2 * 256 < 2**22. A conversion instruction would be slow.
    """
    start = tl.full((left.shape[0], right.shape[1]), 0x4B400000, tl.int32)
    sums = tl.dot(left, right, start, out_dtype=tl.int32)
    return sums.to(tl.float32, bitcast=True) - _INTEGER_GRID


@triton.jit
def map_codes(x, inverse, rows, columns, rounding):
    """Round x * inverse to codes; see `to_codes`. Half-even rounding to int8 rounds only once."""
    inverse = tl.broadcast_to(inverse, x.shape)
    if rounding.MODE == _HALF_EVEN and rounding.FORMAT == INT8:
        grid = tl.full(x.shape, _INTEGER_GRID, tl.float32)
        return tl.fma(x, inverse, grid).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        return to_codes(x * inverse, rows, columns, rounding)


@triton.jit
def uniform(rounding, rows, columns):
    """Return random numbers in [0, 1) for elements (row, column) of a head.

    They are nested PCG hashes of the seed, the tensor's stream, the row and the column, as
    docs/numerics.md defines.
    """
    key = pcg_hash(pcg_hash(tl.cast(rounding.seed, tl.uint32)) + rounding.STREAM)
    word = pcg_hash(pcg_hash(rows.to(tl.uint32) + key) + columns.to(tl.uint32))
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2**-24


@triton.jit
def pcg_hash(x):
    """Return the PCG hash of uint32 words; see `sagesim.emulator.rounding.pcg_hash`."""
    state = x * 747796405 + 2891336453
    word = ((state >> ((state >> 28) + 4)) ^ state) * 277803737
    return (word >> 22) ^ word


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax(x, AXIS: tl.constexpr):
    """Return the maximum of |x| along an axis, float32; NaN if there is one."""
    if INTERPRETED:  # there, a reduction by a function of one's own is slow
        return largest(magnitude(x), AXIS).to(tl.float32, bitcast=True)
    else:
        return tl.reduce(tl.abs(x), AXIS, _larger)


# div_rn calls a subroutine for operands that are hardly ever met, and divides in a dozen
# instructions otherwise. `map_scale` and `map_inverse` give the same bits, for every amax whose
# quotients are normal numbers: operands/test_operands.py, of the tests, tries every mantissa.
@triton.jit
def map_step(amax):
    """Return amax / 127, also if 127 / amax overflows; NaN if amax is NaN or infinite."""
    quotient = amax * 0.007874015718698502  # 1 / 127, rounded
    remainder = tl.fma(-quotient, 127.0, amax)
    return tl.fma(remainder, 0.007874015718698502, quotient)


@triton.jit
def map_scale(amax):
    """Return amax / 127; 1 if 127 / amax overflows, NaN if amax is NaN or infinite."""
    return tl.where(amax <= _VANISHING, 1.0, map_step(amax))


@triton.jit
def map_inverse(amax):
    """Return 127 / amax; 0 if it overflows, NaN if amax is NaN or infinite."""
    if INTERPRETED:
        guess = 1.0 / tl.where(amax <= _VANISHING, 1.0, amax)
    else:
        guess = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [amax], dtype=tl.float32, is_pure=True, pack=1
        )
    reciprocal = tl.fma(guess, tl.fma(-amax, guess, 1.0), guess)
    quotient = 127.0 * reciprocal
    remainder = tl.fma(-amax, quotient, 127.0)
    inverse = tl.fma(remainder, reciprocal, quotient)
    return tl.where(amax <= _VANISHING, 0.0, inverse)


@triton.jit
def to_int32(x):
    """Round float32 to int32, ties to even. NaN and numbers beyond int32 give any int32."""
    if INTERPRETED:
        size = tl.abs(x)
        size = tl.where(size < 8388608.0, (size + 8388608.0) - 8388608.0, size)  # 2**23
        size = tl.where(size < 2147483648.0, size, 0.0)
        return tl.where(x < 0, -size, size).to(tl.int32)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rni.s32.f32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )
