"""Errors of P, L and O stay within their bounds, and extreme errors of S attain them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from sagesim import Granularity
from tests.support import examples
from tests.support.assertions import assert_within_bound
from tests.support.inputs import MILD
from tests.support.strategies import cases
from tests.support.theory import SHORT, as_sample
from theory import softmax
from theory.checks.softmax import UNIT, Logits

ROWS = {
    "seed": st.integers(0, 2**32 - 1),
    "n": st.sampled_from((1, 2, 3, 40)),
    "sigma": st.sampled_from((0.0, 1e-3, 1.0, 10.0, 100.0)),
    "size": st.sampled_from((0.0, 1e-9, 1e-3, 0.3, 3.0, 30.0)),
    "kind": st.sampled_from(("noise", "signs", "one", "constant")),
    "is_causal": st.booleans(),
}


def rows(seed, n, sigma, size, kind, is_causal):
    """Logits s [n, n], -inf where masked; their errors x and the limits of |x|, 0 where masked."""
    generator = torch.Generator().manual_seed(seed)
    s = sigma * torch.randn(n, n, generator=generator, dtype=torch.float64)
    off = size * torch.rand(n, n, generator=generator, dtype=torch.float64)
    match kind:
        case "noise":
            x = off * (2 * torch.rand(n, n, generator=generator, dtype=torch.float64) - 1)
        case "signs":
            x = off * torch.randn(n, n, generator=generator).sign()
        case "one":  # the worst case for one element of each row
            x = torch.where(torch.eye(n, dtype=torch.bool).roll(seed % n, 0), off, -off)
        case _:
            x, off = torch.full_like(off, size), torch.full_like(off, size)
    if is_causal:
        masked = torch.ones(n, n, dtype=torch.bool).triu(1)
        s, x, off = s.masked_fill(masked, -math.inf), *(y.masked_fill(masked, 0) for y in (x, off))
    return s, x, off


def spread_of(s, x):
    masked = s.isneginf()
    low, high = x.masked_fill(masked, math.inf), x.masked_fill(masked, -math.inf)
    return high.amax(-1) - low.amin(-1)


def slack_of(s, x):
    """A bound on float64's error of an exponent, which is a relative error of P."""
    size = s.masked_fill(s.isneginf(), 0.0).abs().amax() + x.abs().amax()
    return float(8 * (s.shape[-1] + 8 + size) * UNIT)


def assert_error(error, bound, what) -> None:
    assert_within_bound(actual=error, exact=torch.zeros_like(error), bound=bound, what=what)


@examples(600)
@given(**ROWS)
def test_errors_of_s_stay_within_the_bounds(seed, n, sigma, size, kind, is_causal):
    s, x, off = rows(seed, n, sigma, size, kind, is_causal)
    p, moved, slack = s.softmax(-1), (s + x).softmax(-1), slack_of(s, x)
    error, spread, tiny = (moved - p).abs(), spread_of(s, x), 1e-300
    lse_error = (s + x).logsumexp(-1) - s.logsumexp(-1)
    size_of_lse = s.logsumexp(-1).abs() + (s + x).logsumexp(-1).abs()
    assert_error(lse_error, softmax.lse_bound(off) + slack + 4 * UNIT * size_of_lse, "L")
    bound = softmax.p_bound(p, off)
    assert_error(error, bound + slack * (p + moved) + tiny, "P")
    crude = p * torch.expm1(2 * off.amax(-1, keepdim=True))
    assert bool((bound <= torch.minimum(crude, torch.ones_like(p)) * (1 + 1e-9) + 1e-15).all())
    remainder = moved - p - softmax.p_first_order(p, x)
    rest = softmax.p_remainder_bound(p, spread)
    assert_error(remainder, rest + slack * (p * (1 + 2 * spread[..., None]) + moved) + tiny, "rest")
    variation = error.sum(-1) / 2
    assert_error(variation, softmax.variation_bound(spread) + slack, "variation")
    generator = torch.Generator().manual_seed(seed)
    v = 10 * torch.randn(n, 3, generator=generator, dtype=torch.float64) + 5
    bound = softmax.o_bound(softmax.value_range(v, is_causal=is_causal), variation)
    assert_error((moved - p) @ v, bound + slack * (p @ v.abs() + moved @ v.abs()), "O")


@examples(60)
@given(case=cases(MILD, **SHORT), how=st.sampled_from((Granularity.PerToken, Granularity.PerHead)))
def test_the_emulator_stays_within_the_bounds(case, how):
    y = Logits.of(as_sample(case), how)
    seen = y.exact.p.sum(-1, keepdim=True) > 0
    p, slack = y.exact.p, float(y.slack)
    error, off = y.trace.p - p, y.x.abs()
    # An element of P that underflows to 0 may become a float64 number under the error.
    vanished = (2.0**-1070 * torch.exp(2 * off.amax(-1, keepdim=True))).clamp(max=1.0)
    bound = softmax.p_bound(p, off) + 4 * slack * (p + y.trace.p) + vanished
    assert_error(error, bound, "P")
    assert_error(y.trace.lse - y.exact.lse, softmax.lse_bound(off) + slack, "L")
    assert_error(error.abs().sum(-1) / 2, softmax.variation_bound(y.spread) + 2 * slack, "sum")
    assert bool(seen.all())


@examples(100)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.sampled_from((2, 3, 40)),
    sigma=st.sampled_from((0.1, 1.0, 5.0)),
    size=st.sampled_from((1e-6, 0.1, 2.0)),
)
def test_the_bound_of_p_is_attained_at_every_element(seed, n, sigma, size):
    generator = torch.Generator().manual_seed(seed)
    s = sigma * torch.randn(n, generator=generator, dtype=torch.float64)
    off = size * (0.1 + torch.rand(n, generator=generator, dtype=torch.float64))
    own = torch.eye(n, dtype=torch.float64)
    x = off * (2 * own - 1)  # row j is the worst case for element j
    up, down = (((s + e).softmax(-1) - s.softmax(-1)).diagonal().abs() for e in (x, -x))
    bound = softmax.p_bound(s.softmax(-1), off)
    assert torch.maximum(up, down).tolist() == pytest.approx(bound.tolist(), rel=1e-6, abs=1e-15)


@pytest.mark.parametrize("e", (1e-3, 0.5, 5.0))
def test_two_keys_attain_the_bounds_of_the_variation_and_of_o(e):
    """Two keys of odds exp(-e), which an error of S changes to exp(e)."""
    s, x = torch.tensor([[-e / 2, e / 2]]).double(), torch.tensor([[e, -e]]).double()
    variation = ((s + x).softmax(-1) - s.softmax(-1)).abs().sum(-1) / 2
    bound = softmax.variation_bound(spread_of(s, x))
    assert float(variation) == pytest.approx(float(bound), rel=1e-9)
    assert float(bound) == pytest.approx(math.tanh(e / 2), rel=1e-6)
    with pytest.raises(AssertionError, match="exceed the bound"):
        assert_error(variation, 0.99 * bound, "variation")
    v = torch.tensor([[3.0], [-2.0]]).double()
    o_error = ((s + x).softmax(-1) - s.softmax(-1)) @ v
    o_bound = softmax.o_bound(softmax.value_range(v), variation)
    assert float(o_error.abs()) == pytest.approx(float(o_bound), rel=1e-9)


@pytest.mark.parametrize("e", (1e-2, 1.0, 4.0))
def test_a_vanishing_element_attains_the_bound_of_the_remainder(e):
    s = torch.tensor([[-40.0, 0.0]]).double()
    x = torch.tensor([[e, -e]]).double()
    p = s.softmax(-1)
    remainder = (s + x).softmax(-1) - p - softmax.p_first_order(p, x)
    bound = softmax.p_remainder_bound(p, spread_of(s, x))
    assert float(remainder[0, 0]) == pytest.approx(float(bound[0, 0]), rel=1e-6)
    without_spread = softmax.p_remainder_bound(p, x.abs().amax(-1))  # half of the true spread
    with pytest.raises(AssertionError, match="exceed the bound"):
        assert_error(remainder, without_spread, "remainder")


def test_a_constant_error_attains_the_bound_of_l_and_leaves_p_unchanged():
    s = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).double()
    x = torch.full_like(s, -0.7)
    lse_error = (s + x).logsumexp(-1) - s.logsumexp(-1)
    assert lse_error.abs().tolist() == pytest.approx(softmax.lse_bound(x.abs()).tolist())
    assert not bool(softmax.variation_bound(spread_of(s, x)).any())
    assert float(softmax.p_first_order(s.softmax(-1), x).abs().max()) < 1e-15


def test_the_bound_of_p_is_1_for_errors_of_s_in_the_hundreds():
    p = torch.tensor([[0.5, 0.5, 0.0]]).double()
    assert softmax.p_bound(p, torch.tensor([[1e4, 0.0, 0.0]]).double()).tolist() == [[1.0] * 3]


def test_the_causal_value_range_covers_the_keys_that_a_query_attends_to():
    v = torch.tensor([[1.0, 0.0], [4.0, 0.0], [2.0, -3.0]])
    assert softmax.value_range(v, is_causal=True).tolist() == [[0, 0], [3, 0], [3, 3]]
    assert softmax.value_range(v).tolist() == [[3, 3]]


def drawn(s, deviation, trials=40000):
    """The errors of P and of L under independent Gaussian errors of S, one per trial."""
    generator = torch.Generator().manual_seed(0)
    x = deviation * torch.randn(trials, *s.shape, generator=generator, dtype=torch.float64)
    return (s + x).softmax(-1) - s.softmax(-1), (s + x).logsumexp(-1) - s.logsumexp(-1)


def test_first_order_moments_are_those_of_small_errors():
    s = 2 * torch.randn(2, 5, generator=torch.Generator().manual_seed(1)).double()
    deviation = 0.05 * (1 + torch.arange(5.0)).double().expand(2, 5) / 3
    p, u = s.softmax(-1), deviation**2
    p_error, lse_error = drawn(s, deviation)
    ratio = p_error.var(0) / softmax.p_variance(p, u)
    # 40000 draws: a variance is right to 0.7 % (one deviation).
    assert ratio.flatten().tolist() == pytest.approx([1.0] * 10, abs=0.035)
    v = torch.randn(5, 3, generator=torch.Generator().manual_seed(2)).double()
    ratio = (p_error @ v).var(0) / softmax.o_variance(p, v, u)
    assert ratio.flatten().tolist() == pytest.approx([1.0] * 6, abs=0.035)
    moments = softmax.lse_moments(p, u)
    assert (lse_error.var(0) / moments.variance).tolist() == pytest.approx([1.0] * 2, abs=0.035)
    # The mean is a hundredth of a deviation. Averaging over x and -x cancels the first order.
    x_mean = lse_error.mean(0) - drawn(s, -deviation)[1].mean(0)
    assert float(x_mean.abs().max()) < 0.1 * float(deviation.max())
    both = (lse_error.mean(0) + drawn(s, -deviation)[1].mean(0)) / 2
    assert (both / moments.mean).tolist() == pytest.approx([1.0] * 2, abs=0.05)
    # A twin without the change of L, u P^2, is wrong by more than a factor of 2.
    assert ratio.numel() and float((u * p**2 / softmax.p_variance(p, u)).max()) > 2


@pytest.mark.parametrize("u", (0.01, 1.0, 4.0))
@pytest.mark.parametrize("p", (1e-6, 0.2, 0.5, 0.99))
def test_lognormal_moments_of_two_keys_are_exact(p, u):
    """With two keys, the sum of the others is one log-normal number: no approximation."""
    both = torch.tensor([[p, 1 - p]], dtype=torch.float64)
    found = softmax.p_lognormal_moments(both, torch.full_like(both, u))

    def moment(power):
        def at(z):
            odds = p / (1 - p) * math.exp(math.sqrt(2 * u) * z)
            return (odds / (1 + odds) - p) ** power * stats.norm.pdf(z)

        return integrate.quad(at, -12, 12, epsabs=1e-12, limit=200)[0]

    assert float(found.mean[0, 0]) == pytest.approx(moment(1), rel=1e-3, abs=1e-3 * p * (1 - p))
    assert float(found.mean_square[0, 0]) == pytest.approx(moment(2), rel=1e-2)


def test_the_quadrature_is_off_by_less_than_1e_4_up_to_a_deviation_of_4():
    """Key 0 alone has an error: the log odds are Gaussian, of deviation 4 at u = 16."""
    found, exact = list[float](), list[float]()
    for p in (1e-6, 1e-3, 0.05, 0.2, 0.35, 0.5, 0.7, 0.95, 0.999):
        for deviation in (1.0, 2.0, 3.0, 3.5, 4.0):
            both = torch.tensor([[p, 1 - p]], dtype=torch.float64)
            u = torch.tensor([[deviation**2, 0.0]], dtype=torch.float64)
            moments = softmax.p_lognormal_moments(both, u)
            found += [float(moments.mean[0, 0]), float(moments.mean_square[0, 0])]
            for power in (1, 2):

                def at(z, power=power, p=p, deviation=deviation):
                    odds = math.log(p / (1 - p)) + deviation * z
                    return (1 / (1 + math.exp(-odds)) - p) ** power * stats.norm.pdf(z)

                exact.append(integrate.quad(at, -12, 12, epsabs=1e-12, limit=400)[0])
    assert_within_bound(
        actual=torch.tensor(found, dtype=torch.float64),
        exact=torch.tensor(exact, dtype=torch.float64),
        bound=torch.tensor(1e-4),
        what="moments",
    )


@pytest.mark.parametrize("u", (0.01, 0.25, 1.0))
def test_among_many_keys_relative_errors_grow_like_an_exponential(u):
    n = 4000
    p = torch.full((1, n), 1 / n, dtype=torch.float64)
    u_row = torch.full_like(p, u)
    found = softmax.p_lognormal_moments(p, u_row).mean_square * n**2
    # The sum of the others varies by sqrt(expm1(u) / n), at most 2 % here.
    assert float(found[0, 0]) == pytest.approx(math.expm1(u), rel=0.03)
    error, _ = drawn(torch.zeros(1, n).double(), math.sqrt(u), trials=100)
    measured = float((n * error).square().mean())
    # 400000 draws of exp(2 x). At u = 1 its deviation is several times its mean.
    assert measured == pytest.approx(float(found[0, 0]), rel=0.03 if u < 1 else 0.06)
    first = float(softmax.p_variance(p, u_row)[0, 0]) * n**2
    assert (first == pytest.approx(measured, rel=0.06)) == (u < 0.1)


def test_p_of_a_single_key_has_no_error():
    p = torch.tensor([[1.0, 0.0], [0.3, 0.7]]).double()
    u = torch.tensor([[4.0, 0.0], [1.0, 1.0]]).double()
    found = softmax.p_lognormal_moments(p, u)
    assert found.mean_square[0].tolist() == [0, 0]
    assert float(found.mean_square[1].min()) > 0
    assert softmax.p_variance(p, u)[0].tolist() == [0, 0]


def test_the_error_of_an_exponential_is_finite_where_p_underflows():
    log_p = torch.tensor([-4000.0, -4000.0, -800.0, -1.0, -math.inf]).double()
    off = torch.tensor([3990.0, 10.0, 0.0, 1e-9, 10.0]).double()
    expected = [math.exp(-10), 0.0, 0.0, math.exp(-1) * 1e-9, 0.0]
    assert softmax.exponential_error(log_p, off).tolist() == pytest.approx(expected, rel=1e-8)
    infinite = torch.full((), math.inf).double()
    assert softmax.exponential_error(log_p, infinite).isposinf().all()
