"""The order in which the forward computes its tiles, so that all programs end together.

The tiles of a group of heads are computed at a time, the longest first. With fewer heads in a group
more of their tokens stay in the cache; with more heads the multiprocessors are busy to the end.

The forward deals its tiles to the programs in snake order. Under a causal mask tiles take unequal
time, and the number of heads per group decides the load balance: with some numbers the last program
takes half as long again as the others. Which numbers are bad changes with every sequence length, so
the host simulates the candidates and picks the best.

The backward with dV, dQ and dK in 16 bit deals its tiles, too, if there are numbers that are good
enough. Otherwise, and in the other backwards, every tile has a program of its own: see
`operands.program_order`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sagesim_kernels.operands import (
    BYTES_OF_A_QUERY,
    CACHE,
    MANY_WAVES,
    OVERHEAD,
    Grid,
    KernelProblem,
    choose_backward_heads,
    heads_of_packed_tiles,
    steps_of_key_tiles,
    steps_of_query_tiles,
)
from sagesim_kernels.target import multiprocessor_count

_BEYOND_CACHE: Final = 1.02
"""The factor on the time of groups whose K and V exceed `CACHE`."""

_BEYOND_CACHE_BACKWARD: Final = 1.06
"""The same for queries and sums of dQ in the backward."""

_SAVED_STEPS: Final = 2
"""Steps of a tile of the backward that a program saves if it loads the tile during the last one."""

_STEP_IF_DEALT: Final = {64: 1.0, 128: 1.05}
"""The time of a step of the backward if tiles are dealt, by the channels of a tile. With 128, it
needs a few more instructions, and programs that end late are not given fewer tiles."""

MOST_QUERY_HEADS: Final = 4
"""Query heads of a program of the backward. Programs with more are long, so that some end late.
While one of them is at its first head, another is at its last: their queries do not stay in the
cache together."""


_STEP_OF_TWO: Final = 1.14
"""The time of a step of a forward if two programs share a multiprocessor, each with half of the
queries, beside the step of a single program. Alone on a multiprocessor, a program with half of the
queries takes as long for a step as with all."""

_SAVED_BY_TWO: Final = 1.8
"""Steps that a tile of such a program takes less than `OVERHEAD`."""

_FEW_STEPS: Final = 24
"""With fewer steps in a tile of 128 channels than this, `backward_joint` is faster than
`backward_halves`, or at most 1 % slower."""


@lru_cache(maxsize=4096)
def has_few_steps(
    n_q: int, n_k: int, offset: int | None, keys: int, groups: int, lowest: int | None
) -> bool:
    """Return whether tiles of keys of 128 channels have few steps on average.

    The arguments are those of `operands.choose_backward_heads`.
    """
    steps = steps_of_key_tiles(n_q, n_k, offset, keys, groups, lowest) - OVERHEAD
    return bool(steps.mean() < _FEW_STEPS)


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
        return max((n for n in divisors if n * head_bytes <= CACHE), default=divisors[0])

    def time(heads_per_group: int) -> float:
        is_beyond = heads_per_group * head_bytes > CACHE
        steps_taken = _most_steps(steps, heads, programs, heads_per_group)
        return steps_taken * (_BEYOND_CACHE if is_beyond else 1.0)

    return min(divisors, key=time)


@lru_cache(maxsize=4096)
def prefers_two_programs(
    n_q: int,
    n_k: int,
    offset: int | None,
    rows: int,
    heads: int,
    multiprocessors: int,
    head_bytes: int,
) -> bool:
    """Return whether a forward ends sooner with two programs a multiprocessor than with one.

    Each of the two has tiles of half as many queries. A tile takes less time besides its steps: the
    two programs run the same code, and a program's consumers have copies of their own, of which the
    instruction cache holds few. Less time is lost at the end of sequences and of the launch. But
    each program loads K and V for itself, so that a step takes longer.

    Args:
        n_q, n_k, offset, head_bytes: see `choose_heads_per_group`.
        rows: queries of a tile of a single program.
        heads: heads of all sequences.
    """

    def time(rows: int, programs: int, saved: float) -> float:
        steps = steps_of_query_tiles(n_q, n_k, offset, None, rows)
        tiles, programs = heads * steps.size, min(heads * steps.size, programs)
        tenths = np.rint(10 * (steps - saved)).astype(np.int64)
        if tiles > MANY_WAVES * programs:
            return heads * int(tenths.sum()) / programs
        # With all arguments, as the launch passes them, so that the result is kept for it.
        group = choose_heads_per_group(n_q, n_k, offset, rows, heads, programs, head_bytes, None)
        return _most_steps(tenths, heads, programs, group)

    are_alone = heads * -(-n_q // (rows // 2)) <= multiprocessors
    two = time(rows // 2, 2 * multiprocessors, _SAVED_BY_TWO)
    return two * (1.0 if are_alone else _STEP_OF_TWO) < time(rows, multiprocessors, 0.0)


def order_of_queries(
    problem: KernelProblem, grid: Grid, rows: int, programs: int, head_bytes: int
) -> int:
    """Return how many heads a forward computes at a time; see `choose_heads_per_group`.

    grid: with tiles of `rows` queries.
    """
    if grid.cu is not None:
        return heads_of_packed_tiles(problem, grid, rows, programs, head_bytes, queries=True)
    return choose_heads_per_group(
        problem.longest_q,
        problem.longest_k,
        problem.longest_offset,
        rows,
        grid.all_heads,
        programs,
        head_bytes,
        problem.longest_lowest,
    )


def order_of_keys(
    problem: KernelProblem, grid: Grid, keys: int, query_heads: int, channels: int
) -> int:
    """Return how many heads a backward computes at a time, if each tile has a program of its own.

    grid: with tiles of `keys` keys. query_heads: of a program. channels: of a tile.
    """
    if grid.cu is not None:
        head_bytes = problem.longest_q * query_heads * channels * BYTES_OF_A_QUERY
        programs = multiprocessor_count()
        return heads_of_packed_tiles(
            problem, grid, keys, programs, head_bytes, queries=False, query_heads=query_heads
        )
    return choose_backward_heads(
        problem.longest_q,
        problem.longest_k,
        problem.longest_offset,
        keys,
        grid.all_heads,
        query_heads,
        multiprocessor_count(),
        lowest=problem.longest_lowest,
    )


class BackwardOrder(NamedTuple):
    """How a launch of a backward orders its tiles of keys."""

    heads_per_group: int  #: of how many heads the tiles are computed at a time
    is_dealt: bool  #: whether programs are dealt several tiles; else each has one


@lru_cache(maxsize=4096)
def choose_backward_order(
    n_q: int,
    n_k: int,
    offset: int | None,
    keys: int,
    heads: int,
    groups: int,
    programs: int,
    channels: int,
    lowest: int | None = None,
) -> BackwardOrder:
    """Return the order in which the last program is expected to end first.

    A program that is dealt several tiles loads the next one while it stores the last one. But a
    program with one tile starts when any other ends, so that tiles that take unequal time are
    balanced with any number of heads at a time.

    Args:
        programs: that run at the same time.
        channels: of a tile.
        The others: see `operands.choose_backward_heads`, whose order within a group is kept.
    """
    few = choose_backward_heads(n_q, n_k, offset, keys, heads, groups, programs, lowest)
    steps = steps_of_key_tiles(n_q, n_k, offset, keys, groups, lowest)
    if heads * steps.size <= programs:
        return BackwardOrder(few, is_dealt=False)
    simulated = min(heads, MANY_WAVES * programs // steps.size + 1)  # more are balanced alike
    head_bytes = n_q * groups * channels * BYTES_OF_A_QUERY

    def time(heads_per_group: int) -> float:
        is_beyond = heads_per_group > few and heads_per_group * head_bytes > CACHE
        most = _most_steps(steps - _SAVED_STEPS, simulated, programs, heads_per_group)
        return most * _STEP_IF_DEALT[channels] * (_BEYOND_CACHE_BACKWARD if is_beyond else 1.0)

    is_equal = steps.min() == steps.max()
    dealt = few if is_equal else min(range(1, min(simulated, programs) + 1), key=time)
    average = simulated * int(steps.sum()) / programs
    last = -(-simulated * steps.size // programs) * int(steps[0]) if is_equal else average
    if time(dealt) < last:
        return BackwardOrder(dealt, is_dealt=True)
    return BackwardOrder(few, is_dealt=False)


def _most_steps(steps: NDArray[np.int64], heads: int, programs: int, heads_per_group: int) -> int:
    """Return the steps of the program that finishes last. The last group may have fewer heads."""
    groups, rest = divmod(heads, heads_per_group)
    tiles = np.tile(np.repeat(steps, heads_per_group), groups)
    tiles = np.concatenate((tiles, np.repeat(steps, rest)))
    waves = -(-tiles.size // programs)
    dealt = np.zeros((waves, programs), dtype=np.int64)
    dealt.flat[: tiles.size] = tiles
    dealt[1::2] = dealt[1::2, ::-1]
    return int(dealt.sum(0).max())
