"""Device functions that several kernels share: codes, scales, products and random numbers.

A kernel is compiled without fusing multiplications into additions (see `LAUNCH`), so that every
float32 operation below is rounded where it is written, on every GPU and by every compiler.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import triton
import triton.language as tl

from sagesim.spec import AttentionSpec, RoundingMode

LAUNCH: Final[dict[str, Any]] = {"enable_fp_fusion": False}
"""Options of every launch."""

LOG2_E: Final = 1.4426950408889634
LN_2: Final = 0.6931471805599453
LOG2_127: Final = 6.988684686772166


class Rounding(NamedTuple):
    """A spec's rounding as a kernel sees it, for one tensor."""

    MODE: Any  #: constexpr, one of `ROUNDINGS`
    seed: Any
    STREAM: Any  #: constexpr, the tensor's stream of random numbers

    @classmethod
    def of(cls, spec: AttentionSpec, tensor: str) -> Rounding:
        """The spec's rounding of a tensor named as in `sagesim.spec.OPERANDS`."""
        mode = tl.constexpr(ROUNDINGS[spec.rounding.mode])
        if spec.rounding.seed is None:
            return cls(mode, None, None)
        return cls(mode, spec.rounding.seed, tl.constexpr(STREAMS[tensor]))


STREAMS: Final = {"q": 0, "k": 1, "v": 2, "do": 3, "p": 4, "ds": 5}
"""The stream of random numbers that each tensor's stochastic rounding draws from."""

ROUNDINGS: Final = {mode: index for index, mode in enumerate(RoundingMode)}
"""The number by which a kernel knows a rounding mode."""

_HALF_EVEN = tl.constexpr(ROUNDINGS[RoundingMode.HALF_EVEN])
_HALF_AWAY = tl.constexpr(ROUNDINGS[RoundingMode.HALF_AWAY])

# Adding 1.5 * 2**23 leaves the nearest integer, ties to even, in the low bits of a float32.
_INTEGER_GRID = tl.constexpr(12582912.0)

# The largest amax whose 127 / amax overflows to infinity.
_VANISHING = tl.constexpr(127.0 * 2.0**-128)


@triton.jit
def magnitude(x):
    """|x| as an int32 that orders as magnitudes do, with NaN above everything: a maximum of these
    lets no NaN get lost."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_and_inverse(amax):
    """amax, as of `magnitude` -> amax / 127 and 127 / amax, each one correctly rounded division.

    1 and 0 where amax is so small that its inverse overflows.
    """
    amax = amax.to(tl.float32, bitcast=True)
    vanishing = amax <= _VANISHING
    amax = tl.where(vanishing, 127.0, amax)
    code_max = tl.full(amax.shape, 127.0, tl.float32)
    scale = tl.math.div_rn(amax, code_max)
    inverse = tl.math.div_rn(code_max, amax)
    return scale, tl.where(vanishing, 0.0, inverse)


@triton.jit
def row_sums(x):
    """The sum of each row of x [m, n], float32, rounded once.

    Added up in float64, since the order of a sum follows the layout that the compiler chose for
    x, and that the strides it was loaded with.
    """
    return tl.sum(x.to(tl.float64), 1).to(tl.float32)


@triton.jit
def to_codes(y, rows, columns, rounding):
    """Round y, in units of codes and at most 127 up to rounding, to int8.

    rows, columns: the elements' places in their head, broadcastable to y.
    rounding: a `Rounding`.
    """
    if rounding.MODE == _HALF_EVEN:
        return (y + _INTEGER_GRID).to(tl.int32, bitcast=True).to(tl.int8)
    elif rounding.MODE == _HALF_AWAY:
        size = tl.abs(y)
        whole = tl.floor(size)
        whole += tl.where(size - whole >= 0.5, 1.0, 0.0)  # size - whole is exact: ties are seen
        return tl.where(y < 0, -whole, whole).to(tl.int8)
    else:
        below = tl.floor(y)
        up = y - below > uniform(rounding, rows, columns)
        codes = below + tl.where(up, 1.0, 0.0)
        return tl.minimum(tl.maximum(codes, -127.0), 127.0).to(tl.int8)


@triton.jit
def uniform(rounding, rows, columns):
    """Random numbers in [0, 1) of the elements (row, column) of a head: PCG hashes of the seed, the
    tensor's stream, the row and the column, nested, as docs/numerics.md says."""
    seed = tl.full((1, 1), 0, tl.uint32) + tl.cast(rounding.seed, tl.uint32)
    key = pcg_hash(pcg_hash(seed) + rounding.STREAM)
    word = pcg_hash(pcg_hash(rows.to(tl.uint32) + key) + columns.to(tl.uint32))
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2**-24


@triton.jit
def pcg_hash(x):
    """The PCG hash of uint32 words; see `sagesim.rounding.pcg_hash`."""
    state = x * 747796405 + 2891336453
    word = ((state >> ((state >> 28) + 4)) ^ state) * 277803737
    return (word >> 22) ^ word
