"""Bounds and estimates of the error that low precision adds to attention.

Each module states one topic: `rounding`, `matmul`, `softmax`, `ds_bound`, `ds_error`, `dq_sums`,
`row_bounds`, `fp8_sums`, `int8_dp`, `smoothing`, `qk_norm`, `qk_error` and `noise`. Two functions
combine the topics: `attention_bound` bounds the errors of O, dQ, dK and dV, and `error_budget`
estimates them.

The modules of `theory` only state. `theory.checks` measures: it has one module per topic, which
compares that topic's functions with the emulator. `python -m theory` runs all of these checks.
"""

from theory.attention_bound import attention_bound
from theory.bound_propagation import AttentionBound
from theory.budget import Budget, error_budget

__all__ = ["AttentionBound", "Budget", "attention_bound", "error_budget"]
