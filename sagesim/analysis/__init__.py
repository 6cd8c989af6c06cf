"""How large the errors of a computation are, and which matmul causes them."""

from sagesim.analysis.attribution import (
    Attribution,
    SiteEffect,
    SwitchEffect,
    attribute,
)
from sagesim.analysis.causality import Influence, influence
from sagesim.analysis.layers import Measured, errors, errors_of_both, measure
from sagesim.analysis.metrics import (
    GRADIENTS,
    TENSORS,
    TITLES,
    Comparison,
    Error,
    compare,
    error,
    geometric_mean,
    gradient_error,
    mean,
    pool_errors,
)
from sagesim.analysis.number_range import (
    RangeLoss,
    largest_losses,
    range_losses,
    range_warnings,
)
from sagesim.analysis.pooling import pool
from sagesim.analysis.report import (
    Layer,
    advice,
    headline,
    limitations,
    number,
    render,
    templates,
)
from sagesim.analysis.runs import LOGITS, OUTPUTS, RUNS, memory, run_count
from sagesim.analysis.sampling import Sample
from sagesim.analysis.sigma import COLUMNS, PAPER_TABLE_1, Setting, gaussian_errors

__all__ = [
    "COLUMNS",
    "GRADIENTS",
    "LOGITS",
    "OUTPUTS",
    "PAPER_TABLE_1",
    "RUNS",
    "TENSORS",
    "TITLES",
    "Attribution",
    "Comparison",
    "Error",
    "Influence",
    "Layer",
    "Measured",
    "RangeLoss",
    "Sample",
    "Setting",
    "SiteEffect",
    "SwitchEffect",
    "advice",
    "attribute",
    "compare",
    "error",
    "errors",
    "errors_of_both",
    "gaussian_errors",
    "geometric_mean",
    "gradient_error",
    "headline",
    "influence",
    "largest_losses",
    "limitations",
    "mean",
    "measure",
    "memory",
    "number",
    "pool",
    "pool_errors",
    "range_losses",
    "range_warnings",
    "render",
    "run_count",
    "templates",
]
