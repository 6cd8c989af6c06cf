"""Attribution: errors and shares of the seven matmuls, compared with direct emulation."""

import functools
import math
from dataclasses import replace

import pytest
import torch

import sagesim.analysis.runs
from sagesim import (
    FACTORED,
    FP8_GRADIENTS,
    FPA,
    FPA_FP16,
    SAGE_FORWARD,
    SAGEBWD,
    SITES,
    AttentionProblem,
    Delta,
    Granularity,
    MatmulSpec,
    Precision,
    attribute,
    compare,
    exact,
    exact_backward,
    trace,
)
from sagesim.analysis import (
    LOGITS,
    OUTPUTS,
    RUNS,
    RangeLoss,
    Sample,
    advice,
    gradient_error,
    headline,
    limitations,
    memory,
    pool,
    pool_errors,
    range_losses,
    range_warnings,
    run_count,
)
from sagesim.analysis.metrics import SITE_NAMES
from sagesim.analysis.runs import specs_of_runs
from sagesim.spec import with_precision
from tests.support.allocations import Allocations
from tests.support.assertions import assert_bitwise

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
"""The tensors that rounding at each site changes if delta comes from O."""


def problem(sigma: float = 1.0, heads: int = 2) -> tuple[torch.Tensor, ...]:
    q, k, v, do = torch.randn(4, 1, heads, 96, 32, generator=torch.Generator().manual_seed(1))
    return q * sigma, k * sigma, v, do


def rel_l2(x, spec, **call) -> dict[str, float]:
    overall = compare(trace(*x, spec=spec, **call), exact(*x, **call)).overall
    return {t: overall[t].rel_l2 for t in OUTPUTS}


@pytest.fixture(scope="module")
def found():
    return attribute(*problem(), base=sagesim.SAGEBWD_ALL_INT8)


def test_every_error_equals_that_of_emulating_its_spec(found):
    x, base = problem(), found.base
    assert found.error == pytest.approx(rel_l2(x, base), rel=1e-12)
    for effect in (*found.sites, found.logits):
        measured = effect.site.split("+")
        others = [s for s in SITES if s not in measured]
        only = with_precision(base, Precision.FP32, *others)
        without = with_precision(base, Precision.FP32, *measured)
        assert effect.only == pytest.approx(rel_l2(x, only), rel=1e-12), effect.site
        assert effect.without == pytest.approx(rel_l2(x, without), rel=1e-12), effect.site
    for effect in found.switches:
        assert effect.error == pytest.approx(rel_l2(x, effect.spec), rel=1e-12), effect.switch


def test_every_error_against_the_own_forward_equals_that_of_emulating_its_spec(found):
    own, x = found.own_forward, problem()
    measured = {"base": own.error}
    measured |= {f"only {e.site}": e.only for e in (*own.sites, own.logits)}
    measured |= {f"without {e.site}": e.without for e in (*own.sites, own.logits)}
    measured |= {f"change {e.switch}": e.error for e in own.switches}
    for name, spec in specs_of_runs(own.base).items():
        if name == "unrounded":
            continue
        t = trace(*x, spec=spec)
        q, k, v, do = x
        expected = compare(t, exact_backward(AttentionProblem(q=q, k=k, v=v, do=do), t)).overall
        assert measured[name] == pytest.approx(
            {t: expected[t].rel_l2 for t in OUTPUTS}, rel=1e-9
        ), name
    assert own.own_forward is None


def test_rounding_qk_alone_is_no_error_against_the_own_forward(found):
    for t in OUTPUTS:
        assert found.own_forward.logits.only[t] < 1e-5 < 1e-3 < found.logits.only[t], t


def test_each_option_is_changed_alone(found):
    smooth_q, smooth_k, delta = (effect.spec for effect in found.switches)
    base = found.base
    assert smooth_q == replace(base, smoothing=replace(base.smoothing, q=True))
    assert smooth_k == replace(base, smoothing=replace(base.smoothing, k=False))
    assert delta == replace(base, delta=Delta.FROM_P)


def test_a_product_has_a_share_of_exactly_the_tensors_that_it_reaches(found):
    for effect in (*found.sites, found.logits):
        for t in OUTPUTS:
            if t in REACHES[effect.site]:
                assert effect.share[t] != 0, (effect.site, t)
            else:
                # t is equal in both runs, so the difference is exactly 0.
                assert effect.share[t] == 0, (effect.site, t)


@pytest.mark.parametrize("sigma", [1.0, 4.0])
@pytest.mark.parametrize("base", [SAGEBWD, FACTORED])
def test_shares_add_up_to_1(base, sigma):
    """Small errors add up nearly as vectors, and shares of vectors add up to 1."""
    found = attribute(*problem(sigma), base=base)
    for t in OUTPUTS:
        assert abs(found.interaction(t)) < 0.05, t


def test_errors_of_qk_and_qk_recompute_cancel():
    """This is why they have one share together: each alone adds more error than both."""
    found = attribute(*problem(4.0))
    qk, recompute = found.sites[0], found.sites[2]
    assert min(qk.only["ds"], recompute.only["ds"]) > 1.2 * found.logits.only["ds"]


def test_the_only_int8_product_has_the_whole_share():
    """All products are in FP16 except dK, which is in INT8 with one scale per tile."""
    base = with_precision(SAGEBWD, Precision.FP16, *[s for s in SITES if s != "dk"])
    found = attribute(*problem(), base=base)
    assert found.largest("dk").site == "dk"
    assert found.largest("dk").share["dk"] > 0.99
    assert found.summary("dk") == "100% of the dK error comes from dK = dSᵀ Q."


def test_the_headline_and_the_advice_are_about_the_gradients_error():
    """Here dP causes most of the error of dS, and dV most of the gradients' error."""
    q, k, v, do = problem(0.1)
    coarse = MatmulSpec(Precision.INT8, Granularity.PerTile, Granularity.PerHead)
    dp = MatmulSpec(Precision.INT8, Granularity.PerToken, Granularity.PerToken)
    base = replace(FPA, dp=dp, dv=coarse)
    do = do.clone()
    do[..., 0, :] *= 100
    found = attribute(q, k, v, do, base=base)
    by_ds, by_gradients = found.largest("ds").site, found.largest().site
    assert (by_ds, by_gradients) == ("dp", "dv")
    assert headline(found) == found.summary()
    assert "the gradients' error" in headline(found)
    assert SITE_NAMES["dv"] in headline(found)
    assert found.summary("ds").endswith(f"of the dS error comes from {SITE_NAMES['dp']}.")
    product = advice(found)[0]
    assert f"Compute {SITE_NAMES['dv']} in 16 bit" in product.sentence
    assert "the gradients' error" in product.sentence
    before, after = found.gradient_error, gradient_error(found.largest().without)
    assert f"{1 - after / before:.0%} lower" in product.sentence
    assert product.label == with_precision(base, Precision.INPUT16, "dv").label()


def test_rounding_to_the_dtype_of_the_outputs_belongs_to_no_product():
    x = tuple(y.half() for y in problem())
    for effect in attribute(*x).sites:
        for t in {"o", "dv"} - REACHES[effect.site]:
            assert effect.share[t] == 0, (effect.site, t)
    nothing = attribute(*x, base=FPA)
    assert nothing.summary("ds") == "No product adds to the dS error under 'fpa'."
    assert nothing.summary() == "No product adds to the gradients' error under 'fpa'."
    assert nothing.interaction("o") == 0


def test_computing_heads_in_groups_changes_no_result(monkeypatch):
    g = torch.Generator().manual_seed(2)
    q, do = torch.randn(2, 2, 4, 40, 16, generator=g)
    k, v = torch.randn(2, 2, 2, 40, 16, generator=g)
    mask = torch.rand(2, 1, 40, 40, generator=g) < 0.7
    whole = attribute(q, k, v, do, enable_gqa=True, attn_mask=mask)
    calls = []
    monkeypatch.setattr(sagesim.analysis.runs, "_MAP_ENTRIES", 1)
    grouped = attribute(
        q, k, v, do, enable_gqa=True, attn_mask=mask, progress=lambda: calls.append(1)
    )
    assert len(calls) == 4 * RUNS
    assert grouped.error == pytest.approx(whole.error, rel=1e-9)
    for found, expected in zip(grouped.parts, whole.parts, strict=True):
        assert found.share == pytest.approx(expected.share, rel=1e-6, abs=1e-9)


def test_pooled_layers_have_equal_weights():
    layers = [attribute(*problem(sigma, heads=1)) for sigma in (1.0, 4.0)]
    pooled = pool(layers)
    for t in OUTPUTS:
        product = layers[0].error[t] * layers[1].error[t]
        assert pooled.error[t] == pytest.approx(product**0.5, rel=1e-12)
        shares = [layer.logits.share[t] for layer in layers]
        assert pooled.logits.share[t] == pytest.approx(sum(shares) / 2, rel=1e-12, abs=1e-15)
    with pytest.raises(ValueError, match="one base spec"):
        pool([layers[0], attribute(*problem(), base=FACTORED)])


def test_an_invalid_tensor_raises_and_is_named(as_installed):
    q, k, v, do = problem()
    with pytest.raises(ValueError, match="v holds NaN"):
        attribute(q, k, v * float("nan"), do)
    with pytest.raises(ValueError, match="do is"):
        attribute(q, k, v, do[..., :5])
    empty = attribute(q[..., :0, :], k, v, do[..., :0, :])
    assert set(empty.error.values()) == {0.0}


def test_the_printed_table_has_every_effect(found):
    text = str(found)
    for word in (*SITES, LOGITS, "interaction", *(e.title for e in found.switches)):
        assert word in text


def capture_of(layers=3, kv_heads=4, n=256, d=16):
    generator = torch.Generator().manual_seed(7)
    for _ in range(layers):
        q, do = torch.randn(2, 1, 2 * kv_heads, n, d, generator=generator)
        k, v = torch.randn(2, 1, kv_heads, n, d, generator=generator)
        yield AttentionProblem(q=2 * q, k=2 * k, v=v, do=do, is_causal=True, enable_gqa=True)


@pytest.fixture(scope="module")
def whole():
    return pool([attribute(x) for x in capture_of()])


class TestSamples:
    """A sample of heads and queries gives about the result of all, and says how uncertain it is."""

    def test_the_part_of_a_causal_problem_has_the_rows_of_the_whole(self):
        """All keys stay, and no key becomes padding, so O and dQ are the same bits."""
        whole = next(capture_of(1))
        t = trace(whole, spec=SAGEBWD)
        parts = Sample(heads=2, rows=100).parts(whole, SAGEBWD)
        assert [part.q.shape[-2] for part in parts] == [128, 128]
        for part, head in zip(parts, (1, 3), strict=True):
            own, heads = trace(part, spec=SAGEBWD), slice(2 * head, 2 * head + 2)
            for name in ("o", "dq"):
                actual, expected = getattr(own, name)[0], getattr(t, name)[0, heads]
                assert_bitwise(actual=actual[:, -64:], expected=expected[:, -64:], what=name)

    def test_the_part_of_a_problem_with_a_window_has_the_numbers_of_the_whole(self):
        """Some queries leave out keys, which would be padding without the other queries."""
        q, k, v, do = problem(heads=2)
        x = AttentionProblem(q=q, k=k + 5, v=v, do=do, window=(20, 20))
        whole, sample = trace(x, spec=SAGEBWD), Sample(rows=64)
        parts = sample.parts(x, SAGEBWD)
        assert [part.q.shape[-2] for part in parts] == [q.shape[-2]] * 2
        assert sample.fraction(x, SAGEBWD) == 1.0
        for head, part in enumerate(parts):
            found = trace(part, spec=SAGEBWD)
            assert_bitwise(actual=found.dk[0, 0], expected=whole.dk[0, head], what="dk")

    @pytest.mark.parametrize(("rows", "measured"), [(128, 1 / 2), (129, 3 / 4), (256, 1.0)])
    def test_the_measured_fraction_counts_each_query_once(self, rows, measured):
        x = next(capture_of(1, kv_heads=1))
        found = attribute(x, sample=Sample(rows=rows))
        assert found.measured == measured
        if measured == 1:
            assert found.error == pytest.approx(attribute(x).error, rel=1e-12)

    def test_a_problem_without_queries_is_its_only_part(self):
        empty = torch.zeros(1, 1, 0, 16)
        x = AttentionProblem(q=empty, k=empty, v=empty, do=empty)
        sample = Sample(rows=5)
        assert len(sample.parts(x, SAGEBWD)) == sample.fraction(x, SAGEBWD) == 1

    def test_a_sample_of_everything_is_the_whole(self):
        x = next(capture_of(1))
        whole, sample = attribute(x), attribute(x, sample=Sample(heads=99))
        assert sample.measured == 1.0
        assert sample.error == pytest.approx(whole.error, rel=1e-12)
        assert all(effect.sampling_error == 0 for effect in sample.parts)

    @pytest.mark.parametrize("sample", [Sample(heads=2), Sample(rows=128), Sample(2, 128)])
    def test_shares_are_within_four_standard_errors(self, sample, whole):
        part = pool([attribute(x, sample=sample) for x in capture_of()])
        assert 0 < part.measured < 0.8
        for a, b in zip(whole.parts, part.parts, strict=True):
            off = abs(whole.gradient_share(a) - part.gradient_share(b))
            assert off <= 4 * b.sampling_error + 0.02, a.site
        assert "±" in part.summary() and "±" not in whole.summary()

    def test_a_sampled_head_has_the_numbers_that_it_has_alone(self):
        x = next(capture_of(1))
        found = attribute(x, sample=Sample(heads=1))
        alone = attribute(list(x.head_groups(entries=0))[-1])
        assert found.error == pytest.approx(alone.error, rel=1e-12)
        for a, b in zip(found.parts, alone.parts, strict=True):
            assert a.share == pytest.approx(b.share, rel=1e-9)

    def test_the_error_of_one_head_of_several_is_unknown(self):
        """Differences between its queries say nothing about other heads."""
        found = attribute(next(capture_of(1)), sample=Sample(heads=1))
        assert all(math.isnan(effect.sampling_error) for effect in found.parts)
        assert "with an unknown error of sampling" in found.summary()

    def test_halves_of_an_only_head_show_the_error_of_its_queries(self):
        x, sample = next(capture_of(1, kv_heads=1)), Sample(rows=128)
        [part] = sample.parts(x, SAGEBWD)
        halves = sample.halves(x, SAGEBWD)
        assert [half.q.shape[-2] for half in halves] == [128, 64]  # the last block is in both
        found, alone = attribute(x, sample=sample), attribute(part)
        assert found.error == pytest.approx(alone.error, rel=1e-12)
        assert all(effect.sampling_error > 0 for effect in found.parts)
        assert sample.halves(next(capture_of(1)), SAGEBWD) == []

    @pytest.mark.parametrize(("field", "number"), [("heads", 0), ("rows", -1)])
    def test_a_number_that_is_not_positive(self, field, number):
        with pytest.raises(ValueError, match=f"{field}={number} is not a positive number"):
            Sample(**{field: number})


class TestZeros:
    """Tensors that are zero have no error; a zero reference leaves a relative error no value."""

    def test_a_layer_without_gradients_is_left_out_of_the_average(self):
        q, k, v, do = problem()
        layer, empty = attribute(q, k, v, do), attribute(q, k, v, 0 * do)
        pooled = pool([empty, layer])
        for name in ("ds", "dq", "dk", "dv"):
            assert pooled.error[name] == pytest.approx(layer.error[name], rel=1e-12)
            for a, b in zip(pooled.parts, layer.parts, strict=True):
                assert a.share[name] == b.share[name]
        assert pooled.error["o"] == pytest.approx(layer.error["o"], rel=1e-12)
        assert pooled.verdict() == layer.verdict()
        assert pool([empty, empty]).error["dq"] == 0

    def test_such_a_layer_hides_no_layer_that_is_not_finite(self):
        q, k, v, do = problem()
        overflowing = attribute(1e6 * q, k, v, do, base=FPA_FP16)
        assert not overflowing.is_finite
        pooled = pool([attribute(q, k, v, 0 * do, base=FPA_FP16), overflowing])
        assert not pooled.is_finite and "not finite" in pooled.verdict()

    def test_a_gradient_that_is_exactly_zero_is_named(self):
        """With one key, P is 1, and dS is 0 but for rounding."""
        x = [torch.randn(1, 1, 1, 16, generator=torch.Generator().manual_seed(0)) for _ in range(4)]
        found = attribute(*x)
        assert math.isinf(found.error["ds"])
        assert found.verdict() == (
            "The exact dS, dK are zero, the computed ones are not: the relative error is infinite."
        )


DP_IN_FP16 = with_precision(SAGEBWD, Precision.FP16, "dp")


class TestRange:
    """Values that FP16 cannot hold are named; they are no finding about rounding."""

    def test_small_gradients_underflow(self):
        q, k, v, do = problem()
        found = attribute(q, k, v, 1e-8 * do, base=DP_IN_FP16)
        assert {(loss.site, loss.tensor) for loss in found.range_losses} == {("dp", "do")}
        assert any("dO underflows FP16 in dP = dO Vᵀ" in words for words in limitations(found))
        for base, gradient in ((DP_IN_FP16, do), (SAGEBWD, 1e-8 * do)):
            assert attribute(q, k, v, gradient, base=base).range_losses == ()
            assert limitations(attribute(q, k, v, gradient, base=base)) == []

    def test_the_gradient_of_the_logits_underflows(self):
        """dS is smaller than dO, and dQ and dK multiply it in FP16."""
        q, k, v, do = problem()
        found = attribute(q, k, v, 1e-4 * do, base=FPA_FP16)
        assert {"dq", "dk"} <= {loss.site for loss in found.range_losses}
        assert "dS underflows FP16 in dQ = dS K: rounding changes it by up to" in found.summary()
        assert found.verdict() in found.summary() and found.summary() in str(found)
        x = AttentionProblem(q=q, k=k, v=v, do=1e-4 * do)
        assert set(range_losses([x], FPA_FP16)) == set(found.range_losses)
        for sample in (Sample(rows=64), Sample(heads=1)):
            assert {"dS"} <= {loss.operand for loss in range_losses([x], FPA_FP16, sample)}

    @pytest.mark.parametrize("factor", [1e-24, 1e-38])
    def test_gradients_whose_squares_underflow(self, factor):
        """In float32, their norms are 0."""
        q, k, v, do = problem()
        (loss,) = attribute(q, k, v, factor * do, base=DP_IN_FP16).range_losses
        assert loss.lost == 1.0

    @pytest.mark.parametrize("factor", [1e5, 1e18, 1e30])
    def test_values_whose_squares_overflow(self, factor):
        q, k, v, do = problem()
        x = AttentionProblem(q=q, k=k, v=factor * v, do=do)
        assert any(loss.overflows and loss.operand == "V" for loss in range_losses([x], DP_IN_FP16))

    def test_a_small_loss_is_not_called_0_percent(self):
        loss = RangeLoss("dq", "ds", Precision.FP16, 0.0014)
        assert "by up to 0.14% of its norm" in range_warnings([loss])[0]

    def test_large_gradients_overflow(self):
        """The headline names the product. No share is a finding, and no change is advised."""
        q, k, v, do = problem()
        found = attribute(q, k, v, 1e5 * do, base=DP_IN_FP16)
        assert found.verdict() == "dS, dQ, dK are not finite: dP = dO Vᵀ overflows."
        assert "dO overflows FP16 in dP = dO Vᵀ: elements become infinite." in limitations(found)
        assert advice(found) == []
        pooled = pool([found, attribute(q, k, v, do, base=DP_IN_FP16)])
        assert pooled.verdict() == found.verdict()

    def test_p_of_the_backward_overflows(self):
        """The forward rounds S to INT8, which cannot overflow, and the backward to FP16."""
        q, k, v, do = (x.half() for x in problem())
        found = attribute(30 * q, 30 * k, v, do, base=SAGE_FORWARD)
        overflowing = {(loss.site, loss.tensor) for loss in found.range_losses if loss.overflows}
        assert ("dv", "p") in overflowing
        assert "P overflows FP16 in dV = Pᵀ dO: elements become infinite." in found.summary()
        assert "not finite: P = exp(S - L) of the backward becomes too large" in found.verdict()
        assert SITE_NAMES["qk"] not in found.summary()


def test_the_number_of_runs_is_known_beforehand():
    for sample in (None, Sample(heads=1), Sample(rows=64)):
        calls, x = list[int](), next(capture_of(1))
        attribute(x, sample=sample, progress=functools.partial(calls.append, 1))
        assert len(calls) == run_count(x, SAGEBWD, sample)


@pytest.mark.parametrize("base", [SAGEBWD, FP8_GRADIENTS])
def test_the_memory_is_known_beforehand(base):
    q, k, v, do = torch.randn(4, 1, 1, 256, 8, generator=torch.Generator().manual_seed(0))
    x = AttentionProblem(q=q, k=k, v=v, do=do)
    with Allocations() as allocations:
        attribute(x, base=base)
    expected = memory(x, base, None)
    assert 0.9 * expected < allocations.peak < expected


def test_inputs_that_require_a_gradient_give_no_warning(recwarn):
    attribute(*torch.randn(4, 1, 1, 16, 8).requires_grad_())
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.usefixtures("as_installed")
def test_a_sample_of_a_fraction_of_a_head_raises():
    for given in ({"heads": 1.5}, {"rows": "a"}):
        with pytest.raises(TypeError, match=f"{next(iter(given))} is .*; it must be an integer"):
            Sample(**given)


def test_nothing_to_pool_raises():
    for function in (pool, pool_errors):
        with pytest.raises(ValueError, match="to pool"):
            function([])


def test_errors_are_those_of_every_intermediate():
    x = next(capture_of(1))
    assert attribute(x).errors == compare(trace(x, spec=SAGEBWD), exact(x)).overall
