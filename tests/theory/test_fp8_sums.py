"""Sums of FP8 products: the model against integers written anew, and the bound on what is lost."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support import examples
from tests.support.assertions import assert_within_bound
from theory.checks.fp8_sums import LENGTHS, PROMOTE, column, loss
from theory.fp8_sums import (
    ADA,
    BLACKWELL,
    HOPPER,
    relative_bound,
    tensor_core_sum,
    truncation_bound,
)

CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
CODES = CODES[CODES.isfinite()]


def truncated(x: Fraction, bits: int) -> Fraction:
    """x towards 0 to a multiple of 2^bits."""
    unit = Fraction(2) ** bits
    return math.trunc(x / unit) * unit


def exponent(x: Fraction) -> int:
    return math.frexp(float(x))[1] - 1


def one_at_a_time(left, right, how, promote):
    """The sum of two lists, with Python's exact fractions."""
    total = part = Fraction(0)
    for first in range(0, len(left), how.terms):
        if promote and first and first % promote == 0:
            total, part = Fraction(float(torch.tensor(float(total + part)))), Fraction(0)
        terms = [(Fraction(a), Fraction(b)) for a, b in zip(left, right, strict=True)]
        terms = [(a, b) for a, b in terms[first : first + how.terms] if a * b]
        places = [max(exponent(a), -6) + max(exponent(b), -6) for a, b in terms]
        places += [exponent(part)] if part else []
        if not places:
            continue
        unit = max(places) - how.aligned_bits
        part = truncated(part, unit) + sum(truncated(a * b, unit) for a, b in terms)
        if part:
            part = truncated(part, exponent(part) - how.result_bits)
    return float(torch.tensor(float(total + part)))


def draw(seed: int, terms: int, sign: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    left, right = CODES[torch.randint(len(CODES), (2, terms), generator=generator)]
    return (left.abs(), right.abs()) if sign else (left, right)


@examples(60)
@given(
    seed=st.integers(0, 2**32 - 1),
    terms=st.sampled_from((1, 16, 31, 32, 33, 100, 128)),
    how=st.sampled_from((HOPPER, ADA, BLACKWELL)),
    promote=st.sampled_from((None, 32, 64)),
    sign=st.booleans(),
)
def test_sums_are_those_of_the_model_in_exact_fractions(seed, terms, how, promote, sign):
    left, right = draw(seed, terms, sign)
    found = float(tensor_core_sum(left, right, how, promote=promote))
    assert found == one_at_a_time(left.tolist(), right.tolist(), how, promote)


@examples(100)
@given(
    seed=st.integers(0, 2**32 - 1),
    terms=st.integers(1, 600),
    how=st.sampled_from((HOPPER, ADA, BLACKWELL)),
    promote=st.sampled_from((None, 64, 256)),
    sign=st.booleans(),
)
def test_no_sum_loses_more_than_the_bound(seed, terms, how, promote, sign):
    left, right = draw(seed, terms, sign)
    assert_within_bound(
        actual=tensor_core_sum(left, right, how, promote=promote)[None],
        exact=(left * right).sum(-1)[None],
        bound=truncation_bound(left, right, how, promote=promote)[None],
        what="sum",
    )


def test_the_order_within_an_instruction_does_not_matter():
    left, right = draw(0, 64, sign=False)
    order = torch.cat([torch.randperm(32), 32 + torch.randperm(32)])
    assert tensor_core_sum(left, right) == tensor_core_sum(left[order], right[order])


def test_a_long_sum_of_one_sign_loses_more_the_longer_it_is_unless_it_is_promoted():
    never = [loss(*column(n, 4.0), None) for n in LENGTHS[:3]]
    promoted = [loss(*column(n, 4.0), PROMOTE) for n in LENGTHS[:3]]
    assert never[0] > 0.03 and never[1] > 3 * never[0] and never[2] > 1.5 * never[1]
    assert max(promoted) < 0.005 and promoted[2] < 1.2 * promoted[0]


def test_the_bound_of_promoted_sums_does_not_grow_and_that_of_others_does():
    assert relative_bound(PROMOTE) == pytest.approx(8 * 34 * 2.0**-13)
    assert relative_bound(131072) > 100 * relative_bound(1024)


@pytest.mark.parametrize("promote", [0, -32, 33])
@pytest.mark.parametrize("function", [tensor_core_sum, truncation_bound])
def test_promotion_is_after_whole_instructions(function, promote):
    with pytest.raises(ValueError, match=f"promote={promote}"):
        function(CODES, CODES, promote=promote)
