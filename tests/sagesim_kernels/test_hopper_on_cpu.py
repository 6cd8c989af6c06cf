"""Hopper's kernels, run on the CPU from their PTX: see `tests.support.ptx_hopper`."""

import pytest
import torch

from tests.sagesim_kernels.ptx_calls import Call, check_masked_results, check_results
from tests.support.ptx_worker import PtxRunner

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("compiled by the oldest Triton")]

HOPPER = 90
KERNELS = {
    "forward": "hopper_forward",
    "codes forward": "hopper_forward_codes",
    "backward": "hopper_backward",
    "codes backward": "hopper_codes_backward",
    "wide": "hopper_wide",
}

IN_E5M2 = "fp8_gradients delta=p dv=fp8_e5m2 dq=fp8_e5m2 dk=fp8_e5m2 block=64x64"
EXHAUSTIVE = pytest.mark.exhaustive

CALLS = {
    "factored_qk": (Call("factored_qk", 150, 200, heads=2, is_causal=True), "forward", "backward"),
    "fpa_fp16_d40": (
        Call("factored_qk qk=fp16 qk_recompute=fp16", 70, 130, d=40, dtype=torch.float16),
    ),
    "sagebwd": (Call("sagebwd", 150, 200, is_causal=True), "codes forward", "codes backward"),
    "factored_d128": (Call("factored", 70, 200, d=128), "codes forward", "codes backward"),
    "fp8_gradients": (
        Call("fp8_gradients", 300, 200, heads=2, is_causal=True), "forward", "codes backward",
    ),
    "fp8_gradients_d128": (Call("fp8_gradients", 130, 150, d=128), "forward", "codes backward"),
    "fp8_e5m2_d72": (Call(IN_E5M2, 130, 150, d=72, is_causal=True), "forward", "codes backward"),
    "d256": (Call("factored_qk", 130, 100, d=256, is_causal=True), "wide"),
}  # fmt: skip
"""A call, and the kernels that have to compute it."""


@pytest.mark.parametrize("name", CALLS)
def test_results_are_as_exact_as_the_emulators(runner: PtxRunner, name: str) -> None:
    call, *kernels = CALLS[name]
    found = check_results(runner, call, HOPPER)
    assert {KERNELS[x] for x in kernels} <= set(found.kernels)


MASKED_CALLS = {
    "window": (
        Call("factored_qk", 140, 200, window=(50, 10), lower_right=True, heads=2),
        "forward", "backward",
    ),
    "key_mask_and_sinks": (
        Call(
            "factored_pv16", 200, 260, heads=2, window=(30, 10), lower_right=True, sink=5.0,
            dead_keys=(range(10), range(100, 190)),
        ),
        "codes backward",
    ),
    "lengths_and_sinks": (
        Call("fp8_gradients", 150, 150, is_causal=True, used_keys=70, sink=5.0), "codes backward",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKED_CALLS)
def test_masks_and_sinks(runner: PtxRunner, name: str) -> None:
    """Nothing of a token that is masked everywhere reaches a result."""
    call, *kernels = MASKED_CALLS[name]
    found = check_masked_results(runner, call, HOPPER)
    assert {KERNELS[x] for x in kernels} <= set(found.kernels)
