"""Where the time of our kernels goes."""

from importlib import import_module

import pytest
import triton

from sagesim import FACTORED, FACTORED_PV16
from sagesim_kernels.bench.jobs import PREPARATION, PRODUCTS, by_job, preparation_share
from sagesim_kernels.bench.meter import Kernel

MODULES = (
    "portable.forward",
    "portable.dq",
    "portable.dkdv",
    "operands.quantization",
    "operands.means",
    "operands.delta",
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


def test_delta_from_p_is_the_first_pass_over_the_queries():
    ran = launches("quantize_kernel", "forward_kernel", "dq_kernel", "dq_kernel", "dkdv_kernel")
    assert by_job(ran, FACTORED) == pytest.approx(
        {"quantizing": 0.001, "forward": 0.002, "delta": 0.003, "dq": 0.004, "dk and dv": 0.005}
    )


def test_delta_from_o_has_a_kernel_of_its_own():
    ran = launches("delta_kernel", "dq_kernel", "sum_chunks_kernel", "divide_sums_kernel", "Memset")
    seconds = by_job(ran, FACTORED_PV16)
    assert seconds == pytest.approx(
        {"delta": 0.001, "dq": 0.002, "smoothing": 0.007, "other": 0.005}
    )
    assert preparation_share(seconds) == pytest.approx(13 / 15)
