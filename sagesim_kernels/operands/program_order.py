"""The order of programs that own a tile each, so that the last of them end together.

Under a mask tiles take unequal time. A program starts when another one ends. If the tiles of a head
follow each other, the last head's longest tile ends long after all others. So the programs compute
the tiles of a group of heads at a time, the longest first. With fewer heads in a group more of
their tokens stay in the cache; with more heads the multiprocessors are busy to the end. The host
simulates which number is enough.

The host does not know the lengths of packed sequences; see `packed_tiles`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

BLOCK: Final = 64
"""Keys of a step of a forward, and queries of a step of a backward."""

OVERHEAD: Final = 4
"""The time, in steps, that a tile needs for its first loads and for storing its results."""

MANY_WAVES: Final = 64
"""With more tiles per program at a time than this, every number of heads is balanced."""

_SHARING: Final = 4
"""Programs of one head that should run at the same time: each token that one of them loads, and
each sum of dQ, is in the cache for the others."""

CACHE: Final = 2**25
"""Bytes of tokens that stay in the L2 cache beside all other data. An H200's cache has 50 MB."""

BYTES_OF_A_KEY: Final = 1 + 2
"""For each channel, in a forward: codes of K, and V."""

BYTES_OF_A_QUERY: Final = 1 + 2 + 2 + 4
"""For each channel, in a backward: codes of Q, Q, dO and sums of dQ."""

_LATE: Final = 1.05
"""The end of a launch of packed sequences, beside that of a balanced one, for which fewer heads at
a time are chosen. It follows from assumed lengths."""

_NEARLY_BALANCED: Final = 1.01
"""Fewer heads in a group pay for an imbalance up to this factor."""


def steps_of_query_tiles(
    n_q: int, n_k: int, offset: int | None, lowest: int | None, rows: int
) -> NDArray[np.int64]:
    """Return the time of each tile of a head in steps, in the order in which they are computed.

    With a limit after the diagonal, the last tile comes first: without another limit it is the
    longest.

    Args:
        n_q, n_k: tokens of the longest sequence.
        offset: query i attends to no key after i + offset; None without such a limit.
        lowest: query i attends to no key before i + lowest; None without such a limit.
        rows: queries of a tile.
    """
    first = np.arange(0, n_q, rows)
    end = np.full_like(first, n_k) if offset is None else np.clip(first + rows + offset, 1, n_k)
    begin = np.zeros_like(first) if lowest is None else np.clip(first + lowest, 0, end - 1)
    steps = -(-end // BLOCK) - begin // BLOCK + OVERHEAD
    return steps if offset is None else steps[::-1]


def steps_of_key_tiles(
    n_q: int, n_k: int, offset: int | None, keys: int, groups: int, lowest: int | None
) -> NDArray[np.int64]:
    """Return the time of each tile of keys of a head in steps, from the first one on.

    The arguments are those of `choose_backward_heads`.
    """
    first = np.arange(0, n_k, keys)
    begin, end = np.zeros_like(first), np.full_like(first, n_q)
    if offset is not None:
        begin = np.clip(first - offset, 0, n_q)
    if lowest is not None:
        end = np.clip(first + keys - lowest, 0, n_q)
    return groups * np.maximum(-(-end // BLOCK) - begin // BLOCK, 0) + OVERHEAD


@lru_cache(maxsize=4096)
def choose_forward_heads(
    n_q: int,
    n_k: int,
    offset: int | None,
    lowest: int | None,
    rows: int,
    heads: int,
    programs: int,
) -> int:
    """Return of how many heads programs that own queries compute the tiles at a time.

    One without a limit after the diagonal: all tiles take the same time then.

    Args:
        n_q, n_k, offset, lowest, rows: see `steps_of_query_tiles`.
        heads: of all sequences.
        programs: that run at the same time.
    """
    if offset is None:
        return 1

    def steps() -> NDArray[np.int64]:
        return steps_of_query_tiles(n_q, n_k, offset, lowest, rows)

    return _fewest(-(-n_q // rows), heads, programs, steps)


@lru_cache(maxsize=4096)
def choose_backward_heads(
    n_q: int,
    n_k: int,
    offset: int | None,
    keys: int,
    heads: int,
    groups: int,
    programs: int,
    lowest: int | None = None,
) -> int:
    """Return of how many heads programs that own keys compute the tiles at a time.

    The order within a group is: the first tile of keys of each head, then the next one of each
    head. Under a causal mask the first tile is the longest.

    Args:
        n_q, n_k: tokens of the longest sequence.
        offset: query i attends to no key after i + offset; None without such a limit.
        keys: keys of a tile.
        heads: heads of K and V of all sequences, times the programs that share a tile of one.
        groups: query heads of a program.
        programs: that run at the same time.
        lowest: query i attends to no key before i + lowest; None without such a limit.
    """

    def steps() -> NDArray[np.int64]:
        return steps_of_key_tiles(n_q, n_k, offset, keys, groups, lowest)

    return _fewest(-(-n_k // keys), heads, programs, steps)


def choose_packed_heads(heads: int, head_bytes: int, longest: float) -> int:
    """Return of how many heads the tiles of packed sequences are computed at a time, a divisor.

    As many as fit in the cache. But the longest tile of the last heads begins when all others are
    done: if the launch would end late, there are more.

    Args:
        heads: of a sequence.
        head_bytes: of the tokens that the longest sequence of a head loads again and again.
        longest: the time of the longest tile, as a share of that of a balanced launch.
    """
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    fitting = max((n for n in divisors if n * head_bytes <= CACHE), default=1)
    balanced = next(n for n in divisors if n >= min(longest + 1 - _LATE, 1) * heads)
    return max(fitting, balanced)


def _fewest(tiles: int, heads: int, programs: int, steps: Callable[[], NDArray[np.int64]]) -> int:
    """Return the fewest heads of a group with which the last program ends early enough.

    programs: that run at the same time. steps: returns the time of each tile of a head, in order.
    """
    enough = min(-(-9 * programs // (10 * tiles)), heads)  # all have a program at the start
    if heads * tiles > MANY_WAVES * programs:
        return enough
    times = steps().tolist()
    candidates, most = [enough], min(programs // _SHARING, heads)
    while 2 * candidates[-1] <= most:
        candidates.append(2 * candidates[-1])
    ends = [_end_of(times, heads, n, programs) for n in candidates]
    limit = _NEARLY_BALANCED * min(ends)
    return next(n for n, end in zip(candidates, ends, strict=True) if end <= limit)


def _end_of(steps: list[int], heads: int, heads_per_group: int, programs: int) -> int:
    """Return when the last program ends, in steps."""
    ends = [0] * programs
    for first in range(0, heads, heads_per_group):
        for time in steps:
            for _ in range(min(heads_per_group, heads - first)):
                heapq.heapreplace(ends, ends[0] + time)
    return max(ends)
