"""Sums of dQ as integers stay within the bound of a row, the range of int32 and the error bound."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sagesim import (
    FACTORED,
    FPA_FP16,
    SAGEBWD,
    Granularity,
    MatmulSpec,
    Precision,
    Rounding,
    quantize,
)
from sagesim.emulator import from_tiles, to_tiles
from sagesim.emulator.quantization import encode_within
from sagesim.emulator.row_bounds import TOP_CODES
from sagesim.spec import HALF_AWAY, HALF_EVEN, RoundingMode
from tests.support import examples
from tests.support.assertions import assert_within_bound
from theory import dq_sums
from theory.checks.dq_sums import Sums, aligned, doubled, smoothed_lse, subnormal
from theory.checks.samples import gaussian
from theory.dq_sums import Growth, code_floor, growth, k_bound, largest_attended, largest_sum, unit

MODES = (HALF_EVEN, HALF_AWAY, Rounding.stochastic(5))
BLOCK_Q, BLOCK_K = 4, 16
FLOAT32 = 1 + 2.0**-21  # codes and scales are computed in float32
INT32 = 2**31


def float64(x):
    return torch.tensor(x, dtype=torch.float64)


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


@examples(100)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(sorted(KINDS)),
    precision=st.sampled_from((Precision.INT8, Precision.FP8_E4M3, Precision.FP8_E5M2)),
    rounding=st.sampled_from(MODES),
    above=st.sampled_from((1.0, 30.0, 1e5)),
)
def test_rounding_with_scales_from_bounds_grows_a_row_by_at_most_g(
    seed, kind, precision, rounding, above
):
    """Also if the bound is far above the row: then many numbers are below the smallest code."""
    generator = torch.Generator().manual_seed(seed)
    ds = KINDS[kind](torch.randn(2 * BLOCK_Q, 3 * BLOCK_K, generator=generator))
    bound = above * ds.abs().amax(-1)
    top = torch.full_like(bound, TOP_CODES[precision][-1])
    tiles, rows = to_tiles(ds, BLOCK_Q, BLOCK_K), (-1, BLOCK_Q)
    of_rows = (x.unflatten(0, rows)[..., None, None] for x in (bound, top))
    rounded = encode_within(tiles, *of_rows, precision, rounding, "ds", 0).dequantize()
    found = from_tiles(rounded, *ds.shape).double().abs().sum(-1)
    how = MatmulSpec(precision, Granularity.PerRowBound, Granularity.PerBlock)
    g = growth(how, rounding.mode, BLOCK_K)
    most = (g.own * ds.double().abs().sum(-1) + g.of_bound * ds.shape[-1] * bound) * FLOAT32
    assert_within_bound(actual=found, exact=torch.zeros_like(found), bound=most, what="row sums")


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.FP8_E4M3, Precision.FP8_E5M2])
def test_stochastic_rounding_grows_rows_that_are_far_below_their_bound(precision):
    """The share of the bound for each key is needed."""
    how = MatmulSpec(precision, Granularity.PerRowBound, Granularity.PerBlock)
    g = growth(how, RoundingMode.STOCHASTIC, BLOCK_K)
    ds = torch.full((1, 64, 1, BLOCK_K), 0.02 * g.of_bound)
    top = torch.full((1, 64, 1, 1), TOP_CODES[precision][-1])
    rounded = encode_within(
        ds, torch.ones_like(top), top, precision, Rounding.stochastic(1), "ds", 0
    ).dequantize()
    row = rounded.double().sum(-1).max()
    assert float(row) > g.own * float(ds[0, 0].sum())


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
def test_16_bit_grows_a_row_by_at_most_g(seed, dtype, exponent):
    x = torch.randn(64, generator=torch.Generator().manual_seed(seed)).double() * 2.0**exponent
    g = growth(FPA_FP16.dq, RoundingMode.HALF_EVEN, 64).own
    rounded = x.to(dtype).double()
    assert_within_bound(actual=rounded, exact=torch.zeros_like(x), bound=g * x.abs(), what="16 bit")


def test_a_subnormal_fp16_ds_doubles():
    """The bound counts it, and needs the whole factor: without subnormal numbers it would be 1."""
    sums = Sums.of(subnormal(), FPA_FP16)
    assert growth(FPA_FP16.dq, RoundingMode.HALF_EVEN, 64).own == 2
    assert 0.99 < float((sums.magnitudes / sums.bound).max()) <= 1
    limit = largest_sum(sums.attended)
    assert bool((sums.integers.abs().amax(-1) <= limit).all()) and float(limit.max()) < INT32


@examples(300)
@given(
    mantissa=st.floats(1.0, 2.0),
    exponent=st.integers(-200, 118),
    k=st.sampled_from((-100, -60, -30, 0, 10, 40)),
    in_16_bit=st.booleans(),
)
def test_the_unit_is_the_least_power_of_two_that_fits(mantissa, exponent, k, in_16_bit):
    ds_sum, k_max = (float64(x) for x in (mantissa * 2.0**exponent, 2.0**k))
    floor = None if in_16_bit else torch.tensor(2.0**-70).double()
    u = float(unit(ds_sum, k_max, floor=floor))
    bound = (dq_sums.SLACK * float(ds_sum) + 2.0**-120) * 2.0**k
    if bound > (2.0**126 if in_16_bit else 2.0**156):
        assert math.isnan(u)
        return
    assert math.frexp(u)[0] == 0.5
    lowest = 2.0**-126 if floor is None else float(floor)
    assert u >= max(bound * 2.0**-30, lowest)
    assert u == lowest or u < bound * 2.0**-29


SLACK = dq_sums.SLACK


@pytest.mark.parametrize(
    ("ds_sum", "k", "is_codes", "expected"),
    [
        (0.0, 1.0, True, 2.0**-126),
        (0.0, 2.0**31, True, 2.0**-119),
        (2.0**30 / SLACK, 1.0, True, 2.0),  # 2^-120 is added
        ((2.0**30 - 1) / SLACK, 1.0, True, 1.0),
        (2.0**119 / SLACK, 0.99 * 2.0**7, False, 2.0**96),
        (2.0**119 / SLACK, 1.01 * 2.0**7, False, math.nan),
        (2.0**119 / SLACK, 1.01 * 2.0**7, True, 2.0**97),
        (2.0**119 / SLACK, 0.99 * 2.0**37, True, 2.0**126),
        (2.0**119 / SLACK, 1.01 * 2.0**37, True, math.nan),
        (0.999 * 2.0**120 / SLACK, 1.0, True, 2.0**90),
        (2.0**120 / SLACK, 1.0, True, math.nan),
        (math.nan, 1.0, True, math.nan),
        (math.inf, 1.0, False, math.nan),
    ],
)
def test_the_unit_at_its_limits(ds_sum, k, is_codes, expected):
    floor = torch.tensor(2.0**-126).double() if is_codes else None
    if (ds_sum, k) == (2.0**30 / SLACK, 1.0):
        ds_sum = math.nextafter(ds_sum, math.inf)  # 2^-120 is less than float64 resolves here
    found = float(unit(float64(ds_sum), float64(k), floor=floor))
    assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_the_smallest_unit_of_codes():
    """It counts rows that share a scale, and K of all blocks with a key that a row attends to."""
    ds_sum = torch.tensor([1.0, 2.0**10, 2.0**3]).double() / SLACK * 0.99
    k = torch.tensor([1.0, 2.0**-3, 4.0, 2.0**-2, 2.0**20])[:, None]
    attends = torch.ones(3, 5, dtype=torch.bool).tril()

    def exponents(per_tile):
        floor = code_floor(ds_sum, k, attends, per_tile=per_tile, block_q=2, block_k=2)
        return [math.frexp(x)[1] - 1 + 126 for x in floor.tolist()]

    # The second block of queries attends to key 2, so its block of keys counts.
    assert exponents(per_tile=False) == [0, 10, 3 + 2]
    assert exponents(per_tile=True) == [10, 10, 3 + 2]


def test_only_keys_that_a_query_attends_to_count():
    attends = torch.ones(3, 3, dtype=torch.bool).tril()
    assert largest_attended(torch.tensor([1.0, 3.0, 2.0]), attends).tolist() == [1, 3, 3]
    assert largest_attended(torch.tensor([1.0, 3.0, math.nan]), attends).tolist()[:2] == [1, 3]
    assert math.isnan(largest_attended(torch.tensor([1.0, 3.0, math.nan]), attends)[2])
    assert k_bound(torch.tensor([[0.0], [-5.0], [2.0]]), attends).tolist() == [2.0**-126, 5, 5]


@pytest.mark.parametrize("signs", [1, -1])
def test_a_row_of_2_to_the_20_keys_does_not_overflow(signs):
    """Parts of one sign, of odd halves of units that round up, and of the largest magnitude."""
    blocks = 2**20 // 32
    odd = 2**30 // blocks // 2 * 2 - 1  # and a half: rounds to even, upwards
    parts = signs * torch.full((blocks,), odd + 0.5, dtype=torch.float64)
    total = parts.abs().sum()
    assert 0.99 * 2.0**30 < float(total) <= 2.0**30
    bound = (total - 2.0**-100) / SLACK
    assert float(unit(bound, torch.tensor(1.0).double(), floor=None)) == 1.0
    running = parts.round().long().cumsum(0).abs()
    limit = float(largest_sum(torch.tensor(blocks)))
    assert float(total) + blocks / 2 == float(running[-1])
    assert 0.99 * limit < float(running.max()) <= limit < INT32


def test_half_of_the_unit_would_overflow():
    """The twin of the test above: a sum of 2^31 units is possible with units half as large."""
    sums = Sums.of(doubled(), SAGEBWD)
    assert float(largest_sum(torch.tensor(0))) <= INT32 <= 2 * float(largest_sum(torch.tensor(0)))
    assert 4 * float(sums.integers.abs().max()) > INT32


def test_float32_errors_stay_within_the_slack_up_to_2_to_the_20_keys():
    assert dq_sums.float32_error(2**20, 32) < SLACK - 1
    assert dq_sums.float32_error(2**21, 32) > SLACK - 1
    assert SLACK - 1 == 2.0**-6


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
    one = torch.tensor(1.0).double()
    for bound in (0.51, 0.99, 1.0, 1e9):
        ds_sum = float64(bound) / SLACK
        loss = float(dq_sums.loss_bound(ds_sum, one, count))
        found = float(dq_sums.error_bound(unit(ds_sum, one, floor=None), count))
        assert found < loss <= 2 * found


@pytest.mark.parametrize(
    ("spec", "sample"),
    [(SAGEBWD, doubled(128)), (FPA_FP16, subnormal(128))],
    ids=["sagebwd", "fp16"],
)
def test_the_bound_of_a_row_is_reached(spec, sample):
    ratio = (lambda s: s.magnitudes / s.bound)(Sums.of(sample, spec))[..., -1]
    assert 0.99 < float(ratio) <= 1


def test_without_rounding_the_bound_of_a_row_is_reached_but_for_g():
    sums = Sums.of(aligned(128), FPA_FP16)
    assert float((2 * sums.magnitudes / sums.bound).max()) == pytest.approx(1, rel=1e-5)


def test_rows_of_p_that_do_not_sum_to_1_count():
    """p_bound multiplies by the row sums; without them the bound is too small by as much."""
    lse = torch.zeros(2)
    sums = torch.tensor([0.5, 3.0])
    all_8, all_3 = torch.ones(2, 8) > 0, torch.ones(2, 3) > 0
    assert dq_sums.p_bound(lse, all_8, p_sums=sums).tolist() == [0.5, 3.0]
    assert dq_sums.p_bound(lse, all_8).tolist() == [1.0, 1.0]
    large = torch.full((2,), 2.0**26)
    assert dq_sums.p_bound(large, all_8.tril(4)).tolist() == [5.0, 6.0]
    q, k = torch.ones(2, 40), torch.ones(3, 40)
    size = 2.0**-21 * 64 * 40 * 0.5 / math.log(2)
    for worse in (1.0, math.inf, math.nan):  # of a key whose P is 0, or not finite itself
        found = dq_sums.p_bound(lse, all_3, q=q, k=k, scale=-0.5)
        assert found.tolist() == pytest.approx([2.0**size] * 2, rel=1e-12)
        k[1] = worse


def test_row_sums_of_p_are_unbounded_where_2_to_the_x_is_above_float32():
    attends = torch.ones(2, 3, dtype=torch.bool)
    lse = float64([0.9999, 1.0001]) * 127 * 2.0**21 * math.log(2)  # x is just below and above 127
    q, k = torch.zeros(2, 40), torch.zeros(3, 40)
    for sums in (None, torch.ones(2)):
        below, above = dq_sums.p_bound(lse, attends, p_sums=sums, q=q, k=k).tolist()
        assert below == pytest.approx(2.0 ** (127 * 0.9999), rel=1e-9)
        assert above == math.inf
    assert dq_sums.p_bound(lse, attends).tolist() == [3.0, 3.0]


def test_the_bound_of_a_row_by_hand():
    v = torch.tensor([[3.0, 4.0], [0.0, 1.0], [math.inf, 0.0]])
    do = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 2.0]])

    def bound(attends):
        return dq_sums.ds_bound(
            v=v,
            do=do,
            delta=torch.tensor([-1.0, 0.0, 0.0]),
            p_bound=torch.ones(3),
            attends=attends,
            growth=Growth(1.0, 0.5),
            block_q=2,
        ).tolist()

    first_two = torch.tensor([True, True, False]).expand(3, 3)
    assert bound(first_two) == [6 + 8, 10 + 8, 10 + 5]
    assert bound(torch.ones(3, 3, dtype=torch.bool).tril()) == [6 + 8, 10 + 8, math.inf]


def test_the_logsumexp_is_that_of_the_smoothed_logits():
    """A mean of K changes what attention returns, and not what the sums of dQ depend on."""
    plain = gaussian(1.0, 64)
    moved = replace(plain, k=plain.k + 1000.0)
    one, other = (smoothed_lse(x, x.trace(SAGEBWD)) for x in (plain, moved))
    bound = torch.full_like(one, 0.1, dtype=torch.float64)
    assert_within_bound(actual=other, exact=one.double(), bound=bound, what="lse")
    assert float((moved.trace(SAGEBWD).lse - one).abs().max()) > 100


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
