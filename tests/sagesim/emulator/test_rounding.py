import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sagesim import HALF_AWAY, HALF_EVEN, Precision, Rounding
from sagesim.emulator.rounding import (
    CODE_MAX,
    FLOAT8_DTYPE,
    STREAMS,
    pcg_hash,
    round_codes_,
    uniform,
)
from tests.support import examples
from tests.support.assertions import assert_bitwise
from tests.support.strategies import seeds

INT8, FP8 = Precision.INT8, (Precision.FP8_E4M3, Precision.FP8_E5M2)


def rounded(values, precision, rounding) -> list[float]:
    y = torch.tensor([list(values)], dtype=torch.float32)
    return round_codes_(y, precision, rounding, "q")[0].tolist()


def grid(precision: Precision) -> list[float]:
    """Every finite value of an FP8 format, ascending, from the definition of its bits.

    E4M3 has 1 sign bit, 4 exponent bits (bias 7) and 3 mantissa bits; all ones is NaN. E5M2 has 1,
    5 (bias 15) and 2; exponents of all ones are infinities and NaN.
    """
    exponent_bits, mantissa_bits, bias = {"fp8_e4m3": (4, 3, 7), "fp8_e5m2": (5, 2, 15)}[precision]
    values = set()
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            last = exponent == 2**exponent_bits - 1
            if last and (precision == "fp8_e5m2" or mantissa == 2**mantissa_bits - 1):
                continue
            lead = 1 if exponent else 0
            value = (lead + mantissa / 2**mantissa_bits) * 2.0 ** (max(exponent, 1) - bias)
            values |= {value, -value}
    return sorted(values)


def neighbours(x: float) -> list[float]:
    """The next float32 number below x, x, and the next above."""
    return [
        float(np.nextafter(np.float32(x), np.float32(-math.inf))),
        x,
        float(np.nextafter(np.float32(x), np.float32(math.inf))),
    ]


class TestInt8:
    HALVES = tuple(i + 0.5 for i in range(-127, 127))

    def test_half_even_ties_go_to_the_even_code(self):
        for tie, code in zip(self.HALVES, rounded(self.HALVES, INT8, HALF_EVEN), strict=True):
            assert code in (tie - 0.5, tie + 0.5) and code % 2 == 0

    def test_half_away_ties_go_away_from_zero(self):
        for tie, code in zip(self.HALVES, rounded(self.HALVES, INT8, HALF_AWAY), strict=True):
            assert code == tie + math.copysign(0.5, tie)

    @pytest.mark.parametrize("rounding", [HALF_EVEN, HALF_AWAY])
    def test_the_float32_numbers_beside_a_tie_round_to_nearest(self, rounding):
        """Adding 0.5 and truncating would fail: 0.49999997 + 0.5 is 1 in float32."""
        for tie in self.HALVES:
            below, _, above = neighbours(tie)
            assert rounded([below, above], INT8, rounding) == [tie - 0.5, tie + 0.5]

    @given(values=st.lists(st.floats(-127, 127, width=32), min_size=1), rounding=st.booleans())
    @examples(200)
    def test_is_to_nearest_and_symmetric(self, values, rounding):
        rounding = HALF_AWAY if rounding else HALF_EVEN
        codes = rounded(values, INT8, rounding)
        for value, code in zip(values, codes, strict=True):
            assert code == int(code) and abs(code - value) <= 0.5 and abs(code) <= 127
        assert rounded([-v for v in values], INT8, rounding) == [-c for c in codes]

    @pytest.mark.parametrize("rounding", [HALF_EVEN, HALF_AWAY, Rounding.stochastic(5)])
    def test_an_amax_that_rounds_above_127_stays_127(self, rounding):
        """Two roundings can make x * (127 / amax) of the largest element exceed 127."""
        top = 127 * (1 + 2**-22)
        assert set(rounded([top] * 50 + [-top] * 50, INT8, rounding)) == {127, -127}


@pytest.mark.parametrize("precision", FP8)
class TestFp8:
    def test_the_finite_values_are_those_of_torchs_dtype(self, precision):
        bits = torch.arange(256, dtype=torch.uint8).view(FLOAT8_DTYPE[precision]).double()
        finite = sorted(set(bits[bits.isfinite()].tolist()))
        assert grid(precision) == finite
        assert max(finite) == CODE_MAX[precision]

    @pytest.mark.parametrize("rounding", [HALF_EVEN, HALF_AWAY, Rounding.stochastic(1)])
    def test_every_code_is_rounded_to_itself(self, precision, rounding):
        assert rounded(grid(precision), precision, rounding) == grid(precision)

    def test_half_even_equals_torchs_cast_around_every_code_and_every_tie(self, precision):
        codes = grid(precision)
        ties = [(a + b) / 2 for a, b in pairwise(codes)]
        points = [p for x in codes[1:-1] + ties for p in neighbours(x)]
        y = torch.tensor([points], dtype=torch.float32)
        cast = y.to(FLOAT8_DTYPE[precision]).float()
        assert_bitwise(
            actual=round_codes_(y.clone(), precision, HALF_EVEN, "q"), expected=cast, what="codes"
        )

    def test_half_even_and_half_away_follow_their_definitions(self, precision):
        """Both round to nearest; ties go to the code with an even last bit, or to the larger."""
        codes = grid(precision)
        positive = [c for c in codes if c >= 0]
        for index, (low, high) in enumerate(pairwise(positive)):
            tie = (low + high) / 2
            below, _, above = neighbours(tie)
            even = low if index % 2 == 0 else high  # the index is the bit pattern of the code
            points = [below, tie, above, -below, -tie, -above]
            assert rounded(points, precision, HALF_EVEN) == [low, even, high, -low, -even, -high]
            assert rounded(points, precision, HALF_AWAY) == [low, high, high, -low, -high, -high]

    @given(seed=seeds, data=st.data())
    @examples(60)
    def test_stochastic_gives_one_of_the_two_adjacent_codes(self, precision, seed, data):
        top = CODE_MAX[precision]
        values = data.draw(st.lists(st.floats(-top, top, width=32), min_size=1))
        codes = np.array(grid(precision))
        for value, code in zip(
            values, rounded(values, precision, Rounding.stochastic(seed)), strict=True
        ):
            low = codes[codes <= value].max()
            high = codes[codes >= value].min()
            assert code in (low, high)

    def test_stochastic_is_unbiased_in_every_binade(self, precision):
        """A number a quarter of the way between two codes rounds up a quarter of the time.

        The count is binomial and must lie within six standard deviations (one false alarm in 5e8).
        """
        positive = [c for c in grid(precision) if c >= 0]
        trials = 4096
        for low, high in zip(positive[::5], positive[1::5], strict=False):
            y = torch.full((64, 64), low + (high - low) / 4)
            found = Counter(
                round_codes_(y, precision, Rounding.stochastic(9), "v").flatten().tolist()
            )
            assert set(found) == {low, high}
            deviation = math.sqrt(trials * 3 / 16)
            assert abs(found[high] - trials / 4) < 6 * deviation


class TestRandomNumbers:
    def test_the_hash_is_the_published_one(self):
        """The function pcg of Jarzynski and Olano, "Hash Functions for GPU Rendering" (2020)."""

        def pcg(v: int) -> int:
            state = (v * 747796405 + 2891336453) % 2**32
            word = (((state >> ((state >> 28) + 4)) ^ state) * 277803737) % 2**32
            return (word >> 22) ^ word

        words = [0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1, 12345, 3735928559]
        assert pcg_hash(torch.tensor(words)).tolist() == [pcg(w) for w in words]

    @given(seed=seeds, tensor=st.sampled_from(sorted(STREAMS)), first_row=st.integers(0, 10**6))
    @examples(30)
    def test_an_elements_number_depends_on_its_position_only(self, seed, tensor, first_row):
        device = torch.device("cpu")
        whole = uniform(seed, tensor, 40, 30, first_row, device)
        part = uniform(seed, tensor, 7, 11, first_row + 13, device)
        assert_bitwise(actual=whole[13:20, :11], expected=part, what="u")

    def test_numbers_are_multiples_of_2_to_the_minus_24_in_0_to_1(self):
        u = uniform(3, "q", 256, 256, 0, torch.device("cpu"))
        assert u.min() >= 0 and u.max() < 1
        assert bool((u * 2**24 == (u * 2**24).floor()).all())

    @pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
    @pytest.mark.parametrize("tensor", STREAMS)
    def test_they_are_uniform(self, seed, tensor):
        """The chi-square statistic of 256 bins is below its mean plus six standard deviations."""
        u = uniform(seed, tensor, 512, 128, 0, torch.device("cpu"))
        counts = torch.histc(u, bins=256, min=0, max=1)
        chi2 = ((counts - 256) ** 2 / 256).sum().item()
        assert chi2 < 255 + 6 * math.sqrt(2 * 255)

    def test_rows_columns_seeds_and_tensors_are_uncorrelated(self):
        """The sample correlation of n independent pairs has a standard deviation of n**-1/2."""
        n = 256
        device = torch.device("cpu")
        u = uniform(7, "q", n, n, 0, device)
        others = {
            "next row": (u[:-1], u[1:]),
            "next column": (u[:, :-1], u[:, 1:]),
            "transpose": (u.triu(1), u.mT.triu(1)),
            "next seed": (u, uniform(8, "q", n, n, 0, device)),
            **{f"{t}": (u, uniform(7, t, n, n, 0, device)) for t in STREAMS if t != "q"},
        }
        for name, (a, b) in others.items():
            keep = a != 0
            r = torch.corrcoef(torch.stack([a[keep], b[keep]]))[0, 1].item()
            assert abs(r) < 6 / math.sqrt(int(keep.sum())), name


class TestStochasticInt8:
    @given(seed=seeds, whole=st.integers(-127, 126), sixteenths=st.integers(0, 16))
    @examples(40)
    def test_is_unbiased(self, seed, whole, sixteenths):
        """The share rounded up is the fraction, within six standard deviations of 16384 draws."""
        fraction, trials = sixteenths / 16, 128 * 128
        y = torch.full((128, 128), whole + fraction)
        codes = round_codes_(y, INT8, Rounding.stochastic(seed), "ds")
        up = (codes - whole).sum().item()
        assert set(codes.flatten().tolist()) <= {whole, whole + 1}
        if sixteenths in (0, 16):
            assert up == fraction * trials
        else:
            assert abs(up - fraction * trials) < 6 * math.sqrt(trials * fraction * (1 - fraction))

    def test_every_code_is_rounded_to_itself(self):
        codes = torch.arange(-127.0, 128.0).expand(200, 255).clone()
        found = round_codes_(codes.clone(), INT8, Rounding.stochastic(3), "q")
        assert_bitwise(actual=found, expected=codes, what="codes")

    @given(seed=seeds)
    @examples(10)
    def test_equal_seeds_give_equal_codes_and_other_seeds_do_not(self, seed):
        y = torch.full((20, 20), 0.5)
        one, same, other = (
            round_codes_(y.clone(), INT8, Rounding.stochastic(s), "q")
            for s in (seed, seed, (seed + 1) % 2**32)
        )
        assert_bitwise(actual=one, expected=same, what="codes")
        assert not torch.equal(one, other)


def test_rounding_is_in_place():
    for precision in (INT8, *FP8):
        for rounding in (HALF_EVEN, HALF_AWAY, Rounding.stochastic(0)):
            y = torch.tensor([[0.3, 1.7]])
            assert round_codes_(y, precision, rounding, "q").data_ptr() == y.data_ptr()
