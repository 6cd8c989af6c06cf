"""Combinations of parameters, of which most test runs need a selection."""

import itertools
from collections.abc import Callable, Mapping, Sequence
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


def numbered(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """Return values by the ids that pytest gives to values without a name of their own."""
    return {f"{name}{i}": value for i, value in enumerate(values)}


def combined(is_needed: Callable[..., bool], *axes: Mapping[str, Any]) -> list[Any]:
    """Return all combinations of a value of each axis, for `pytest.mark.parametrize`.

    Those of which is_needed(*values) is false have the mark `exhaustive`. The ids are those of one
    `parametrize` for each axis, the first one next to the function.

    axes: values by id.
    """
    found = []
    for ids in itertools.product(*axes):
        values = [axis[name] for axis, name in zip(axes, ids, strict=True)]
        marks = () if is_needed(*values) else pytest.mark.exhaustive
        found.append(pytest.param(*values, id="-".join(ids), marks=marks))
    return found
