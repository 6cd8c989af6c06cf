"""sagesim: low-bit attention in PyTorch, each of its seven matrix products set on its own."""

from sagesim._attention import attention
from sagesim._capture import Recording, capture
from sagesim._emulate import emulate
from sagesim._exact import Exact, exact
from sagesim._fuzz import fuzz
from sagesim._fuzz_cases import FuzzCase
from sagesim._fuzz_report import FuzzReport
from sagesim._quantize import QTensor, quantize
from sagesim._trace import Trace, trace
from sagesim.attribution import Attribution, attribute
from sagesim.captured import Call, Capture
from sagesim.metrics import Comparison, Error, compare
from sagesim.presets import (
    CAUSAL_SAFE,
    FACTORED,
    FACTORED_PV16,
    FACTORED_QK,
    FPA,
    FPA_BF16,
    FPA_FP16,
    PRESETS,
    SAGE_FORWARD,
    SAGEBWD,
    SAGEBWD_ALL_INT8,
    with_precision,
)
from sagesim.qk_norm import QKNorm
from sagesim.spec import (
    HALF_AWAY,
    HALF_EVEN,
    SITES,
    AttentionSpec,
    Delta,
    Granularity,
    MatmulSpec,
    Precision,
    Rounding,
    RoundingMode,
    Smoothing,
)

__version__ = "0.1.0"

__all__ = [
    "CAUSAL_SAFE",
    "FACTORED",
    "FACTORED_PV16",
    "FACTORED_QK",
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
    "fuzz",
    "quantize",
    "trace",
    "with_precision",
]
