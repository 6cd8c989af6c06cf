"""Trainable INT8 attention in Triton: what `sagesim` emulates, on a GPU."""

from sagesim_kernels._trace import Coded, KernelTrace, trace
from sagesim_kernels.api import attention, attention_varlen
from sagesim_kernels.support import Support, supports

__all__ = ["Coded", "KernelTrace", "Support", "attention", "attention_varlen", "supports", "trace"]
