"""In which order the forward computes its tiles, so that all programs are done at the same time.

Tiles are dealt to programs in snake order, and under a mask they take unequal time. How even the
sums come out hangs on how many heads go together; with some numbers the last program takes half as
long again as the others, and which numbers these are changes with every length. So it is computed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

_BLOCK: Final = 64
"""Keys of a step."""

_OVERHEAD: Final = 4
"""Steps that a tile takes beside its own: first loads, and O."""

_CACHE: Final = 2**25
"""Bytes of K and V that the L2 cache keeps beside everything else; an H200's has 50 MB."""

_BEYOND_CACHE: Final = 1.02
"""How much longer it takes where they are more."""


_MANY: Final = 64
"""Laps of which the sums come out even however many heads go together."""


@lru_cache(maxsize=4096)
def group_of(
    n_q: int, n_k: int, offset: int | None, rows: int, heads: int, programs: int, head_bytes: int
) -> int:
    """How many heads go together, a divisor of `heads`: first the longest tile of each of them,
    then the next of each.

    One head alone comes last, as programs next to each other are slow when they share keys.

    Args:
        n_q, n_k: tokens of the longest sequence.
        offset: query i attends to keys 0..i + offset; None where nothing is masked.
        rows: queries of a tile.
        heads: of all sequences.
        head_bytes: of K and V of a head.
    """
    divisors = [n for n in range(2, min(heads, programs) + 1) if heads % n == 0] or [1]
    steps = _steps(n_q, n_k, offset, rows)
    if heads * steps.size > _MANY * programs:  # and to count them all would take too long
        return max((n for n in divisors if n * head_bytes <= _CACHE), default=divisors[0])

    def time(group: int) -> float:
        beyond = group * head_bytes > _CACHE
        return _longest(steps, heads, programs, group) * (_BEYOND_CACHE if beyond else 1.0)

    return min(divisors, key=time)


def _steps(n_q: int, n_k: int, offset: int | None, rows: int) -> NDArray[np.int64]:
    """Of each tile of a head, the longest first."""
    end = np.arange(rows, n_q + rows, rows)[::-1]
    end = np.full_like(end, n_k) if offset is None else np.clip(end + offset, 1, n_k)
    return -(-end // _BLOCK) + _OVERHEAD


def _longest(steps: NDArray[np.int64], heads: int, programs: int, group: int) -> int:
    """Steps until the last program is done."""
    tiles = np.tile(np.repeat(steps, group), heads // group)
    laps = -(-tiles.size // programs)
    dealt = np.zeros((laps, programs), dtype=np.int64)
    dealt.flat[: tiles.size] = tiles
    dealt[1::2] = dealt[1::2, ::-1]
    return int(dealt.sum(0).max())
