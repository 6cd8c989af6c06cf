"""sagesim emulates low-bit attention in PyTorch and measures its errors.

The precision of each of the seven matrix products of the forward and the backward can be chosen.
"""

from sagebwd import warn_of_other_distribution
from sagesim.analysis import Attribution, Comparison, Error, attribute, compare
from sagesim.emulator import (
    Exact,
    QKNorm,
    QTensor,
    Trace,
    attention,
    exact,
    exact_backward,
    quantize,
    trace,
)
from sagesim.fuzzing import FuzzCase, FuzzReport, fuzz
from sagesim.models import Call, Capture, Recording, capture, emulate
from sagesim.problem import AttentionOptions, AttentionProblem
from sagesim.spec import (
    CAUSAL_SAFE,
    FACTORED,
    FACTORED_PV16,
    FACTORED_QK,
    FACTORED_QK16,
    FP8_GRADIENTS,
    FPA,
    FPA_BF16,
    FPA_FP16,
    HALF_AWAY,
    HALF_EVEN,
    PRESETS,
    SAGE_FORWARD,
    SAGEBWD,
    SAGEBWD_ALL_INT8,
    SITES,
    AttentionSpec,
    Delta,
    Granularity,
    MatmulSpec,
    Precision,
    Rounding,
    RoundingMode,
    Smoothing,
    with_precision,
)

__version__ = "0.1.0"

warn_of_other_distribution()

__all__ = [
    "CAUSAL_SAFE",
    "FACTORED",
    "FACTORED_PV16",
    "FACTORED_QK",
    "FACTORED_QK16",
    "FP8_GRADIENTS",
    "FPA",
    "FPA_BF16",
    "FPA_FP16",
    "HALF_AWAY",
    "HALF_EVEN",
    "PRESETS",
    "SAGEBWD",
    "SAGEBWD_ALL_INT8",
    "SAGE_FORWARD",
    "SITES",
    "AttentionOptions",
    "AttentionProblem",
    "AttentionSpec",
    "Attribution",
    "Call",
    "Capture",
    "Comparison",
    "Delta",
    "Error",
    "Exact",
    "FuzzCase",
    "FuzzReport",
    "Granularity",
    "MatmulSpec",
    "Precision",
    "QKNorm",
    "QTensor",
    "Recording",
    "Rounding",
    "RoundingMode",
    "Smoothing",
    "Trace",
    "__version__",
    "attention",
    "attribute",
    "capture",
    "compare",
    "emulate",
    "exact",
    "exact_backward",
    "fuzz",
    "quantize",
    "trace",
    "with_precision",
]
