"""Where the time of our kernels goes."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import triton

import sagesim_kernels
from sagesim_kernels.bench.jobs import PREPARATION, PRODUCTS, by_job, preparation_share
from sagesim_kernels.bench.meter import Kernel

MODULES = (
    "portable.forward",
    "portable.gradients",
    "portable.p_rows",
    "operands.casting",
    "operands.quantization",
    "operands.means",
    "operands.delta",
    "operands.dq_sums",
    "operands.dq_units",
    "operands.key_bounds",
    "operands.logit_shift",
    "operands.logsumexp",
    "hopper.forward",
    "hopper.forward_codes",
    "hopper.backward_kernel",
    "hopper.capped_rows",
    "hopper.codes_kernel",
    "hopper.codes_operands",
    "preparation.query_rows",
    "hopper.fp8_rows",
    "hopper.p_rows_kernel",
    "preparation.one_pass",
    "preparation.forward_kernel",
    "operands.splits",
    "hopper.wide_kernel",
    "hopper.wide_backward",
    "ampere.forward",
    "ampere.backward",
    "ampere.p_rows",
    "operands.row_bounds",
    "operands.key_padding",
    "operands.packed_tiles",
    "packing_kernel",
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


def test_every_kernel_that_is_launched_has_a_job():
    launched: set[str] = set()
    for path in Path(sagesim_kernels.__file__).parent.rglob("*.py"):
        launched |= set(re.findall(r"\blaunch\(\s*(\w+),", path.read_text(encoding="utf-8")))
    assert {"hopper_forward", "ampere_backward", "quantize_kernel"} < launched
    assert launched <= set(PRODUCTS) | set(PREPARATION)


def launches(*names):
    return [Kernel(name, 0.001 * (i + 1)) for i, name in enumerate(names)]


def test_launches_of_a_job_are_added():
    ran = launches("delta_kernel", "p_rows_kernel", "gradients_kernel", "units_kernel", "Memset")
    seconds = by_job(ran)
    assert seconds == pytest.approx(
        {"delta": 0.003, "dq, dk and dv": 0.003, "units of dq": 0.004, "other": 0.005}
    )
    assert preparation_share(seconds) == pytest.approx(12 / 15)
