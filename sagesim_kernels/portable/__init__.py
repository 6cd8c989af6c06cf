"""Triton kernels for every GPU: the forward, dQ, and dK and dV."""

from sagesim_kernels.portable.backward import backward
from sagesim_kernels.portable.forward import forward
from sagesim_kernels.portable.p_and_ds import UNTRACED, MapTrace, MapTraces

__all__ = [
    "UNTRACED",
    "MapTrace",
    "MapTraces",
    "backward",
    "forward",
]
