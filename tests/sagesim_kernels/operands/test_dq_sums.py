"""Units of dQ: those of the theory, for every kind of row; and what they must not lose."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sagesim import (
    CAUSAL_SAFE,
    FACTORED_QK,
    SAGE_FORWARD,
    SAGEBWD,
    AttentionSpec,
    Delta,
    Rounding,
    Smoothing,
)
from sagesim.problem import resolve_input16
from sagesim_kernels.operands import KernelProblem, Rows, SubtractedMeans, finish_dq, padded
from sagesim_kernels.operands.dq_sums import DqSums
from sagesim_kernels.portable import backward
from tests.support.assertions import assert_within_bound
from tests.support.calls import run_attention, run_exact, run_trace
from tests.support.combinations import crossed
from tests.support.inputs import Case
from tests.support.kernels import DEVICE, HERE, SPECS, kernel_case, run_kernels
from theory import dq_sums
from theory.checks.dq_sums import ds_bound_of, floor_of, operand
from theory.checks.samples import Sample

pytestmark = HERE

NAMES = ("sagebwd", "factored", "factored_pv16", "fpa_fp16")
UNITS = {name: SPECS[name] for name in NAMES} | {
    "causal_safe": CAUSAL_SAFE,
    "sage_forward": SAGE_FORWARD,
    "stochastic": replace(SAGEBWD, rounding=Rounding.stochastic(5)),
    "stochastic rows": replace(SPECS["factored"], rounding=Rounding.stochastic(5)),
    "delta from P": replace(SAGEBWD, delta=Delta.FROM_P, block_q=128, block_k=32),
}
not_a_number = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@pytest.fixture
def units(unplanned, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The units of each backward of the portable kernels, [1, heads, tokens]."""
    found: list[Tensor] = []
    finish = backward.finish_dq

    def finish_dq(problem, sums: DqSums, *rest: object) -> None:
        found.append(sums.unit[None, :, : problem.q.shape[2]].cpu().clone())
        finish(problem, sums, *rest)

    monkeypatch.setattr(backward, "finish_dq", finish_dq)
    monkeypatch.setattr("sagesim_kernels.hopper.serves_backward", lambda *_: False)
    return found


def expected_units(case: Case, spec) -> tuple[Tensor, Tensor]:
    """The units of the theory, for a bound that is a little smaller and a little larger."""
    case = case.map(lambda x: x.cpu())
    fields = {name: getattr(case, name) for name in ("q", "k", "v", "do", "is_causal")}
    sample = Sample(name="units", **fields)
    trace = sample.trace(spec)
    k = operand(sample, trace, "dq", "k")
    k_max = dq_sums.k_bound(k, sample.attends)
    ds_sum = ds_bound_of(sample, trace)
    return tuple(
        dq_sums.unit(x, k_max, floor=floor_of(x, sample, trace))
        for x in (ds_sum * (1 - 2.0**-9), ds_sum * (1 + 2.0**-9))
    )


@pytest.mark.parametrize(("name", "is_causal"), crossed([*UNITS], [False, True]))
def test_units_are_those_of_the_theory(units, name, is_causal):
    """Rows of very different sizes; the bound itself is known up to float32 and other codes."""
    spec = replace(UNITS[name], smoothing=Smoothing())
    c = kernel_case(seed=3, n_q=150, n_k=170, d=24, d_v=16, is_causal=is_causal)
    powers = torch.arange(150, device=DEVICE)[:, None] % 13
    c = replace(c, do=c.do * 2.0**-powers, v=c.v * 2.0 ** (torch.arange(170).to(c.v)[:, None] / 30))
    run_kernels(c, spec)
    low, high = expected_units(c, spec)
    assert bool(((units[0] >= low) & (units[0] <= high)).all())
    assert float((low == high).double().mean()) > 0.95  # nearly all are known exactly
    assert len(low.unique()) > (2 if name == "stochastic" else 8)


def test_units_contain_the_row_sums_of_another_p(units):
    """Logits are large, and the backward rounds Q and K to INT8, but the forward does not."""
    spec = AttentionSpec.parse("factored_qk qk=bf16 smooth=none")
    c = kernel_case(seed=3, n_q=70, n_k=90, d=24)
    c = replace(c, q=c.q * 32)
    run_kernels(c, spec)
    low, high = expected_units(c, spec)
    assert bool(((units[0] >= low) & (units[0] <= high)).all())
    assert float(run_trace(c, spec).p_recompute.sum(-1).max()) > 2


@pytest.mark.parametrize(("name", "kind"), crossed(NAMES, ["block", "channel"]))
def test_a_small_k_beside_zeros_loses_nothing(name, kind):
    """A region of zeros has the scale 1, and must not make the units those of K = 127."""
    c = kernel_case(seed=1, n_q=40, n_k=130, d=16)
    k = c.k.clone() * 2.0**-12
    if kind == "block":
        k[..., 64:128, :] = 0
    else:
        k[..., 3] = 0
    c = replace(c, k=k, q=c.q * 2.0**12)
    spec = replace(SPECS[name], smoothing=Smoothing())
    found, sim, exact = run_kernels(c, spec).dq, run_attention(c, spec).dq, run_exact(c).dq
    error, own = ((x.cpu().double() - exact.cpu().double()).square().mean() for x in (found, sim))
    assert float(error) <= 1.1 * float(own)


@not_a_number
@pytest.mark.parametrize(
    ("name", "token"), crossed(["sagebwd", "factored", "factored_pv16"], [0, 100])
)
def test_a_v_that_overflows_in_dp_alone_reaches_dq(name, token):
    """PV is in INT8, or in 16 bit as dP is; O and delta may be finite."""
    spec = replace(
        SPECS[name], dp=replace(SPECS[name].dp, precision=SPECS["fpa_fp16"].dp.precision)
    )
    c = kernel_case(seed=1, n_q=130, n_k=130, d=16, is_causal=True)
    c.v[..., token, 3] = 1e6
    bad = ~run_kernels(c, spec).dq.isfinite().all(-1).cpu()
    expected = ~run_trace(c, spec).dq.isfinite().all(-1).cpu()
    assert torch.equal(bad, expected) and bool(bad.any())


@not_a_number
@pytest.mark.parametrize("label", ["fpa_fp16", "factored_qk dq=fp16 dk=bf16"])
def test_a_ds_that_overflows_fp16_reaches_its_row_of_dq(label):
    """No int32 is infinite: where a part of dQ is, its row becomes NaN. dP and delta are finite."""
    spec = AttentionSpec.parse(label)
    c = kernel_case(seed=5, n_q=70, n_k=90, d=64)
    c.v.mul_(200)
    c.do[..., [7, 66], :] *= 2000
    found, trace = run_kernels(c, spec), run_trace(c, spec)
    assert bool(trace.ds.isfinite().all()) and bool(found.o.isfinite().all())
    overflows = (trace.ds.abs() > torch.finfo(torch.float16).max).any(-1).cpu()
    assert overflows.nonzero()[:, -1].tolist() == [7, 66]
    for dq in (found.dq, trace.dq):
        assert torch.equal(~dq.isfinite().cpu(), overflows[..., None].expand_as(dq))


@not_a_number
@pytest.mark.parametrize("tensor", ["q", "k", "v", "do"])
@pytest.mark.parametrize("name", ["sagebwd", "fpa_fp16"])
def test_a_query_without_keys_has_no_nan_of_its_tile(name, tensor):
    c = kernel_case(seed=6, n_q=90, n_k=20, d=16, is_causal=True)
    getattr(c, tensor)[..., -5, 0] = math.nan
    dq = run_kernels(c, SPECS[name], causal_alignment="lower_right").dq
    assert not bool(dq[..., :70, :].any())
    assert bool(dq[..., -5, :].isnan().any())


def test_rows_far_apart_in_a_tile(units):
    """Codes that are 0 do not overflow where they are multiplied by scales of another row."""
    c = kernel_case(seed=2, n_q=64, n_k=64, d=16)
    c.do[..., ::2, :] = 0
    spec = replace(SAGEBWD, smoothing=Smoothing())
    c = replace(c, q=c.q * 2.0**-60, k=c.k * 2.0**60)
    dq = run_kernels(c, spec).dq
    assert not bool(dq[..., ::2, :].any()) and bool(dq.isfinite().all())
    assert bool((units[0] >= 2.0**-67).all())
    bound = 1e-5 * run_attention(c, spec).dq.abs().amax().double().expand(dq.shape)
    assert_within_bound(actual=dq, exact=run_attention(c, spec).dq.double(), bound=bound, what="dq")


@pytest.mark.parametrize("d", [40, 64, 72, 96, 104, 128])
def test_sums_that_tma_added_become_dq(d: int) -> None:
    """The sums of padding channels, to which TMA adds nothing, may be anything."""
    n, channels = 96, padded(d)
    q, k = (torch.zeros(1, heads, n, d, device=DEVICE) for heads in (2, 1))
    problem = KernelProblem.of(
        q,
        k,
        k,
        spec=resolve_input16(FACTORED_QK, torch.float32),
        scale=0.5,
        is_causal=False,
        lower_right=False,
    )
    values = torch.randint(-(2**30), 2**30, (2, 2, 64, channels), dtype=torch.int32, device=DEVICE)
    values[..., d:] = 77
    # Of 16 rows and 8 channels: four numbers of each thread, two in each of two rows.
    groups = values.view(2, 2, 4, 2, 8, channels // 8, 4, 2).permute(0, 1, 5, 2, 4, 6, 3, 7)
    sums = DqSums.by_tma(problem, channels)
    assert sums.sums.shape == (2, 128, channels)
    sums.sums.copy_(groups.reshape(2, 128, channels))
    sums.unit.fill_(2.0**-20)
    dq = torch.empty_like(q)
    lse2 = Rows.of(torch.zeros(1, 2, n, device=DEVICE))
    finish_dq(problem, sums, lse2, None, SubtractedMeans.of(None, None, k), dq)
    expected = values.view(2, 128, channels)[None, :, :n, :d].float() * 2.0**-20 * 0.5
    assert torch.equal(dq, expected)
