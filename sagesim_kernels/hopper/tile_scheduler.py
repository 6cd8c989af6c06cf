"""The order in which forward and backward compute their tiles, so that all programs end together.

Both compute the tiles of a group of heads at a time, the longest first. With fewer heads in a group
more of their tokens stay in the cache; with more heads the multiprocessors are busy to the end.

The forward deals its tiles to the programs in snake order. Under a causal mask tiles take unequal
time, and the number of heads per group decides the load balance: with some numbers the last program
takes half as long again as the others. Which numbers are bad changes with every sequence length, so
the host simulates the candidates and picks the best.

In the backward every tile has a program of its own, which starts when another one ends. The host
simulates this, too.
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

_BLOCK: Final = 64
"""Keys of a step."""

_OVERHEAD: Final = 4
"""The time, in steps, that a tile needs for its first loads and for storing its results."""

_CACHE: Final = 2**25
"""Bytes of K and V that stay in the L2 cache beside all other data. An H200's cache has 50 MB."""

_BEYOND_CACHE: Final = 1.02
"""The factor on the time of groups whose K and V exceed `_CACHE`."""

_MANY_WAVES: Final = 64
"""With more tiles per program than this, every number of heads per group is balanced."""

_FEWEST_HEADS: Final = 4
"""With fewer heads, the query heads of a group are divided among programs of the backward."""

_MOST_QUERY_HEADS: Final = 4
"""Programs with more query heads are long, so that some end late. While one of them is at its first
head, another is at its last: their queries do not stay in the cache together."""

_SHARING: Final = 4
"""Programs of one head that should run at the same time in the backward: each query that one of
them loads, and each sum of dQ, is in the cache for the others."""

_NEARLY_BALANCED: Final = 1.01
"""Fewer heads in a group pay for an imbalance up to this factor."""


@lru_cache(maxsize=4096)
def choose_heads_per_group(
    n_q: int,
    n_k: int,
    offset: int | None,
    rows: int,
    heads: int,
    programs: int,
    head_bytes: int,
    lowest: int | None = None,
) -> int:
    """Return how many heads to compute at a time, a divisor of `heads`.

    The order within a group is: the longest tile of each head, then the next tile of each head. A
    group of one head is the last choice, because neighbouring programs that share keys are slow.

    Args:
        n_q, n_k: tokens of the longest sequence.
        offset: query i attends to no key after i + offset; None without such a limit.
        rows: queries of a tile.
        heads: heads of all sequences.
        programs: programs of the launch.
        head_bytes: bytes of K and V of one query head.
        lowest: query i attends to no key before i + lowest; None without such a limit.
    """
    divisors = [n for n in range(2, min(heads, programs) + 1) if heads % n == 0] or [1]
    steps = _steps(n_q, n_k, offset, lowest, rows)
    if heads * steps.size > _MANY_WAVES * programs:  # balanced, and too many to simulate
        return max((n for n in divisors if n * head_bytes <= _CACHE), default=divisors[0])

    def time(heads_per_group: int) -> float:
        is_beyond = heads_per_group * head_bytes > _CACHE
        steps_taken = _most_steps(steps, heads, programs, heads_per_group)
        return steps_taken * (_BEYOND_CACHE if is_beyond else 1.0)

    return min(divisors, key=time)


def _steps(
    n_q: int, n_k: int, offset: int | None, lowest: int | None, rows: int
) -> NDArray[np.int64]:
    """Return the time of each tile of a head in steps, in the order in which they are computed.

    With a limit after the diagonal, the last tile comes first: without another limit it is the
    longest.
    """
    first = np.arange(0, n_q, rows)
    end = np.full_like(first, n_k) if offset is None else np.clip(first + rows + offset, 1, n_k)
    begin = np.zeros_like(first) if lowest is None else np.clip(first + lowest, 0, end - 1)
    steps = -(-end // _BLOCK) - begin // _BLOCK + _OVERHEAD
    return steps if offset is None else steps[::-1]


def _most_steps(steps: NDArray[np.int64], heads: int, programs: int, heads_per_group: int) -> int:
    """Return the steps of the program that finishes last."""
    tiles = np.tile(np.repeat(steps, heads_per_group), heads // heads_per_group)
    waves = -(-tiles.size // programs)
    dealt = np.zeros((waves, programs), dtype=np.int64)
    dealt.flat[: tiles.size] = tiles
    dealt[1::2] = dealt[1::2, ::-1]
    return int(dealt.sum(0).max())


def query_heads_per_program(heads: int, groups: int) -> int:
    """Return how many query heads of a group a program of the backward computes.

    At most `_MOST_QUERY_HEADS`, and fewer if there are so few heads of K and V that their programs
    would not keep a GPU busy. The choice decides in which order dK and dV are added up. So it
    depends on nothing but the numbers of heads: a sequence gives the same bytes in every batch.

    heads: heads of K and V of a sequence. groups: query heads for each of them.
    """
    most = min(groups, _MOST_QUERY_HEADS)
    divisors = [n for n in range(most, 0, -1) if groups % n == 0]
    return next((n for n in divisors if heads * groups // n >= _FEWEST_HEADS), 1)


@lru_cache(maxsize=4096)
def choose_backward_heads(
    n_q: int,
    n_k: int,
    offset: int | None,
    keys: int,
    heads: int,
    groups: int,
    multiprocessors: int,
    lowest: int | None = None,
) -> int:
    """Return of how many heads the backward computes the tiles at a time; the last may be fewer.

    The order within a group is: the first tile of keys of each head, then the next one of each
    head. Under a causal mask the first tile is the longest.

    Args:
        n_q, n_k: tokens of the longest sequence.
        offset: query i attends to no key after i + offset; None without such a limit.
        keys: keys of a tile.
        heads: heads of K and V of all sequences, times the programs that share a tile of one.
        groups: query heads of a program.
        multiprocessors: each runs one program at a time.
        lowest: query i attends to no key before i + lowest; None without such a limit.
    """
    tiles = -(-n_k // keys)
    enough = min(-(-9 * multiprocessors // (10 * tiles)), heads)  # all have a program at the start
    if heads * tiles > _MANY_WAVES * multiprocessors:
        return enough
    first = np.arange(0, n_k, keys)
    begin, end = np.zeros_like(first), np.full_like(first, n_q)
    if offset is not None:
        begin = np.clip(first - offset, 0, n_q)
    if lowest is not None:
        end = np.clip(first + keys - lowest, 0, n_q)
    steps = np.maximum(-(-end // _BLOCK) - begin // _BLOCK, 0)
    steps = (groups * steps + _OVERHEAD).tolist()
    candidates, most = [enough], min(multiprocessors // _SHARING, heads)
    while 2 * candidates[-1] <= most:
        candidates.append(2 * candidates[-1])
    ends = [_end_of(steps, heads, n, multiprocessors) for n in candidates]
    limit = _NEARLY_BALANCED * min(ends)
    return next(n for n, end in zip(candidates, ends, strict=True) if end <= limit)


def _end_of(steps: list[int], heads: int, heads_per_group: int, multiprocessors: int) -> int:
    """Return when the last program of the backward ends, in steps."""
    ends = [0] * multiprocessors
    for first in range(0, heads, heads_per_group):
        for time in steps:
            for _ in range(min(heads_per_group, heads - first)):
                heapq.heapreplace(ends, ends[0] + time)
    return max(ends)
