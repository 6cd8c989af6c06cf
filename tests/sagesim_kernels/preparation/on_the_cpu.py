"""Tests that run kernels on the CPU from PTX, beside kernels that Triton interprets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.kernels import IS_INTERPRETED

_MARKS = (
    pytest.mark.slow,
    pytest.mark.skipif(not IS_INTERPRETED, reason="the expected results are interpreted"),
    pytest.mark.xdist_group("compiled by the oldest Triton"),
)


def on_the_cpu(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that runs kernels on the CPU, from their PTX."""
    for mark in _MARKS:
        test = mark(test)
    return test
