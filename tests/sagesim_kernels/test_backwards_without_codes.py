"""Backwards that write no codes of P and dS: those of mma.sync, and Hopper's own with codes.

The contract of a trace does not reach them in INT8. Here their results are as exact as the
emulator's. On Hopper natively, or with `--code sm80` as an A100 has them.
"""

import numpy as np
import pytest

from sagesim import PRESETS
from sagesim_kernels import ampere, hopper
from tests.sagesim_kernels.exactness import assert_as_exact_as_the_emulator
from tests.sagesim_kernels.kernel_cases import LAYOUTS, KernelCase
from tests.support.kernels import all_served, run_kernels

pytestmark = pytest.mark.gpu

SPECS = ("sagebwd", "factored", "factored_pv16", "factored_qk", "fpa_bf16", "fpa_fp16")
DRAWS = 25
"""Calls for each spec, head size and mask."""

LENGTHS = (31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 191, 192, 193, 300, 449)


@pytest.fixture
def are_served(unplanned, monkeypatch: pytest.MonkeyPatch, spec: str, d: int):
    """Fail the test if another kernel ran a backward."""
    if spec == "factored_qk" and hopper.is_hopper():
        pytest.skip("hopper/test_in_16_bit.py tests Hopper's kernels for this spec")
    in_codes = hopper.is_hopper() and not spec.startswith("fpa")
    package, serves = (hopper, "serves_codes") if in_codes else (ampere, "serves_backward")
    with all_served(monkeypatch, package, serves):
        yield


@pytest.mark.usefixtures("are_served")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [40, 64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("spec", SPECS)
def test_results_are_as_exact_as_the_emulators(spec: str, d: int, is_causal: bool) -> None:
    """Up to one rounding to the dtype of the inputs, and in the largest error a factor of 2."""
    parsed = PRESETS[spec]
    rng = np.random.default_rng([SPECS.index(spec), d, is_causal])
    layout = str(rng.choice(LAYOUTS))  # kernels are compiled for each
    for _ in range(DRAWS):
        problem = KernelCase(
            spec=parsed,
            n_q=int(rng.choice(LENGTHS)),
            n_k=int(rng.choice(LENGTHS)),
            d=d,
            d_v=d,
            heads=(1, 6, 2),
            kinds=("gaussian",) * 4,
            dtype="float16" if spec == "fpa_fp16" else "bfloat16",
            is_causal=is_causal,
            causal_alignment=("upper_left", "lower_right")[int(rng.integers(2))],
            layout=layout,
            seed=int(rng.integers(2**31)),
        )
        found = run_kernels(problem.case, parsed)
        assert_as_exact_as_the_emulator(found, problem.case, parsed, f"of {problem!r}", factor=2.0)
