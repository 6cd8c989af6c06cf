"""The error budget predicts the emulator's errors and rejects what it cannot predict."""

import dataclasses

import pytest
import torch

import sagesim
from sagesim import AttentionSpec
from sagesim.analysis import OUTPUTS
from tests.support.combinations import crossed
from theory.budget import PARTS, error_budget
from theory.checks.budget import WITHIN, of_errors, pooled, sinks
from theory.checks.samples import captured, gaussian


def small(sigma=2.0, seed=0, n=96, d=16):
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = torch.randn(4, 2, n, d, generator=generator)
    return sigma * q, sigma * k, v, do


@pytest.mark.parametrize(
    "label",
    [
        "sagebwd",
        "factored",
        "factored_pv16",
        "sagebwd_all_int8",
        "sagebwd smooth=qk",
        "sagebwd smooth=none block=32x64",
        "factored round=stochastic@1",
        "fpa_bf16",
        "sagebwd qk=fp8_e4m3@block,block qk_recompute=fp8_e4m3@block,block dv=fp8_e5m2@tile,block",
    ],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_predicted_errors_are_within_25_percent(label, is_causal):
    sample = pooled([gaussian(2.0, 128, 32, is_causal=is_causal, seed=i) for i in range(4)])
    budget = error_budget(sample, spec=AttentionSpec.parse(label))
    failed = [c for c in of_errors(sample, budget) if not c.holds]
    assert not failed, failed


SINKS, CAPPED = sinks(3.0), sinks(3.0, softcap=4.0)


@pytest.mark.parametrize(
    ("label", "name"),
    crossed(
        ["sagebwd smooth=qk", "sagebwd smooth=none", "factored_pv16", "sagebwd delta=p"],
        ["sinks", "softcap"],
    ),
)
def test_with_sinks_and_a_softcap_errors_are_within_25_percent(label, name):
    sample = SINKS if name == "sinks" else CAPPED
    budget = error_budget(sample, spec=AttentionSpec.parse(label))
    failed = [c for c in of_errors(sample, budget) if not c.holds]
    assert not failed, failed


ABOVE = (0.0, 10.0, 30.0, 60.0, 100.0)
"""How far a sink is above the largest logit. From 87 on, P is below the normal float32 numbers."""


def far_sinks(above, *, is_causal, dtype=torch.float32):
    """Heads with the same sink, `above` the largest of their logits. K has a mean in each head."""
    found = pooled([gaussian(0.5, 64, 16, is_causal=is_causal, seed=i) for i in range(24)])
    heads = found.q.shape[1]
    k = found.k + torch.randn(1, heads, 1, 16, generator=torch.Generator().manual_seed(1))
    largest = (found.q @ k.mT * found.logit_scale).amax()
    found = dataclasses.replace(found, k=k, sinks=(largest + above).expand(heads))
    return found.map(lambda x: x.to(dtype))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "label", ["factored_qk", "sagebwd", "factored", "fp8_gradients", "fpa_fp16"]
)
def test_errors_are_within_25_percent_if_a_sink_takes_nearly_all_weight(label, is_causal):
    """P, dS and dQ are as small as exp(-above). They underflow in 16 bit and in float32."""
    spec = AttentionSpec.parse(label)
    for above in ABOVE:
        sample = far_sinks(above, is_causal=is_causal)
        predicted = error_budget(sample, spec=spec).error
        measured = sagesim.compare(sample.trace(spec), sample.exact()).overall
        for t in OUTPUTS:
            assert measured[t].rel_l2 == pytest.approx(predicted[t], rel=WITHIN), (above, t)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_p_below_the_normal_float32_numbers_is_an_error_of_a_spec_that_rounds_nothing(is_causal):
    """At 95, most P are a few hundred times the smallest float32 number."""
    for above in (60.0, 95.0):
        sample = far_sinks(above, is_causal=is_causal)
        predicted = error_budget(sample, spec=sagesim.FPA).error
        measured = sagesim.compare(sample.trace(sagesim.FPA), sample.exact()).overall
        for t in OUTPUTS:
            assert (predicted[t] > 0) == (above == 95.0)
            assert measured[t].rel_l2 == pytest.approx(predicted[t], rel=WITHIN, abs=1e-5), t


@pytest.mark.parametrize("label", ["factored_qk", "sagebwd", "factored"])
def test_outputs_that_underflow_in_float16_have_an_error_of_1(label):
    spec = AttentionSpec.parse(label)
    for above in ABOVE[2:]:
        sample = far_sinks(above, is_causal=True, dtype=torch.float16)
        predicted = error_budget(sample, spec=spec).error
        measured = sagesim.compare(sample.trace(spec), sample.exact()).overall
        for t in ("o", "dq", "dk", "dv"):
            assert measured[t].rel_l2 == pytest.approx(predicted[t], rel=1e-3), t
            assert predicted[t] == pytest.approx(1.0, abs=1e-3), t


@pytest.mark.parametrize(
    ("option", "wrong"),
    [("sinks", {"o", "dq", "dk", "dv"}), ("softcap", {"o", "ds", "dq", "dk", "dv"})],
)
def test_the_budget_without_a_sink_or_a_softcap_is_another(option, wrong):
    measured = sagesim.compare(CAPPED.trace(sagesim.SAGEBWD), CAPPED.exact()).overall
    budget = error_budget(dataclasses.replace(CAPPED, **{option: None}), spec=sagesim.SAGEBWD)
    found = {t for t in OUTPUTS if abs(measured[t].rel_l2 / budget.error[t] - 1) > WITHIN}
    assert wrong <= found


def test_the_budget_of_another_spec_is_not_within_25_percent():
    """The check would fail if the budget of FACTORED were given for SAGEBWD."""
    sample = captured()[1]
    measured = sagesim.compare(sample.trace(sagesim.SAGEBWD), sample.exact()).overall
    budget = error_budget(sample, spec=sagesim.FACTORED)
    wrong = [t for t in OUTPUTS if abs(measured[t].rel_l2 / budget.error[t] - 1) > WITHIN]
    assert {"ds", "dq", "dk", "dv"} <= set(wrong)


def test_a_spec_that_rounds_nothing_has_no_error():
    budget = error_budget(*small(), spec=sagesim.FPA)
    assert set(budget.error.values()) == set(budget.own_error.values()) == {0.0}
    assert all(share == 0.0 for part in budget.share.values() for share in part.values())


@pytest.mark.parametrize("site", ["pv", "dv", "dp", "dq", "dk"])
def test_the_only_rounded_site_has_the_whole_share(site):
    spec = dataclasses.replace(sagesim.FPA, **{site: sagesim.SAGEBWD_ALL_INT8.site(site)})
    budget = error_budget(*small(), spec=spec)
    reached = {t for t in OUTPUTS if budget.error[t] > 0}
    expected = {"pv": {"o", "ds", "dq", "dk"}, "dp": {"ds", "dq", "dk"}}.get(site, {site})
    assert reached == expected
    assert all(budget.share[site][t] == 1.0 for t in reached)
    assert budget.largest(next(iter(reached))) == site


def test_qk_adds_nothing_to_the_error_against_the_own_forward():
    only = sagesim.AttentionSpec.parse("fpa qk=int8@block,block qk_recompute=int8@block,block")
    assert set(error_budget(*small(), spec=only).own_error.values()) == {0.0}
    both, without = (
        error_budget(*small(), spec=sagesim.AttentionSpec.parse(label))
        for label in ("sagebwd", "sagebwd qk=fp32 qk_recompute=fp32")
    )
    assert both.own_error == without.error and both.error != without.error


def test_shares_add_up_to_1_and_squared_errors_are_summed_over_heads():
    tensors = small()
    budget = error_budget(*tensors, spec=sagesim.SAGEBWD)
    for t in OUTPUTS:
        assert abs(sum(budget.share[site][t] for site in PARTS) - 1) < 1e-12
    doubled = [torch.cat([x, x]) for x in tensors]
    repeated = error_budget(*doubled, spec=sagesim.SAGEBWD)
    for t in OUTPUTS:
        assert abs(repeated.error[t] / budget.error[t] - 1) < 1e-12


def test_scale_multiplies_the_logits():
    q, k, v, do = small()
    doubled = error_budget(2 * q, k, v, do, spec=sagesim.SAGEBWD)
    given = error_budget(q, k, v, do, spec=sagesim.SAGEBWD, scale=2 / 4)
    assert abs(given.error["o"] / doubled.error["o"] - 1) < 1e-12


def test_the_budget_prints_as_a_table():
    text = str(error_budget(*small(), spec=sagesim.SAGEBWD))
    assert text.splitlines()[0].split() == ["sagebwd", "O", "dS", "dQ", "dK", "dV"]
    assert len(text.splitlines()) == 3 + len(PARTS)


def test_unsupported_problems_raise():
    q, k, v, do = small()
    with pytest.raises(ValueError, match="qk and qk_recompute round differently"):
        error_budget(q, k, v, do, spec=sagesim.SAGE_FORWARD)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        error_budget(q, k[:1], v[:1], do, spec=sagesim.SAGEBWD)
    with pytest.raises(ValueError, match=r"attn_mask is torch.float32; it must be boolean"):
        error_budget(q, k, v, do, spec=sagesim.SAGEBWD, attn_mask=torch.zeros(96, 96))


@pytest.mark.parametrize("label", ["fpa_fp16", "factored_qk", "sagebwd_all_int8"])
def test_errors_of_v_that_pv_and_dp_share_cancel_also_in_16_bit(label):
    """The budget counts them twice: against the own forward, dS, dQ and dK have less error."""
    spec = AttentionSpec.parse(label)
    sample = pooled([gaussian(3.0, 128, 32, seed=i) for i in range(4)])
    traced = sample.trace(spec)
    measured = sagesim.compare(traced, sagesim.exact_backward(sample, traced)).overall
    predicted = error_budget(sample, spec=spec).own_error
    for t in ("ds", "dq", "dk"):
        assert predicted[t] > (1 + WITHIN) * measured[t].rel_l2, t


@pytest.mark.parametrize(
    ("delta", "mean_of", "off"),
    [
        ("o", "", {}),
        ("o", "kv", {"dq": 1}),
        ("p", "k", {"dq": -1}),
        ("o", "do", {"dk": 1}),
    ],
)
def test_means_make_errors_of_dp_add_up_in_dq_and_dk(delta, mean_of, off):
    """dP alone is rounded. off: 1 where the error is larger than predicted, -1 where smaller."""
    sample = pooled([gaussian(1.0, 128, 32, seed=i) for i in range(4)])
    means = {t: 8 * torch.randn(32, generator=torch.Generator().manual_seed(1)) for t in ("k", "v")}
    moved = {t: getattr(sample, t) + means[t] for t in mean_of if t in means}
    if mean_of == "do":
        moved = {"do": sample.do + means["k"]}
    sample = dataclasses.replace(sample, **moved)
    spec = AttentionSpec.parse(f"fpa dp=int8@token,token delta={delta}")
    measured = sagesim.compare(sample.trace(spec), sample.exact()).overall
    predicted = error_budget(sample, spec=spec).error
    found = {t: measured[t].rel_l2 / predicted[t] - 1 for t in ("ds", "dq", "dk")}
    sides = {t: 1 if x > 0 else -1 for t, x in found.items() if abs(x) > WITHIN}
    assert sides == off, found


def test_a_call_and_its_arguments_give_one_budget():
    """A recorded call brings its mask, scale and grouped heads with it."""
    q, k, v, do = (x[None] for x in small(n=64))
    call = sagesim.Call(
        q=q,
        k=k[:, :1],
        v=v[:, :1],
        do=do,
        is_causal=True,
        scale=0.3,
        enable_gqa=True,
        index=0,
        name="layer",
    )
    budget = error_budget(call, spec=sagesim.SAGEBWD)
    again = error_budget(
        q,
        k[:, :1],
        v[:, :1],
        do,
        spec=sagesim.SAGEBWD,
        is_causal=True,
        scale=0.3,
        enable_gqa=True,
    )
    full = error_budget(q, k[:, :1], v[:, :1], do, spec=sagesim.SAGEBWD, enable_gqa=True)
    assert budget.error == again.error and budget.share == again.share
    assert budget.error != full.error


@pytest.mark.parametrize("kind", ["grouped", "mask", "more keys", "more queries"])
@pytest.mark.parametrize("label", ["sagebwd", "factored smooth=qk"])
def test_grouped_heads_and_masks_are_predicted_within_25_percent(kind, label):
    """Padding is in no mean and no scale, and dK and dV are sums over a group of heads."""
    generator = torch.Generator().manual_seed(3)
    n_q, n_k = {"more keys": (96, 128), "more queries": (128, 96)}.get(kind, (128, 128))
    kv_heads = 4 if kind == "grouped" else 8
    q, do = torch.randn(2, 1, 8, n_q, 32, generator=generator)
    k, v = torch.randn(2, 1, kv_heads, n_k, 32, generator=generator)
    mask = None
    if kind == "mask":
        mask = torch.ones(8, n_q, n_k, dtype=torch.bool)
        mask[:, :, 100:] = False
        mask[:3, :, :40] = False
        mask[5, 70:] = False
        k[..., 100:, :] += 50
    problem = sagesim.AttentionProblem(
        q=2 * q,
        k=2 * k,
        v=v,
        do=do,
        is_causal=kind.startswith("more"),
        attn_mask=mask,
        enable_gqa=kind == "grouped",
    )
    spec = AttentionSpec.parse(label)
    budget = error_budget(problem, spec=spec)
    compared = sagesim.compare(sagesim.trace(problem, spec=spec), sagesim.exact(problem)).overall
    for t in OUTPUTS:
        assert abs(compared[t].rel_l2 / budget.error[t] - 1) <= WITHIN, t
