"""Samples of an attention problem: some heads of K and V, and some blocks of queries.

Each part of a sample is an attention problem of its own: one head of K and V, the query heads that
share it, all keys, and the queries of some blocks. O, dS and dQ of a part are those of the whole
problem. dK and dV of a part are sums over its queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sagesim.problem import AttentionProblem
from sagesim.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Sample:
    """How much of each attention problem to measure.

    heads: heads of K and V, evenly spaced; each with all query heads that share it. None: all.
    rows: queries of each head, in evenly spaced blocks; rounded up to whole blocks. None: all.
        Scales of Q and dO that a whole head shares are those of the measured queries.

    Raises:
        ValueError: if a number is not positive.
    """

    heads: int | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "rows"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"{name}={number} is not a positive number")

    def parts(self, problem: AttentionProblem, spec: AttentionSpec) -> list[AttentionProblem]:
        """The parts of a problem with do, at least two unless they would have a single block.

        A block of queries of the spec is taken whole, so that its queries have the scales that
        they have in the whole problem. The last block is in every part: under a causal mask, it
        attends to all keys, so that none is padding.
        """
        block = min(spec.block_q, max(problem.q.shape[-2], 1))
        problems = list(problem.head_groups(entries=0))
        taken = _spaced(len(problems), self.heads)
        blocks = -(-problem.q.shape[-2] // block)
        rows = _spaced(blocks, None if self.rows is None else -(-self.rows // block))
        # Two parts of a head, so that their difference shows the error of sampling.
        halves = 2 if len(rows) > 1 and (self.rows is not None or len(taken) == 1) else 1
        parts: list[AttentionProblem] = []
        for head in taken:
            for half in range(halves):
                own = sorted({*rows[half::halves], blocks - 1})
                parts.append(_select(problems[head], own, block))
        return parts


def measured_fraction(problem: AttentionProblem, parts: Sequence[AttentionProblem]) -> float:
    """The fraction of the entries of S that are in the parts, at most 1."""
    entries = (math.prod(x.q.shape[:-1]) * x.k.shape[-2] for x in parts)
    return min(1.0, sum(entries) / (math.prod(problem.q.shape[:-1]) * problem.k.shape[-2]))


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


def _spaced(count: int, wanted: int | None) -> list[int]:
    """`wanted` of the numbers 0..count - 1, evenly spaced, the last one included."""
    if wanted is None or wanted >= count:
        return list(range(count))
    return [count - 1 - i * count // wanted for i in reversed(range(wanted))]


def _select(problem: AttentionProblem, blocks: Sequence[int], block: int) -> AttentionProblem:
    """The problem with the queries of some blocks only."""
    n_q = problem.q.shape[-2]
    rows = torch.cat([torch.arange(b * block, min((b + 1) * block, n_q)) for b in blocks])
    if len(rows) == n_q:
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
