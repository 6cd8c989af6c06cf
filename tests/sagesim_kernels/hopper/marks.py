"""Marks of tests that run Hopper's own kernels."""

import pytest

from sagesim_kernels import hopper
from sagesim_kernels.interpreter import IS_INTERPRETED

IS_HOPPER = not IS_INTERPRETED and hopper.is_hopper()

ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="not compiled for Hopper"),
]
