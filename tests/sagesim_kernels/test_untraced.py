"""The contract of calls without codes finds errors in results, and the fuzz cases reach it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from sagesim import PRESETS, AttentionSpec
from sagesim_kernels import hopper
from tests.sagesim_kernels import kernel_cases
from tests.sagesim_kernels.contract import as_kernel_trace, emulate, emulated_case
from tests.sagesim_kernels.contract import run_kernels as run_traced
from tests.sagesim_kernels.kernel_cases import KernelCase
from tests.sagesim_kernels.untraced import check_call, has_codes_backward
from tests.support.inputs import Case, case
from tests.support.kernels import HERE, Results, kernel_case, run_kernels

SPECS = ("sagebwd", "factored", "factored_pv16")
"""The presets whose backward Hopper computes in codes."""

SHAPE = {"n_q": 130, "n_k": 150, "d": 24, "heads": (1, 2)}
PLAIN = case(seed=1, **SHAPE)
CAUSAL = replace(PLAIN, is_causal=True)
ONE = case(seed=2, n_q=1, n_k=1, d=16)


def emulated(x: Case, spec: AttentionSpec) -> Results:
    sim = emulate(x, spec)
    return Results(sim.o, sim.lse, sim.dq, sim.dk, sim.dv)


def check(found: Results, x: Case, spec: AttentionSpec) -> None:
    sim = emulate(x, spec)
    check_call(found, as_kernel_trace(sim), x, sim)


@pytest.mark.parametrize("x", [PLAIN, CAUSAL, ONE], ids=["full", "causal", "one"])
@pytest.mark.parametrize("spec", SPECS)
def test_the_emulators_gradients_are_within_the_contract(spec: str, x: Case) -> None:
    check(emulated(x, PRESETS[spec]), x, PRESETS[spec])


@pytest.mark.parametrize("spec", [pytest.param(x, marks=HERE) for x in SPECS])
def test_the_gradients_of_portable_kernels_are_within_the_contract(spec: str) -> None:
    x = kernel_case(seed=3, is_causal=True, **SHAPE)
    found, on_cpu = run_kernels(x, PRESETS[spec]), emulated_case(x)
    found = Results(*(y.cpu() for y in found))
    traced = run_traced(x, PRESETS[spec])
    check_call(found, traced, on_cpu, emulate(on_cpu, PRESETS[spec]))


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
@pytest.mark.parametrize("spec", SPECS)
def test_an_error_of_a_thousandth_is_found(spec: str, name: str) -> None:
    found = emulated(CAUSAL, PRESETS[spec])
    wrong = found._replace(**{name: getattr(found, name) * 1.001})
    with pytest.raises(AssertionError, match=name):
        check(wrong, CAUSAL, PRESETS[spec])


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_gradients_with_the_scales_of_another_spec_are_found(name: str) -> None:
    """Scales of rows and columns instead of one of a tile: a smaller error, but another number."""
    given, other = PRESETS["sagebwd"], PRESETS["factored"]
    other = replace(given, dv=other.dv, dq=other.dq, dk=other.dk)
    found = emulated(PLAIN, given)
    wrong = found._replace(**{name: getattr(emulated(PLAIN, other), name)})
    with pytest.raises(AssertionError, match=name):
        check(wrong, PLAIN, given)


def test_nan_is_found() -> None:
    found = emulated(PLAIN, PRESETS["factored"])
    found.dk[0, 0, 3, 5] = torch.nan
    with pytest.raises(AssertionError, match="dk"):
        check(found, PLAIN, PRESETS["factored"])


def test_other_results_than_the_traces_are_refused() -> None:
    found = emulated(PLAIN, PRESETS["factored"])
    with pytest.raises(AssertionError, match="unlike a trace's"):
        check(found._replace(o=found.o * 1.001), PLAIN, PRESETS["factored"])


IN_CODES = ("sagebwd", "factored")
"""The presets whose forward Hopper computes in codes."""


@pytest.mark.parametrize("x", [PLAIN, CAUSAL, ONE], ids=["full", "causal", "one"])
@pytest.mark.parametrize("spec", IN_CODES)
def test_the_emulators_output_is_within_the_contract_of_a_forward_in_codes(
    spec: str, x: Case
) -> None:
    sim = emulate(x, PRESETS[spec])
    check_call(emulated(x, PRESETS[spec]), as_kernel_trace(sim), x, sim, forward=True)


@pytest.mark.parametrize("name", ["o", "lse"])
@pytest.mark.parametrize("spec", IN_CODES)
def test_an_error_of_a_forward_in_codes_is_found(spec: str, name: str) -> None:
    sim = emulate(CAUSAL, PRESETS[spec])
    found = emulated(CAUSAL, PRESETS[spec])
    wrong = found._replace(**{name: getattr(found, name) * 1.001})
    with pytest.raises(AssertionError, match=name):
        check_call(wrong, as_kernel_trace(sim), CAUSAL, sim, forward=True, backward=False)


def test_an_output_with_the_scales_of_another_spec_is_found() -> None:
    given, other = PRESETS["sagebwd"], PRESETS["factored"]
    sim = emulate(PLAIN, given)
    wrong = emulated(PLAIN, replace(given, pv=other.pv))
    with pytest.raises(AssertionError, match=r"^o\b"):
        check_call(wrong, as_kernel_trace(sim), PLAIN, sim, forward=True, backward=False)


@pytest.mark.parametrize("spec", SPECS)
def test_enough_fuzz_cases_run_the_backward_in_codes(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Hopper GPU, one of seven cases of these presets at least. Others have windows, padding,
    or another rounding, for example, which that backward does not have."""
    monkeypatch.setattr(hopper.support, "IS_INTERPRETED", False)
    monkeypatch.setattr(hopper.support, "is_hopper", lambda: True)
    monkeypatch.setattr(kernel_cases, "DEVICE", "cuda")
    cases: list[KernelCase] = []

    @seed(1)
    @settings(max_examples=400, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
    @given(kernel_cases.problems(PRESETS[spec]))
    def draw(problem: KernelCase) -> None:
        cases.append(problem)

    draw()
    monkeypatch.setattr(kernel_cases, "DEVICE", "cpu")  # where the tensors are
    served = [has_codes_backward(x.case, x.parsed) for x in cases]
    assert sum(served) >= len(cases) / 7, f"{sum(served)} of {len(cases)}"
    sizes = {x.d for x, is_served in zip(cases, served, strict=True) if is_served}
    assert sizes == {64, 96, 128}
