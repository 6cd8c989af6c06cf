"""Trainable INT8 attention on GPUs, in Triton and Gluon: the kernels that `sagesim` emulates."""

from importlib.util import find_spec

if find_spec("triton") is None:
    raise ModuleNotFoundError(
        "sagesim_kernels needs triton: pip install 'sagebwd[kernels]'", name="triton"
    )

from sagesim_kernels.api import attention, attention_varlen
from sagesim_kernels.cards import default_spec
from sagesim_kernels.support import Support, supports
from sagesim_kernels.tracing import Coded, KernelTrace, trace

__all__ = [
    "Coded",
    "KernelTrace",
    "Support",
    "attention",
    "attention_varlen",
    "default_spec",
    "supports",
    "trace",
]
