"""Measurements of the statements of `theory`: one module per topic.

A module of `theory` states bounds and estimates; the module of the same name in `theory.checks`
compares them with the emulator and yields one `Check` per comparison. The imports go one way:
`theory.checks` imports the modules of `theory`, which never import `theory.checks`.
`theory.qk_error` has no module of its own here: `theory.checks.budget` measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from theory.checks import (
    attention_bound,
    budget,
    dq_sums,
    ds_bound,
    ds_error,
    fp8_sums,
    int8_dp,
    matmul,
    noise,
    qk_norm,
    rounding,
    row_bounds,
    smoothing,
    softmax,
)
from theory.checks.check import Check

CHECKS: dict[str, Callable[[], Iterator[Check]]] = {
    "rounding": rounding.checks,
    "matmul": matmul.checks,
    "softmax": softmax.checks,
    "ds_bound": ds_bound.checks,
    "ds_error": ds_error.checks,
    "dq_sums": dq_sums.checks,
    "row_bounds": row_bounds.checks,
    "fp8_sums": fp8_sums.checks,
    "int8_dp": int8_dp.checks,
    "smoothing": smoothing.checks,
    "qk_norm": qk_norm.checks,
    "noise": noise.checks,
    "attention_bound": attention_bound.checks,
    "budget": budget.checks,
}
"""The function that measures each topic, in the order of the pages of the docs."""
