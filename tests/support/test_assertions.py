"""Each of the four assertions rejects results of planted bugs, and accepts right results."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sagesim import FPA, HALF_AWAY, SAGEBWD, Granularity, Smoothing, quantize
from tests.support import assertions
from tests.support.assertions import (
    assert_bitwise,
    assert_sqnr_at_least,
    assert_within_bound,
    assert_within_budget,
)
from tests.support.calls import run_attention, run_exact
from tests.support.inputs import case, half_integer_ties, offset

GAUSSIAN = case(seed=1, n_q=70, n_k=70, d=16, is_causal=True)
SHIFTED = case(seed=2, n_q=70, n_k=70, d=16, kinds=(half_integer_ties, offset, offset, offset))
TIES = case(seed=3, n_q=70, n_k=70, d=16, kinds=(half_integer_ties,) * 4, scale=1e-4)


def emulate(spec=SAGEBWD, case=GAUSSIAN) -> Tensor:
    return run_attention(case, spec).o


def with_scales_of(codes_from: Tensor, scales_from: Tensor) -> Tensor:
    """The codes of one tensor, dequantized with the scales per token of another."""
    first, second = (quantize(x, Granularity.PerToken) for x in (codes_from, scales_from))
    return first.codes * second.scale


TWINS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "lost mask": lambda: (emulate(), emulate(case=replace(GAUSSIAN, is_causal=False))),
    "swapped scales": lambda: (
        with_scales_of(GAUSSIAN.q, GAUSSIAN.q),
        with_scales_of(GAUSSIAN.q, GAUSSIAN.k),
    ),
    "wrong tie rule": lambda: (
        emulate(case=TIES),
        emulate(spec=replace(SAGEBWD, rounding=HALF_AWAY), case=TIES),
    ),
    "no smoothing": lambda: (
        emulate(case=SHIFTED),
        emulate(spec=replace(SAGEBWD, smoothing=Smoothing()), case=SHIFTED),
    ),
    "scale of a padded head": lambda: (
        emulate(),
        emulate(case=replace(GAUSSIAN, scale=1 / math.sqrt(64))),
    ),
    "not a number": lambda: (emulate(), emulate().index_fill(-1, torch.tensor([3]), math.nan)),
    "infinite": lambda: (emulate(), emulate().index_fill(-1, torch.tensor([3]), math.inf)),
    "one element": lambda: (emulate(), emulate().index_fill(-2, torch.tensor([5]), 0.5)),
}
"""Right and wrong outputs by the planted bug that makes them differ."""

COMPARISONS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "bitwise": lambda right, found: assert_bitwise(actual=found, expected=right, what="o"),
    "bound": lambda right, found: assert_within_bound(
        actual=found, exact=right.double(), bound=torch.tensor(1e-6), what="o"
    ),
    "budget": lambda right, found: assert_within_budget(
        actual=found,
        exact=right.double(),
        yardstick=right.bfloat16(),
        factor=0.0,
        band=1e-6,
        what="o",
    ),
    "sqnr": lambda right, found: assert_sqnr_at_least(
        actual=found, exact=right.double(), floor_db=100.0, what="o"
    ),
}


@pytest.mark.parametrize("comparison", COMPARISONS)
@pytest.mark.parametrize("twin", TWINS)
def test_every_assertion_rejects_every_planted_bug(comparison, twin):
    right, wrong = TWINS[twin]()
    COMPARISONS[comparison](right, right.clone())
    with pytest.raises(AssertionError, match=r"^o: "):
        COMPARISONS[comparison](right, wrong)


def test_all_parameters_are_keyword_only_without_defaults():
    functions = [f for name, f in vars(assertions).items() if name.startswith("assert_")]
    assert len(functions) == 4
    for function in functions:
        for parameter in inspect.signature(function).parameters.values():
            assert parameter.kind is parameter.KEYWORD_ONLY
            assert parameter.default is parameter.empty


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_shapes_are_never_broadcast(comparison):
    with pytest.raises(AssertionError, match=r"shape \(1, 3\), expected \(2, 3\)"):
        COMPARISONS[comparison](torch.ones(2, 3), torch.ones(1, 3))


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_empty_tensors_agree(comparison):
    COMPARISONS[comparison](torch.ones(2, 0), torch.ones(2, 0))


class TestBitwise:
    def test_signs_of_zero_and_of_nan_are_compared(self):
        for one, other in ((0.0, -0.0), (math.nan, -math.nan)):
            a, b = torch.tensor([one]), torch.tensor([math.copysign(other, -1)])
            assert_bitwise(actual=a, expected=a.clone(), what="x")
            with pytest.raises(AssertionError, match="1 of 1 elements differ"):
                assert_bitwise(actual=b, expected=a, what="x")

    def test_dtypes_are_compared(self):
        with pytest.raises(AssertionError, match=r"dtype torch\.int8"):
            assert_bitwise(actual=torch.ones(2).char(), expected=torch.ones(2), what="x")

    @pytest.mark.parametrize(
        "dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float64, torch.bool]
    )
    def test_any_dtype_and_stride_is_accepted(self, dtype):
        x = torch.eye(3).to(dtype)
        assert_bitwise(actual=x.mT, expected=x, what="x")
        with pytest.raises(AssertionError, match="6 of 9"):
            assert_bitwise(actual=x[[1, 2, 0]], expected=x, what="x")


class TestBound:
    def test_an_error_equal_to_the_bound_passes_and_a_larger_one_fails(self):
        exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
        bound = torch.tensor([0.25, 0.0], dtype=torch.float64)
        assert_within_bound(actual=torch.tensor([1.25, 2.0]), exact=exact, bound=bound, what="x")
        for wrong in ([1.2500001, 2.0], [1.0, 2.0000002], [math.nan, 2.0]):
            with pytest.raises(AssertionError, match="1 of 2 elements exceed"):
                assert_within_bound(actual=torch.tensor(wrong), exact=exact, bound=bound, what="x")

    def test_infinities_must_be_the_same(self):
        exact = torch.tensor([-math.inf], dtype=torch.float64)
        same = {"exact": exact, "bound": torch.tensor(0.0), "what": "lse"}
        assert_within_bound(actual=torch.tensor([-math.inf]), **same)
        for wrong in (math.inf, -1e30, math.nan):
            with pytest.raises(AssertionError, match="exceed"):
                assert_within_bound(actual=torch.tensor([wrong]), **same)

    @pytest.mark.parametrize("bound", [math.inf, math.nan, -1.0])
    def test_a_bound_that_is_not_finite_and_positive_raises(self, bound):
        x = torch.ones(1, dtype=torch.float64)
        with pytest.raises(AssertionError, match="the bound must be finite"):
            assert_within_bound(actual=x, exact=x, bound=torch.tensor(bound), what="x")

    @pytest.mark.parametrize("comparison", ["bound", "budget", "sqnr"])
    def test_a_reference_that_is_not_float64_or_holds_nan_raises(self, comparison):
        for exact in (torch.ones(1), torch.tensor([math.nan], dtype=torch.float64)):
            arguments = {"actual": torch.ones(1), "exact": exact, "what": "x"}
            with pytest.raises(AssertionError, match="the reference"):
                match comparison:
                    case "bound":
                        assert_within_bound(bound=torch.tensor(1.0), **arguments)
                    case "budget":
                        assert_within_budget(
                            yardstick=torch.ones(1), factor=2.0, band=0.0, **arguments
                        )
                    case _:
                        assert_sqnr_at_least(floor_db=0.0, **arguments)


class TestBudget:
    EXACT = torch.tensor([3.0, 4.0, 0.0, 0.0], dtype=torch.float64)  # RMS 2.5
    YARDSTICK = torch.tensor([3.1, 4.0, 0.0, 0.0], dtype=torch.float64)

    def check(self, actual, factor, band):
        assert_within_budget(
            actual=torch.tensor(actual, dtype=torch.float64),
            exact=self.EXACT,
            yardstick=self.YARDSTICK,
            factor=factor,
            band=band,
            what="x",
        )

    def test_maximum_is_limited(self):
        self.check([3.0, 4.19, 0.0, 0.0], 2.0, 0.0)
        with pytest.raises(AssertionError, match=r"maximum error 0\.21"):
            self.check([3.0, 4.21, 0.0, 0.0], 2.0, 0.0)

    def test_rms_is_limited_also_if_the_maximum_is_within_its_limit(self):
        with pytest.raises(AssertionError, match="RMS error"):
            self.check([3.19, 4.19, 0.19, 0.19], 2.0, 0.0)

    def test_band_is_in_units_of_the_rms(self):
        self.check([3.0, 4.024, 0.0, 0.0], 0.0, 0.01)
        with pytest.raises(AssertionError, match="maximum"):
            self.check([3.0, 4.026, 0.0, 0.0], 0.0, 0.01)

    def test_a_yardstick_that_is_not_finite_raises(self):
        with pytest.raises(AssertionError, match="the yardstick's error must be finite"):
            assert_within_budget(
                actual=self.EXACT,
                exact=self.EXACT,
                yardstick=self.EXACT * math.inf,
                factor=2.0,
                band=0.0,
                what="x",
            )


class TestSqnr:
    def test_an_error_of_a_tenth_is_twenty_decibels(self):
        exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
        arguments = {"actual": exact * 1.1, "exact": exact, "what": "x"}
        assert_sqnr_at_least(floor_db=19.999, **arguments)
        with pytest.raises(AssertionError, match=r"SQNR 20\.00 dB is below"):
            assert_sqnr_at_least(floor_db=20.001, **arguments)

    def test_noise_without_signal_is_below_every_floor(self):
        exact = torch.zeros(2, dtype=torch.float64)
        with pytest.raises(AssertionError, match="SQNR -inf"):
            assert_sqnr_at_least(actual=exact + 1, exact=exact, floor_db=-300.0, what="x")


def test_a_failure_reports_the_worst_elements_and_the_relative_error():
    exact = torch.full((2, 3), 2.0, dtype=torch.float64)
    actual = exact.clone()
    actual[1, 2], actual[0, 1] = 8.0, 3.0
    with pytest.raises(AssertionError) as failure:
        assert_within_bound(actual=actual, exact=exact, bound=torch.tensor(0.5), what="dq")
    lines = str(failure.value).splitlines()
    assert "dq: 2 of 6 elements exceed the bound, by up to a factor 12" in lines[0]
    assert "error / RMS of the reference (2): max 3" in lines[0]
    assert lines[1].split(":")[0].strip() == "[1, 2]"
    assert lines[1].endswith("8, expected 2 (3)")
    assert lines[2].split(":")[0].strip() == "[0, 1]"


def test_fpa_is_within_a_budget_that_sagebwd_exceeds():
    exact = run_exact(GAUSSIAN).o
    float16 = torch.nn.functional.scaled_dot_product_attention(
        *(x.half() for x in GAUSSIAN.qkvdo[:3]), is_causal=True
    )
    budget = {"exact": exact, "yardstick": float16, "factor": 2.0, "band": 2.0**-23, "what": "o"}
    assert_within_budget(actual=emulate(spec=FPA), **budget)
    with pytest.raises(AssertionError, match="exceeds"):
        assert_within_budget(actual=emulate(), **budget)
