"""The parts of dS's error: the identity, the bound through delta, and the estimates.

Estimates are compared with drawn errors of known moments, and with the emulator.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sagesim
from sagesim import FACTORED, SAGEBWD, AttentionSpec, Granularity, quantize
from tests.support import examples
from tests.support.assertions import assert_bitwise, assert_within_bound
from tests.support.theory import assert_moments, draw_errors
from theory.checks.ds_error import (
    SMOOTHED_FPA,
    Anatomy,
    amax,
    common_gradient,
    in_float32,
    operand,
    products,
    relative,
    tolerance,
)
from theory.checks.samples import captured, gaussian, outlier_channels
from theory.ds_bound import centred
from theory.ds_error import (
    dispersion,
    ds_error,
    ds_moments_from_pv,
    ds_moments_from_qk,
    scale_gain,
    through_delta_bound,
)
from theory.matmul import product_moments
from theory.rounding import Moments, rounding_moments

U = 2.0**-53
LABELS = ("sagebwd", "factored", "sagebwd_all_int8", "sage_forward", "sagebwd pv=fp8_e5m2")
CASES = {
    "label": st.sampled_from(LABELS),
    "seed": st.integers(0, 2**32 - 1),
    "n": st.sampled_from((1, 2, 3, 17, 70)),
    "sigma": st.sampled_from((0.0, 1.0, 30.0)),
    "outlier": st.sampled_from((1.0, 100.0)),
    "is_causal": st.booleans(),
}


def problem(seed, n, sigma, outlier):
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = torch.randn(4, 2, n, 16, generator=generator)
    do[:, n // 2] *= outlier
    v[..., 3] *= outlier
    return q * sigma, k, v, do


@pytest.mark.slow
@examples(200)
@given(**CASES)
def test_the_four_parts_add_up_to_the_error(label, seed, n, sigma, outlier, is_causal):
    x = problem(seed, n, sigma, outlier)
    e = sagesim.exact(*x, is_causal=is_causal)
    t = sagesim.trace(*x, spec=AttentionSpec.parse(label), is_causal=is_causal)
    parts = ds_error(
        e.p,
        e.dp,
        e.delta,
        computed_p=t.p_recompute,
        computed_dp=t.dp,
        computed_delta=t.delta,
    )
    computed = t.p_recompute.double() * (t.dp.double() - t.delta.double()[..., None])
    size = 1 + t.p_recompute.double()
    size = size * (t.dp.double().abs() + e.dp.abs() + (e.delta.abs() + t.delta.abs())[..., None])
    assert_within_bound(
        actual=parts.total, exact=computed - e.ds, bound=(n + 16) * 2 * U * size, what="identity"
    )


@pytest.mark.slow
@examples(200)
@given(**CASES)
def test_the_bound_through_delta_holds(label, seed, n, sigma, outlier, is_causal):
    x = problem(seed, n, sigma, outlier)
    e = sagesim.exact(*x, is_causal=is_causal)
    spec = replace(AttentionSpec.parse(label), delta=sagesim.Delta.FROM_O)
    t = sagesim.trace(*x, spec=spec, is_causal=is_causal)
    measured = (e.p * (t.delta - e.delta)[..., None]).square().mean(-1).sqrt()
    bound = through_delta_bound(e.p, x[3], t.o - e.o)
    # delta is a float32 sum of 16 products; exact delta is a float64 sum.
    slack = 17 * 2.0**-24 * (x[3] * t.o).abs().sum(-1).double() * e.p.square().mean(-1).sqrt()
    slack = slack + (n + 32) * U * e.dp.abs().amax(-1)
    assert_within_bound(
        actual=measured, exact=torch.zeros_like(measured), bound=bound + slack, what="delta"
    )


def test_the_bound_through_delta_is_attained_so_no_smaller_bound_holds():
    do = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    p = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    o_error = do * 0.01
    measured = (p * (do * o_error).sum(-1, keepdim=True)).square().mean(-1).sqrt()
    bound = through_delta_bound(p, do, o_error)
    assert_within_bound(actual=measured, exact=bound, bound=1e-15 * bound, what="parallel")
    with pytest.raises(AssertionError, match="exceed the bound"):
        assert_within_bound(
            actual=measured, exact=torch.zeros_like(bound), bound=0.99 * bound, what="twin"
        )


@examples(200)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from((0.0, 1.0, 8.0)),
    exponent=st.integers(-60, 60),
)
def test_elements_without_variance_have_exactly_the_mean_as_their_error(seed, spread, exponent):
    """The error is that of the emulator's quantizer."""
    z = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(seed))
    x = z[0] * torch.exp(spread * z[1]) * 2.0**exponent
    rounded = quantize(x, Granularity.PerToken)
    moments = rounding_moments(x, rounded.scale)
    error = rounded.dequantize().double() - x.double()
    known = moments.variance == 0
    # The quantizer multiplies in float32, and a tie in float32 need not be one in float64.
    scale = rounded.scale.double().expand_as(error)
    ties = ((x.double() / scale).abs().frac() - 0.5).abs() < 1e-5
    assert_within_bound(
        actual=error.where(known & ~ties, 0.0),
        exact=moments.mean.where(known & ~ties, 0.0),
        bound=128 * 2.0**-23 * scale,
        what="known",
    )
    assert bool((moments.variance <= scale.square() / 12).all())


def test_a_rounding_error_is_noise_in_the_middle_and_a_bias_at_the_ends():
    scale = torch.tensor([0.5], dtype=torch.float64)
    x = torch.tensor([0.1, -0.2, 0.3, -0.7, 20.1, 63.5], dtype=torch.float64)
    moments = rounding_moments(x, scale)
    mean = torch.tensor([-0.1, 0.2, 0.2, 0.2, 0.0, 0.0], dtype=torch.float64)
    variance = torch.tensor([0, 0, 0, 0, 0.25 / 12, 0], dtype=torch.float64)
    assert_within_bound(actual=moments.mean, exact=mean, bound=torch.tensor(4 * U), what="mean")
    assert_bitwise(actual=moments.variance, expected=variance, what="variance")
    empty = rounding_moments(torch.zeros(3), torch.zeros(3))
    assert_bitwise(actual=empty.mean_square, expected=torch.zeros(3).double(), what="all zero")


def test_the_relative_error_of_a_zero_tensor():
    zero, error = torch.zeros(2).double(), Moments(torch.zeros(2), torch.ones(2))
    assert Moments.none(zero).relative_to(zero) == 0
    assert error.relative_to(zero) == math.inf
    assert error.relative_to(torch.full((2,), 2.0)) == 0.5


def test_the_moments_of_a_product():
    a, b = torch.randn(5, 7, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    a_error, b_error = (Moments(0.1 * torch.randn_like(x), x.square()) for x in (a, b))
    moments = product_moments(a, b, a_error, b_error)
    sample = [
        (a + x) @ (b + y) - a @ b for x, y in zip(*draw_errors(a_error, b_error), strict=True)
    ]
    assert_moments(moments, torch.stack(sample), "product")


@pytest.mark.parametrize("which", ["q", "k", "mean"])
def test_the_moments_from_qk_are_those_of_small_errors(which):
    """dS and its delta are recomputed from Q and K with tiny errors."""
    q, k, v, do = torch.randn(4, 6, 4, dtype=torch.float64)
    x, tiny = sagesim.exact(q, k, v, do), 1e-7
    zero, one = torch.zeros_like(q), torch.ones_like(q)
    noise = Moments(zero, tiny**2 * (1 + q.abs()))
    known = Moments(tiny * torch.randn_like(q), zero)
    none = Moments(zero, zero)
    q_error = {"q": noise, "k": none, "mean": known}[which]
    k_error = {"q": none, "k": noise, "mean": Moments(tiny * one.cumsum(-2), zero)}[which]
    moments = ds_moments_from_qk(x.p, centred(x.p, x.dp), q, k, q_error, k_error, 0.5)
    draws = 1 if which == "mean" else 4000
    off_q, off_k = draw_errors(q_error, k_error, draws=draws)
    sample = sagesim.exact(q + off_q, k + off_k, v.expand_as(off_q), do.expand_as(off_q)).ds - x.ds
    if which == "mean":
        # The second order is 1e-7 of the first; float64's rounding is 1e-9 of it.
        limit = 1e-5 * tiny * torch.ones_like(x.ds)
        assert_within_bound(actual=sample[0], exact=moments.mean, bound=limit, what="known error")
    else:
        assert_moments(moments, sample, which)
        half = Moments(moments.mean, moments.variance / 2)
        with pytest.raises(AssertionError, match="exceed the bound"):
            assert_moments(half, sample, "twin of half the variance")


def test_the_moments_from_pv():
    p, v, do = torch.rand(5, 7).softmax(-1).double(), torch.randn(7, 4), torch.randn(5, 4)
    v, do = v.double(), do.double()
    p_error, v_error = Moments(0.1 * p, p.square()), Moments(0.1 * v, v.square())
    moments = ds_moments_from_pv(p, v, do, p_error, v_error)
    off_p, off_v = draw_errors(p_error, v_error)
    # First order: the variance does not include the product of both errors.
    o_off = off_p @ v + p @ off_v
    known = p_error.mean @ v_error.mean
    sample = -p * ((o_off + known) * do).sum(-1, keepdim=True)
    assert_moments(moments, sample, "through delta")


@pytest.mark.slow
@pytest.mark.parametrize("layer", range(6))
@pytest.mark.parametrize("spec", [SAGEBWD, FACTORED], ids=["sagebwd", "factored"])
def test_estimates_on_every_layer_of_the_capture(layer, spec):
    """The error of dS through QK and through PV, and of dQ, dK and dV from their own rounding."""
    sample = in_float32(captured()[layer])
    exact, parts = sample.exact(), Anatomy.of(sample, spec)
    for name, moments, sites in (
        ("qk", parts.qk, {"qk": spec.qk, "qk_recompute": spec.qk_recompute}),
        ("pv", parts.pv, {"pv": spec.pv}),
    ):
        found = relative(sample.trace(replace(SMOOTHED_FPA, **sites)).ds, exact.ds)
        assert found == pytest.approx(moments.relative_to(exact.ds), rel=tolerance(moments)), name
    for product in products(sample):
        assert product.measured(spec) == pytest.approx(product.predicted(spec), rel=0.15)


def test_small_elements_make_a_bias_that_noise_does_not_explain():
    """For dV with similar rows of dO, a model of noise alone is too small by a factor of 4."""
    product = products(common_gradient())[2]
    assert product.site == "dv"
    scale = amax(product.left.mT, SAGEBWD.dv.lhs, SAGEBWD).mT / 127
    right = operand(product.right, SAGEBWD.dv.rhs, SAGEBWD)
    nothing = torch.zeros_like(product.left)
    exact = product.left @ product.right
    lost = product.left.square().minimum(scale.square() / 12)
    noise = product_moments(product.left, product.right, Moments(nothing, lost), right)
    measured = product.measured(SAGEBWD)
    assert measured > 4 * noise.relative_to(exact)
    assert measured == pytest.approx(product.predicted(SAGEBWD), rel=0.1)


@pytest.mark.parametrize("parts", [1, 8, 64])
def test_the_dispersion_of_known_regions(parts):
    """It is 1 for equal parts, and 1 / (number of parts) if a single part is not 0."""
    x = torch.zeros(64, 64, dtype=torch.float64)
    x[:: 64 // parts] = 1.0
    fine = amax(x, Granularity.PerTileRow, SAGEBWD)
    coarse = amax(x, Granularity.PerTile, SAGEBWD)
    assert dispersion(fine, coarse, torch.ones(())) == parts / 64
    assert scale_gain(1.0, parts / 64, 1.0) == math.sqrt(64 / parts)
    assert dispersion(0 * fine, 0 * coarse, torch.ones(())) == 1.0


@examples(100)
@given(seed=st.integers(0, 2**32 - 1), spread=st.floats(0, 10), n=st.sampled_from((1, 5, 64, 70)))
def test_the_dispersion_is_between_its_limits(seed, spread, n):
    z = torch.randn(2, n, 24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = z[0] * torch.exp(spread * z[1, :, :1])
    fine, coarse = (amax(x, g, SAGEBWD) for g in (Granularity.PerTileRow, Granularity.PerTile))
    assert 1 / 64 * (1 - 1e-12) <= dispersion(fine, coarse, torch.ones(())) <= 1


def test_the_gain_from_dispersions_holds_only_if_elements_span_many_codes():
    """It agrees with the emulator at sigma 1. At sigma 5 most of P and dS is below half a code,
    and the gain charges shared scales a noise that they do not have."""
    for product in products(gaussian(1.0)):
        gain = product.measured(SAGEBWD) / product.measured(FACTORED)
        assert product.gain_of_dispersions() == pytest.approx(gain, rel=0.1)
    for product in products(gaussian(5.0)):
        gain = product.measured(SAGEBWD) / product.measured(FACTORED)
        assert product.gain_of_dispersions() > 1.5 * gain


def test_the_estimate_for_one_dominant_row_is_within_a_third():
    """One row of dO carries most of dS, so a measurement averages over the rounding of one row."""
    sample = outlier_channels()
    exact = sample.exact().ds
    found = relative(sample.trace(SAGEBWD).ds, exact)
    parts = Anatomy.of(sample, SAGEBWD)
    predicted = math.hypot(parts.qk.relative_to(exact), parts.pv.relative_to(exact))
    assert found == pytest.approx(predicted, rel=1 / 3)
