"""Which calls the kernels for mma.sync compute, and on which GPUs."""

from dataclasses import replace

import pytest
import torch

from sagesim import (
    CAUSAL_SAFE,
    FACTORED,
    FACTORED_PV16,
    FACTORED_QK,
    FPA_BF16,
    HALF_AWAY,
    SAGEBWD,
    SAGEBWD_ALL_INT8,
    AttentionSpec,
    Smoothing,
)
from sagesim.problem import resolve_input16
from sagesim_kernels import ampere
from sagesim_kernels.ampere import support
from sagesim_kernels.operands import NO_EXTRAS, Extras, KernelProblem

MMA_SYNC = (80, 86, 89, 120, 121)
WITHOUT = (100, 103, 110)
"""Capabilities of data center Blackwell, which multiplies with tcgen05."""


def problem(
    spec: AttentionSpec = FACTORED,
    *,
    d: int = 64,
    d_v: int | None = None,
    extras: Extras = NO_EXTRAS,
):
    q, k, v = (torch.zeros(1, 2, 8, x, device="meta") for x in (d, d, d_v or d))
    spec = resolve_input16(spec, torch.bfloat16)
    return KernelProblem.of(
        q, k, v, spec=spec, scale=1.0, is_causal=True, lower_right=False, extras=extras
    )


SERVED = {
    "factored": problem(),
    "factored_pv16": problem(FACTORED_PV16),
    "factored_qk": problem(FACTORED_QK),
    "sagebwd": problem(SAGEBWD),
    "fpa_bf16": problem(FPA_BF16),
    "d 33": problem(d=33),
    "d 96, d_v 80": problem(d=96, d_v=80),
    "d 128": problem(d=128),
    "window": problem(extras=Extras(window=(3, 0))),
    "lengths": problem(extras=Extras(seqused_k=torch.zeros(1, dtype=torch.int32))),
    "sinks": problem(extras=Extras(sinks=torch.zeros(2))),
}
OTHERS = {
    "d 32": problem(d=32),
    "d 129": problem(d=129),
    "d_v of another tile": problem(d_v=65),
    "blocks of 128": problem(replace(FACTORED, block_q=128)),
    "Q smoothed": problem(replace(FACTORED, smoothing=Smoothing(q=True, k=True))),
    "half away": problem(replace(FACTORED, rounding=HALF_AWAY)),
    "blocks of 32 keys": problem(replace(CAUSAL_SAFE, block_k=32)),
    "softcap": problem(extras=Extras(softcap=20.0)),
}


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets the compute capability of the current device."""
    monkeypatch.setattr(support, "IS_INTERPRETED", False)

    def capability(number: int) -> None:
        monkeypatch.setattr(support, "compute_capability", lambda: number)

    return capability


@pytest.mark.parametrize("name", SERVED)
def test_served(name, on):
    for capability in MMA_SYNC:
        on(capability)
        assert ampere.serves_forward(SERVED[name]) and ampere.serves_backward(SERVED[name])


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_left_to_the_portable_kernels(name, on):
    on(80)
    assert not ampere.serves_forward(OTHERS[name]) and not ampere.serves_backward(OTHERS[name])


def test_hopper_has_the_backward_alone(on):
    on(90)
    assert not ampere.serves_forward(problem()) and ampere.serves_backward(problem())


@pytest.mark.parametrize("capability", WITHOUT)
def test_data_center_blackwell_has_neither(capability, on):
    on(capability)
    assert not ampere.serves_forward(problem()) and not ampere.serves_backward(problem())


def test_dp_in_int8_has_the_forward_alone(on):
    on(80)
    x = problem(SAGEBWD_ALL_INT8)
    assert ampere.serves_forward(x) and not ampere.serves_backward(x)


def test_the_interpreter_runs_the_portable_kernels(monkeypatch):
    monkeypatch.setattr(support, "IS_INTERPRETED", True)
    assert not ampere.serves_forward(problem()) and not ampere.serves_backward(problem())
