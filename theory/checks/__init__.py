"""Measurements of every statement of `theory`, one module a topic."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from theory.check import Check
from theory.checks import (
    attention_bound,
    budget,
    ds_bound,
    ds_error,
    int8_dp,
    matmul,
    noise,
    qk_norm,
    rounding,
    smoothing,
    softmax,
)

CHECKS: dict[str, Callable[[], Iterator[Check]]] = {
    "rounding": rounding.checks,
    "matmul": matmul.checks,
    "softmax": softmax.checks,
    "ds_bound": ds_bound.checks,
    "ds_error": ds_error.checks,
    "int8_dp": int8_dp.checks,
    "smoothing": smoothing.checks,
    "qk_norm": qk_norm.checks,
    "noise": noise.checks,
    "attention_bound": attention_bound.checks,
    "budget": budget.checks,
}
"""By topic, in the order of the docs: what measures its statements."""
