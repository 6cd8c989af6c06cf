"""The emulator: from the arguments of an attention call to outputs, gradients and a trace."""

from sagesim.emulator.autograd import attention
from sagesim.emulator.forward import Smoothed
from sagesim.emulator.hooks import Hooks, Place
from sagesim.emulator.layout import FlatProblem, flatten
from sagesim.emulator.passes import plain_float32, run
from sagesim.emulator.qk_norm import QKNorm
from sagesim.emulator.quantization import (
    COLUMN,
    ROW,
    SHARED,
    Operand,
    QTensor,
    encode,
    from_tiles,
    quantize,
    to_tiles,
)
from sagesim.emulator.reference import Exact, exact
from sagesim.emulator.rounding import CODE_MAX, uniform
from sagesim.emulator.tiling import Panel
from sagesim.emulator.tracing import Recorder, Trace, trace

__all__ = [
    "CODE_MAX",
    "COLUMN",
    "ROW",
    "SHARED",
    "Exact",
    "FlatProblem",
    "Hooks",
    "Operand",
    "Panel",
    "Place",
    "QKNorm",
    "QTensor",
    "Recorder",
    "Smoothed",
    "Trace",
    "attention",
    "encode",
    "exact",
    "flatten",
    "from_tiles",
    "plain_float32",
    "quantize",
    "run",
    "to_tiles",
    "trace",
    "uniform",
]
