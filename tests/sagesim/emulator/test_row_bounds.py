"""Scales from bounds against docs/numerics.md, written anew in numpy, one row at a time."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sagesim import AttentionSpec, Delta, Granularity, Precision, quantize, trace
from sagesim.emulator import CODE_MAX, row_bounds
from tests.support import examples
from tests.support.assertions import assert_bitwise
from tests.support.calls import run_exact, run_trace
from tests.support.inputs import MODERATE, case
from tests.support.strategies import cases

F = np.float32
TOPS = {
    "int8": [127],
    "fp8_e4m3": [448, 416, 384, 352, 320, 288, 256, 240],
    "fp8_e5m2": [57344, 49152, 40960, 32768],
}
BOUNDED = "dv={0}@row_bound,{1} dq={0}@row_bound,block dk={0}@row_bound,{1}"


def spec_of(precision="fp8_e4m3", granularity="block", words="") -> AttentionSpec:
    return AttentionSpec.parse(f"factored_qk {BOUNDED.format(precision, granularity)} {words}")


def pairwise(x: np.ndarray) -> np.float32:
    x = np.concatenate([x, np.zeros(2 ** math.ceil(math.log2(len(x))) - len(x), F)])
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


def norm(x: np.ndarray) -> np.float32:
    e = min(127, max(-126, math.frexp(float(np.abs(x).max()))[1]))
    return np.sqrt(pairwise((x * F(2.0**-e)) ** 2)) * F(2.0**e)


def code(x: np.ndarray, precision: str) -> np.ndarray:
    if precision == "int8":
        return np.rint(x)
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[precision]
    return torch.from_numpy(np.asarray(x, F)).to(dtype).float().numpy()


def folded(x: np.ndarray, beta: np.ndarray, precision: str) -> tuple[np.ndarray, F, list[int]]:
    """Codes, scale and top codes of one region of dO or Q whose rows are multiplied by beta."""
    z, c, tops = x * beta[:, None], F(CODE_MAX[Precision(precision)]), TOPS[precision]
    amax = np.abs(z).max()
    scaled = z * (c * F(tops[-1]) / amax)
    codes, chosen = np.zeros_like(z), []
    for i, row in enumerate(scaled):
        rounded = {t: code(row / F(t), precision) for t in tops}
        loss = {t: pairwise((r * F(t) - row) ** 2) for t, r in rounded.items()}
        top = min(tops, key=lambda t: (loss[t], -t)) if len(tops) > 1 else tops[0]
        codes[i] = rounded[top]
        chosen.append(top)
    return codes, amax / (c * F(tops[-1])), chosen


@pytest.mark.parametrize("precision", TOPS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_codes_and_scales_are_those_of_the_definition(precision, is_causal):
    c = case(seed=3, n_q=40, n_k=40, d=12, heads=(1,), is_causal=is_causal)
    t = run_trace(c, spec_of(precision, "block", "block=16x16"))
    q = (c.q[0].float()).numpy()
    do, v = c.do[0].bfloat16().float().numpy(), c.v[0].bfloat16().float().numpy()
    m = t.s_recompute[0].amax(-1)
    w = (m - t.lse[0]).exp()  # K-smoothing changes both by the same constant
    of_v = max(norm(row) for row in v)
    ds = np.array([norm(row) * of_v for row in do], F) + t.delta[0].abs().numpy()
    for site, tensor, x, beta in (
        ("dv", "do", c.do[0].float().numpy(), w.numpy()),
        ("dk", "q", q, w.numpy() * ds),
    ):
        found = t.operands[f"{site}.{tensor}"]
        left = t.operands[f"{site}.{'p' if site == 'dv' else 'ds'}"]
        map_ = (t.p_recompute if site == "dv" else t.ds)[0].numpy()
        for block in range(0, 40, 16):
            rows = slice(block, min(block + 16, 40))
            codes, scale, tops = folded(x[rows], beta[rows].astype(F), precision)
            np.testing.assert_allclose(found.scale[0, rows, 0].numpy(), scale, rtol=1e-5)
            same = found.codes[0, rows].float().numpy() == codes
            assert same.mean() > 0.98, (site, block, same.mean())
            of_rows = beta[rows] / np.array(tops, F)
            np.testing.assert_allclose(left.scale[0, rows, 0].numpy(), of_rows, rtol=1e-5)
            again = code(map_[rows] / of_rows[:, None], precision)
            assert (left.codes[0, rows].float().numpy() == again).mean() > 0.98
    assert_bitwise(
        actual=t.operands["dq.ds"].codes.float(),
        expected=t.operands["dk.ds"].codes.float(),
        what="dq and dk share the codes of dS",
    )


@given(cases(MODERATE), st.sampled_from(list(TOPS)), st.sampled_from(list(Delta)))
@examples(40)
def test_no_code_overflows(case, precision, delta):
    """No number is above the largest code before it is rounded: conversions may saturate."""
    spec = replace(spec_of(precision, "block"), delta=delta)
    t = run_trace(case, spec)
    for name, x in t.operands.items():
        assert x.codes.float().isfinite().all(), name
    largest = CODE_MAX[Precision(precision)] * (1 + 2.0**-16)
    for name, x in (("dv.p", t.p_recompute), ("dq.ds", t.ds), ("dk.ds", t.ds)):
        assert bool((x.abs() <= t.operands[name].scale * largest).all()), name


@pytest.mark.parametrize("precision", TOPS)
def test_a_bound_that_is_a_tenth_too_small_overflows(precision, monkeypatch):
    right = row_bounds.p_bound
    monkeypatch.setattr(row_bounds, "p_bound", lambda *x: 0.9 * right(*x))
    x = run_trace(case(seed=0, n_q=40, n_k=40, d=12, heads=(1,)), spec_of(precision))
    largest = x.p_recompute / x.operands["dv.p"].scale
    assert float(largest.max()) > 1.05 * CODE_MAX[Precision(precision)]


def test_errors_are_those_of_three_mantissa_bits():
    """Each gradient is as accurate as two operands of 3 mantissa bits allow, and not more."""
    c = case(seed=0, n_q=256, n_k=256, d=64, heads=(4,))
    found, exactly = run_trace(c, spec_of()), run_exact(c)
    for name in ("dq", "dk", "dv"):
        expected = getattr(exactly, name).double()
        error = (getattr(found, name).double() - expected).norm() / expected.norm()
        assert 0.025 < error < 0.045, (name, float(error))


def test_rows_of_a_small_block_vanish_only_if_it_shares_a_scale_with_a_large_one():
    q, v, do = torch.zeros(1, 128, 8), torch.ones(1, 128, 8), torch.ones(1, 128, 8)
    do[:, :64] *= 2.0**10
    lost = {
        g: trace(q, q, v, do, spec=spec_of("int8", g)).vanished["dv.do"].rows
        for g in ("block", "head")
    }
    assert lost == {"block": 0, "head": 0.5}


def test_quantize_refuses_the_granularity_of_bounds():
    with pytest.raises(ValueError, match="x does not determine the bound"):
        quantize(torch.ones(4, 4), Granularity.PerRowBound, block=(2, 2))
