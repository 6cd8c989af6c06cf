import math

import pytest
import torch

from sagesim import FPA, SAGEBWD, compare, exact, trace
from sagesim.analysis import (
    TENSORS,
    Comparison,
    error,
    geometric_mean,
    gradient_error,
    pool_errors,
)


def test_an_error_equals_its_definition():
    found = error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    assert found.rel_l2 == pytest.approx(0.5 / 5, rel=1e-15)
    assert found.sqnr_db == pytest.approx(20, rel=1e-12)
    assert found.max_error == pytest.approx(0.5 / math.sqrt(25 / 2), rel=1e-15)
    assert found.cosine == pytest.approx((9 + 18) / (5 * math.sqrt(9 + 4.5**2)), rel=1e-15)


def test_errors_of_zero_and_nan_tensors():
    zero, one, nan = torch.zeros(3), torch.ones(3), torch.full((3,), math.nan)
    equal = error(zero, zero)
    assert (equal.cosine, equal.rel_l2, equal.sqnr_db, equal.max_error) == (1, 0, math.inf, 0)
    zero_reference = error(one, zero)
    found = (zero_reference.cosine, zero_reference.rel_l2, zero_reference.max_error)
    assert found == (0, math.inf, math.inf)
    zero_result = error(zero, one)
    assert (zero_result.cosine, zero_result.rel_l2) == (0, 1)
    assert math.isnan(error(nan, one).rel_l2)
    with pytest.raises(ValueError, match=r"\(3,\) and \(2,\)"):
        error(zero, torch.zeros(2))


@pytest.mark.parametrize("size", [1e-100, 1e100])
def test_errors_of_numbers_whose_products_are_no_float64_are_those_of_ordinary_numbers(size):
    r, a = torch.tensor([3.0, 4.0]).double(), torch.tensor([3.0, 4.5]).double()
    expected, found = error(a, r), error(size * a, size * r)
    for name in ("cosine", "rel_l2", "sqnr_db", "max_error"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-12)


def test_an_error_may_be_larger_than_the_root_of_the_largest_number():
    found = error(*torch.tensor([[1e150], [1e-150]], dtype=torch.float64))
    assert found.rel_l2 == pytest.approx(1e300, rel=1e-12)
    assert found.sqnr_db == pytest.approx(-6000, rel=1e-12)


def test_masked_logits_are_left_out_unless_one_is_finite():
    x = torch.randn(4, 1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    t, e = trace(*x, spec=FPA, is_causal=True), exact(*x, is_causal=True)
    assert compare(t, e).overall["s"].rel_l2 < 1e-6
    t.s[0, 0, 0, 5] = 0.0  # query 0 attends to a later key
    assert compare(t, e).overall["s"].rel_l2 == math.inf


def test_errors_are_per_head_and_joined_over_heads():
    g = torch.Generator().manual_seed(0)
    q, do = torch.randn(2, 2, 4, 20, 8, generator=g)
    k, v = torch.randn(2, 2, 2, 20, 8, generator=g)
    found = compare(
        trace(q, k, v, do, spec=SAGEBWD, enable_gqa=True), exact(q, k, v, do, enable_gqa=True)
    )
    assert set(found.overall) == set(TENSORS)
    assert {name: len(heads) for name, heads in found.per_head.items()} == {
        name: 4 if name in ("dk", "dv") else 8 for name in TENSORS
    }
    first = Comparison({name: m[:1] for name, m in found.moments.items()})
    rest = Comparison({name: m[1:] for name, m in found.moments.items()})
    assert Comparison.joined([first, rest]).overall == found.overall
    assert first.overall["o"] == found.per_head["o"][0]
    assert all(name in str(found) for name in TENSORS)


def test_different_shapes_raise():
    x = torch.randn(4, 1, 2, 9, 8)
    with pytest.raises(ValueError, match="s of the trace"):
        compare(trace(*x, spec=FPA), exact(*x[..., :5, :]))


def test_the_geometric_mean_is_that_of_its_definition():
    assert geometric_mean([1.0, 10.0, 100.0]) == pytest.approx(10, rel=1e-14)
    assert geometric_mean([0.0, 10.0]) == geometric_mean([]) == 0
    assert math.isnan(geometric_mean([0.0, math.nan]))
    assert math.isinf(geometric_mean([0.0, math.inf]))


def test_the_gradient_error_of_huge_errors_is_a_number():
    assert gradient_error({"dq": 3e200, "dk": 4e200, "dv": 0.0}) == pytest.approx(
        5e200 / math.sqrt(3), rel=1e-14
    )


def test_the_largest_error_of_several_layers_is_nan_if_one_is():
    one = error(torch.tensor([1.5]), torch.tensor([1.0]))
    bad = error(torch.tensor([torch.nan]), torch.tensor([1.0]))
    for layers in ([one, bad], [bad, one]):
        pooled = pool_errors([dict.fromkeys(TENSORS, layer) for layer in layers])
        assert math.isnan(pooled["dq"].max_error) and math.isnan(pooled["dq"].rel_l2)
