"""The cases of the benchmark."""

from sagesim import SITES, AttentionSpec
from sagesim.spec import Precision
from sagesim_kernels import supports
from sagesim_kernels.bench.cases import (
    CODE_PEERS,
    CODE_SPECS,
    PAYOFF_BASE,
    PAYOFF_SITES,
    PEERS,
    QUICK_PEERS,
    SPECS,
    CaptureCase,
    GaussianCase,
    TimedCase,
    all_cases,
    code_cases,
    payoff_labels,
    payoff_spec,
    quick_cases,
)
from sagesim_kernels.bench.masks import MaskCase


def test_every_shape_once():
    cases = all_cases(SPECS, PEERS)
    speed = [c.shape for c in cases if isinstance(c, TimedCase) and c.part == "speed"]
    assert {(s.tokens, s.head_dim, s.is_causal) for s in speed} == {
        (2**i, d, causal) for i in range(9, 16) for d in (64, 128) for causal in (False, True)
    }
    assert len(speed) == 28
    assert all(s.heads * s.head_dim == 2048 for s in speed)
    assert all(s.batch * s.tokens == 16384 or (s.batch, s.tokens) == (1, 32768) for s in speed)


def test_code_of_other_gpus_is_timed_at_two_lengths_beside_flash_attention_2():
    cases = code_cases(CODE_SPECS, CODE_PEERS)
    found = [(c.shape.tokens, c.shape.head_dim, c.shape.is_causal) for c in cases]
    assert sorted(found) == [
        (n, d, causal) for n in (4096, 8192) for d in (64, 128) for causal in (False, True)
    ]
    for case in cases:
        assert case.shape.batch * case.shape.tokens == 16384
        assert case.shape.heads * case.shape.head_dim == 2048
        assert case.contenders == (*CODE_SPECS, "sdpa flash")
    assert tuple(AttentionSpec.parse(label).label() for label in CODE_SPECS) == CODE_SPECS


def test_keys_name_each_case_once():
    for cases in (
        all_cases(SPECS, PEERS),
        quick_cases(SPECS, QUICK_PEERS),
        code_cases(CODE_SPECS, CODE_PEERS),
    ):
        assert len({case.key for case in cases}) == len(cases)


def test_every_case_of_speed_has_the_specs_and_every_peer():
    for case in all_cases(["sagebwd", "factored dp=int8"], PEERS):
        if isinstance(case, TimedCase) and case.part == "speed":
            assert case.contenders == ("sagebwd", "factored dp=int8", *PEERS)


def test_other_peers_are_left_out_of_speed_and_errors():
    chosen = PEERS[1:3]
    for case in all_cases(["sagebwd"], chosen):
        if isinstance(case, TimedCase) and case.part == "speed":
            assert case.contenders == ("sagebwd", *chosen)
        elif isinstance(case, GaussianCase):
            assert {*case.contenders}.intersection(PEERS) == {*chosen}


def test_quick():
    cases = quick_cases(["factored_pv16", "sagebwd"], QUICK_PEERS)
    assert [case.key for case in cases] == [
        "speed d64 causal n4096",
        "speed d128 causal n4096",
        "accuracy d64 causal sigma1",
        "accuracy d64 causal sigma5",
    ]
    assert {c for case in cases for c in case.contenders} == {
        "factored_pv16",
        "sagebwd",
        *PEERS[:-1],
    }


def test_quick_cases_are_cases_of_a_whole_run():
    keys = {case.key for case in all_cases(SPECS, PEERS)}
    assert {case.key for case in quick_cases(SPECS, QUICK_PEERS)} <= keys


def test_operations_by_the_usual_count():
    full, causal = (
        next(c.shape for c in all_cases(SPECS, PEERS) if c.key == f"speed d64 {m} n4096")
        for m in ("full", "causal")
    )
    assert full.flop("forward") == 4 * 4 * 32 * 4096**2 * 64 == 2 * causal.flop("forward")
    assert full.flop("backward") == 2.5 * full.flop("forward")
    assert full.flop("both") == full.flop("forward") + full.flop("backward")


def test_payoff_switches_one_site_and_nothing_else():
    for sites in PAYOFF_SITES:
        spec = payoff_spec(sites)
        turned = [s for s in SITES if spec.site(s) != PAYOFF_BASE.site(s)]
        assert turned == sites.split("+")
        for site in turned:
            pair = {spec.site(site).precision, PAYOFF_BASE.site(site).precision}
            assert pair == {Precision.INT8, Precision.INPUT16}
        assert (spec.delta, spec.smoothing) == (PAYOFF_BASE.delta, PAYOFF_BASE.smoothing)


def test_every_spec_that_is_timed_has_a_kernel():
    for label in (*SPECS, *payoff_labels()):
        assert supports(AttentionSpec.parse(label))


def test_errors_are_measured_for_every_contender_that_is_timed():
    cases = all_cases(SPECS, PEERS)
    unmasked = [case for case in cases if not isinstance(case, MaskCase)]
    everyone = {c for case in unmasked for c in case.contenders}
    measured = [c for c in cases if isinstance(c, GaussianCase | CaptureCase)]
    assert len(measured) == 9
    assert all(set(c.contenders) == everyone for c in measured)
    assert {c.sigma for c in measured if isinstance(c, GaussianCase)} == {1.0, 5.0}
