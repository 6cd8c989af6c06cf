"""Gluon kernels for GPUs that multiply with mma.sync: A100, RTX 30, 40 and 50, L40.

Importing this package does not import the kernels. Gluon is experimental, so `dispatch` imports
them when it launches one.
"""

from sagesim_kernels.ampere.support import copied, serves_backward, serves_forward

__all__ = ["copied", "serves_backward", "serves_forward"]
