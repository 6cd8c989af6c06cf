"""Shares are checked against what each product can reach, and against the whole."""

from dataclasses import replace

import pytest
import torch

import sagesim.analysis.attribution
from sagesim import (
    FACTORED,
    FPA,
    SAGEBWD,
    SITES,
    Delta,
    Precision,
    attribute,
    compare,
    exact,
    trace,
)
from sagesim.analysis import LOGITS, OUTPUTS, RUNS, pool
from sagesim.spec import with_precision

REACHES = {
    "qk": {"o", "ds", "dq", "dk", "dv"},
    "pv": {"o", "ds", "dq", "dk"},
    "qk_recompute": {"ds", "dq", "dk", "dv"},
    "dv": {"dv"},
    "dp": {"ds", "dq", "dk"},
    "dq": {"dq"},
    "dk": {"dk"},
    LOGITS: {"o", "ds", "dq", "dk", "dv"},
}
"""What each product can change where delta comes from O."""


def problem(sigma: float = 1.0, heads: int = 2) -> tuple[torch.Tensor, ...]:
    q, k, v, do = torch.randn(4, 1, heads, 96, 32, generator=torch.Generator().manual_seed(1))
    return q * sigma, k * sigma, v, do


def rel_l2(x, spec, **call) -> dict[str, float]:
    overall = compare(trace(*x, spec=spec, **call), exact(*x, **call)).overall
    return {t: overall[t].rel_l2 for t in OUTPUTS}


@pytest.fixture(scope="module")
def found():
    return attribute(*problem(), base=sagesim.SAGEBWD_ALL_INT8)


def test_every_error_is_that_of_its_spec(found):
    x, base = problem(), found.base
    assert found.error == pytest.approx(rel_l2(x, base), rel=1e-12)
    for effect in (*found.sites, found.logits):
        ours = effect.site.split("+")
        others = [s for s in SITES if s not in ours]
        only = with_precision(base, Precision.FP32, *others)
        without = with_precision(base, Precision.FP32, *ours)
        assert effect.only == pytest.approx(rel_l2(x, only), rel=1e-12), effect.site
        assert effect.without == pytest.approx(rel_l2(x, without), rel=1e-12), effect.site
    for effect in found.switches:
        assert effect.error == pytest.approx(rel_l2(x, effect.spec), rel=1e-12), effect.switch


def test_the_switches_are_turned(found):
    smooth_q, smooth_k, delta = (effect.spec for effect in found.switches)
    base = found.base
    assert smooth_q == replace(base, smoothing=replace(base.smoothing, q=True))
    assert smooth_k == replace(base, smoothing=replace(base.smoothing, k=False))
    assert delta == replace(base, delta=Delta.FROM_P)


def test_a_product_has_a_share_of_what_it_can_reach_and_of_nothing_else(found):
    for effect in (*found.sites, found.logits):
        for t in OUTPUTS:
            if t in REACHES[effect.site]:
                assert effect.share[t] != 0, (effect.site, t)
            else:
                # Runs differ in nothing that reaches t, so that the difference is exactly 0.
                assert effect.share[t] == 0, (effect.site, t)


@pytest.mark.parametrize("sigma", [1.0, 4.0])
@pytest.mark.parametrize("base", [SAGEBWD, FACTORED])
def test_the_shares_of_the_parts_make_up_the_whole(base, sigma):
    """Errors this small add up nearly as vectors, and shares of vectors sum to 1."""
    found = attribute(*problem(sigma), base=base)
    for t in OUTPUTS:
        assert abs(found.interaction(t)) < 0.05, t


def test_halves_of_the_logits_cancel():
    """Which is why they are one part: alone each adds more than both together."""
    found = attribute(*problem(4.0))
    qk, recompute = found.sites[0], found.sites[2]
    assert min(qk.only["ds"], recompute.only["ds"]) > 1.2 * found.logits.only["ds"]


def test_a_planted_culprit_is_found():
    """Everything in FP16 but dK, which is in INT8 with one scale for whole tiles."""
    base = with_precision(SAGEBWD, Precision.FP16, *[s for s in SITES if s != "dk"])
    found = attribute(*problem(), base=base)
    assert found.largest("dk").site == "dk"
    assert found.largest("dk").share["dk"] > 0.99
    assert found.summary("dk") == "100% of the dK error comes from dK = dSᵀ Q."


def test_what_the_outputs_dtype_rounds_belongs_to_no_product():
    x = tuple(y.half() for y in problem())
    for effect in attribute(*x).sites:
        for t in {"o", "dv"} - REACHES[effect.site]:
            assert effect.share[t] == 0, (effect.site, t)
    nothing = attribute(*x, base=FPA)
    assert nothing.summary() == "No product adds to the dS error under 'fpa'."
    assert nothing.interaction("o") == 0


def test_groups_of_heads_change_nothing(monkeypatch):
    g = torch.Generator().manual_seed(2)
    q, do = torch.randn(2, 2, 4, 40, 16, generator=g)
    k, v = torch.randn(2, 2, 2, 40, 16, generator=g)
    mask = torch.rand(2, 1, 40, 40, generator=g) < 0.7
    whole = attribute(q, k, v, do, enable_gqa=True, attn_mask=mask)
    calls = []
    monkeypatch.setattr(sagesim.analysis.attribution, "_MAP_ENTRIES", 1)
    parts = attribute(
        q, k, v, do, enable_gqa=True, attn_mask=mask, progress=lambda: calls.append(1)
    )
    assert len(calls) == 4 * RUNS
    assert parts.error == pytest.approx(whole.error, rel=1e-9)
    for ours, theirs in zip(parts.parts, whole.parts, strict=True):
        assert ours.share == pytest.approx(theirs.share, rel=1e-6, abs=1e-9)


def test_layers_count_alike_when_pooled():
    layers = [attribute(*problem(sigma, heads=1)) for sigma in (1.0, 4.0)]
    pooled = pool(layers)
    for t in OUTPUTS:
        product = layers[0].error[t] * layers[1].error[t]
        assert pooled.error[t] == pytest.approx(product**0.5, rel=1e-12)
        shares = [layer.logits.share[t] for layer in layers]
        assert pooled.logits.share[t] == pytest.approx(sum(shares) / 2, rel=1e-12, abs=1e-15)
    with pytest.raises(ValueError, match="one base spec"):
        pool([layers[0], attribute(*problem(), base=FACTORED)])


def test_bad_input_is_named(as_installed):
    q, k, v, do = problem()
    with pytest.raises(ValueError, match="v holds NaN"):
        attribute(q, k, v * float("nan"), do)
    with pytest.raises(ValueError, match="do is"):
        attribute(q, k, v, do[..., :5])
    empty = attribute(q[..., :0, :], k, v, do[..., :0, :])
    assert set(empty.error.values()) == {0.0}


def test_it_prints_every_effect(found):
    text = str(found)
    for word in (*SITES, LOGITS, "interaction", *(e.title for e in found.switches)):
        assert word in text
