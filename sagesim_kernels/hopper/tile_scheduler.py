"""The order in which the forward computes its tiles, so that all programs end together.

The tiles of a group of heads are computed at a time, the longest first. With fewer heads in a group
more of their tokens stay in the cache; with more heads the multiprocessors are busy to the end.

The forward deals its tiles to the programs in snake order. Under a causal mask tiles take unequal
time, and the number of heads per group decides the load balance: with some numbers the last program
takes half as long again as the others. Which numbers are bad changes with every sequence length, so
the host simulates the candidates and picks the best.

In the backward every tile has a program of its own: see `operands.program_order`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sagesim_kernels.operands import MANY_WAVES, steps_of_query_tiles

_CACHE: Final = 2**25
"""Bytes of K and V that stay in the L2 cache beside all other data. An H200's cache has 50 MB."""

_BEYOND_CACHE: Final = 1.02
"""The factor on the time of groups whose K and V exceed `_CACHE`."""

MOST_QUERY_HEADS: Final = 4
"""Query heads of a program of the backward. Programs with more are long, so that some end late.
While one of them is at its first head, another is at its last: their queries do not stay in the
cache together."""


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
    steps = steps_of_query_tiles(n_q, n_k, offset, lowest, rows)
    if heads * steps.size > MANY_WAVES * programs:  # balanced, and too many to simulate
        return max((n for n in divisors if n * head_bytes <= _CACHE), default=divisors[0])

    def time(heads_per_group: int) -> float:
        is_beyond = heads_per_group * head_bytes > _CACHE
        steps_taken = _most_steps(steps, heads, programs, heads_per_group)
        return steps_taken * (_BEYOND_CACHE if is_beyond else 1.0)

    return min(divisors, key=time)


def _most_steps(steps: NDArray[np.int64], heads: int, programs: int, heads_per_group: int) -> int:
    """Return the steps of the program that finishes last."""
    tiles = np.tile(np.repeat(steps, heads_per_group), heads // heads_per_group)
    waves = -(-tiles.size // programs)
    dealt = np.zeros((waves, programs), dtype=np.int64)
    dealt.flat[: tiles.size] = tiles
    dealt[1::2] = dealt[1::2, ::-1]
    return int(dealt.sum(0).max())
