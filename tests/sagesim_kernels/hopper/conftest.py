"""For the tests of Hopper's kernels: those that a test's head size asks for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.many_steps import asks_for_many_steps, in_many_steps


@pytest.fixture(autouse=True)
def kernels_of_long_sequences(request: pytest.FixtureRequest) -> Iterator[None]:
    """With a parameter that is a `ManySteps`, every call has the kernels of long sequences."""
    callspec = getattr(request.node, "callspec", None)
    parameters = () if callspec is None else tuple(callspec.params.values())
    with in_many_steps(asks_for_many_steps(parameters)):
        yield
