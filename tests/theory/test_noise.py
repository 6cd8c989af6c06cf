"""Estimators are unbiased, rounding errors match their moments, and batches cross as predicted."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sagesim
from sagesim import AttentionSpec, Granularity, Rounding
from sagesim.emulator import uniform
from tests.support import examples
from tests.support.assertions import assert_within_bound
from tests.support.inputs import NASTY
from tests.support.strategies import tensors
from theory import noise
from theory.checks import noise as checks
from theory.checks.noise import Examples


def population(seed: int, size: int, p: int, offset: float):
    generator = torch.Generator().manual_seed(seed)
    return offset + torch.randn(size, p, generator=generator, dtype=torch.float64) ** 3


@examples(60)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.sampled_from((2, 3, 4)),
    p=st.sampled_from((1, 2, 5)),
    offset=st.sampled_from((0.0, 1.0, 100.0)),
)
def test_estimates_are_unbiased_over_every_sample_of_a_population(seed, n, p, offset):
    """The expectation is exact: a mean over all n-tuples of four vectors, with repetition."""
    x = population(seed, 4, p, offset)
    drawn = [
        noise.sample_moments(x[list(chosen)]) for chosen in itertools.product(range(4), repeat=n)
    ]
    mean = x.mean(0)
    square, trace = float(mean @ mean), float((x - mean).square().sum(1).mean())
    scale = float(x.square().sum(1).max())
    found = sum(m.mean_square for m in drawn) / len(drawn)
    assert found == pytest.approx(square, abs=1e-12 * scale)
    assert sum(m.trace for m in drawn) / len(drawn) == pytest.approx(trace, abs=1e-12 * scale)
    naive = square + trace / n  # the expectation of |mean of n|^2, a biased estimate
    if offset == 0:
        assert found != pytest.approx(naive, rel=1e-6)
    covariance = (x - mean).mT @ (x - mean) / 4
    variance = noise.mean_square_variance(
        float(mean @ covariance @ mean), float(covariance.square().sum()), n
    )
    spread = sum((m.mean_square - found) ** 2 for m in drawn) / len(drawn)
    assert spread == pytest.approx(variance, abs=1e-10 * scale**2)


@pytest.mark.parametrize("offset", (0.0, 0.2, 3.0))
@pytest.mark.parametrize("p", (3, 100))
def test_the_standard_error_is_the_deviation_of_the_estimates(offset, p):
    generator = torch.Generator().manual_seed(0)
    x = offset + torch.randn(800, 50, p, generator=generator, dtype=torch.float64)
    drawn = [noise.sample_moments(part) for part in x]
    deviation = float(torch.tensor([m.mean_square for m in drawn]).std())
    claimed = math.sqrt(sum(m.mean_square_error**2 for m in drawn) / len(drawn))
    # The jackknife counts the noise that remains without a mean twice.
    truth = noise.mean_square_variance(p * offset**2, p, 50)
    doubled = noise.mean_square_variance(p * offset**2, 2 * p, 50)
    assert deviation == pytest.approx(math.sqrt(truth), rel=0.1)  # 800 draws scatter by 2.5 percent
    assert claimed == pytest.approx(math.sqrt(doubled), rel=0.1)


@pytest.mark.parametrize("offset", (0.0, 100.0))
def test_the_standard_error_is_that_of_leaving_out_each_sample(offset):
    x = population(0, 7, 3, offset)
    others = [torch.cat([x[:i], x[i + 1 :]]) for i in range(len(x))]
    found = [noise.sample_moments(part).mean_square for part in others]
    each = torch.tensor(found, dtype=torch.float64)
    expected = float(((each - each.mean()).square().sum() * 6 / 7).sqrt())
    assert noise.sample_moments(x).mean_square_error == pytest.approx(expected, rel=1e-6)


def test_the_standard_error_of_two_samples_is_unknown_and_of_equal_ones_0():
    assert math.isnan(noise.sample_moments(torch.randn(2, 3)).mean_square_error)
    assert noise.sample_moments(torch.ones(5, 3)).mean_square_error == 0


def test_standard_errors_that_are_too_small_would_be_seen(monkeypatch):
    """Half of the right errors miss more often than the checks allow."""
    spectrum = checks.SPECTRA["64 equal directions"]
    assert checks.missed(spectrum, 10.0, draws=200) <= 0.05
    right = noise._mean_square_error
    monkeypatch.setattr(noise, "_mean_square_error", lambda *x: right(*x) / 2)
    assert checks.missed(spectrum, 10.0, draws=200) > 0.2


def test_the_gradient_over_its_error_by_hand():
    assert noise.gradient_to_error(4.0, 1.0) == 2
    assert noise.gradient_to_error(4.0, 0.0) == math.inf
    assert math.isnan(noise.gradient_to_error(-1.0, 1.0))
    assert noise.effective_rank(torch.tensor([1.0, 1.0, 0.0])) == 2


def test_a_single_sample_raises():
    with pytest.raises(ValueError, match="1 samples"):
        noise.sample_moments(torch.ones(1, 3))


def test_batches_and_scales_by_hand():
    """|b| = 0.1, tr Sigma = 4, |G| = 2: noise scale 1; visible at 400, or 1 / r^2 noise scales."""
    assert noise.noise_scale(4.0, 4.0) == 1
    assert noise.visible_batch(0.01, 4.0) == pytest.approx(400)
    assert noise.visible_batch(0.01, 4.0, 1.0) == pytest.approx(500)
    assert noise.visible_batch(0.0, 4.0) == math.inf
    assert noise.visible_batch(-1e-9, 4.0) == math.inf
    batch = torch.tensor([1.0, 400.0])
    assert noise.batch_mean_square(0.01, 4.0, batch).tolist() == pytest.approx([4.01, 0.02])


@examples(100)
@given(x=tensors(NASTY), mode=st.sampled_from(("nearest", "stochastic")))
def test_rounding_errors_match_nearest_error_flushed_and_stochastic_variance(x, mode):
    rounding = sagesim.Rounding.stochastic(3) if mode == "stochastic" else sagesim.spec.HALF_EVEN
    codes = sagesim.quantize(x, Granularity.PerToken, block=16, rounding=rounding)
    step, x = codes.scale.double(), x.double()
    error = codes.codes * step - x
    slack = 127 * 4 * 2.0**-24 * step + 0 * x
    if mode == "nearest":
        # Near a tie, float32 may round to either neighbour.
        tie = ((x / step - (x / step).floor() - 0.5).abs() < 1e-4) * step
        predicted = noise.nearest_error(x, step)
        assert_within_bound(actual=error, exact=predicted, bound=slack + tie, what="nearest")
        lost = noise.flushed(x, step).masked_fill((x.abs() / step - 0.5).abs() < 1e-4, 0.0)
        away = torch.where(lost != 0, error - lost, 0.0)
        assert_within_bound(actual=away, exact=torch.zeros_like(x), bound=slack, what="flushed")
    else:
        variance = noise.stochastic_variance(x, step)
        assert_within_bound(
            actual=variance, exact=step**2 / 8 + 0 * x, bound=step**2 / 8 * (1 + 1e-12), what="var"
        )
        # The error is -f or 1 - f steps, so (error + f)(error - 1 + f) = 0, which is
        # error^2 - error (1 - 2 f) = variance.
        f = x / step - (x / step).floor()
        whole = error**2 - error * (1 - 2 * f) * step
        assert_within_bound(
            actual=whole, exact=variance, bound=4 * step * slack + step**2 * 1e-9, what="stochastic"
        )


def test_the_mean_over_all_draws_is_the_number_itself():
    """Over 1000 equally spaced draws, the mean error is below their distance."""
    f = torch.linspace(0, 0.999, 50, dtype=torch.float64)
    u = (torch.arange(1000, dtype=torch.float64)[:, None] + 0.5) / 1000
    error = (f > u).double() - f
    assert float(error.mean(0).abs().max()) <= 1 / 1000
    variance = noise.stochastic_variance(f, torch.tensor(1.0))
    assert_within_bound(
        actual=error.square().mean(0), exact=variance, bound=variance * 0 + 1e-3, what="variance"
    )
    every_f = torch.linspace(0, 1, 100001, dtype=torch.float64)[:-1]
    for draw in (0.0, 0.25, 0.9):
        mean = float(((every_f > draw).double() - every_f).mean())
        said = noise.shared_draw_error(torch.tensor(draw), torch.tensor(1.0))
        assert mean == pytest.approx(float(said), abs=1e-4)


def test_the_mean_error_of_one_seed_follows_its_own_draws():
    x = torch.rand(2000, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x[..., 0] = 1.0

    def mean_error(rounding):
        q = sagesim.quantize(x, Granularity.PerToken, block=8, rounding=rounding)
        return (q.codes * q.scale.double() - x)[..., 1:].mean(0) * 127

    shared = mean_error(Rounding.stochastic(5))
    draw = uniform(5, "q", 8, 8, 0, x.device).double()[..., 1:]
    said = noise.shared_draw_error(draw, torch.tensor(1.0))
    assert_within_bound(actual=shared, exact=said, bound=0 * said + 0.05, what="one seed")
    other = mean_error(Rounding.stochastic(6))
    with pytest.raises(AssertionError, match="exceed the bound"):
        assert_within_bound(actual=other, exact=said, bound=0 * said + 0.05, what="another seed")


def test_flushed_and_nearest_error_by_hand():
    x = torch.tensor([0.4, -0.4, 0.6, 2.5], dtype=torch.float64)
    one = torch.tensor(1.0, dtype=torch.float64)
    assert noise.flushed(x, one).tolist() == [-0.4, 0.4, 0, 0]
    assert noise.nearest_error(x, one).tolist() == pytest.approx([-0.4, 0.4, 0.4, -0.5])


def test_a_crossing_is_found_where_two_lines_meet():
    batches = [1, 2, 4, 8, 16]
    falling = [8 / b for b in batches]
    assert checks.crossing(batches, falling, [1.6] * 5) == pytest.approx(5)
    assert math.isnan(checks.crossing(batches, falling, [0.01] * 5))


def test_gradients_of_the_training_problem_are_those_of_autograd():
    some = Examples.draw(3, spread=0.5)
    w_q, w_k, w_v = (w.double() for w in some.w)
    x = some.x.double()
    w_q.requires_grad_()
    o = sagesim.attention(x @ w_q, x @ w_k, x @ w_v, spec=AttentionSpec.parse("fpa"))
    (o - some.target).square().sum().div(2).backward()
    assert w_q.grad is not None
    total = some.exact().sum(0).view_as(w_q)
    assert_within_bound(actual=w_q.grad, exact=total, bound=0 * total + 1e-9, what="gradient")
    emulated = some.emulated("fpa")
    assert_within_bound(
        actual=emulated, exact=some.exact(), bound=0 * emulated + 1e-2, what="emulated gradient"
    )
    quantized = some.emulated("sagebwd")
    with pytest.raises(AssertionError, match="exceed the bound"):
        assert_within_bound(
            actual=quantized, exact=some.exact(), bound=0 * emulated + 1e-2, what="quantized"
        )


@pytest.mark.slow
def test_one_seed_per_example_removes_the_bias():
    some = Examples.draw(512, spread=0.1)
    exact = some.exact()
    one = noise.sample_moments(some.emulated("sagebwd round=stochastic@7") - exact)
    many = noise.sample_moments(some.reseeded("sagebwd", 1) - exact)
    assert one.mean_square > 20 * one.mean_square_error
    assert abs(many.mean_square) < 0.02 * one.mean_square
