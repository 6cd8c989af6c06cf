"""Shared memory for the queries of a step of the backward, and the copies to it."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from sagesim_kernels.ampere.device import (
    BLOCK,
    VECTOR,
    VECTORS,
    copy_channels,
    copy_scales,
    copy_tokens,
    copy_vectors,
    rows_layout,
)
from sagesim_kernels.gluon_compat import reinterpret
from sagesim_kernels.operands import head_pointers, live_queries, stored_start_of

STATS = gl.constexpr(4)
"""How many numbers each query has; see `preparation.start_rows`."""


class QueryBuffers(NamedTuple):
    """Shared memory for the queries of a step; the first axis is the stage."""

    q: Any
    do: Any
    q_right: Any
    do_right: Any
    q_scales: Any  #: of q_right's channels, if each has its own
    do_scales: Any  #: of do_right's channels, likewise
    row_stats: Any  #: the first axis has `STATS` numbers of each stage


@gluon.jit
def right_buffer(x, other, BITS: gl.constexpr):
    """Allocate shared memory for a right operand of queries, unless it is in `other`.

    other: the buffer [stages, queries, channels] of the left operand.
    """
    STAGES: gl.constexpr = other.shape[0]
    QUERIES: gl.constexpr = other.shape[1]
    CHANNELS: gl.constexpr = other.shape[2]
    if BITS == 8:
        return gl.allocate_shared_memory(
            gl.int8, [STAGES, CHANNELS, QUERIES], rows_layout(QUERIES, 8)
        )
    elif BITS == 16:
        DTYPE: gl.constexpr = x.ptr.dtype.element_ty
        return gl.allocate_shared_memory(
            DTYPE, [STAGES, QUERIES, CHANNELS], rows_layout(CHANNELS, 16)
        )
    else:
        return other


@gluon.jit
def scale_buffer(x, other, STAGES: gl.constexpr, CHANNELS: gl.constexpr):
    """Allocate shared memory for the scales of channels if each has its own; else return other."""
    if x.BY_CHANNEL:
        return gl.allocate_shared_memory(gl.float32, [STAGES, CHANNELS], VECTOR)
    else:
        return other


@gluon.jit
def _copy_right(
    x, base, scales, first, lowest, last, buffer, scale_buffer, stage, BITS: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """Start to copy the queries of a step of a right operand, if it has a buffer of its own."""
    if BITS == 16:
        copy_tokens(x, base, first, lowest, last, buffer.index(stage))
    elif BITS == 8:
        copy_channels(x, base, first, buffer.index(stage))
        copy_scales(x, scales, first, scale_buffer, stage, D)


@gluon.jit
def copy_queries(
    q, do, q_right, do_right, row_stats, dq_sums, lengths, buffers, b, h, block, stage, sizes,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Start to copy the queries of a step to a stage of `QueryBuffers`.

    Operands are parameters of their own, because Triton 3.6 loses the constexprs of nested tuples.
    """
    cu, n = lengths.cu_q, lengths.n_q
    lowest, last = live_queries(lengths, b)
    first = block * CONFIG.queries
    q_base, _q_scales = head_pointers(q, cu, n, b, h)
    copy_tokens(q, q_base, first, lowest, last, buffers.q.index(stage))
    do_base, _do_scales = head_pointers(do, cu, n, b, h)
    copy_tokens(do, do_base, first, lowest, last, buffers.do.index(stage))
    qr_base, qr_scales = head_pointers(q_right, cu, n, b, h)
    _copy_right(
        q_right, qr_base, qr_scales, first, lowest, last, buffers.q_right, buffers.q_scales,
        stage, CONFIG.q_right, sizes.D,
    )  # fmt: skip
    dor_base, dor_scales = head_pointers(do_right, cu, n, b, h)
    _copy_right(
        do_right, dor_base, dor_scales, first, lowest, last, buffers.do_right,
        buffers.do_scales, stage, CONFIG.do_right, sizes.DV,
    )  # fmt: skip
    of_sequence = row_stats + (h.to(gl.int64) * dq_sums.tokens + stored_start_of(cu, n, b)) * STATS
    step = block & (BLOCK // CONFIG.queries - 1)  # which step of its 64 queries
    at = (block - step) * (CONFIG.queries * STATS) + step * CONFIG.queries
    stats = reinterpret(
        buffers.row_stats, gl.float32, [CONFIG.stages, STATS, CONFIG.queries], VECTORS
    )
    copy_vectors(of_sequence + at, BLOCK, stats.index(stage))
    async_copy.commit_group()
