"""Samples of an attention problem: some heads of K and V, and some blocks of queries.

Each part of a sample is an attention problem of its own: one head of K and V, the query heads that
share it, all keys, and the queries of some blocks. O, dS and dQ of a part are those of the whole
problem, except for what `Sample` says. dK and dV of a part are sums over its queries.

Heads that are taken count as a sample of heads, also if all are: with fewer queries of all heads,
the error of sampling is estimated as too large.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sagesim.checks import check_type
from sagesim.problem import AttentionProblem
from sagesim.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Sample:
    """How much of each attention problem to measure.

    heads: heads of K and V, evenly spaced; each with all query heads that share it. None: all.
    rows: queries of each head, in evenly spaced blocks; rounded up to whole blocks. None: all.
        Scales of Q and dO that a whole head shares are those of the measured queries. With
        stochastic rounding, the measured queries have other random numbers than in the whole
        problem. All queries of a head are measured if some of them would leave out a key that
        another query attends to, as with a window: the key would become padding, and the mean of
        K and the scales of K and V that a head shares would be others.

    Raises:
        TypeError: if one is neither an integer nor None.
        ValueError: if a number is not positive.
    """

    heads: int | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "rows"):
            number = getattr(self, name)
            check_type(name, number, int | None, "an integer or None")
            if number is not None and number < 1:
                raise ValueError(f"{name}={number} is not a positive number")

    def parts(self, problem: AttentionProblem, spec: AttentionSpec) -> list[AttentionProblem]:
        """The parts of a problem with do: the taken queries of each taken head of K and V.

        A block of queries of the spec is taken whole, so that its queries have the scales that
        they have in the whole problem. The last block is taken: under a causal mask, it attends to
        all keys, so that none is padding.
        """
        return [_select(head, rows) for head, rows in self._heads(problem, spec)]

    def halves(self, problem: AttentionProblem, spec: AttentionSpec) -> list[AttentionProblem]:
        """The part of a problem with one head, in two halves; else nothing.

        Their difference shows the error of sampling. With several heads, the differences between
        heads show it. The last block is in both halves.
        """
        heads = list(self._heads(problem, spec))
        if len(heads) != 1 or _head_count(problem) != 1:
            return []
        [(head, rows)] = heads
        block = _block(problem, spec)
        blocks = (rows // block).unique()
        if len(rows) == problem.q.shape[-2] or len(blocks) < 2:
            return []
        of_halves = [torch.cat([blocks[half::2], blocks[-1:]]) for half in range(2)]
        rows_of_halves = [rows[torch.isin(rows // block, some)] for some in of_halves]
        if _any_leaves_out_a_key(head, rows_of_halves):
            return []
        return [_select(head, some) for some in rows_of_halves]

    def fraction(self, problem: AttentionProblem, spec: AttentionSpec) -> float:
        """The fraction of the entries of S that are in the parts."""
        taken = sum(len(rows) for _, rows in self._heads(problem, spec))
        whole = problem.q.shape[-2] * _head_count(problem)
        return taken / whole if whole else 1.0

    def _heads(
        self, problem: AttentionProblem, spec: AttentionSpec
    ) -> Iterator[tuple[AttentionProblem, Tensor]]:
        """Each taken head, and its taken queries."""
        n_q, block = problem.q.shape[-2], _block(problem, spec)
        problems = list(problem.head_groups(entries=0))
        blocks = -(-n_q // block)
        chosen = _spaced(blocks, None if self.rows is None else -(-self.rows // block))
        every = torch.arange(n_q)
        rows = every[torch.isin(every // block, torch.tensor(chosen))]
        for head in (problems[i] for i in _spaced(len(problems), self.heads)):
            yield head, every if _any_leaves_out_a_key(head, [rows]) else rows


def jackknife(values: Sequence[float], fraction: float) -> float:
    """The standard error of a statistic from its values with one part of the sample left out.

    NaN if there are no values.

    fraction: the measured fraction; the error is smaller by the factor sqrt(1 - fraction), because
        a sample of everything has no error.

    Source: B. Efron and C. Stein, "The Jackknife Estimate of Variance", Ann. Statist. 9(3), 1981.
    """
    n = len(values)
    if not n:
        return math.nan
    center = sum(values) / n
    variance = (n - 1) / n * sum((x - center) ** 2 for x in values)
    return math.sqrt(variance * (1 - fraction))


def _head_count(problem: AttentionProblem) -> int:
    """The heads of K and V of all sequences."""
    return sum(1 for _ in problem.head_groups(entries=0))


def _block(problem: AttentionProblem, spec: AttentionSpec) -> int:
    """The queries of a block of the spec, or of the problem if it has fewer."""
    return min(spec.block_q, max(problem.q.shape[-2], 1))


def _spaced(count: int, wanted: int | None) -> list[int]:
    """`wanted` of the numbers 0..count - 1, evenly spaced, the last one included."""
    if wanted is None or wanted >= count:
        return list(range(count))
    return [count - 1 - i * count // wanted for i in reversed(range(wanted))]


def _any_leaves_out_a_key(problem: AttentionProblem, parts: Sequence[Tensor]) -> bool:
    """Whether the queries of a part attend to fewer keys than all queries together."""
    if not problem.is_masked:
        return False
    attends = problem.attends
    keys = attends.any(-2)
    return any(
        not torch.equal(attends[..., rows.to(attends.device), :].any(-2), keys) for rows in parts
    )


def _select(problem: AttentionProblem, rows: Tensor) -> AttentionProblem:
    """The problem with some of its queries only."""
    if len(rows) == problem.q.shape[-2]:
        return problem
    rows = rows.to(problem.q.device)
    return AttentionProblem(
        q=problem.q[..., rows, :],
        k=problem.k,
        v=problem.v,
        do=problem.gradient[..., rows, :],
        attn_mask=problem.attends[..., rows, :] if problem.is_masked else None,
        sinks=problem.sinks,
        softcap=problem.softcap,
        scale=problem.scale,
        enable_gqa=problem.enable_gqa,
    )
