"""Masks in a kernel: which keys a query attends to, and which blocks a loop has to visit."""

from __future__ import annotations

import triton
import triton.language as tl

from sagesim_kernels.operands.layout import length_of


@triton.jit
def causal_offset(lengths, b):
    """Return the offset of the mask: query i of sequence b attends to keys 0..i + offset.

    Without a mask the offset is the number of keys, so that every query attends to all of them.
    """
    if lengths.LOWER_RIGHT:
        return length_of(lengths.cu_k, lengths.n_k, b) - length_of(lengths.cu_q, lengths.n_q, b)
    elif lengths.IS_CAUSAL:
        return tl.cast(0, tl.int32)
    else:
        return length_of(lengths.cu_k, lengths.n_k, b)


@triton.jit
def live_queries(lengths, b):
    """Return first and n: queries first..n of sequence b attend to a key, earlier ones to none."""
    n = length_of(lengths.cu_q, lengths.n_q, b)
    if lengths.IS_CAUSAL:
        return tl.maximum(-causal_offset(lengths, b), 0), n
    else:
        return tl.cast(0, tl.int32), n


@triton.jit
def live_keys(lengths, b):
    """Return n: keys 0..n of sequence b are attended to, later ones are not."""
    n = length_of(lengths.cu_k, lengths.n_k, b)
    if lengths.IS_CAUSAL:
        n_q = length_of(lengths.cu_q, lengths.n_q, b)
        return tl.maximum(tl.minimum(n, n_q + causal_offset(lengths, b)), 0)
    else:
        return n


@triton.jit
def attends(queries, keys, n_k, offset):
    """Return whether each query attends to each key; queries and keys broadcast."""
    return (keys < n_k) & (keys <= queries + offset)


@triton.jit
def key_loop_bounds(first, TILE: tl.constexpr, BLOCK: tl.constexpr, n_k, offset):
    """Return the bounds of the two loops over keys, for queries first..first + TILE.

    The first bound is the end of the key blocks that need no mask: every query attends to all of
    their keys. The second is the end of the keys that any of the queries attends to.
    """
    by_all = tl.maximum(tl.minimum(n_k, first + offset + 1), 0)
    # This 0 is opaque to the compiler. If Triton can prove that a loop is empty, as it can for a
    # single token or tile, then ptxas 12.8 and 12.9 crash on the code that it generates.
    by_all += tl.program_id(1)
    return by_all // BLOCK * BLOCK, tl.minimum(n_k, first + TILE + offset)


@triton.jit
def query_loop_bounds(first, TILE: tl.constexpr, BLOCK: tl.constexpr, n_k, offset, first_live, n_q):
    """Return the bounds of the two loops over queries, for keys first..first + TILE.

    The first bound is the start of the first query block that attends to any of the keys. From the
    second bound on, every query attends to all of the keys; it is n_q if there is no such query.
    """
    by_any = tl.maximum(first_live, first - offset)
    by_all = tl.maximum(first_live, first + TILE - 1 - offset)
    if first + TILE > n_k:
        by_all = n_q
    return by_any // BLOCK * BLOCK, tl.minimum(tl.cdiv(by_all, BLOCK) * BLOCK, n_q)
