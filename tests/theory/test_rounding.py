"""Rounding errors stay within their bounds, and their mean squares match the closed forms."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from sagesim import Granularity, Precision, Rounding, quantize
from sagesim.emulator.rounding import FLOAT8_DTYPE
from sagesim.spec import HALF_AWAY, HALF_EVEN, RoundingMode
from tests.support import examples
from tests.support.assertions import assert_bitwise, assert_within_bound
from tests.support.inputs import EXTREME, NASTY
from tests.support.region_quantizer import regions
from tests.support.strategies import MAP_GRANULARITIES, SCALED, TOKEN_GRANULARITIES, tensors
from theory import rounding
from theory.checks import rounding as checks
from theory.rounding import GRIDS, rounding_bound

MODES = (HALF_EVEN, HALF_AWAY, Rounding.stochastic(5))
DTYPE16 = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}


def one(x: float) -> torch.Tensor:
    return torch.tensor([[x]], dtype=torch.float64)


def assert_bound(rounded, x, bound) -> None:
    assert_within_bound(actual=rounded, exact=x.double(), bound=bound, what="rounded")


def dequantized(x, how, block, precision, mode):
    q = quantize(x, how, block=block, precision=precision, rounding=mode)
    return q.codes.double() * q.scale.double()


@examples(500)
@given(
    x=tensors(EXTREME),
    how=st.sampled_from(sorted(TOKEN_GRANULARITIES + MAP_GRANULARITIES)),
    block=st.sampled_from((1, 16, 64)),
    precision=st.sampled_from(SCALED),
    mode=st.sampled_from(MODES),
)
def test_scaled_formats_stay_within_the_bound(x, how, block, precision, mode):
    size = (block, 2 * block) if how.is_map else block
    rows, columns = size if how.is_map else (block, x.shape[-1])
    amax = rounding.region_amax(x.double(), how, rows, columns)
    bound = rounding_bound(x, amax, precision, mode.mode)
    assert_bound(dequantized(x, how, size, precision, mode), x, bound)
    # Callers may pass bounds on |x| and amax, so the bound must not decrease with either.
    grown = rounding_bound(1.1 * x.double(), 1.3 * amax, precision, mode.mode)
    assert bool((grown >= bound).all())


@examples(100)
@given(x=tensors(NASTY), precision=st.sampled_from(sorted(DTYPE16)), wide=st.booleans())
def test_sixteen_bit_formats_stay_within_the_bound(x, precision, wide):
    x = x.double() * (1 + 2.0**-30) if wide else x  # torch rounds float64 to float32 first
    bound = rounding_bound(x, x, precision)
    rounded = x.to(DTYPE16[precision]).double()
    assert_bound(rounded, x, bound)
    assert not bool(rounding_bound(x, x, Precision.FP32).any())


@pytest.mark.parametrize("how", sorted(TOKEN_GRANULARITIES + MAP_GRANULARITIES))
def test_regions_are_those_of_the_contract(how):
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros_like(x)
    block = (16, 8) if how.is_map else 16
    for rows, columns in regions(40, 24, how.value, block):
        expected[rows, columns] = x[rows, columns].abs().max()
    found = rounding.region_amax(x, how, 16, 8 if how.is_map else 24)
    assert_bitwise(actual=found, expected=expected, what="amax")


WORST = {
    Precision.INT8: (0.5, 127.0),
    Precision.FP8_E4M3: (17 / 16, 448.0),
    Precision.FP8_E5M2: (9 / 8, 57344.0),
}


@pytest.mark.parametrize("precision", WORST)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_bound_is_attained_so_no_smaller_bound_holds(precision, mode):
    """A midpoint attains it to nearest; a number just above a code attains it stochastically."""
    value, largest = WORST[precision]
    if mode.mode is RoundingMode.STOCHASTIC:
        # x is just above a number. Some of the many equal elements are rounded up, which is an
        # error of nearly the whole gap.
        value = value - 0.49 if precision is Precision.INT8 else 1 + (value - 1) / 50
    x = torch.full((64, 64), value)
    x[:, 0] = largest
    rounded = dequantized(x, Granularity.PerToken, 64, precision, mode)
    bound = rounding_bound(x, one(largest), precision, mode.mode)
    assert_bound(rounded, x, bound)
    with pytest.raises(AssertionError, match="exceed the bound"):
        assert_bound(rounded, x, 0.95 * bound)


def test_stochastic_rounding_exceeds_the_bound_to_nearest():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    rounded = dequantized(x, Granularity.PerToken, 64, Precision.INT8, MODES[2])
    amax = x.abs().amax(-1, keepdim=True)
    with pytest.raises(AssertionError, match="exceed the bound"):
        assert_bound(rounded, x, rounding_bound(x, amax, Precision.INT8))


def test_the_bound_is_infinite_for_an_overflow_and_raises_for_input16():
    x = torch.tensor([65503.0, 65519.0, 65520.0, 1e30], dtype=torch.float64)
    assert x.half().isinf().tolist() == [False, False, True, True]
    assert rounding_bound(x, x, Precision.FP16).isinf().tolist() == [False, False, True, True]
    assert rounding_bound(x, x, Precision.BF16).isfinite().all()
    with pytest.raises(ValueError, match="input16"):
        rounding_bound(x, x, Precision.INPUT16)


@pytest.mark.parametrize("precision", (Precision.FP8_E4M3, Precision.FP8_E5M2))
def test_spacing_matches_the_numbers_of_the_fp8_formats(precision):
    bits = torch.arange(128, dtype=torch.uint8).view(FLOAT8_DTYPE[precision]).double()
    numbers = bits[bits.isfinite()]  # 0 and the positive numbers, in order
    assert float(numbers[-1]) == GRIDS[precision].largest
    found = rounding.spacing(3 * numbers[:-1], torch.tensor(3.0), precision)
    assert found.tolist() == (3 * numbers.diff()).tolist()


@pytest.mark.parametrize("precision", sorted(DTYPE16))
def test_spacing_matches_nextafter_in_the_16_bit_formats(precision):
    x = checks.wide((1000,)).to(DTYPE16[precision])
    above = torch.nextafter(x.abs(), torch.full_like(x, torch.inf))
    found = rounding.spacing(x, torch.ones(()), precision)
    assert found.tolist() == (above.double() - x.abs().double()).tolist()


@examples(200)
@given(x=tensors(EXTREME), precision=st.sampled_from(SCALED))
def test_expected_squares_do_not_exceed_the_bound(x, precision):
    q = quantize(x, Granularity.PerToken, block=64, precision=precision)
    expected = rounding.expected_square(x, q.scale, precision)
    bound = rounding_bound(x, x.double().abs().amax(-1, keepdim=True), precision)
    zeros = torch.zeros_like(expected)
    assert_within_bound(actual=expected.sqrt(), exact=zeros, bound=bound, what="RMS")
    assert not bool(expected[x == 0].any())


def test_expected_squares_of_small_typical_and_largest_elements():
    x = torch.tensor([0.3, 0.5, 0.6, 100.2, 127.0])
    expected = [0.09, 0.25, 1 / 12, 1 / 12, 0.0]
    found = rounding.expected_square(torch.cat([x, -2 * x]), torch.tensor([1.0] * 5 + [2.0] * 5))
    assert found.tolist() == pytest.approx(expected + [4 * e for e in expected], rel=1e-6)


@pytest.mark.parametrize("sigma", (0.003, 0.02, 0.1, 0.3, 0.5, 1.0, 7.0))
def test_the_mean_square_of_a_gaussian_is_the_integral(sigma):
    cells = range(math.ceil(10 * sigma) + 1)
    parts = [
        integrate.quad(
            lambda x, k=k: (x - k) ** 2 * stats.norm.pdf(x, scale=sigma),
            k - 0.5,
            k + 0.5,
            points=[k - 3 * sigma, k, k + 3 * sigma] if sigma < 0.1 else None,
            epsabs=1e-15,
        )[0]
        for k in cells
    ]
    exact = parts[0] + 2 * sum(parts[1:])
    found = rounding.gaussian_mean_square(one(2 * sigma), one(2.0))
    assert float(found) == pytest.approx(4 * exact, rel=1e-6)
    uniform = 4 / 12
    assert (uniform == pytest.approx(4 * exact, rel=0.01)) == (sigma >= 0.5)


def test_the_gaussian_mean_square_broadcasts():
    sigma = torch.tensor([[0.001, 0.2], [1.0, 50.0]], dtype=torch.float64)
    found = rounding.gaussian_mean_square(sigma, torch.ones_like(sigma))
    single = [
        float(rounding.gaussian_mean_square(one(float(s)), one(1.0))) for s in sigma.flatten()
    ]
    assert found.flatten().tolist() == pytest.approx(single, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("median", (0.01, 0.4, 3.0, 40.0))
@pytest.mark.parametrize("deviation", (0.2, 1.0, 2.5))
def test_the_moments_of_a_lognormal_are_the_integrals(median, deviation):
    law = stats.lognorm(s=deviation, scale=median)

    def moment(power):
        """The moment of the error, integrated over log x, which is Gaussian."""
        total = 0.0
        for k in range(128):
            low, high = max(k - 0.5, 1e-12), min(k + 0.5, 127.0)
            total += integrate.quad(
                lambda y, k=k: (k - math.exp(y)) ** power * law.pdf(math.exp(y)) * math.exp(y),
                math.log(low),
                math.log(high),
                epsabs=1e-14,
                limit=200,
            )[0]
        return total / law.cdf(127.0)

    found = rounding.lognormal_moments(one(math.log(3 * median)), one(deviation), one(3.0))
    assert float(found.mean) == pytest.approx(3 * moment(1), rel=1e-5, abs=1e-9)
    assert float(found.mean_square) == pytest.approx(9 * moment(2), rel=1e-5)


def integral_of_lognormal_errors(m: float, t: float) -> tuple[float, float]:
    """Mean and variance of the error in codes, by quadrature over z = (log x - m) / t."""
    ends = [-math.inf, *(math.log(k + 0.5) for k in range(127)), math.log(127)]
    ends = [(y - m) / t for y in ends]
    peak = min(0.0, ends[-1])  # of the density within the region

    def integral(of):
        """Of of(error, x) under the density, without its constant factor."""
        total = 0.0
        for k, (low, high) in enumerate(pairwise(ends)):
            low = max(low, peak - 40)
            inside = [z for z in (peak - 6, peak, peak + 6) if low < z < high]

            def at(z, k=k):
                x = math.exp(m + t * z)
                return of(k - x, x) * math.exp((peak**2 - z**2) / 2)

            total += sum(
                integrate.quad(at, a, b, epsabs=0, epsrel=1e-11, limit=400)[0]
                for a, b in pairwise([low, *inside, high])
                if a < b
            )
        return total

    mass = integral(lambda error, x: 1.0)
    mean = integral(lambda error, x: error) / mass
    return mean, integral(lambda error, x: error**2) / mass - mean**2


@pytest.mark.parametrize(
    ("m", "t"),
    [(math.log(127) - t * math.sqrt(2 * math.log(2048)), t) for t in (5.0, 6.0, 9.0, 16.0, 25.0)]
    + [(-2.0, 5.0), (-2.0, 9.0), (200.0, 9.0), (3.0, 0.05)],
)
def test_the_moments_of_a_wide_lognormal_are_the_integrals(m, t):
    """A row of 2048 logits whose largest is typical; medians near a code; far above the region."""
    mean, variance = integral_of_lognormal_errors(m, t)
    found = rounding.lognormal_moments(one(m + math.log(3)), one(t), one(3.0))
    assert float(found.mean) == pytest.approx(3 * mean, rel=1e-6)
    assert float(found.variance) == pytest.approx(9 * variance, rel=1e-6)


def test_elements_that_round_to_0_have_a_bias():
    """Elements of a hundredth of a code: the mean error is nearly the whole error."""
    found = rounding.lognormal_moments(one(math.log(0.01)), one(0.1), one(1.0))
    assert float(found.mean) == pytest.approx(-0.01 * math.exp(0.1**2 / 2), rel=1e-9)
    assert float(found.mean.square()) > 0.98 * float(found.mean_square)


@pytest.mark.parametrize("parts", (1, 2, 3, 4, 5, 16, 127))
@pytest.mark.parametrize("mode", MODES[:2], ids=str)
def test_the_mean_square_of_numbers_on_a_grid(parts, mode):
    places = torch.arange(-60 * parts, 60 * parts) / parts  # every offset equally often
    x = checks.with_scale(places[None])
    error = dequantized(x, Granularity.PerToken, 1, Precision.INT8, mode) - x.double()
    exact = float(error.square().mean()) * x.numel() / places.numel()
    found = rounding.grid_mean_square(parts, torch.tensor(2.0))
    # Grid points that float32 does not represent are off by the rounding of numbers up to 60.
    assert float(found) == pytest.approx(4 * exact, rel=1e-4, abs=1e-9)


def test_a_grid_of_no_parts_raises():
    with pytest.raises(ValueError, match="parts=0"):
        rounding.grid_mean_square(0, torch.tensor(1.0))


SMALLEST_INT8 = 127 * 2.0**-128
"""At an amax of up to this, 127 / amax overflows, and the region becomes 0."""


@pytest.mark.parametrize("precision", SCALED)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_bound_holds_for_regions_whose_scale_is_subnormal(precision, mode):
    """The smallest regions that do not become 0. Codes times scales are rounded to float32."""
    largest = GRIDS[precision].largest * 2.0**-128
    share = torch.rand(64, 64, generator=torch.Generator().manual_seed(0))
    for above in (1 + 2.0**-22, 1.001, 1.5, 3.9):
        x = (largest * above * share).float()
        x[:, 0], x[:, 1] = largest * above, 2.0**-149
        q = quantize(x, Granularity.PerToken, block=64, precision=precision, rounding=mode)
        assert bool((q.scale < 2.0**-126).all())
        amax = x.double().amax(-1, keepdim=True)
        bound = rounding_bound(x, amax, precision, mode.mode)
        assert_bound(q.dequantize(), x, bound)


def test_a_subnormal_scale_is_off_by_more_than_a_unit():
    """By up to four. Nine units cover it and the four other roundings; six would not."""
    amax = SMALLEST_INT8 * (1 + torch.arange(1, 4096, dtype=torch.float64) * 2.0**-23)
    scale = (amax.float() / 127).double()
    off = (scale / (amax.float().double() / 127) - 1).abs()
    assert 3.9 * rounding.UNIT < float(off.max()) <= 4 * rounding.UNIT
    assert float(off.max()) + 4 * rounding.UNIT > 6 * rounding.UNIT


@pytest.mark.parametrize("dtype", rounding.OUTPUT_GRIDS)
def test_the_bound_of_an_output_is_infinite_where_its_dtype_overflows(dtype):
    grid = rounding.OUTPUT_GRIDS[dtype]
    assert grid.largest == torch.finfo(dtype).max
    first = torch.tensor(grid.largest / (1 - grid.unit) * (1 - grid.unit / 2), dtype=torch.float64)
    step = torch.float64 if dtype is torch.float32 else torch.float32  # torch rounds through it
    below = torch.nextafter(first.to(step), torch.zeros((), dtype=step))
    x = torch.stack([below.double(), first])
    rounded = x.to(step).to(dtype)
    assert rounded.isinf().tolist() == [False, True]
    bound = rounding.output_rounding_bound(x, dtype)
    assert bound.isinf().tolist() == [False, True]
    assert_bound(rounded[:1], x[:1], bound[:1])
