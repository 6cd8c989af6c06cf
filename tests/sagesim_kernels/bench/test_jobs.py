"""Where the time of our kernels goes."""

from importlib import import_module

import pytest
import triton

from sagesim_kernels.bench.jobs import PREPARATION, PRODUCTS, by_job, preparation_share
from sagesim_kernels.bench.meter import Kernel

MODULES = (
    "portable.forward",
    "portable.gradients",
    "portable.p_rows",
    "operands.quantization",
    "operands.means",
    "operands.delta",
    "operands.dq_sums",
    "operands.dq_units",
    "operands.logsumexp",
    "hopper.forward",
    "hopper.backward_kernel",
    "hopper.backward",
)


def test_the_names_are_those_of_the_kernels():
    """A kernel under another name would count as "other"."""
    named = set(PRODUCTS) | set(PREPARATION)
    found: set[str] = set()
    for module in MODULES:
        own = import_module(f"sagesim_kernels.{module}")
        kernels = {
            name
            for name in named
            if isinstance(getattr(own, name, None), triton.runtime.KernelInterface)
        }
        assert kernels, module
        found |= kernels
    assert found == named


def launches(*names):
    return [Kernel(name, 0.001 * (i + 1)) for i, name in enumerate(names)]


def test_launches_of_a_job_are_added():
    ran = launches("delta_kernel", "p_rows_kernel", "gradients_kernel", "units_kernel", "Memset")
    seconds = by_job(ran)
    assert seconds == pytest.approx(
        {"delta": 0.003, "dq, dk and dv": 0.003, "units of dq": 0.004, "other": 0.005}
    )
    assert preparation_share(seconds) == pytest.approx(12 / 15)
