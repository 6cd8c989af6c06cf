"""Steps of the forward's softmax in which P is rounded to codes, and the sums of their product.

Codes of P are 127 P relative to the row's maximum in a block of 64 keys. The exponential includes
this factor times 2^-24, the unit of subnormal float16 numbers: rounded to float16, its bits are the
code. What a row has summed up is relative to a *unit* 2^-level. A row gets a new level when the
maximum of a block is so much greater than that of the level before that sums might overflow, and
keeps it otherwise. So most steps do not rescale what is summed up.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagesim_kernels.hopper.codes_sums import CHUNK
from sagesim_kernels.hopper.forward_masks import exponents, logits_of, upper, upper_max
from sagesim_kernels.hopper.forward_tiles import BLOCK
from sagesim_kernels.hopper.forward_warps import partial_sums
from sagesim_kernels.operands import LOG2_127, attends

CODE_UNIT = gl.constexpr(2.0**-24)
"""What a code stands for in the exponentials."""

_LOG2_ONE = gl.constexpr(LOG2_127 - 24)
"""log2 of the exponential at the maximum of a block."""

_NEW_WEIGHT = gl.constexpr(8)
_GROWTH = gl.constexpr(6)
"""The weight of a block that gives its row a new level is 2^-_NEW_WEIGHT. Maxima that are greater
by up to _GROWTH in base 2 keep the level. So a weight is at most 1/4, and no sum is larger than 32
times the sum of the magnitudes of the terms of P V."""

_TO_CODES = gl.constexpr("""{
.reg .b32 low, high;
cvt.rn.f16x2.f32 low, $2, $1;
cvt.rn.f16x2.f32 high, $4, $3;
prmt.b32 $0, low, high, 0x6420;
}""")

_NUMBERS = BLOCK.value * CHUNK.value // 128
"""Numbers of a chunk that a thread holds: two of each of two rows by turns."""

_RESCALE = gl.constexpr(
    "\n".join(
        [
            "{",
            ".reg .pred p, q;",
            f"setp.neu.f32 p, ${2 * _NUMBERS}, 1.0;",
            f"setp.neu.or.f32 p, ${2 * _NUMBERS + 2}, 1.0, p;",
            "vote.sync.any.pred q, p, -1;",
            "@!q bra.uni DONE;",
            *(f"mul.rn.f32 ${i}, ${i}, ${2 * _NUMBERS + i};" for i in range(_NUMBERS)),
            "DONE:",
            "}",
        ]
    )
)
_RESCALE_OPERANDS = gl.constexpr(
    ",".join(["=&f"] * _NUMBERS + [f"{i}" for i in range(_NUMBERS)] + ["f"] * _NUMBERS)
)
_RESCALE_PACK = gl.constexpr(_NUMBERS)

SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK.value, 32]))
"""Layout of the sums of a chunk [queries, channels]."""

SUM_ROWS = gl.constexpr(gl.SliceLayout(1, SUMS.value))
"""Layout of one number for each row of the sums, a query."""

SUM_COLUMNS = gl.constexpr(gl.SliceLayout(0, SUMS.value))
"""Layout of one number for each column of the sums, a channel."""


@gluon.jit
def _left_codes(p):
    """Return the codes of exponentials [queries, keys] as a left operand.

    Keys are in `operands.in_register_order`, so that no thread exchanges codes with another.
    """
    p = p.reshape([BLOCK, 4, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([BLOCK, BLOCK])
    p = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS, 4), assert_trivial=True)
    return gl.inline_asm_elementwise(_TO_CODES, "=r,f,f,f,f", [p], gl.int8, is_pure=True, pack=4)


@gluon.jit
def codes_step(MASKED: gl.constexpr, s, factor, level, keys, mask):
    """Return what one block of keys adds to the sums of its queries.

    Args:
        MASKED: whether a query may not attend to a key.
        s: S of the block without the row's factor, see `apply_key_scales`.
        factor: of each query, not negative.
        level: of each query before the block; infinite before the first key.
        keys: see `key_indices`.
        mask: `Mask`.

    Returns:
        The codes of P as a left operand. The row sums of P in four parts, see `partial_sums`, not
        weighted. The weight of the codes and of their row sums. The new level. The factor that
        makes former sums relative to the new level.
    """
    if MASKED:
        x = logits_of(s, factor)
        is_attended = attends(mask.queries[:, None], keys[None, :], mask.n_k, mask.offset)
        x = gl.where(is_attended, x, -float("inf"))
        block_max = gl.max(x, 1)
        is_empty = block_max == -float("inf")
        block_level = _LOG2_ONE - upper(gl.where(is_empty, 0.0, block_max))
        p = gl.exp2(x + block_level[:, None])
        block_level = gl.where(is_empty, float("inf"), block_level)
    else:
        minus_level = upper_max(s, factor) - _LOG2_ONE
        p = gl.exp2(exponents(s, factor, minus_level))
        block_level = -minus_level
    is_new = block_level - level < _NEW_WEIGHT - _GROWTH
    new_level = gl.where(is_new, block_level - _NEW_WEIGHT, level)
    finite_level = new_level
    if MASKED:
        finite_level = gl.where(new_level == float("inf"), 0.0, new_level)
    weight = gl.exp2(finite_level - block_level)
    shrink = gl.exp2(finite_level - level)
    return _left_codes(p), partial_sums(p), weight, new_level, shrink


@gluon.jit
def add_sums(total, sums, weight, scales, stage, C: gl.constexpr):
    """Return total plus the sums of chunk C times the weights of rows and the scales of channels.

    weight: times the scale of V, if channels share one. scales: of V in shared memory, for each
    stage; or None if channels share one.
    """
    sums = sums.to(gl.float32)
    if scales is None:
        return gl.fma(sums, weight[:, None].broadcast_to(sums.shape), total)
    else:
        column = scales.index(stage).slice(C * CHUNK, CHUNK).load(SUM_COLUMNS)[None, :]
        return gl.fma(sums * weight[:, None], column.broadcast_to(total.shape), total)


@gluon.jit
def rescaled(totals, shrink):
    """Return totals, chunks [queries, CHUNK], times the factor of each query.

    A warp of which all factors are 1 skips the multiplication, which changes no bit.
    """
    result = ()
    for c in gl.static_range(len(totals)):
        factors = shrink[:, None].broadcast_to(totals[c].shape)
        result += (
            gl.inline_asm_elementwise(
                _RESCALE,
                _RESCALE_OPERANDS,
                [totals[c], factors],
                gl.float32,
                is_pure=False,
                pack=_RESCALE_PACK,
            ),
        )
    return result


@gluon.jit
def joined(left, right):
    """Return two chunks of channels as one tensor [queries, channels]."""
    return gl.join(left, right).permute([0, 2, 1]).reshape([BLOCK, 2 * CHUNK])
