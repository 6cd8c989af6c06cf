"""Pairs of parameters, of which CI runs a selection in which each value occurs."""

from collections.abc import Sequence
from typing import Any

import pytest


def crossed(first: Sequence[Any], second: Sequence[Any], *, each: int = 1) -> list[Any]:
    """Return all pairs of a value of `first` and one of `second`, for `pytest.mark.parametrize`.

    In CI, each value of `first` is paired with `each` values of `second`, which take turns. The
    other pairs have the mark `exhaustive`: `make fuzz` and GPUs run them.
    """
    if not 0 < each <= len(second) <= len(first) * each:
        raise ValueError(f"{each} of {len(second)} values for each of {len(first)} miss some")
    pairs = []
    for i, one in enumerate(first):
        for j, other in enumerate(second):
            is_in_ci = (j - i * each) % len(second) < each
            marks = () if is_in_ci else pytest.mark.exhaustive
            pairs.append(pytest.param(one, other, marks=marks))
    return pairs
