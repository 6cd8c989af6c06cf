"""Smoothing leaves P and the gradients unchanged; its costs and gains are as predicted."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sagesim import AttentionSpec
from tests.support import examples
from tests.support.assertions import assert_within_bound
from tests.support.inputs import MILD, NASTY
from tests.support.strategies import cases, tensors
from tests.support.theory import as_sample
from theory import smoothing
from theory.checks import smoothing as checks
from theory.checks.samples import gaussian, outlier_channels
from theory.checks.smoothing import UNIT, row_sum_slack

SHORT = {
    "lengths": st.sampled_from((1, 2, 3, 17, 64, 65)),
    "head_sizes": st.sampled_from((1, 8, 40)),
    "masks": ("none", "causal"),
}


def assert_equal(actual, expected, slack, what):
    assert_within_bound(actual=actual, exact=expected, bound=slack, what=what)


@examples(200)
@given(case=cases(NASTY, **SHORT), far=st.sampled_from((0.0, 1.0, 1e4)))
def test_subtracting_a_vector_from_all_keys_leaves_p_and_shifts_l_by_lse_shift(case, far):
    x = as_sample(case)
    scale = x.q.shape[-1] ** -0.5
    shift = far * torch.randn(x.k.shape[-1], generator=torch.Generator().manual_seed(0)).double()
    shifted = replace(x, k=x.k - shift)
    off = sum(
        smoothing.logit_rounding(x.q, k, scale=scale, unit=UNIT).amax(-1, keepdim=True)
        for k in (x.k, x.k - shift, shift.expand_as(x.k))
    )
    before, after = x.exact(), shifted.exact()
    n = x.k.shape[-2]
    slack = before.p * torch.expm1(4 * off + 4 * n * UNIT) + 1e-300
    assert_equal(after.p, before.p, slack, "P")
    lse = after.lse + smoothing.lse_shift(x.q, shift, scale=scale)
    slack = 2 * off.squeeze(-1) + (n + 4) * UNIT * (1 + before.lse.abs() + after.lse.abs())
    assert_equal(lse, before.lse, slack, "L")
    if far == 1e4 and case.kinds[0] == "gaussian" and x.q.shape[-1] == 40:
        with pytest.raises(AssertionError, match="exceed the bound"):
            assert_equal(after.lse, before.lse, slack, "L that is not corrected")


@examples(200)
@given(k=tensors(NASTY))
def test_smoothing_less_than_doubles_the_largest_key(k):
    k = k.double()
    grown = (k - k.mean(-2, keepdim=True)).abs().amax((-2, -1))
    bound = smoothing.amax_growth(k.shape[-2]) * k.abs().amax((-2, -1))
    # The mean of n numbers is off by at most n roundings of the largest, even if it cancels.
    bound = bound + (k.shape[-2] + 1) * UNIT * k.abs().amax((-2, -1))
    assert_within_bound(actual=grown, exact=torch.zeros_like(grown), bound=bound, what="amax")


@pytest.mark.parametrize("n", (2, 3, 1000))
def test_the_bound_on_the_growth_is_attained_so_no_smaller_bound_holds(n):
    k = -torch.ones(n, 1, dtype=torch.float64)
    k[0] = 1
    assert float((k - k.mean(0)).abs().max()) == pytest.approx(smoothing.amax_growth(n), rel=1e-12)
    assert smoothing.amax_growth(1) == 0
    with pytest.raises(ValueError, match="tokens=0"):
        smoothing.amax_growth(0)


PV = ("sagebwd", "factored", "sagebwd pv=int8@row,head block=16x32")


@pytest.mark.slow
@examples(150)
@given(case=cases(NASTY, **SHORT), label=st.sampled_from(PV))
def test_row_sums_of_ds_are_the_error_of_pv_and_stay_within_their_bound(case, label):
    x = as_sample(case)
    t = checks.trace(x, f"{label} dp=fp32 delta=o")
    slack, sums = row_sum_slack(x, t), t.ds.sum(-1)
    assert_equal(smoothing.row_sum(x.do, t.o - t.p @ x.v), sums, slack + 1e-300, "row sums")
    steps = checks.p_step(t), t.operands["pv.v"].scale.double()
    bound = smoothing.row_sum_bound(t.p, x.v, x.do, *steps) + slack + 1e-300
    assert_equal(sums, torch.zeros_like(sums), bound, "row sums")
    consistent = checks.trace(x, f"{label} dp=fp32 delta=p").ds.sum(-1)
    assert_equal(consistent, torch.zeros_like(sums), slack + 1e-300, "row sums, delta from P")


def test_row_sums_exceed_half_of_their_bound():
    """With one key and one channel the bound is attained up to float32."""
    one = torch.ones(1, 1, dtype=torch.float64)
    bound = smoothing.row_sum_bound(one, 100 * one, 2 * one, 0 * one, one)
    assert float(bound) == pytest.approx(2 * 0.5, rel=1e-4)
    v_error = 0.5 * one
    with pytest.raises(AssertionError, match="exceed the bound"):
        assert_equal(smoothing.row_sum(2 * one, v_error), 0 * one[0], bound / 2, "row sum")


def test_mean_squares_are_those_of_uniform_errors():
    """Compared with the mean over 20000 errors drawn from the model."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.5

    q, k, q_step, k_step = draw(3, 4), draw(5, 4), draw(3, 1) / 30, draw(5, 1) / 30
    trials = 20000
    q_off = (draw(trials, 3, 4) - 1) * q_step
    k_off = (draw(trials, 5, 4) - 1) * k_step
    error = 0.3 * ((q + q_off) @ (k + k_off).mT - q @ k.mT)
    predicted = smoothing.logit_mean_square(q, k, q_step, k_step, scale=0.3)
    # Four standard errors: the mean of 20000 squared sums of a dozen terms scatters by 1 percent.
    assert (error.square().mean(0) / predicted).flatten().tolist() == pytest.approx(
        [1.0] * 15, rel=0.04
    )

    ds, ds_step = draw(3, 5), draw(3, 5) / 30
    ds_off = (draw(trials, 3, 5) - 1) * ds_step
    error = 0.3 * ((ds + ds_off).mT @ (q + q_off) - ds.mT @ q)
    predicted = smoothing.dk_mean_square(ds, q, ds_step, q_step, scale=0.3)
    assert (error.square().mean(0) / predicted).flatten().tolist() == pytest.approx(
        [1.0] * 20, rel=0.04
    )


def test_errors_of_elements_below_half_a_step_add_up():
    """A hundred equal elements of P all become 0; their errors have the same sign."""
    p = torch.full((1, 100), 0.01, dtype=torch.float64)
    v, do = torch.ones(100, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    step, tiny = (torch.tensor(x, dtype=torch.float64) for x in (0.021, 1e-9))
    square = smoothing.row_sum_mean_square(p, v, do, step, tiny)
    assert float(square) == pytest.approx(1.0)
    independent = smoothing.row_sum_mean_square(p, v, do, step / 10, tiny)
    assert float(independent) == pytest.approx(100 * 0.0021**2 / 12)


@examples(50)
@given(seed=st.integers(0, 2**32 - 1), n=st.sampled_from((1, 2, 17)))
def test_the_dropped_term_replaces_smoothed_keys_by_raw_keys(seed, n):
    generator = torch.Generator().manual_seed(seed)
    s, k, delta_error = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((n, n), (n, 8), (n,))
    )
    p, k_mean = s.softmax(-1), k.mean(-2, keepdim=True)
    error = smoothing.delta_error_in_dq(p, k - k_mean, delta_error, scale=0.5)
    after = error + smoothing.dropped_term(-delta_error, k_mean, scale=0.5)
    raw = smoothing.delta_error_in_dq(p, k, delta_error, scale=0.5)
    assert_equal(after, raw, torch.full_like(raw, 100 * n * UNIT), "dQ")
    predicted = smoothing.with_dropped_term(error, p, k, k_mean, delta_error, scale=0.5)
    assert predicted == pytest.approx(float(raw.norm()), rel=1e-9)


@pytest.mark.parametrize("mean", (0.0, 4.0))
def test_the_dropped_term_increases_the_error_if_keys_have_a_large_mean(mean):
    x = gaussian(1.0, tokens=128, d=32)
    x = replace(x, k=x.k + mean).map(lambda t: t.double())
    before, after, predicted = checks.dropped_term_errors(x)
    assert after == pytest.approx(predicted, rel=0.03)
    assert after > 1.2 * before if mean else after == pytest.approx(before, rel=0.03)


BRANCH = ("fpa smooth=qk", "sagebwd smooth=qk", "factored smooth=qk block=16x32")


@pytest.mark.slow
@examples(150)
@given(case=cases(MILD, **SHORT), label=st.sampled_from(BRANCH))
def test_the_bias_branch_completes_dk_and_its_error_stays_within_the_bound(case, label):
    x, spec = as_sample(case), AttentionSpec.parse(label)
    scale, exact = x.q.shape[-1] ** -0.5, x.exact()
    q_mean = smoothing.block_means(x.q, spec.block_q)
    t = x.trace(spec)
    size = scale * (t.ds.abs().mT @ (x.q.abs() + 2 * q_mean.abs()))
    slack = (x.q.shape[-2] + 8) * 4 * UNIT * size + 1e-300
    branch = smoothing.bias_branch(t.ds, q_mean, scale=scale)
    if label == BRANCH[0]:
        assert_equal(t.dk, scale * (t.ds.mT @ x.q), slack, "dK")
    rebuilt = scale * (t.ds.mT @ (x.q - q_mean)) + branch
    assert_equal(rebuilt, scale * (t.ds.mT @ x.q), slack, "dK")
    error = smoothing.bias_branch(t.ds, q_mean, scale=scale)
    error -= smoothing.bias_branch(exact.ds, q_mean, scale=scale)
    bound = smoothing.bias_branch_bound((t.ds - exact.ds).abs(), q_mean, scale=scale)
    sizes = scale * ((t.ds.abs() + exact.ds.abs()).mT @ q_mean.abs())
    bound = bound + (x.q.shape[-2] + 8) * 4 * UNIT * sizes + 1e-300
    assert_equal(error, torch.zeros_like(error), bound, "bias branch")


def test_dk_without_the_bias_branch_is_wrong():
    x = outlier_channels(tokens=64)
    x = replace(x, q=x.q + 1).map(lambda t: t.double())
    exact, q_mean = x.exact(), smoothing.block_means(x.q, 64)
    smoothed_only = (exact.ds.mT @ (x.q - q_mean)) / 8
    with pytest.raises(AssertionError, match="exceed the bound"):
        assert_equal(smoothed_only, exact.dk, 1e-3 * exact.dk.abs().max(), "dK")
    assert_equal(
        smoothed_only + smoothing.bias_branch(exact.ds, q_mean, scale=1 / 8),
        exact.dk,
        torch.full_like(exact.dk, 1e-9),
        "dK",
    )


def test_block_means_of_a_full_and_of_a_short_block():
    x = torch.tensor([[1.0], [3.0], [10.0]])
    assert smoothing.block_means(x, 2).flatten().tolist() == [2.0, 2.0, 10.0]
