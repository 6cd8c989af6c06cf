"""The parts of a loop over keys or queries, and the mask of a step.

Blocks of which every entry is masked are left out, and some of the others need no mask.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagesim_kernels.ampere.device import BLOCK
from sagesim_kernels.operands import (
    is_unmasked,
    key_loops_without_padding,
    lowest_diagonal,
    query_loops,
    unmasked_keys,
)

PARTS = gl.constexpr(3)
"""Parts of a loop over keys, or over queries. The one in the middle needs no mask."""


class Parts(NamedTuple):
    """Where the parts of a loop begin and end.

    Parts of a loop over keys: see `operands.key_loops`, in tokens. Over queries: see
    `operands.query_loops`, in steps.
    """

    begin: Any
    whole: Any
    whole_end: Any
    end: Any


@gluon.jit
def key_parts(lengths, b, first, ROWS: gl.constexpr, n_k, offset):
    """Return the `Parts` of the keys of queries first..first + ROWS of sequence b."""
    begin, whole, whole_end, end = key_loops_without_padding(
        lengths, b, first, ROWS, BLOCK, n_k, offset
    )
    if lengths.key_mask is not None:
        is_empty = whole >= whole_end
        whole = gl.where(is_empty, begin, whole)
        whole_end = gl.where(is_empty, begin, whole_end)
    return Parts(begin, whole, whole_end, end)


@gluon.jit
def visible_keys(lengths, b, queries, end_of_keys, keys, n_k):
    """Return whether each query attends to each key, [queries, keys].

    end_of_keys: of each query; it attends to none from there on. The caller computes it once.
    """
    visible = keys[None, :] < end_of_keys[:, None]
    if lengths.left is not None:
        visible = visible & (keys[None, :] >= (queries + lowest_diagonal(lengths, b))[:, None])
    if lengths.key_mask is not None:
        visible = visible & is_unmasked(lengths, b, keys, n_k)[None, :]
    return visible


@gluon.jit
def query_parts(
    lengths, b, first, KEYS: gl.constexpr, STEP: gl.constexpr, n_k, offset, first_live, n_q
):
    """Return the `Parts` of the queries of keys first..first + KEYS; see `operands.query_loops`.

    A tile that a key mask leaves in part needs a mask in every step.
    """
    begin, whole, whole_end, end = query_loops(
        lengths, b, first, KEYS, STEP, n_k, offset, first_live, n_q
    )
    begin = begin // STEP
    whole = (whole + STEP - 1) // STEP
    whole_end = (whole_end + STEP - 1) // STEP
    end = (end + STEP - 1) // STEP
    if lengths.key_mask is not None:
        live = unmasked_keys(lengths, b, first, gl.minimum(first + KEYS, n_k))
        end = gl.where(live > 0, end, begin)
        whole = gl.where(live == KEYS, whole, end)
        whole_end = gl.where(live == KEYS, whole_end, end)
    return Parts(begin, whole, whole_end, end)


@gluon.jit
def query_limits(lengths, b, keys, n_k, offset):
    """Return the first and the last query that may attend to each key.

    The first query of a key that no query attends to is behind all queries.
    """
    is_live = keys < n_k
    if lengths.key_mask is not None:
        is_live = is_live & is_unmasked(lengths, b, keys, n_k)
    first_query = gl.where(is_live, keys - offset, 0x7FFFFFFF)
    return first_query, keys - lowest_diagonal(lengths, b)


@gluon.jit
def visible_queries(lengths, queries, first_query, last_query):
    """Return whether each query attends to each key, [keys, queries]; see `query_limits`."""
    visible = queries[None, :] >= first_query[:, None]
    if lengths.left is not None:
        visible = visible & (queries[None, :] <= last_query[:, None])
    return visible
