"""Steps of the forward's softmax in which P is rounded to codes, and the sums of their product.

Exponentials include a factor, and sums are relative to levels: see `operands.levels`.
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
from sagesim_kernels.operands import LOG2_ONE, attends, exponential_codes, next_level
from sagesim_kernels.operands import rescaled as rescaled_numbers
from sagesim_kernels.partial_sums import partial_sums

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
    return exponential_codes(p)


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
        block_level = LOG2_ONE - upper(gl.where(is_empty, 0.0, block_max))
        p = gl.exp2(x + block_level[:, None])
        block_level = gl.where(is_empty, float("inf"), block_level)
    else:
        minus_level = upper_max(s, factor) - LOG2_ONE
        p = gl.exp2(exponents(s, factor, minus_level))
        block_level = -minus_level
    weight, new_level, shrink = next_level(block_level, level, MASKED)
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
        result += (rescaled_numbers(totals[c], factors),)
    return result


@gluon.jit
def joined(left, right):
    """Return two chunks of channels as one tensor [queries, channels]."""
    return gl.join(left, right).permute([0, 2, 1]).reshape([BLOCK, 2 * CHUNK])
