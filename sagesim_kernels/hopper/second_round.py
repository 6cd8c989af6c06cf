"""The second round of a forward program, for rows that a fixed reference does not fit.

The loop over blocks without a mask has a fixed reference, see `operands.fixed_reference`: the
largest logit of the masked blocks, which come first. A row that fails is stored as such. When all
tiles of a program are finished, a second round computes the failed rows again.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sagesim_kernels.gluon_compat import barrier
from sagesim_kernels.hopper.forward_structures import BARRIER
from sagesim_kernels.hopper.forward_tiles import BLOCK, waves
from sagesim_kernels.operands import MOST_SUM

_FAILED = gl.constexpr(-float("inf"))
"""The logsumexp of a row that failed. No other row has it."""

_NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Rounds(NamedTuple):
    """What the warps of a program tell each other after the first round; both None: no other."""

    failed: Any  #: int32 [consumers, BLOCK] in shared memory, 1 if a row of any tile failed
    done: Any  #: barrier: all consumers have stored `failed`


@gluon.jit
def allocate_rounds(CONSUMERS: gl.constexpr):
    """Return the `Rounds` of a program with two rounds."""
    failed = gl.allocate_shared_memory(gl.int32, [CONSUMERS, BLOCK], _NUMBERS)
    done = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(done, CONSUMERS)
    fence_async_shared()
    return Rounds(failed, done)


@gluon.jit
def has_failed(row_sum, o):
    """Return which rows do not fit the reference.

    row_sum: the sums of P. o: the sums of P V, [rows, channels].
    """
    # A sum of magnitudes is infinite or NaN if one of them is.
    size = gl.convert_layout(gl.sum(gl.abs(o), 1), row_sum.type.layout)
    return ~((row_sum <= MOST_SUM) & (size < float("inf")))


@gluon.jit
def lse2_to_store(row_lse2, failed):
    """Return the logsumexp of each row, or what stands for a row that has failed."""
    return gl.where(failed, _FAILED, row_lse2)


@gluon.jit
def failed_before(lse2_ptrs, is_row):
    """Return which rows failed in the first round, of those where is_row."""
    return gl.load(lse2_ptrs, mask=is_row, other=0.0) == _FAILED


@gluon.jit
def finish_round(rounds, failed, CONSUMER: gl.constexpr):
    """Tell the others which rows of this consumer failed; failed: int32 [BLOCK]."""
    rounds.failed.index(CONSUMER).store(failed)
    barrier()
    mbarrier.arrive(rounds.done, count=1)


@gluon.jit
def has_failed_row(failed):
    """Return whether a row failed, of a consumer; failed: int32 [BLOCK]."""
    return gl.max(failed, 0) > 0


@gluon.jit
def _has_failed_tile(rounds):
    """Return whether a row of any tile of the program failed."""
    CONSUMERS: gl.constexpr = rounds.failed.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    found = False
    for i in gl.static_range(CONSUMERS):
        found = found | has_failed_row(rounds.failed.index(i).load(LAYOUT))
    return found


@gluon.jit
def waves_of_round(rounds, scheduler, ROUND: gl.constexpr):
    """Return how many waves a round has: none in the second one if no row failed."""
    count = waves(scheduler)
    if ROUND == 1:
        mbarrier.wait(rounds.done, 0)
        if not _has_failed_tile(rounds):
            count = count * 0
    return count
