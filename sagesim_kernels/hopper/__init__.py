"""Gluon kernels for Hopper GPUs, for specs in which QK alone is INT8.

Importing this package does not import the kernels. Gluon is experimental, so `dispatch` imports
them when it launches one.
"""

from sagesim_kernels.hopper.preparation import prepare_forward
from sagesim_kernels.hopper.support import (
    CHANNELS,
    has_dead_keys,
    has_dead_queries,
    has_to_copy,
    is_hopper,
    is_wide,
    serves,
)

__all__ = [
    "CHANNELS",
    "has_dead_keys",
    "has_dead_queries",
    "has_to_copy",
    "is_hopper",
    "is_wide",
    "prepare_forward",
    "serves",
]
