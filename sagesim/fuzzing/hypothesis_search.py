"""Search with Hypothesis for the first, or the smallest, example that satisfies a predicate."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Generator
from typing import Any, Final, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.configuration import set_hypothesis_home_dir, storage_directory
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

Example = TypeVar("Example")

_CHECKS: Final[Any] = list(HealthCheck)  # type checkers cannot infer the element type


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
    """Draw at most `cases` examples and return the first that satisfies the predicate, or None.

    Equal arguments give the same examples while the same modules are loaded: neither Hypothesis's
    database nor a settings profile nor a deadline is used. After another module is imported, and in
    another program, the examples may differ: Hypothesis also draws the constants of the loaded
    modules that are not of an installed package, and has no setting against it. Shrinking stops
    after Hypothesis's limit of five minutes.

    Args:
        strategy: draws the examples.
        predicate: the condition.
        cases: largest number of examples before shrinking.
        seed: seed of the search; see above.
        shrink: return the smallest example that the search finds. If the predicate's answer for an
            example changes, the best example so far is returned.
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
        with _temporary_home():
            search()
    except (_Found, Flaky):
        return found[-1]
    return None


@contextlib.contextmanager
def _temporary_home() -> Generator[None]:
    """Let Hypothesis cache the constants of the loaded code in a folder that is then deleted.

    It writes this cache even without a database, by default to `.hypothesis` in the folder in which
    the program started.
    """
    before = storage_directory(intent_to_write=False).home_directory
    with tempfile.TemporaryDirectory() as home:
        set_hypothesis_home_dir(home)
        try:
            yield
        finally:
            set_hypothesis_home_dir(before)
