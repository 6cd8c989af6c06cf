"""The emulator: computes the outputs, gradients and intermediates of attention under a spec."""

from sagesim.emulator.autograd import attention
from sagesim.emulator.forward import SmoothedQK
from sagesim.emulator.hooks import Hooks, Place
from sagesim.emulator.layout import FlatProblem, flatten
from sagesim.emulator.passes import Passes, plain_float32, run, run_backward, run_forward
from sagesim.emulator.qk_norm import QKNorm
from sagesim.emulator.quantization import (
    COLUMN,
    ROW,
    SHARED_AXES,
    Operand,
    QTensor,
    encode,
    from_tiles,
    quantize,
    to_tiles,
)
from sagesim.emulator.reference import Exact, exact, exact_backward
from sagesim.emulator.rounding import CODE_MAX, uniform
from sagesim.emulator.row_bounds import fold
from sagesim.emulator.tiling import Panel
from sagesim.emulator.tracing import ForwardSoftmax, Recorder, Trace, Vanished, trace

__all__ = [
    "CODE_MAX",
    "COLUMN",
    "ROW",
    "SHARED_AXES",
    "Exact",
    "FlatProblem",
    "ForwardSoftmax",
    "Hooks",
    "Operand",
    "Panel",
    "Passes",
    "Place",
    "QKNorm",
    "QTensor",
    "Recorder",
    "SmoothedQK",
    "Trace",
    "Vanished",
    "attention",
    "encode",
    "exact",
    "exact_backward",
    "flatten",
    "fold",
    "from_tiles",
    "plain_float32",
    "quantize",
    "run",
    "run_backward",
    "run_forward",
    "to_tiles",
    "trace",
    "uniform",
]
