"""Levels of the rows of a forward that rounds P to codes.

Codes of P are 127 P relative to the row's maximum in a block of 64 keys. The exponential includes
this factor times 2^-24, the unit of subnormal float16 numbers: rounded to float16, its bits are the
code. What a row has summed up is relative to a *unit* 2^-level. A row gets a new level when the
maximum of a block is so much greater than that of the level before that sums might overflow, and
keeps it otherwise. So most steps do not rescale what is summed up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sagesim_kernels.operands.rounding import LOG2_127

CODE_UNIT = tl.constexpr(2.0**-24)
"""What a code stands for in the exponentials."""

LOG2_ONE = tl.constexpr(LOG2_127 - 24)
"""log2 of the exponential at the maximum of a block."""

_NEW_WEIGHT = tl.constexpr(8)
_GROWTH = tl.constexpr(6)
"""The weight of a block that gives its row a new level is 2^-_NEW_WEIGHT. Maxima that are greater
by up to _GROWTH in base 2 keep the level. So a weight is at most 1/4, and no sum is larger than 32
times the sum of the magnitudes of the terms of P V."""

_TO_CODES = tl.constexpr("""{
.reg .b32 low, high;
cvt.rn.f16x2.f32 low, $2, $1;
cvt.rn.f16x2.f32 high, $4, $3;
prmt.b32 $0, low, high, 0x6420;
}""")

_NUMBERS = 32
"""Numbers that `rescaled` multiplies at once: two of each of two rows by turns."""

_RESCALE = tl.constexpr(
    "\n".join(
        [
            "{",
            ".reg .pred p, q;",
            f"setp.neu.f32 p, ${2 * _NUMBERS}, 0f3F800000;",
            f"setp.neu.or.f32 p, ${2 * _NUMBERS + 2}, 0f3F800000, p;",
            "vote.sync.any.pred q, p, -1;",
            "@!q bra.uni DONE;",
            *(f"mul.rn.f32 ${i}, ${i}, ${2 * _NUMBERS + i};" for i in range(_NUMBERS)),
            "DONE:",
            "}",
        ]
    )
)
_RESCALE_OPERANDS = tl.constexpr(
    ",".join(["=&f"] * _NUMBERS + [f"{i}" for i in range(_NUMBERS)] + ["f"] * _NUMBERS)
)
_RESCALE_PACK = tl.constexpr(_NUMBERS)


@triton.jit
def exponential_codes(p):
    """Return the codes of exponentials, int8; see `LOG2_ONE`."""
    return tl.inline_asm_elementwise(_TO_CODES, "=r,f,f,f,f", [p], tl.int8, is_pure=True, pack=4)


@triton.jit
def next_level(block_level, level, MAY_BE_EMPTY: tl.constexpr):
    """Return the weights of a block's codes and row sums, the new levels, and `shrink`.

    shrink is the factor that makes former sums relative to the new level.

    Args:
        block_level: `LOG2_ONE` less the maximum of each row in the block; infinite without a key.
        level: of each row before the block; infinite before its first key.
        MAY_BE_EMPTY: whether block_level may be infinite.
    """
    is_new = block_level - level < _NEW_WEIGHT - _GROWTH
    new_level = tl.where(is_new, block_level - _NEW_WEIGHT, level)
    finite_level = new_level
    if MAY_BE_EMPTY:
        finite_level = tl.where(new_level == float("inf"), 0.0, new_level)
    weight = tl.exp2(finite_level - block_level)
    shrink = tl.exp2(finite_level - level)
    return weight, new_level, shrink


@triton.jit
def rescaled(total, factors):
    """Return total * factors, of one shape, in which a thread holds numbers of two rows by turns.

    A warp of which all factors are 1 skips the multiplication, which changes no bit.
    """
    return tl.inline_asm_elementwise(
        _RESCALE, _RESCALE_OPERANDS, [total, factors], tl.float32, is_pure=False, pack=_RESCALE_PACK
    )
