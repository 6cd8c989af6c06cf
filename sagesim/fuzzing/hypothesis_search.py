"""Hypothesis as a search: the first example that a predicate holds for, or the smallest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

Example = TypeVar("Example")

_CHECKS: Final[Any] = list(HealthCheck)  # their metaclass hides from type checkers what they are


class _Found(Exception):
    pass


def find(
    strategy: SearchStrategy[Example],
    predicate: Callable[[Example], bool],
    *,
    cases: int,
    seed: int,
    shrink: bool = False,
) -> Example | None:
    """An example, of at most `cases`, that the predicate holds for; None where none was met.

    The same arguments try the same examples in the same program: no database, no settings profile
    and no clock has a say. But Hypothesis draws some numbers from the constants of whatever code is
    loaded, and shrinking ends after five minutes, its own limit.

    Args:
        shrink: go on to the smallest example that the predicate holds for. A predicate that
            changes its mind about an example ends it with the best one so far.
    """
    found: list[Example] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=cases,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        database=None,
        derandomize=False,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=_CHECKS,
        verbosity=Verbosity.quiet,
    )
    @hypothesis.given(strategy)
    def search(example: Example) -> None:
        if predicate(example):
            found.append(example)
            raise _Found

    try:
        search()
    except (_Found, Flaky):
        return found[-1]
    return None
