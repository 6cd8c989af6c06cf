"""The moments from rounding Q and K, compared with drawn errors."""

import math

import pytest
import torch
from scipy import integrate, stats

import sagesim
from tests.support.assertions import assert_within_bound
from theory.ds_bound import centred
from theory.ds_error import Cap, cap_of
from theory.qk_error import _outer_squares, qk_moments, saturation_of_ds, saturation_of_p
from theory.rounding import Moments

DRAWS = 4000
SIZE = 3e-3
"""The deviation of the drawn errors: small, so that higher orders are negligible."""


def problem(sigma=1.0, n=9, d=3):
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = torch.randn(4, n, d, generator=generator, dtype=torch.float64)
    return sigma * q, sigma * k, v + 0.5 * k, do


def predicted(q, k, v, do, q_variance, k_variance, **changes):
    x = sagesim.exact(q, k, v, do)
    errors = [Moments(torch.zeros_like(t), t) for t in (q_variance, k_variance)]
    arguments = {"q_rounded": q, "scale": 1 / math.sqrt(q.shape[-1])} | changes
    return qk_moments(x.p, centred(x.p, x.dp), q, k, v, do, *errors, **arguments)


def variances(q, k, v, do, q_variance, k_variance):
    """The mean squared errors of the outputs over drawn errors of Q and K."""
    generator = torch.Generator().manual_seed(1)
    shape = (DRAWS, *q.shape)
    noise = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    off_q, off_k = q + q_variance.sqrt() * noise[0], k + k_variance.sqrt() * noise[1]
    wide = (x.expand(shape) for x in (v, do))
    found, exact = sagesim.exact(off_q, off_k, *wide), sagesim.exact(q, k, v, do)
    # Only S is computed from the erroneous Q and K: dQ and dK multiply dS by the exact K and Q,
    # because `qk_moments` leaves out the rounding of the operands of dQ and dK.
    scale = 1 / math.sqrt(q.shape[-1])
    through = {"o": found.o, "ds": found.ds, "dv": found.dv}
    through |= {"dq": scale * found.ds @ k, "dk": scale * found.ds.mT @ q}
    return {t: (x - getattr(exact, t)).square().mean(0) for t, x in through.items()}


@pytest.mark.parametrize("rounded", ["q", "k"])
def test_variances_are_those_of_drawn_errors(rounded):
    """O, dS and dQ are exact to first order, row by row, and so are dK and dV if only Q is rounded.

    If K is rounded, dK and dV take the errors of the other keys as independent between queries,
    so only their totals are compared.
    """
    x = problem()
    size = SIZE**2 * (1 + x[0].square())
    of = [size if rounded == t else torch.zeros_like(size) for t in ("q", "k")]
    moments, measured = predicted(*x, *of), variances(*x, *of)
    for t in ("o", "ds", "dq", *(("dk", "dv") if rounded == "q" else ())):
        # Five standard errors of a variance from DRAWS normal draws.
        bound = 5 * math.sqrt(2 / DRAWS) * moments[t].variance + 0.02 * SIZE**2
        assert_within_bound(
            actual=moments[t].variance, exact=measured[t], bound=bound, what=f"{t}, {rounded}"
        )
    for t in ("dk", "dv"):
        ratio = float(moments[t].variance.sum() / measured[t].sum())
        assert 0.7 < ratio < 1.4, (t, rounded, ratio)


SINK, SOFTCAP = 0.7, 1.5


def with_sink(x, axis):
    return torch.cat([x, torch.zeros_like(x.narrow(axis, 0, 1))], axis)


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("softcap", [None, SOFTCAP])
@pytest.mark.parametrize("rounded", ["q", "k"])
def test_variances_with_a_sink_and_a_softcap(rounded, softcap, has_sink):
    """As above; a sink is one key more, without K, V and errors."""
    q, k, v, do = problem()
    size = SIZE**2 * (1 + q.square())
    of = {t: size if rounded == t else torch.zeros_like(size) for t in ("q", "k")}
    options = {"softcap": softcap, "sinks": torch.tensor([SINK]).double() if has_sink else None}
    x = sagesim.exact(*(t[None] for t in (q, k, v, do)), **options)
    p, dp, s = x.p[0], x.dp[0], x.s[0]
    cap = cap_of(s, softcap)
    k_all, v_all, k_size = k, v, of["k"]
    if has_sink:
        p, dp = torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1), with_sink(dp, -1)
        k_all, v_all, k_size = (with_sink(t, -2) for t in (k, v, of["k"]))
        cap = Cap(torch.nn.functional.pad(cap.slope, (0, 1), value=1.0), with_sink(cap.bend, -1))
    errors = [Moments(torch.zeros_like(t), t) for t in (of["q"], k_size)]
    scale = 1 / math.sqrt(q.shape[-1])
    moments = qk_moments(
        p,
        centred(p, dp),
        q,
        k_all,
        v_all,
        do,
        *errors,
        q_rounded=q,
        scale=scale,
        cap=None if softcap is None else cap,
    )

    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(2, DRAWS, *q.shape, generator=generator, dtype=torch.float64)
    off_q, off_k = q + of["q"].sqrt() * noise[0], k + of["k"].sqrt() * noise[1]
    wide = [t[:, None] for t in (off_q, off_k, v.expand_as(off_k), do.expand_as(off_q))]
    found = sagesim.exact(*wide, **options)
    ds = found.ds[:, 0]
    through = {"o": found.o[:, 0], "ds": ds, "dq": scale * ds @ k}
    for t, value in through.items():
        predicted = moments[t].variance
        if t == "ds":
            predicted = predicted[:, : k.shape[0]]
        bound = 5 * math.sqrt(2 / DRAWS) * predicted + 0.02 * SIZE**2
        measured = (value - getattr(x, t)[0]).square().mean(0)
        assert_within_bound(actual=predicted, exact=measured, bound=bound, what=f"{t}, {rounded}")


def test_wrong_operands_give_wrong_variances():
    q, k, v, do = problem()
    size = SIZE**2 * torch.ones_like(q)
    measured = variances(q, k, v, do, size, size)
    for twin in (
        predicted(q, k, v, do, 2 * size, size),
        predicted(q, k, v, do, size, size, scale=1.0),
        predicted(q, k, v, do, size, size, q_rounded=2 * q),
    ):
        for t in ("o", "ds", "dq"):
            ratio = float(twin[t].variance.sum() / measured[t].sum())
            assert not 0.8 < ratio < 1.25, t


@pytest.mark.parametrize("size", [1.0, 2.0**-200, 2.0**200])
def test_sums_of_outer_products_are_those_of_float64(size):
    """Of sizes beyond float32, with a channel that is 2^60 times larger, and with a sink."""
    generator = torch.Generator().manual_seed(0)
    n, keys, d_x, d_y = 300, 40, 5, 4

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a, weights = draw(n, d_x).square(), size * draw(n, keys)
    x, y = (torch.cat([draw(keys - 1, d), torch.zeros(1, d)]) / size for d in (d_x, d_y))
    x[:, 0] *= 2.0**60
    a[:, 0] *= 2.0**-120
    weights[:, -1] = 1e300  # of the sink, whose x and y are 0
    weights[:7, 20:] = 0.0
    centre = (weights[:, :9] @ x[:9] / 9, y[0].expand(n, d_y)), (x[1].expand(n, d_x), draw(n, d_y))
    m = (weights[:, :, None, None] * (x[:, :, None] * y[:, None, :])).sum(1)
    for left, right in centre:
        m = m - left[..., :, None] * right[..., None, :]
    exact = (a[..., None] * m.square()).sum(-2)
    found = _outer_squares(a, weights, x, y, *centre)
    assert_within_bound(actual=found, exact=exact, bound=1e-4 * exact, what="sum")
    for twin in (
        _outer_squares(a, weights, x, y),
        _outer_squares(a, weights * 1.01, x, y, *centre),
    ):
        assert bool(((twin - exact).abs() > 1e-4 * exact).any())


@pytest.mark.parametrize("variance", [0.01, 1.0, 30.0])
def test_saturation_is_the_integral(variance):
    """The quadrature is over the difference z of two logits and its error x."""

    def change_of(f, x):
        return integrate.quad(lambda z: (f(z + x) - f(z)) ** 2, -80, 80, points=[-x, 0], limit=400)[
            0
        ]

    def sigmoid(z):
        return 1 / (1 + math.exp(-z))

    def of_ds(z):
        return sigmoid(z) * sigmoid(-z)

    for f, saturation, first_order in (
        (sigmoid, saturation_of_p, 1 / 6),
        (of_ds, saturation_of_ds, 1 / 30),
    ):
        deviation = math.sqrt(variance)
        expected = integrate.quad(
            lambda x, f=f, s=deviation: 2 * stats.norm.pdf(x, scale=s) * change_of(f, x),
            0,
            8 * deviation,
            limit=60,
        )[0]
        found = saturation(torch.tensor([variance], dtype=torch.float64))
        exact = torch.tensor([expected / (first_order * variance)], dtype=torch.float64)
        # `saturation` interpolates a table with 20 entries per decade linearly.
        assert_within_bound(actual=found, exact=exact, bound=0.005 * exact, what=f"{f.__name__}")


def test_saturation_is_1_without_error_and_decreases():
    variance = torch.tensor([0.0, 1e-4, 0.1, 1.0, 10.0, 100.0])
    for saturation in (saturation_of_p, saturation_of_ds):
        found = saturation(variance)
        assert found[0] == 1.0 and found[1] > 0.999
        assert bool((found.diff() <= 0).all())
