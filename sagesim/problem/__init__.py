"""One attention problem: its tensors and options, and the checks of both."""

from sagesim.problem.arguments import (
    autocast,
    check_scale,
    check_spec,
    check_tensors,
    resolve_input16,
)
from sagesim.problem.attention_problem import AttentionProblem

__all__ = [
    "AttentionProblem",
    "autocast",
    "check_scale",
    "check_spec",
    "check_tensors",
    "resolve_input16",
]
