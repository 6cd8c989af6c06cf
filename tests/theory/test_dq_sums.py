"""Sums of dQ as integers stay within the bound of a row, the range of int32 and the error bound."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sagesim import FACTORED, FPA_FP16, SAGEBWD, Granularity, Precision, Rounding, quantize
from sagesim.spec import HALF_AWAY, HALF_EVEN, RoundingMode
from tests.support import examples
from tests.support.assertions import assert_within_bound
from theory import dq_sums
from theory.checks.dq_sums import Sums, aligned, doubled, subnormal
from theory.checks.samples import gaussian
from theory.dq_sums import Growth, growth, largest_sum, row_bound, unit

MODES = (HALF_EVEN, HALF_AWAY, Rounding.stochastic(5))
BLOCK_Q, BLOCK_K = 4, 16
FLOAT32 = 1 + 2.0**-21  # codes and scales are computed in float32
INT32 = 2**31

KINDS = {
    "gaussian": lambda x: x,
    "peaked": lambda x: x**9,
    "sparse": lambda x: x * (x > 1),
    # One element of a tile is large. The others are a little more than half of its code.
    "half_codes": lambda x: x.sign() / 253 + torch.eye(*x.shape),
    # Rows of a tile differ: one row determines the scale of a tile.
    "unequal_rows": lambda x: x.sign() * torch.tensor([1.0, 1 / 253, 1e-3, 0.0]).repeat(2)[:, None],
}


def grown(ds, how, rounding, growth):
    """sum |rounded dS| of each row, and the bound on it."""
    q = quantize(ds, how, block=(BLOCK_Q, BLOCK_K), rounding=rounding, tensor="ds")
    rows = ds.double().abs().sum(-1)
    shared = rows.unflatten(0, (-1, BLOCK_Q)).sum(-1).repeat_interleave(BLOCK_Q)
    bound = growth.own * rows + growth.shared * shared
    return (q.codes.double() * q.scale.double()).abs().sum(-1), bound * FLOAT32


@examples(200)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(sorted(KINDS)),
    how=st.sampled_from((Granularity.PerTile, Granularity.PerTileRow)),
    rounding=st.sampled_from(MODES),
    exponent=st.sampled_from((-60, 0, 60)),
)
def test_rounding_to_codes_grows_a_row_by_at_most_g(seed, kind, how, rounding, exponent):
    generator = torch.Generator().manual_seed(seed)
    ds = KINDS[kind](torch.randn(2 * BLOCK_Q, 3 * BLOCK_K, generator=generator)) * 2.0**exponent
    matmul = replace(SAGEBWD.dq, lhs=how)
    found, bound = grown(ds, how, rounding, growth(matmul, rounding.mode, BLOCK_K))
    assert_within_bound(actual=found, exact=torch.zeros_like(found), bound=bound, what="row sums")


@pytest.mark.parametrize("rounding", [HALF_EVEN, HALF_AWAY], ids=lambda r: r.mode.value)
def test_g_is_more_than_1(rounding):
    """With one scale per tile, a row of a little more than half codes nearly doubles."""
    ds = KINDS["unequal_rows"](torch.ones(2 * BLOCK_Q, 3 * BLOCK_K))
    found, bound = grown(ds, Granularity.PerTile, rounding, Growth(1.0, 0.0))
    assert float((found / bound)[1]) > 1.9
    with pytest.raises(AssertionError, match="exceed the bound"):
        assert_within_bound(actual=found, exact=torch.zeros_like(found), bound=bound, what="twin")


def test_stochastic_rounding_needs_the_rows_of_the_block():
    """One scale per tile: a small row grows by more than block_k / 127 of itself."""
    ds = KINDS["unequal_rows"](torch.ones(2 * BLOCK_Q, 3 * BLOCK_K))
    ds[2] = 1e-4
    own = growth(FACTORED.dq, RoundingMode.STOCHASTIC, BLOCK_K)
    assert own.shared == 0
    seeds = [grown(ds, Granularity.PerTile, Rounding.stochastic(s), own) for s in range(20)]
    assert any(bool((found > bound).any()) for found, bound in seeds)


@examples(100)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from((torch.float16, torch.bfloat16)),
    exponent=st.integers(-40, 10),
)
def test_16_bit_grows_a_row_by_at_most_g_or_2_if_subnormal(seed, dtype, exponent):
    x = torch.randn(64, generator=torch.Generator().manual_seed(seed)).double() * 2.0**exponent
    rounded = x.to(dtype).double()
    g = growth(FPA_FP16.dq, RoundingMode.HALF_EVEN, 64).own
    is_normal = x.abs() >= torch.finfo(dtype).tiny
    limit = x.abs() * torch.where(is_normal, g, g * dq_sums.SUBNORMAL_EXCESS)
    assert_within_bound(actual=rounded, exact=torch.zeros_like(x), bound=limit, what="16 bit")


def test_a_subnormal_fp16_ds_exceeds_the_bound_of_a_row_but_not_int32():
    """dS a little above half of FP16's smallest number doubles, and B_i does not count that."""
    sums = Sums.of(subnormal(), FPA_FP16)
    excess = float((sums.magnitudes / sums.bound).max())
    assert 1.9 < excess <= dq_sums.SUBNORMAL_EXCESS
    limit = largest_sum(sums.attended, dq_sums.SUBNORMAL_EXCESS)
    assert bool((sums.integers.abs().amax(-1) <= limit).all()) and float(limit.max()) < INT32


@examples(300)
@given(
    mantissa=st.floats(1.0, 2.0),
    exponent=st.integers(-200, 126),
    k=st.sampled_from((-100, -60, -30, 0, 10)),
    in_16_bit=st.booleans(),
)
def test_the_unit_is_the_least_power_of_two_that_fits(mantissa, exponent, k, in_16_bit):
    bound = torch.tensor(mantissa * 2.0**exponent, dtype=torch.float64)
    ds_sum = bound * 2.0**-k
    u = float(unit(bound, ds_sum, in_16_bit=in_16_bit))
    if float(ds_sum) >= 2.0**120:
        assert math.isnan(u)
        return
    assert math.frexp(u)[0] == 0.5
    needed = dq_sums.SLACK * float(bound) * 2.0**-30
    lowest = max(2.0**-126, dq_sums.SLACK * float(ds_sum) * 2.0**-126)
    assert u >= max(needed, lowest)
    assert u == 2.0**-126 or u < 2 * max(needed, lowest)


@pytest.mark.parametrize(
    ("bound", "ds_sum", "in_16_bit", "expected"),
    [
        (0.0, 0.0, False, 2.0**-126),
        (2.0**30 / (1 + 2.0**-6), 1.0, False, 1.0),
        (2.0**127, 1.0, True, math.nan),
        (2.0**127, 1.0, False, 2.0**98),
        (2.0**157, 1.0, False, math.nan),
        (1.0, 2.0**120, False, math.nan),
        (math.nan, 1.0, False, math.nan),
    ],
)
def test_the_unit_at_its_limits(bound, ds_sum, in_16_bit, expected):
    x = (torch.tensor(t, dtype=torch.float64) for t in (bound, ds_sum))
    found = float(unit(*x, in_16_bit=in_16_bit))
    assert found == expected or (math.isnan(found) and math.isnan(expected))


@pytest.mark.parametrize("excess", [1.0, dq_sums.SUBNORMAL_EXCESS])
@pytest.mark.parametrize("signs", [1, -1])
def test_a_row_of_2_to_the_20_keys_does_not_overflow(excess, signs):
    """Parts of one sign, of odd halves of units that round up, and of the largest magnitude."""
    blocks = 2**20 // 32
    bound = torch.tensor(2.0**30 / dq_sums.SLACK, dtype=torch.float64)
    assert float(unit(bound, bound, in_16_bit=True)) == 1.0
    # Odd numbers and a half round to even, upwards; the sum of magnitudes is at most excess * 2^30.
    odd = int(excess * 2**30 / blocks) // 2 * 2 - 1
    parts = signs * torch.full((blocks,), odd + 0.5, dtype=torch.float64)
    assert float(parts.abs().sum()) <= excess * 2.0**30
    running = parts.round().long().cumsum(0).abs()
    limit = float(largest_sum(torch.tensor(blocks), excess))
    assert float(parts.abs().sum()) + blocks / 2 == float(running[-1])
    assert 0.99 * limit < float(running.max()) <= limit < INT32


def test_a_unit_of_half_the_size_overflows():
    """The twin of the test above: 2^31 units do not fit."""
    assert float(largest_sum(torch.tensor(2**15), 2.0)) >= INT32


@pytest.mark.parametrize("blocks", [1, 7, 4096])
def test_the_error_of_a_sum(blocks):
    generator = torch.Generator().manual_seed(0)
    parts = 1e4 * torch.randn(blocks, 1000, generator=generator, dtype=torch.float64)
    u, count = torch.tensor(0.25, dtype=torch.float64), torch.tensor(blocks)
    error = (parts / u).round().sum(0) * u - parts.sum(0)
    assert float(error.abs().max()) <= float(dq_sums.error_bound(u, count)) * (1 + 1e-9)
    rms = float(error.square().mean().sqrt())
    assert rms == pytest.approx(float(dq_sums.expected_error(u, count)), rel=0.1)
    ties = torch.full((blocks,), 0.125, dtype=torch.float64)  # they round to 0
    worst = float(((ties / u).round() * u - ties).sum().abs())
    assert worst == float(dq_sums.error_bound(u, count))


@pytest.mark.parametrize(
    ("spec", "sample"), [(SAGEBWD, doubled(128)), (FPA_FP16, aligned(128))], ids=["sagebwd", "fp16"]
)
def test_the_bound_of_a_row_is_reached(spec, sample):
    sums = Sums.of(sample, spec)
    ratio = (sums.magnitudes / sums.bound)[..., -1]
    assert 0.99 < float(ratio) <= 1
    without_g = sums.bound / growth(spec.dq, spec.rounding.mode, spec.block_k).own
    assert float((sums.magnitudes / without_g).max()) > 1 - 1e-5


def test_rows_of_p_that_do_not_sum_to_1_count():
    """p_bound multiplies by the row sums; without them the bound is too small by as much."""
    lse = torch.zeros(2)
    sums = torch.tensor([0.5, 3.0])
    assert dq_sums.p_bound(lse, 8, p_sums=sums).tolist() == [0.5, 3.0]
    assert dq_sums.p_bound(lse, 8).tolist() == [1.0, 1.0]
    assert dq_sums.p_bound(torch.tensor([2.0**26]), 8).tolist() == [8.0]
    q, k = torch.ones(2, 40), torch.ones(3, 40)
    size = 2.0**-21 * 64 * 40 * 0.5 / math.log(2)
    found = dq_sums.p_bound(lse, 8, q=q, k=k, scale=-0.5)
    assert found.tolist() == pytest.approx([2.0**size] * 2, rel=1e-12)


def test_the_bound_of_a_row_by_hand():
    one = torch.ones(2)
    v = torch.tensor([[3.0, 4.0], [math.inf, 0.0]])
    do = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    sums = dq_sums.ds_bound(
        v=v, do=do, delta=torch.tensor([-1.0, 0.0]), p_bound=one, growth=Growth(1.0, 0.5), block_q=2
    )
    assert sums.tolist() == [6 + 8, 10 + 8]
    assert row_bound(sums, torch.tensor([[1.0, -2.0]])).tolist() == [28.0, 36.0]


def test_a_unit_in_the_last_place():
    x = torch.tensor([1.0, 1.9, -2.0, 0.75])
    assert dq_sums.last_place(x, torch.bfloat16).tolist() == [2**-7, 2**-7, 2**-6, 2**-8]
    assert dq_sums.last_place(x, torch.float16).tolist() == [2**-10, 2**-10, 2**-9, 2**-11]


def test_unknown_growths_raise():
    with pytest.raises(ValueError, match="fp32"):
        growth(replace(SAGEBWD.dq, precision=Precision.FP32), RoundingMode.HALF_EVEN, 64)
    with pytest.raises(ValueError, match="row"):
        growth(replace(SAGEBWD.dq, lhs=Granularity.PerRow), RoundingMode.STOCHASTIC, 64)


def test_the_sums_of_a_sample_are_its_dq():
    sample = gaussian(1.0, 100, is_causal=True)
    sums, trace = Sums.of(sample, SAGEBWD), sample.trace(SAGEBWD)
    dq = sums.integers * sums.unit[..., None] * sample.q.shape[-1] ** -0.5
    bound = 1e-5 * trace.dq.double().abs().amax().expand_as(dq)
    assert_within_bound(actual=trace.dq, exact=dq, bound=bound, what="dQ")
