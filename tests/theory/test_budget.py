"""The error budget predicts the emulator's errors and rejects what it cannot predict."""

import dataclasses

import pytest
import torch

import sagesim
from sagesim import AttentionSpec
from sagesim.analysis import OUTPUTS
from theory.budget import PARTS, error_budget
from theory.checks.budget import WITHIN, of_errors, pooled
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
    failed = [c for c in of_errors(sample, AttentionSpec.parse(label)) if not c.holds]
    assert not failed, failed


def test_the_budget_of_another_spec_is_not_within_25_percent():
    """The check would fail if the budget of FACTORED were given for SAGEBWD."""
    sample = captured()[1]
    measured = sagesim.compare(sample.trace(sagesim.SAGEBWD), sample.exact()).overall
    budget = error_budget(sample, spec=sagesim.FACTORED)
    wrong = [t for t in OUTPUTS if abs(measured[t].rel_l2 / budget.error[t] - 1) > WITHIN]
    assert {"ds", "dq", "dk", "dv"} <= set(wrong)


def test_a_spec_that_rounds_nothing_has_no_error():
    budget = error_budget(*small(), spec=sagesim.FPA)
    assert set(budget.error.values()) == {0.0}
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
    assert len(text.splitlines()) == 2 + len(PARTS)


def test_unsupported_problems_raise():
    q, k, v, do = small()
    with pytest.raises(ValueError, match="qk and qk_recompute round differently"):
        error_budget(q, k, v, do, spec=sagesim.SAGE_FORWARD)
    with pytest.raises(ValueError, match="differ in heads"):
        error_budget(q, k[:1], v[:1], do, spec=sagesim.SAGEBWD)
    with pytest.raises(ValueError, match="96 queries and 50 keys"):
        error_budget(q, k[:, :50], v[:, :50], do, spec=sagesim.SAGEBWD, is_causal=True)
