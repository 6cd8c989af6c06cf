"""Bounds and estimates of the error of quantized attention: functions, each held to account.

A topic is a module: `theory.rounding`, `matmul`, `softmax`, `ds_bound`, `ds_error`, `int8_dp`,
`smoothing`, `qk_norm`, `qk_error`, `noise`. Two put them together: `attention_bound`, what no error
exceeds, and `error_budget`, what to expect.
"""

from theory.attention_bound import AttentionBound, attention_bound
from theory.budget import Budget, error_budget

__all__ = ["AttentionBound", "Budget", "attention_bound", "error_budget"]
