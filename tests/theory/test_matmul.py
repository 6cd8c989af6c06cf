"""Each product alone stays within its bound and sums integers if its scales factor out."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sagesim import FACTORED, FPA, Granularity, MatmulSpec, Precision, quantize
from sagesim.spec import MAPS, OPERANDS, SITES
from tests.support import examples
from tests.support.assertions import assert_within_bound
from tests.support.inputs import MILD
from tests.support.strategies import cases
from tests.support.theory import SHORT, as_sample
from theory import matmul
from theory.checks.matmul import Site, converted, float64_slack, granularities
from theory.checks.samples import gaussian
from theory.rounding import UNIT, Moments

ROUNDED = (Precision.INT8, Precision.FP8_E4M3, Precision.FP8_E5M2, Precision.FP16, Precision.BF16)


def assert_error(error, bound, what) -> None:
    assert_within_bound(actual=error, exact=torch.zeros_like(error), bound=bound, what=what)


@pytest.mark.slow
@examples(400)
@given(
    case=cases(MILD, **SHORT),
    site=st.sampled_from(SITES),
    pair=st.integers(0, 99),
    precision=st.sampled_from(ROUNDED),
)
def test_every_site_alone_stays_within_the_bound(case, site, pair, precision):
    pairs = granularities(site)
    alone = Site.of(site, as_sample(case), *pairs[pair % len(pairs)], precision)
    slack = float64_slack(alone) + 1e-300
    assert_error(alone.error(), alone.bound() + slack, f"{site}, {alone.spec.label()}")


@pytest.mark.parametrize("site", SITES)
def test_errors_of_coarse_scales_exceed_the_bound_for_fine_scales(site):
    """Inputs with an outlier token, rounded with one scale per head or tile."""
    x = gaussian(1.0, 128, 16)
    gain = torch.ones(128, 1)
    gain[5] = 100
    x = x.map(lambda t: t.double() * gain)
    coarse = {True: Granularity.PerTile, False: Granularity.PerHead}
    fine = {True: Granularity.PerTileRow, False: Granularity.PerToken}
    wrong, right = (
        Site.of(site, x, *(kind[t in MAPS] for t in OPERANDS[site])) for kind in (fine, coarse)
    )
    error = right.error()
    assert_error(error, right.bound() + float64_slack(right), site)
    with pytest.raises(AssertionError, match="exceed the bound"):
        assert_error(error, wrong.bound() + float64_slack(right), site)


def test_the_bound_is_attained_and_needs_its_second_order_term():
    a, off = torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    error = (a + off) @ (a + off) - a @ a
    assert float(matmul.product_bound(a, a, off, off)) == float(error) == 3
    assert float(off @ a + a @ off) < float(error)


@examples(100)
@given(seed=st.integers(0, 2**32 - 1), n=st.sampled_from((1, 2, 17, 300)), size=st.floats(0, 4))
def test_errors_of_the_worst_signs_stay_within_the_bound(seed, n, size):
    generator = torch.Generator().manual_seed(seed)
    a, a_off = torch.randn(2, 3, n, generator=generator, dtype=torch.float64)
    b, b_off = torch.randn(2, n, 2, generator=generator, dtype=torch.float64)
    a_off, b_off = a_off.abs() * size, b_off.abs() * size
    worst_a, worst_b = a + a_off * a.sign(), b + b_off * b.sign()
    error = (worst_a @ worst_b - a @ b).abs()
    bound = matmul.product_bound(a, b, a_off, b_off)
    slack = 8 * n * 2.0**-53 * (worst_a.abs() @ worst_b.abs())
    assert_error(error, bound + slack, "product")
    with_sums = matmul.product_bound(a, b, a_off, b_off, terms=n)
    in_float32 = (worst_a.float() @ worst_b.float()).double() - a @ b
    assert_error(in_float32, with_sums + slack, "product in float32")


def test_a_float32_sum_nearly_attains_its_bound():
    assert matmul.float32_error(100) - matmul.float32_error(0) == pytest.approx(100 * UNIT)
    # 1, then numbers of half its last place: a sequential sum rounds each of them away.
    terms = [1.0] + [2.0**-24] * 4000
    total = torch.tensor(0.0)
    for term in terms:
        total = total + term
    error = abs(float(total) - math.fsum(terms)) / math.fsum(terms)
    assert 0.9 * matmul.float32_error(len(terms)) < error < matmul.float32_error(len(terms))


@pytest.mark.parametrize("site", SITES)
def test_a_site_sums_integers_if_no_scale_varies_along_the_sum(site):
    """Whether a scale varies is read from the quantized operands themselves."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 16, generator=generator)
    axes = {"qk": (1, 1), "qk_recompute": (1, 1), "dp": (1, 1), "pv": (1, 0), "dq": (1, 0)}
    for pair in granularities(site):
        spec = replace(FPA, **{site: MatmulSpec(Precision.INT8, *pair)})
        constant = True
        for how, axis in zip(pair, axes.get(site, (0, 0)), strict=True):
            scale = quantize(x, how, block=(16, 16) if how.is_map else 16).scale.expand(16, 16)
            constant = constant and bool((scale.diff(dim=axis) == 0).all())
        assert matmul.sums_integers(spec, site) == constant, pair
        spec = replace(FPA, **{site: MatmulSpec(Precision.FP8_E4M3, *pair)})
        assert not matmul.sums_integers(spec, site)


@pytest.mark.parametrize("site", ("qk", "dv", "dq", "dk"))
def test_a_float32_sum_exceeds_the_bound_of_an_integer_sum(site):
    """Large terms that cancel: an integer sum is exact, a float32 sum is not."""
    left, right = (torch.randint(-127, 128, (2, 600, 8), generator=g) for g in _generators())
    right[:, 300:], left[:, 300:] = right[:, :300], -left[:, :300]
    left[:, 0] += (left[:, 0] < 127).long()  # a remainder
    step = torch.rand(2, 600, 1, generator=torch.Generator().manual_seed(2)) + 0.5
    parts = (left.mT.double() @ right.double())[:, None]
    in_integers = (left.mT @ right).float().double()
    bound = matmul.integer_sum_bound(parts)
    assert_error(in_integers - parts.sum(-3), bound, site)
    in_float32 = (left * step).mT @ (right / step)
    with pytest.raises(AssertionError, match="exceed the bound"):
        assert_error(in_float32.double() - parts.sum(-3), bound, site)


def test_the_integer_bound_depends_on_the_tiles_and_not_on_the_terms():
    tiles = torch.tensor([3.0, -2.0, 1.0]).double().view(3, 1, 1)
    assert float(matmul.integer_sum_bound(tiles)) == 6 * (3 + 5) * UNIT


def _generators():
    return torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)


@pytest.mark.parametrize("sigma", (0.5, 3.0))
def test_chance_is_the_deviation_of_the_measured_rms(sigma):
    """Over errors drawn from the model, the RMS of one draw has the deviation `chance`."""
    x = converted(gaussian(sigma, 24, 8), torch.float64)
    site = Site.of("qk", x, Granularity.PerHead, Granularity.PerHead)
    a, b = site.arranged(site.left, site.right)
    left, right = (Moments(torch.zeros_like(e.mean), e.variance) for e in site.rounding())
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(400):
        a_off, b_off = (
            (torch.rand(e.variance.shape, generator=generator, dtype=torch.float64) - 0.5)
            * (12 * e.variance).sqrt()
            for e in (left, right)
        )
        found.append(float(((a + a_off) @ (b + b_off) - a @ b).square().mean().sqrt()))
    found = torch.tensor(found)
    expected = matmul.product_moments(a, b, left, right).mean_square.mean().sqrt()
    assert float(found.mean() / expected) == pytest.approx(1.0, abs=0.01)
    assert float(found.std() / found.mean()) == pytest.approx(site.chance(), rel=0.15)


def test_every_int8_site_of_the_factored_preset_sums_integers():
    assert all(
        matmul.sums_integers(FACTORED, site) == (FACTORED.site(site).precision is Precision.INT8)
        for site in SITES
    )
