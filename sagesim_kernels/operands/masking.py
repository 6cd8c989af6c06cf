"""Masks in a kernel: which keys a query attends to, and which blocks a loop has to visit.

Query i of a sequence attends to key j if i + `lowest_diagonal` <= j <= i + `causal_offset`, and j
is no padding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sagesim_kernels.operands.layout import length_of


@triton.jit
def _used_keys(lengths, b):
    """Return the keys of sequence b, without the padding that seqused_k excludes."""
    n = length_of(lengths.cu_k, lengths.n_k, b)
    if lengths.seqused_k is not None:
        used = tl.load(lengths.seqused_k + b)  # in 64 bits it may be more than an int32 holds
        n = tl.minimum(tl.maximum(used, 0), n).to(tl.int32)
    return n


@triton.jit
def _alignment(lengths, b):
    """Return the key on the diagonal of query 0."""
    if lengths.LOWER_RIGHT:
        return length_of(lengths.cu_k, lengths.n_k, b) - length_of(lengths.cu_q, lengths.n_q, b)
    else:
        return tl.cast(0, tl.int32)


@triton.jit
def causal_offset(lengths, b):
    """Return the last diagonal: query i of sequence b attends to no key after i + offset.

    Without a limit the offset is the number of keys, so that every query attends to all of them.
    """
    if lengths.IS_CAUSAL:
        offset = _alignment(lengths, b)
        if lengths.right is not None:
            offset += lengths.right
        return offset
    else:
        return length_of(lengths.cu_k, lengths.n_k, b)


@triton.jit
def lowest_diagonal(lengths, b):
    """Return the first diagonal: query i of sequence b attends to no key before i + diagonal."""
    if lengths.left is not None:
        return _alignment(lengths, b) - lengths.left
    else:
        return -length_of(lengths.cu_q, lengths.n_q, b)


@triton.jit
def live_queries(lengths, b):
    """Return first and end: no query of sequence b outside of first..end attends to a key.

    Every one of these attends to a key unless there is a key mask; see `is_live_query`.
    """
    n = length_of(lengths.cu_q, lengths.n_q, b)
    first = tl.cast(0, tl.int32)
    if lengths.IS_CAUSAL:
        first = tl.maximum(-causal_offset(lengths, b), 0)
    if lengths.left is not None:
        n = tl.maximum(tl.minimum(n, _used_keys(lengths, b) - lowest_diagonal(lengths, b)), 0)
    if lengths.seqused_k is not None:
        n = tl.where(_used_keys(lengths, b) > 0, n, 0)
    return first, n


@triton.jit
def live_keys(lengths, b):
    """Return n: no query attends to keys of sequence b from n on; see `first_live_key`."""
    n = _used_keys(lengths, b)
    if lengths.IS_CAUSAL:
        n_q = length_of(lengths.cu_q, lengths.n_q, b)
        return tl.maximum(tl.minimum(n, n_q + causal_offset(lengths, b)), 0)
    else:
        return n


@triton.jit
def first_live_key(lengths, b):
    """Return n: no query attends to keys of sequence b before n.

    Queries attend to all keys from n to `live_keys` unless there is a key mask; see `is_live_key`.
    """
    if lengths.left is not None:
        return tl.maximum(lowest_diagonal(lengths, b), 0)
    else:
        return tl.cast(0, tl.int32)


@triton.jit
def key_mask_of(lengths, b):
    """Return a pointer to the key mask of sequence b, int8 [n_k], if there are key masks."""
    return lengths.key_mask + b.to(tl.int64) * lengths.n_k


@triton.jit
def is_unmasked(lengths, b, keys, n_k):
    """Return whether the key mask leaves these keys of 0..n_k."""
    at = key_mask_of(lengths, b) + keys
    return tl.load(at, mask=keys < n_k, other=0) != 0


@triton.jit
def is_live_key(lengths, b, keys):
    """Return whether a query of sequence b attends to each key."""
    last = live_keys(lengths, b)
    live = (keys >= first_live_key(lengths, b)) & (keys < last)
    if lengths.key_mask is not None:
        live = live & is_unmasked(lengths, b, keys, last)
    return live


@triton.jit
def unmasked_keys(lengths, b, first, end):
    """Return how many of the keys first..end the key mask leaves; 0 if end < first."""
    row = lengths.key_counts + b.to(tl.int64) * (lengths.n_k + 1)  # of the keys before each key
    has_range = end > first
    until_end = tl.load(row + end, mask=has_range, other=0)
    return until_end - tl.load(row + first, mask=has_range, other=0)


@triton.jit
def keys_of(lengths, b, queries):
    """Return the number of keys that each query attends to."""
    end = tl.minimum(_used_keys(lengths, b), queries + causal_offset(lengths, b) + 1)
    first = tl.maximum(queries + lowest_diagonal(lengths, b), 0)
    if lengths.key_mask is not None:
        return unmasked_keys(lengths, b, first, end)
    else:
        return tl.maximum(end - first, 0)


@triton.jit
def is_live_query(lengths, b, queries):
    """Return whether each query of sequence b attends to a key."""
    first, last = live_queries(lengths, b)
    live = (queries >= first) & (queries < last)
    if lengths.key_mask is not None:
        live = live & (keys_of(lengths, b, queries) > 0)
    return live


@triton.jit
def attends(queries, keys, n_k, offset):
    """Return whether each query attends to each key; queries and keys broadcast.

    This is the mask without a limit on the left and without a key mask.
    """
    return (keys < n_k) & (keys <= queries + offset)


@triton.jit
def attends_in(lengths, b, queries, keys, n_k, offset):
    """Return whether each query attends to each key, under every mask; both broadcast."""
    visible = attends(queries, keys, n_k, offset)
    if lengths.left is not None:
        visible = visible & (keys >= queries + lowest_diagonal(lengths, b))
    if lengths.key_mask is not None:
        visible = visible & is_unmasked(lengths, b, keys, n_k)
    return visible


@triton.jit
def key_loop_bounds(first, TILE: tl.constexpr, BLOCK: tl.constexpr, n_k, offset):
    """Return the bounds of the two loops over keys, for queries first..first + TILE.

    The first bound is the end of the key blocks that need no mask: every query attends to all of
    their keys. The second is the end of the keys that any of the queries attends to. There is no
    limit on the left.
    """
    by_all = tl.maximum(tl.minimum(n_k, first + offset + 1), 0)
    # This 0 is opaque to the compiler. If Triton can prove that a loop is empty, as it can for a
    # single token or tile, then ptxas 12.8 and 12.9 crash on the code that it generates.
    by_all += tl.program_id(1)
    return by_all // BLOCK * BLOCK, tl.minimum(n_k, first + TILE + offset)


@triton.jit
def key_loops(lengths, b, first, TILE: tl.constexpr, BLOCK: tl.constexpr, n_k, offset):
    """Return begin, whole, whole_end and end of the loops over keys, for a tile of queries.

    All queries first..first + TILE attend to all keys of whole..whole_end, but for those that a key
    mask excludes. Some of them attend to some of begin..whole and whole_end..end. All but `end` are
    multiples of BLOCK. Loops that apply a key mask to every block run from begin to end.
    """
    whole_end, end = key_loop_bounds(first, TILE, BLOCK, n_k, offset)
    begin = tl.cast(0, tl.int32)
    whole = tl.cast(0, tl.int32)
    if lengths.left is not None:
        lowest = lowest_diagonal(lengths, b)
        begin = tl.maximum(first + lowest, 0) // BLOCK * BLOCK
        whole = tl.cdiv(tl.maximum(first + TILE - 1 + lowest, 0), BLOCK) * BLOCK
        if whole >= whole_end:
            whole = begin
            whole_end = begin
    return begin, whole, whole_end, end


@triton.jit
def key_loops_without_padding(
    lengths, b, first, TILE: tl.constexpr, BLOCK: tl.constexpr, n_k, offset
):
    """Return what `key_loops` does, for the keys that a key mask leaves.

    None of whole..whole_end is padding. Of the others some may be.
    """
    begin, whole, whole_end, end = key_loops(lengths, b, first, TILE, BLOCK, n_k, offset)
    if lengths.key_mask is not None:
        run = lengths.key_runs + b * 3
        first_key = tl.load(run)
        begin = tl.maximum(begin, first_key // BLOCK * BLOCK)
        whole = tl.maximum(whole, tl.cdiv(first_key, BLOCK) * BLOCK)
        whole_end = tl.minimum(whole_end, tl.load(run + 1) // BLOCK * BLOCK)
        end = tl.minimum(end, tl.load(run + 2))
    return begin, whole, whole_end, end


@triton.jit
def query_loop_bounds(first, TILE: tl.constexpr, BLOCK: tl.constexpr, n_k, offset, first_live, n_q):
    """Return the bounds of the two loops over queries, for keys first..first + TILE.

    The first bound is the start of the first query block that attends to any of the keys. From the
    second bound on, every query attends to all of the keys; it is n_q if there is no such query.
    There is no limit on the left.
    """
    by_any = tl.maximum(first_live, first - offset)
    by_all = tl.maximum(first_live, first + TILE - 1 - offset)
    if first + TILE > n_k:
        by_all = n_q
    return by_any // BLOCK * BLOCK, tl.minimum(tl.cdiv(by_all, BLOCK) * BLOCK, n_q)


@triton.jit
def part_of(parts, PART: tl.constexpr):
    """Return begin and end of part 0, 1 or 2 of a loop; part 1 alone needs no mask.

    parts: has the bounds begin, whole, whole_end and end, as `query_loops` returns them.
    """
    if PART == 0:
        return parts.begin, parts.whole
    elif PART == 1:
        return parts.whole, parts.whole_end
    else:
        return parts.whole_end, parts.end


@triton.jit
def query_loops(
    lengths, b, first, TILE: tl.constexpr, BLOCK: tl.constexpr, n_k, offset, first_live, n_q
):
    """Return begin, whole, whole_end and end of the loops over queries, for a tile of keys.

    All queries of whole..whole_end attend to all keys first..first + TILE, but for those that a key
    mask excludes. Some of begin..whole and whole_end..end attend to some of the keys. All but `end`
    are multiples of BLOCK, or equal to it. Loops over keys that seqused_k excludes are empty.
    """
    begin, whole = query_loop_bounds(first, TILE, BLOCK, n_k, offset, first_live, n_q)
    end = n_q
    whole_end = n_q
    if lengths.left is not None:
        lowest = lowest_diagonal(lengths, b)
        end = tl.minimum(n_q, tl.maximum(first + TILE - lowest, 0))
        whole_end = tl.maximum(tl.minimum(n_q, first - lowest + 1), 0) // BLOCK * BLOCK
        if whole >= whole_end:
            whole = begin
            whole_end = begin
    if lengths.seqused_k is not None:
        has_keys = first < n_k
        end = tl.where(has_keys, end, begin)
        whole = tl.where(has_keys, whole, begin)
        whole_end = tl.where(has_keys, whole_end, begin)
    return begin, whole, whole_end, end
