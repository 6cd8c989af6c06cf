"""The order in which the forward computes its tiles, so that all programs finish together.

The forward deals its tiles to the programs in snake order. Under a causal mask tiles take unequal
time, and the number of heads per group decides the load balance: with some numbers the last program
takes half as long again as the others. Which numbers are bad changes with every sequence length, so
the host simulates the candidates and picks the best.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

_BLOCK: Final = 64
"""Keys of a step."""

_OVERHEAD: Final = 4
"""The time, in steps, that a tile needs for its first loads and for storing O."""

_CACHE: Final = 2**25
"""Bytes of K and V that stay in the L2 cache beside all other data. An H200's cache has 50 MB."""

_BEYOND_CACHE: Final = 1.02
"""The factor on the time of groups whose K and V exceed `_CACHE`."""

_MANY_WAVES: Final = 64
"""With more tiles per program than this, every number of heads per group is balanced."""


@lru_cache(maxsize=4096)
def choose_heads_per_group(
    n_q: int, n_k: int, offset: int | None, rows: int, heads: int, programs: int, head_bytes: int
) -> int:
    """Return how many heads to compute at a time, a divisor of `heads`.

    The order within a group is: the longest tile of each head, then the next tile of each head. A
    group of one head is the last choice, because neighbouring programs that share keys are slow.

    Args:
        n_q, n_k: tokens of the longest sequence.
        offset: query i attends to keys 0..i + offset; None without a mask.
        rows: queries of a tile.
        heads: heads of all sequences.
        programs: programs of the launch.
        head_bytes: bytes of K and V of one query head.
    """
    divisors = [n for n in range(2, min(heads, programs) + 1) if heads % n == 0] or [1]
    steps = _steps(n_q, n_k, offset, rows)
    if heads * steps.size > _MANY_WAVES * programs:  # balanced, and too many to simulate
        return max((n for n in divisors if n * head_bytes <= _CACHE), default=divisors[0])

    def time(heads_per_group: int) -> float:
        is_beyond = heads_per_group * head_bytes > _CACHE
        steps_taken = _most_steps(steps, heads, programs, heads_per_group)
        return steps_taken * (_BEYOND_CACHE if is_beyond else 1.0)

    return min(divisors, key=time)


def _steps(n_q: int, n_k: int, offset: int | None, rows: int) -> NDArray[np.int64]:
    """Return the time of each tile of a head in steps, the longest tile first."""
    end = np.arange(rows, n_q + rows, rows)[::-1]
    end = np.full_like(end, n_k) if offset is None else np.clip(end + offset, 1, n_k)
    return -(-end // _BLOCK) + _OVERHEAD


def _most_steps(steps: NDArray[np.int64], heads: int, programs: int, heads_per_group: int) -> int:
    """Return the steps of the program that finishes last."""
    tiles = np.tile(np.repeat(steps, heads_per_group), heads // heads_per_group)
    waves = -(-tiles.size // programs)
    dealt = np.zeros((waves, programs), dtype=np.int64)
    dealt.flat[: tiles.size] = tiles
    dealt[1::2] = dealt[1::2, ::-1]
    return int(dealt.sum(0).max())
