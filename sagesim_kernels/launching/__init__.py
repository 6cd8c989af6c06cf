"""Launch kernels: record what a call launches, and repeat it in later calls of its kind."""

from sagesim_kernels.launching.arguments import Specialized
from sagesim_kernels.launching.compiled import CompilerFault, check_compiled
from sagesim_kernels.launching.dependent import wait_for_earlier_kernels
from sagesim_kernels.launching.function import Tensors
from sagesim_kernels.launching.plans import forget_plans, launch, on_device_of, planned

__all__ = [
    "CompilerFault",
    "Specialized",
    "Tensors",
    "check_compiled",
    "forget_plans",
    "launch",
    "on_device_of",
    "planned",
    "wait_for_earlier_kernels",
]
