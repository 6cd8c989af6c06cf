"""gamma bounds tokens, steps and logits, and errors grow with sigma as predicted."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sagesim import AttentionSpec, Granularity, QKNorm, quantize
from tests.support import examples
from tests.support.assertions import assert_within_bound
from tests.support.inputs import NASTY
from tests.support.strategies import tensors
from theory import qk_norm
from theory.checks import qk_norm as checks
from theory.checks.samples import Sample, gaussian
from theory.qk_norm import PowerSums

FLOAT64 = 1 + 2.0**-45
"""A bound on the relative float64 error of sums of 72 squares."""


def assert_at_most(actual: Tensor, bound: Tensor | float, what: str) -> None:
    bound = torch.as_tensor(bound, dtype=torch.float64)
    assert_within_bound(actual=actual, exact=torch.zeros_like(actual), bound=bound, what=what)


def norm_of(d: int, seed: int) -> QKNorm:
    """A QKNorm with gammas of both signs, over two decades, some of them 0."""
    norm = QKNorm(d).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for gamma in (norm.gamma_q, norm.gamma_k):
            x = torch.randn(d, generator=generator, dtype=torch.float64)
            gamma.copy_(x.sign() * x.exp2() ** 3 * (x.abs() > 0.1))
    return norm


@examples(300)
@given(q=tensors(NASTY), seed=st.integers(0, 2**32 - 1))
def test_gamma_bounds_tokens_steps_and_logits(q, seed):
    d = q.shape[-1]
    norm = norm_of(d, seed)
    gamma_q, gamma_k = norm.gamma_q.detach(), norm.gamma_k.detach()
    q = q.double()
    with torch.no_grad():
        x, k = norm(q, q.flip(-2))
        plain, _ = QKNorm(d).double()(q, q)
    mean_square = q.square().mean(-1)
    norms = qk_norm.normalised_norm(mean_square, d, norm.eps)
    # Squares of the smallest numbers underflow, in the norm and in the bound.
    assert_within_bound(
        actual=plain.norm(dim=-1), exact=norms, bound=norms * (FLOAT64 - 1) + 1e-150, what="norm"
    )
    assert_at_most(norms, math.sqrt(d) * FLOAT64, "norm")
    assert_at_most(x, qk_norm.channel_bound(gamma_q) * FLOAT64, "channel")
    for how in (Granularity.PerHead, Granularity.PerBlock, Granularity.PerToken):
        # The largest code of a region is 127; a region of zeros has only code 0.
        largest = quantize(x, how, block=16).dequantize().double() / 127
        assert_at_most(largest, qk_norm.step_bound(gamma_q) * (1 + 2.0**-22), "step")
    s = x @ k.mT / math.sqrt(d)
    limit = qk_norm.logit_bound(gamma_q, gamma_k)
    assert_at_most(s, limit * FLOAT64, "S")
    least, largest = qk_norm.weight_bounds(limit * FLOAT64, k.shape[-2])
    p = s.softmax(-1)
    assert_at_most(p, largest * FLOAT64 * (1 + limit * 1e-15), "P")
    assert_at_most(-p + least, 1.0, "P")
    assert float(p.min()) >= least * (1 - 1e-12 * (1 + limit))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_in_16_bit_exceed_the_bounds_by_the_roundoff_of_their_dtype(dtype):
    """Tokens with one nonzero channel attain the bounds before they are rounded."""
    u, norm = torch.finfo(dtype).eps / 2, QKNorm(48)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.gamma_q.copy_(torch.rand(48, generator=generator) + 1)
        norm.gamma_k.copy_(norm.gamma_q)
        token = 16 * torch.eye(48).to(dtype)
        q, k = (x.double() for x in norm(token, token))
    gamma = norm.gamma_q.detach().double()
    channel, logit = qk_norm.channel_bound(gamma), qk_norm.logit_bound(gamma, gamma)
    s = q @ k.mT / math.sqrt(48)
    assert_at_most(q, channel * (1 + u) * (1 + 2.0**-20), "channel")
    assert_at_most(s, logit * (1 + u) ** 2 * (1 + 2.0**-20), "S")
    assert bool((q > channel * (1 + u / 2)).any()), "without the roundoff it does not hold"


ROUNDED = (
    "fpa qk=int8@block,block",
    "fpa qk=int8@token,token",
    "fpa qk=int8@head,block block=16x16",
)


@examples(150)
@given(
    q=tensors(NASTY),
    seed=st.integers(0, 2**32 - 1),
    label=st.sampled_from(ROUNDED),
    is_causal=st.booleans(),
)
def test_gamma_bounds_the_error_of_the_logits(q, seed, label, is_causal):
    norm = norm_of(q.shape[-1], seed)
    with torch.no_grad():
        x, k = norm(q.double(), q.double().flip(-2))
    z = Sample(name=label, q=x, k=k, v=x, do=x, is_causal=is_causal)
    emulated, exact = z.trace(AttentionSpec.parse(label)), z.exact()
    error = (emulated.s - exact.s).nan_to_num(0.0)  # masked elements: -inf - -inf
    limit = qk_norm.logit_error_bound(norm.gamma_q.detach(), norm.gamma_k.detach())
    # Float64's error is relative to the largest logit. By contract, a region below 4e-37 has a
    # step of 1.
    slack = 1e-13 * qk_norm.logit_bound(norm.gamma_q.detach(), norm.gamma_k.detach()) + 1e-30
    assert_at_most(error, limit + slack, "S")


def test_bounds_are_attained_so_no_smaller_bounds_hold():
    gamma_q = torch.tensor([1.0, -3.0, 0.5, 2.0], dtype=torch.float64)
    gamma_k = torch.tensor([2.0, 2.0, 9.0, 0.0], dtype=torch.float64)
    norm = QKNorm(4).double()
    with torch.no_grad():
        norm.gamma_q.copy_(gamma_q)
        norm.gamma_k.copy_(gamma_k)
        token = torch.tensor([[0.0, 1e6, 0.0, 0.0]], dtype=torch.float64)
        q, k = norm(token, token)
    assert float(q.abs().max()) == pytest.approx(float(qk_norm.channel_bound(gamma_q)[1]))
    limit = qk_norm.logit_bound(gamma_q, gamma_k)
    assert abs(float(q @ k.mT)) / 2 == pytest.approx(limit)
    assert limit == pytest.approx(0.5 * 4 * 6)  # max|gamma_q| max|gamma_k| would say 27, not 6
    assert qk_norm.logit_bound(gamma_q, gamma_k, scale=-1.0) == pytest.approx(24)
    s = torch.tensor([limit, -limit, -limit], dtype=torch.float64)
    assert float(s.softmax(0).max()) == pytest.approx(qk_norm.weight_bounds(limit, 3)[1])
    assert float((-s).softmax(0).min()) == pytest.approx(qk_norm.weight_bounds(limit, 3)[0])
    assert qk_norm.weight_bounds(1e6, 1) == (1.0, 1.0)
    with pytest.raises(ValueError, match="tokens=0"):
        qk_norm.weight_bounds(1.0, 0)


def test_the_expected_amax_of_one_two_and_4096_numbers():
    assert qk_norm.expected_amax(1) == pytest.approx(math.sqrt(2 / math.pi), rel=1e-8)
    assert qk_norm.expected_amax(2) == pytest.approx(2 / math.sqrt(math.pi), rel=1e-8)
    x = torch.randn(4000, 4096, generator=torch.Generator().manual_seed(0))
    # The mean of 4000 maxima of deviation 0.25 scatters by 0.004.
    assert float(x.abs().amax(1).mean()) == pytest.approx(qk_norm.expected_amax(4096), abs=0.016)
    with pytest.raises(ValueError, match="count=0"):
        qk_norm.expected_amax(0)


@pytest.mark.parametrize(("tau", "tokens"), [(1e-3, 5), (0.3, 1000), (3.0, 7), (30.0, 4096)])
def test_the_power_sum_of_exponent_1_is_1(tau, tokens):
    sums = PowerSums(tau, tokens)
    assert sums.expectation(1) == pytest.approx(1, rel=1e-9)
    assert sums.expectation(1, 1, 1) == pytest.approx(1, rel=1e-9)
    assert sums.expectation(1, 2) == pytest.approx(sums.expectation(2), rel=1e-9)
    assert 1 / tokens <= sums.expectation(2) <= 1


def test_power_sums_are_those_of_drawn_rows():
    p = (4 * torch.randn(400000, 3, generator=torch.Generator().manual_seed(0)).double()).softmax(
        -1
    )
    a2, a3 = p.square().sum(-1), (p**3).sum(-1)
    sums = PowerSums(4.0, 3)
    for drawn, exponents in ((a2, (2,)), (a2**2, (2, 2)), (a2 * a3, (2, 3)), (a2**3, (2, 2, 2))):
        deviation = float(drawn.std()) / math.sqrt(len(drawn))
        assert sums.expectation(*exponents) == pytest.approx(float(drawn.mean()), abs=5 * deviation)


def test_power_sums_of_equal_keys_and_of_a_single_key():
    assert PowerSums(1e-4, 10).expectation(2) == pytest.approx(0.1, rel=1e-6)
    one = PowerSums(9.0, 1)
    assert one.expectation(2, 3) == pytest.approx(1)
    assert qk_norm.softmax_error(1.0, one) == pytest.approx(0, abs=1e-7)
    assert qk_norm.score_gradient_error(1.0, one) == 0
    with pytest.raises(ValueError, match="tau=0"):
        PowerSums(0, 4)


@pytest.mark.parametrize("tau", (0.5, 3.0, 12.0))
def test_first_order_errors_are_those_of_drawn_logits(tau):
    """The drawn errors are so small that higher orders are negligible."""
    generator = torch.Generator().manual_seed(1)

    def draw():
        return torch.randn(8000, 50, generator=generator, dtype=torch.float64)

    s, e, g = tau * draw(), 1e-4 * draw(), draw()

    def ds(logits):
        p = logits.softmax(-1)
        return p * (g - (p * g).sum(-1, keepdim=True))

    def relative(a, b):
        return float((a - b).norm() / b.norm())

    sums = PowerSums(tau, 50)
    p_error = relative((s + e).softmax(-1), s.softmax(-1))
    assert p_error == pytest.approx(qk_norm.softmax_error(1e-8, sums), rel=0.05)
    ds_error = relative(ds(s + e), ds(s))
    assert ds_error == pytest.approx(qk_norm.score_gradient_error(1e-8, sums), rel=0.05)


def test_the_frozen_limits_are_approached():
    """The limits are approached as tau / sqrt(2 log N) and N grow, slowly: as 1 / log N."""
    away = []
    for tau, tokens in ((20.0, 10**3), (200.0, 10**6), (2000.0, 10**12)):
        sums = PowerSums(tau, tokens)
        exact = qk_norm.softmax_error(1.0, sums)
        away.append(abs(qk_norm.frozen_softmax_error(1.0, tau, tokens) / exact - 1))
        gradient = qk_norm.score_gradient_error(1.0, sums)
        assert gradient == pytest.approx(qk_norm.frozen_score_gradient_error(1.0), rel=0.002)
    assert away == sorted(away, reverse=True)
    assert away[-1] < 0.03
    with pytest.raises(ValueError, match="not above"):
        qk_norm.frozen_softmax_error(1.0, 1.0, 1000)


def test_the_error_of_s_grows_as_sigma_squared_and_not_as_sigma():
    """The prediction from sigma 1 with a wrong power of sigma misses the measurement."""
    measured = checks.errors(2.0).moments["s"].sum(0)
    rms = math.sqrt(float(measured[3] / measured[5]))
    assert rms == pytest.approx(math.sqrt(checks.logit_square(2.0)), rel=0.05)
    assert rms != pytest.approx(2 * math.sqrt(checks.logit_square(1.0)), rel=0.3)


def test_normalised_gaussian_tokens_have_the_deviation_gamma():
    """Growth with sigma is therefore growth with the RMS of gamma."""
    norm = QKNorm(64)
    with torch.no_grad():
        norm.gamma_q.fill_(3.0)
        q, _ = norm(gaussian(0.7).q, gaussian(0.7).k)
    assert float(q.square().mean().sqrt()) == pytest.approx(3.0, rel=1e-5)
