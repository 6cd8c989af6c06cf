"""No code of a map with scales from bounds overflows, for any finite input."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sagesim import FP8_GRADIENTS, AttentionSpec, Delta, Precision, RoundingMode
from sagesim.emulator import CODE_MAX
from sagesim.emulator import row_bounds as emulated_bounds
from tests.support import examples
from theory.checks.row_bounds import INT8, attained, checks, of_dp, row_codes
from theory.checks.samples import Sample
from theory.rounding import UNIT
from theory.row_bounds import (
    OVERFLOW,
    TOP_CODES,
    UNDERFLOW_SHARE,
    ds_bound,
    excess,
    overflows,
    vanishing,
)

E5M2 = AttentionSpec.parse("fp8_gradients dv=fp8_e5m2 dq=fp8_e5m2 dk=fp8_e5m2")
SPECS = {"fp8_e4m3": FP8_GRADIENTS, "fp8_e5m2": E5M2, "int8": INT8}

KINDS = {
    "gaussian": lambda x: x,
    "peaked": lambda x: x**5,
    "sparse": lambda x: x * (x > 1),
    "constant": torch.ones_like,
    "one_row": lambda x: x * (torch.arange(x.shape[-2]) == 3)[:, None],
    "unequal_rows": lambda x: x * torch.exp2(-2.0 * torch.arange(x.shape[-2]))[:, None],
}


@examples(120)
@given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.tuples(*[st.sampled_from(sorted(KINDS))] * 4),
    exponents=st.tuples(*[st.sampled_from((-60, -30, 0, 3, 30))] * 2),
    logits=st.sampled_from((0, 2, 5)),
    precision=st.sampled_from(sorted(SPECS)),
    delta=st.sampled_from(Delta),
    parallel=st.booleans(),
    is_causal=st.booleans(),
)
def test_no_row_exceeds_its_top_code_and_scales_follow_from_the_bounds(
    seed, kinds, exponents, logits, precision, delta, parallel, is_causal
):
    """Sizes from 2^-60 to 2^30, vanishing rows, dO parallel to V: the bound is nearly attained.

    The numbers are those before they are rounded: codes beyond the largest one do not exist.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (KINDS[kind](torch.randn(1, 24, 8, generator=generator)) for kind in kinds)
    if parallel:
        do = v.flip(-2).clone()
    v, do = v * 2.0 ** exponents[0], do * 2.0 ** exponents[1]
    spec = replace(SPECS[precision], delta=delta, block_q=16, block_k=16)
    spec = replace(spec, pv=replace(spec.pv, precision=Precision.BF16))
    x = Sample(name="", q=q * 2.0**logits, k=k * 2.0**logits, v=v, do=do, is_causal=is_causal)
    found = row_codes(x.trace(spec), *of_dp(x))
    assert set(found) == {"dv.p", "dq.ds", "dk.ds"}
    for key, rows in found.items():
        assert float(rows.largest.max()) <= 1 + excess(8), key
        assert float(rows.off.max()) <= excess(8), key


@pytest.mark.parametrize("name", ["p_bound", "ds_bound"])
def test_the_checks_notice_a_bound_that_is_a_tenth_too_small(name, monkeypatch):
    """Scaled by 0.9, w_i is too small for P, and beta_i for a dS that attains it."""
    right = {n: getattr(emulated_bounds, n) for n in ("p_bound", "ds_bound")}
    factor = {n: 0.9 if n == name else 1.0 for n in right}
    of_p = factor["p_bound"]  # beta_i contains w_i, and is to stay right if only w_i is scaled
    changed = {
        "p_bound": lambda *x: of_p * right["p_bound"](*x),
        "ds_bound": lambda w, *x: factor["ds_bound"] * right["ds_bound"](w / of_p, *x),
    }
    for n, function in changed.items():
        monkeypatch.setattr(emulated_bounds, n, function)
    title = "P:" if name == "p_bound" else "dS:"
    of_map = [c for c in checks() if c.statement.startswith(title)]
    scales = [c for c in of_map if "scale" in c.statement]
    numbers = [c for c in of_map if "scale" not in c.statement]
    assert scales and not any(c.holds for c in scales)
    attaining = numbers if name == "p_bound" else [c for c in numbers if "V of two" in c.inputs]
    assert attaining and not any(c.holds for c in attaining)


def test_the_bound_is_nearly_attained():
    """A bound half as large would not hold."""
    sample = attained()
    t = sample.trace(FP8_GRADIENTS)
    bound = ds_bound(t.p_recompute, sample.do.double(), sample.v.double(), t.delta)
    assert (t.ds.abs().amax(-1, keepdim=True) / bound).max() > 0.99
    codes = t.operands["dk.ds"].codes.float().abs()
    assert codes.max() >= 240


@pytest.mark.parametrize("precision", sorted(SPECS))
def test_float32_errors_are_far_below_what_overflows(precision):
    """OVERFLOW is half a code above the largest one; `excess` stays far below it."""
    top = CODE_MAX[Precision(precision)]
    edge = top * OVERFLOW[Precision(precision)]
    spacing = {"int8": 1, "fp8_e4m3": 32, "fp8_e5m2": 8192}[precision]
    assert edge == pytest.approx(top + spacing / 2)
    assert not overflows(Precision(precision), 256)
    assert 10 * excess(256) < OVERFLOW[Precision(precision)] - 1
    assert overflows(Precision(precision), 10**6)


def test_top_codes_are_those_of_the_emulator():
    assert TOP_CODES == emulated_bounds.TOP_CODES


def test_underflow_is_within_the_excess_for_the_smallest_bound_of_every_format():
    """256 errors of 2^-150 against the smallest bound for which top code / bound is finite."""
    for precision in SPECS:
        for top in TOP_CODES[Precision(precision)]:
            top, edge = torch.tensor(top), torch.tensor(top * 2.0**-128)
            least = torch.nextafter(edge, torch.tensor(math.inf))
            assert bool((top / edge).isinf()) and bool((top / least).isfinite())
            assert 256 * 2.0**-150 / float(least) <= UNDERFLOW_SHARE
    share = UNDERFLOW_SHARE / UNIT
    assert excess(256) / UNIT == pytest.approx(4 + 2 * 257 + 2 * (2 + 8) + 8 + share)


def test_vanishing_numbers_are_those_below_half_the_smallest_code():
    x = torch.tensor(vanishing(Precision.FP8_E4M3) * 448)
    assert (x * 0.99).to(torch.float8_e4m3fn).float() == 0
    assert (x * 1.01).to(torch.float8_e4m3fn).float() > 0
    assert vanishing(Precision.INT8, RoundingMode.STOCHASTIC) == 1 / 127
