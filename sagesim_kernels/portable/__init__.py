"""Triton kernels for every GPU: the forward, dQ, and dK and dV."""

from sagesim_kernels.portable.backward import launch_backward
from sagesim_kernels.portable.forward import launch_forward
from sagesim_kernels.portable.p_and_ds import UNTRACED, MapTrace, MapTraces

__all__ = [
    "UNTRACED",
    "MapTrace",
    "MapTraces",
    "launch_backward",
    "launch_forward",
]
