"""The bounds on rows of dS hold, some are attained, and the closed forms are right."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sagesim
from tests.support import examples
from tests.support.assertions import assert_within_bound
from theory.checks.ds_bound import rounding
from theory.ds_bound import (
    capped_bound,
    centred,
    ds_bound,
    ds_rms,
    expected_ds_rms,
    gaussian_crest,
    holder_bound,
    jacobian_bound,
    jacobian_norm,
    jacobian_norm_bound,
    paper_bound,
    paper_flat_bound,
    value_bound,
)

U = 2.0**-53
LOGITS = {
    "uniform": lambda z: 0 * z,
    "ordinary": lambda z: z,
    "sharp": lambda z: 30 * z,
    "one_hot": lambda z: 1000 * z,
    "near_ties": lambda z: 40 * z.round() + 1e-9 * z,
    "two_peaks": lambda z: (0 * z).index_fill(-1, torch.arange(min(2, z.shape[-1])), 6.0),
    "many_zeros": lambda z: z.masked_fill(z < 0.5, -math.inf).index_fill(
        -1, torch.tensor([0]), 1.0
    ),
}
GRADIENTS = {
    "gaussian": lambda z: z,
    "outlier": lambda z: z**9,
    "signs": lambda z: z.sign(),
    "constant": lambda z: 1000 + 1e-3 * z,
    "zero": lambda z: 0 * z,
}
ROWS = {
    "logits": st.sampled_from(sorted(LOGITS)),
    "gradient": st.sampled_from(sorted(GRADIENTS)),
    "n": st.sampled_from((1, 2, 3, 17, 130)),
    "exponent": st.integers(-200, 200),
    "seed": st.integers(0, 2**32 - 1),
}


def rows(logits, gradient, n, exponent, seed):
    """p and dp, [5, n] each, for a kind of logits and a kind of gradient."""
    z = torch.randn(2, 5, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    p = LOGITS[logits](z[0]).softmax(-1)
    return p, GRADIENTS[gradient](z[1]) * 2.0**exponent


def assert_bounds(p, dp, bound, what):
    measured = ds_rms(p, centred(p, dp))
    zero = torch.zeros_like(measured)
    assert_within_bound(actual=measured, exact=zero, bound=bound + rounding(p, dp), what=what)


@pytest.mark.slow
@examples(500)
@given(**ROWS)
def test_every_bound_holds(logits, gradient, n, exponent, seed):
    p, dp = rows(logits, gradient, n, exponent, seed)
    c = centred(p, dp)
    for what, bound in {
        "flat": paper_flat_bound(p, c),
        "paper": paper_bound(p, c),
        "Hoelder 0": holder_bound(p, c, 0.0),
        "Hoelder 0.3": holder_bound(p, c, 0.3),
        "Hoelder 0.5": holder_bound(p, c, 0.5),
        "capped": capped_bound(p, c),
        "Jacobian": jacobian_bound(p, c),
        "ours": ds_bound(p, dp),
    }.items():
        assert_bounds(p, dp, bound, what)


@examples(300)
@given(**ROWS, delta=st.integers(-10, 10))
def test_three_bounds_hold_for_any_delta(logits, gradient, n, exponent, seed, delta):
    """The emulator's delta is rounded and may come from O, so its c is not centred."""
    p, dp = rows(logits, gradient, n, exponent, seed)
    c = dp - delta * 2.0**exponent
    measured = ds_rms(p, c)
    for bound in (paper_bound(p, c), holder_bound(p, c, 0.5), capped_bound(p, c)):
        slack = rounding(p, c)
        assert_within_bound(
            actual=measured, exact=torch.zeros_like(measured), bound=bound + slack, what="any c"
        )


@examples(300)
@given(**ROWS)
def test_the_order_of_the_bounds(logits, gradient, n, exponent, seed):
    """ds_bound never exceeds the paper's bound, and capped_bound neither end of Hoelder's family.

    Between its ends the family is at most their weighted geometric mean.
    """
    p, dp = rows(logits, gradient, n, exponent, seed)
    c, off = centred(p, dp), rounding(p, dp)
    paper, variance = paper_bound(p, c), holder_bound(p, c, 0.0)
    zero = torch.zeros_like(paper)
    for name, lower, upper in (
        ("paper <= flat", paper, paper_flat_bound(p, c)),
        ("capped <= paper", capped_bound(p, c), paper),
        ("capped <= variance", capped_bound(p, c), variance),
        ("ours <= paper", ds_bound(p, dp), paper),
        ("Hoelder's middle <= ends", holder_bound(p, c, 0.5), (paper * variance).sqrt()),
        ("Hoelder's 0.3 <= ends", holder_bound(p, c, 0.3), paper**0.3 * variance**0.7),
        ("Jacobian <= variance", jacobian_bound(p, c), variance),
    ):
        assert_within_bound(actual=lower, exact=zero, bound=upper * (1 + 1e-9) + off, what=name)


@examples(300)
@given(**ROWS)
def test_the_norm_of_the_jacobian_is_within_its_bound(logits, gradient, n, exponent, seed):
    p, _ = rows(logits, gradient, n, exponent, seed)
    jacobian = torch.diag_embed(p) - p[..., None] * p[..., None, :]
    eigenvalue = torch.linalg.eigvalsh(jacobian)[..., -1]
    slack = (n + 16) * 8 * U * torch.ones_like(eigenvalue)
    assert_within_bound(actual=jacobian_norm(p), exact=eigenvalue, bound=slack, what="secular")
    limit = jacobian_norm_bound(p) + slack
    assert_within_bound(
        actual=eigenvalue, exact=torch.zeros_like(limit), bound=limit, what="closed form"
    )
    assert float(jacobian_norm_bound(p).max()) <= 0.5 + n * U


def test_the_jacobian_bound_is_attained():
    p = torch.randn(4, 9, dtype=torch.float64).softmax(-1)
    jacobian = torch.diag_embed(p) - p[..., None] * p[..., None, :]
    dp = torch.linalg.eigh(jacobian).eigenvectors[..., -1]
    bound, measured = jacobian_bound(p, centred(p, dp)), ds_rms(p, centred(p, dp))
    assert_within_bound(
        actual=measured, exact=bound, bound=1e-12 * bound, what="dP along the eigenvector"
    )


def test_the_closed_form_is_exact_for_uniform_and_one_hot_rows_and_two_keys():
    """It also keeps its digits in a row that is nearly one-hot."""
    for p in ([0.25] * 4, [1.0, 0.0, 0.0], [0.9, 0.1], [0.5, 0.5]):
        p = torch.tensor([p], dtype=torch.float64)
        closed = jacobian_norm_bound(p)
        assert_within_bound(
            actual=jacobian_norm(p), exact=closed, bound=closed * 1e-15, what="norm"
        )
    nearly = torch.tensor([[1.0, 1e-20]], dtype=torch.float64)  # 1 - p1 is 0 in float64
    assert float(jacobian_norm_bound(nearly)) == 2e-20


def test_the_jacobian_bound_can_exceed_the_papers():
    """It does for two peaks and constant |c|: the reason that ds_bound is the smallest of three."""
    n = 100_002
    p = torch.full((1, n), 0.5 / (n - 2), dtype=torch.float64)
    p[0, :2] = 0.25
    dp = torch.ones(1, n, dtype=torch.float64)
    dp[0, 1] = -1
    dp[0, 2 : 2 + (n - 2) // 2] = -1
    ratio = jacobian_bound(p, centred(p, dp)) / paper_bound(p, centred(p, dp))
    assert abs(float(ratio) - math.sqrt(2)) < 1e-4
    assert float(ds_bound(p, dp) / ds_rms(p, centred(p, dp))) < 1 + 1e-4


def test_the_looseness_of_the_papers_bounds_for_uniform_p():
    """It is max|c| / RMS(c), and sqrt(N) times that for the flat form."""
    p = torch.full((1, 4), 0.25, dtype=torch.float64)
    c = torch.tensor([[3.0, -1.0, -1.0, -1.0]], dtype=torch.float64)
    crest = 3 / math.sqrt(3)
    measured = ds_rms(p, c)
    assert float(paper_bound(p, c) / measured) == pytest.approx(crest, rel=1e-12)
    assert float(paper_flat_bound(p, c) / measured) == pytest.approx(2 * crest, rel=1e-12)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda p, c: paper_bound(p, c) / 2,
        lambda p, c: p.mean(-1) * c.abs().amax(-1),
        lambda p, c: p.square().mean(-1).sqrt() * c.square().mean(-1).sqrt(),
        lambda p, c: ((p.topk(2, -1).values[..., 1] * (p * c * c).sum(-1)) / p.shape[-1]).sqrt(),
        lambda p, c: holder_bound(p, c, 0.5) * 0.5,
    ],
    ids=["half", "mean of P", "RMS of c", "second largest P", "half of Hoelder's"],
)
def test_wrong_bounds_are_violated(wrong):
    p = torch.tensor([[3.0, 1, 1, 1, 0, 0, 0, 0]], dtype=torch.float64) / 6
    dp = torch.tensor([[1.0, -1, -1, -1, 0, 0, 0, 0]], dtype=torch.float64)
    with pytest.raises(AssertionError, match="exceed the bound"):
        assert_bounds(p, dp, wrong(p, centred(p, dp)), "twin")


def test_the_jacobian_bound_is_violated_if_c_is_not_centred():
    p = torch.full((1, 8), 0.125, dtype=torch.float64)
    p[0] = torch.tensor([0.86] + [0.02] * 7)
    c = torch.ones(1, 8, dtype=torch.float64)
    assert float(jacobian_bound(p, c)) < float(ds_rms(p, c))


@examples(150)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.sampled_from((1, 2, 3, 20)),
    sigma=st.sampled_from((0.0, 1.0, 30.0)),
    mean=st.sampled_from((0.0, 1e4)),
    outlier=st.sampled_from((1.0, 1e3)),
    is_causal=st.booleans(),
)
def test_the_value_bound_holds(seed, n, sigma, mean, outlier, is_causal):
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = torch.randn(4, 2, n, 8, generator=generator, dtype=torch.float64)
    v = v * torch.tensor([outlier] + [1.0] * 7) + mean
    x = sagesim.exact(q * sigma, k, v, do, is_causal=is_causal)
    # dP is a sum of d products. The mean of V makes them large, and cancels in dS.
    size = (do.abs() @ v.abs().mT).amax(-1)
    bound = value_bound(x.p, v, do) + 4 * (n + 24) * U * size
    measured = ds_rms(torch.ones(()), x.ds)
    assert_within_bound(
        actual=measured, exact=torch.zeros_like(measured), bound=bound, what="values"
    )


def test_a_constant_added_to_all_values_leaves_the_value_bound_unchanged():
    q, k, v, do = torch.randn(4, 2, 12, 8, dtype=torch.float64)
    p = sagesim.exact(q, k, v, do).p
    plain, shifted = value_bound(p, v, do), value_bound(p, v + 100, do)
    assert_within_bound(actual=shifted, exact=plain, bound=1e-9 * plain, what="V + 100")


def test_the_expected_rms_is_the_frobenius_norm_of_the_jacobian():
    p = (3 * torch.randn(6, 10, dtype=torch.float64)).softmax(-1)
    jacobian = torch.diag_embed(p) - p[..., None] * p[..., None, :]
    norm = torch.linalg.matrix_norm(jacobian) / math.sqrt(10)
    expected = expected_ds_rms(p, torch.full((6,), 2.0, dtype=torch.float64))
    assert_within_bound(actual=expected, exact=2 * norm, bound=1e-12 * norm, what="Frobenius")


def test_the_gaussian_crest_is_a_median():
    for keys in (1, 64, 4096):
        below = math.erf(gaussian_crest(keys) / math.sqrt(2)) ** keys
        assert below == pytest.approx(0.5, rel=1e-9)
    assert gaussian_crest(4096) == pytest.approx(math.sqrt(2 * math.log(4096)), rel=0.1)


def test_a_theta_outside_0_to_1_raises():
    p = torch.ones(1, 1)
    with pytest.raises(ValueError, match=r"theta=1\.5"):
        holder_bound(p, p, 1.5)
