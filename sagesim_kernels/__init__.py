"""Trainable INT8 attention on GPUs, in Triton and Gluon: the kernels that `sagesim` emulates."""

from sagesim_kernels.api import attention, attention_varlen
from sagesim_kernels.support import Support, supports
from sagesim_kernels.tracing import Coded, KernelTrace, trace

__all__ = ["Coded", "KernelTrace", "Support", "attention", "attention_varlen", "supports", "trace"]
