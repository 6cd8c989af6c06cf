"""Gluon kernels for Hopper GPUs.

There are a forward with PV in 16 bit, one with P in codes, a backward with INT8 in QK alone, and a
backward with P and dS in codes, INT8 or FP8.

Importing this package does not import the kernels. Gluon is experimental, so `dispatch` imports
them when it launches one.
"""

from sagesim_kernels.hopper.support import (
    CHANNELS,
    copied,
    has_dead_keys,
    has_dead_queries,
    is_hopper,
    is_wide,
    serves_backward,
    serves_codes,
    serves_forward,
    serves_forward_in_codes,
    serves_fp8,
)

__all__ = [
    "CHANNELS",
    "copied",
    "has_dead_keys",
    "has_dead_queries",
    "is_hopper",
    "is_wide",
    "serves_backward",
    "serves_codes",
    "serves_forward",
    "serves_forward_in_codes",
    "serves_fp8",
]
