"""One attention problem: its tensors and options, and the checks of both."""

from sagesim.problem.arguments import (
    DTYPES,
    autocast,
    check_flag,
    check_is_tensor,
    check_scale,
    check_spec,
    check_tensors,
    resolve_input16,
    with_four_axes,
)
from sagesim.problem.attention_problem import AttentionProblem, changed_options
from sagesim.problem.masks import (
    Band,
    check_alignment,
    check_key_padding,
    check_lengths,
    check_sinks,
    check_softcap,
    check_window,
)
from sagesim.problem.options import NO_WINDOW, AttentionOptions, CausalAlignment
from sagesim.problem.recognition import boolean_mask, recognised

__all__ = [
    "DTYPES",
    "NO_WINDOW",
    "AttentionOptions",
    "AttentionProblem",
    "Band",
    "CausalAlignment",
    "autocast",
    "boolean_mask",
    "changed_options",
    "check_alignment",
    "check_flag",
    "check_is_tensor",
    "check_key_padding",
    "check_lengths",
    "check_scale",
    "check_sinks",
    "check_softcap",
    "check_spec",
    "check_tensors",
    "check_window",
    "recognised",
    "resolve_input16",
    "with_four_axes",
]
