"""The backward: which tensors each site affects, delta, causality, masks and padding."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sagesim import (
    CAUSAL_SAFE,
    FACTORED,
    FPA,
    FPA_BF16,
    FPA_FP16,
    PRESETS,
    SAGEBWD,
    SITES,
    AttentionSpec,
    Delta,
    Precision,
    Smoothing,
    with_precision,
)
from tests.support import examples
from tests.support.assertions import assert_bitwise, assert_within_bound
from tests.support.calls import run_attention, run_exact, run_trace
from tests.support.inputs import MODERATE, Case, case, random_mask
from tests.support.strategies import cases, seeds, specs

U = 2.0**-24
SMOOTHINGS = (Smoothing(), Smoothing(k=True), Smoothing(q=True, k=True))

TENSORS = (
    "s",
    "p",
    "lse",
    "o",
    "s_recompute",
    "p_recompute",
    "dp",
    "delta",
    "ds",
    "dv",
    "dq",
    "dk",
)


def affected(site: str, delta: Delta) -> set[str]:
    """The tensors of a trace that depend on a site's product.

    s -> p, lse; p -> o; lse, s_recompute -> p_recompute -> dv, ds; dp, delta -> ds -> dq, dk.
    delta is computed from o, or from p_recompute and dp.
    """
    feeds = {
        "s": {"p", "lse"},
        "p": {"o"},
        "lse": {"p_recompute"},
        "s_recompute": {"p_recompute"},
        "p_recompute": {"dv", "ds"},
        "dp": {"ds"},
        "delta": {"ds"},
        "ds": {"dq", "dk"},
    }
    if delta is Delta.FROM_O:
        feeds["o"] = {"delta"}
    else:
        feeds["p_recompute"] |= {"delta"}
        feeds["dp"] |= {"delta"}
    product = {"qk": "s", "pv": "o", "qk_recompute": "s_recompute"}.get(site, site)
    found, new = set(), {product}
    while new:
        found |= new
        new = set().union(*(feeds.get(t, set()) for t in new)) - found
    return found


def test_affected_gives_the_tensors_written_out_here():
    backward = {"delta", "ds", "dq", "dk"}
    assert affected("dq", Delta.FROM_O) == {"dq"} and affected("dk", Delta.FROM_P) == {"dk"}
    assert affected("dv", Delta.FROM_O) == {"dv"}
    assert affected("dp", Delta.FROM_O) == {"dp", "ds", "dq", "dk"}
    assert affected("dp", Delta.FROM_P) == {"dp", *backward}
    assert affected("pv", Delta.FROM_O) == {"o", *backward}
    assert affected("pv", Delta.FROM_P) == {"o"}
    recompute = {"s_recompute", "p_recompute", "dv", "ds", "dq", "dk"}
    assert affected("qk_recompute", Delta.FROM_O) == recompute
    assert affected("qk_recompute", Delta.FROM_P) == recompute | {"delta"}
    assert set(TENSORS) - affected("qk", Delta.FROM_O) == {"s_recompute", "dp"}


@pytest.mark.parametrize("delta", Delta)
@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.FP8_E4M3])
@pytest.mark.parametrize("base", ["sagebwd_all_int8", "factored"])
def test_the_precision_of_a_site_changes_only_what_depends_on_it(base, precision, site, delta):
    spec = replace(with_precision(PRESETS[base], Precision.INT8), delta=delta)
    c = case(seed=7, n_q=100, n_k=130, d=24, heads=(2,), is_causal=True)
    one, other = run_trace(c, spec), run_trace(c, with_precision(spec, precision, site))
    for name in TENSORS:
        before, after = getattr(one, name), getattr(other, name)
        if name in affected(site, delta):
            assert not torch.equal(before, after), f"{site} should change {name}"
        else:
            assert_bitwise(actual=after, expected=before, what=f"{name} under {site}")


@given(cases(MODERATE), specs(), st.sampled_from(SITES), st.sampled_from(list(Precision)))
@examples(40)
def test_the_precision_of_a_site_changes_nothing_else_in_any_spec(case, spec, site, precision):
    one, other = run_trace(case, spec), run_trace(case, with_precision(spec, precision, site))
    for name in set(TENSORS) - affected(site, spec.delta):
        assert_bitwise(actual=getattr(other, name), expected=getattr(one, name), what=name)


@given(cases(MODERATE), specs(), seeds)
@examples(30)
def test_the_forward_does_not_depend_on_the_backwards_spec_and_gradient(case, spec, seed):
    other = replace(
        spec,
        delta=Delta.FROM_P if spec.delta is Delta.FROM_O else Delta.FROM_O,
        **{site: FPA.site(site) for site in SITES[2:]},
    )
    one, two = run_trace(case, spec), run_trace(replace(case, do=case.do * 3 + 1), other)
    for name in ("s", "p", "o", "lse"):
        assert_bitwise(actual=getattr(two, name), expected=getattr(one, name), what=name)


class TestRowSumsOfDs:
    """sum_j dS_ij = sum_j P dP - delta sum_j P, which is 0 if delta = sum_j P dP."""

    @staticmethod
    def bound(t) -> torch.Tensor:
        """A bound of the float32 rounding errors of a row sum of dS.

        delta is a sum of n_k products. dP - delta and its product with P are rounded. P sums to 1
        up to the errors of the exponentials, whose argument S - L is rounded relative to S.
        """
        n_k = t.s.shape[-1]
        p, dp = t.p_recompute.double(), t.dp.double().abs()
        delta = t.delta.double().abs()
        size = t.s.masked_fill(t.s.isneginf(), 0).double().abs().amax(-1) + 8
        error_of_row_sum = (n_k + 32) * U + 8 * U * size
        terms = (p * dp).sum(-1)
        return 1.01 * ((n_k + 3) * U * (terms + delta) + delta * error_of_row_sum) + 2.0**-126

    @given(cases(MODERATE), st.sampled_from(["sagebwd", "sagebwd_all_int8", "factored", "fpa"]))
    @examples(40)
    def test_are_zero_with_delta_from_p(self, case, preset):
        spec = replace(PRESETS[preset], delta=Delta.FROM_P)
        t = run_trace(case, spec)
        total = t.ds.double().sum(-1)
        assert_within_bound(
            actual=total, exact=torch.zeros_like(total), bound=self.bound(t), what="row sums of ds"
        )

    def test_are_not_zero_with_delta_from_o_of_an_int8_product(self):
        c = case(seed=1, n_q=128, n_k=128, d=64)
        t = run_trace(c, SAGEBWD)
        total = t.ds.double().sum(-1)
        with pytest.raises(AssertionError, match="exceed the bound"):
            assert_within_bound(
                actual=total, exact=torch.zeros_like(total), bound=self.bound(t), what="ds"
            )
        # The row sums are the error of delta, which comes from the INT8 product PV.
        error = (t.p_recompute.double() * t.dp.double()).sum(-1) - t.delta.double()
        assert_within_bound(actual=total, exact=error, bound=self.bound(t), what="row sums of ds")

    def test_delta_from_o_is_the_row_sum_of_do_times_o_as_returned(self):
        """o is rounded to the caller's dtype first."""
        c = case(seed=2, n_q=70, n_k=50, d=16).to(torch.bfloat16)
        t = run_trace(c, SAGEBWD)
        terms = c.do.double() * t.o.double()
        assert_within_bound(
            actual=t.delta,
            exact=terms.sum(-1),
            bound=1.001 * 16 * U * terms.abs().sum(-1),
            what="delta",
        )


def influence_of_later_tokens(c: Case, spec: AttentionSpec, i: int) -> dict[str, float]:
    """The change of rows 0..i of o and dq if all later tokens change, relative to the RMS."""
    later = torch.arange(c.q.shape[-2]) > i

    def perturb(x: torch.Tensor, gain: float) -> torch.Tensor:
        return torch.where(later[:, None], x * gain + 1, x)

    other = replace(
        c, q=perturb(c.q, 3.0), k=perturb(c.k, 4.0), v=perturb(c.v, 5.0), do=perturb(c.do, 2.0)
    )
    one, two = run_attention(c, spec), run_attention(other, spec)
    return {
        name: (
            (getattr(two, name) - getattr(one, name))[..., : i + 1, :].abs().max()
            / getattr(one, name).square().mean().sqrt()
        ).item()
        for name in ("o", "dq")
    }


SAFE = {"fpa": FPA, "fpa_fp16": FPA_FP16, "fpa_bf16": FPA_BF16, "causal_safe": CAUSAL_SAFE}
"""Specs in which no scale and no mean combines a token with an earlier one."""


class TestCausality:
    CASE = case(seed=3, n_q=150, n_k=150, d=32, is_causal=True)

    @pytest.mark.parametrize("i", [0, 30, 63, 64, 100, 148])
    @pytest.mark.parametrize("name", SAFE)
    def test_later_tokens_have_exactly_no_influence(self, name, i):
        assert influence_of_later_tokens(self.CASE, SAFE[name], i) == {"o": 0.0, "dq": 0.0}

    @given(cases(MODERATE, masks=("causal",)), st.sampled_from(sorted(SAFE)), st.integers(0, 129))
    @examples(30)
    def test_later_tokens_have_exactly_no_influence_in_any_shape(self, case, name, i):
        n = min(case.q.shape[-2], case.k.shape[-2])
        c = replace(
            case,
            q=case.q[..., :n, :],
            k=case.k[..., :n, :],
            v=case.v[..., :n, :],
            do=case.do[..., :n, :],
        )
        i = i % n
        changed = {
            name: torch.cat([x[..., : i + 1, :], 7 * x[..., i + 1 :, :] + 1], -2)
            for name, x in zip(("q", "k", "v", "do"), c.qkvdo, strict=True)
        }
        one = run_attention(c, SAFE[name])
        other = run_attention(replace(c, **changed), SAFE[name])
        for output in ("o", "dq"):
            before, after = (getattr(x, output)[..., : i + 1, :] for x in (one, other))
            assert_bitwise(actual=after.contiguous(), expected=before.contiguous(), what=output)

    @pytest.mark.parametrize(("name", "spec"), [("sagebwd", SAGEBWD), ("factored", FACTORED)])
    def test_later_tokens_have_influence_through_shared_scales(self, name, spec):
        """Without an influence here, the tests above would prove nothing."""
        found = influence_of_later_tokens(self.CASE, spec, 100)
        assert found["o"] > 1e-4 and found["dq"] > 1e-4, found

    @pytest.mark.parametrize("block", [1, 16, 128])
    def test_causal_safe_has_exactly_no_influence_with_any_block_size(self, block):
        spec = replace(CAUSAL_SAFE, block_q=block, block_k=block)
        for i in (0, 15, 16, 77):
            assert influence_of_later_tokens(self.CASE, spec, i) == {"o": 0.0, "dq": 0.0}


class TestMasks:
    @given(cases(MODERATE, masks=("causal",)), specs())
    @examples(40)
    def test_a_boolean_triangle_is_causal(self, case, spec):
        mask = torch.ones(case.q.shape[-2], case.k.shape[-2], dtype=torch.bool).tril()
        masked = replace(case, is_causal=False, attn_mask=mask)
        one, other = run_attention(case, spec), run_attention(masked, spec)
        for name in one._fields:
            assert_bitwise(actual=getattr(other, name), expected=getattr(one, name), what=name)

    @given(cases(MODERATE, masks=("none",)), specs())
    @examples(20)
    def test_a_mask_of_ones_gives_the_bytes_of_no_mask(self, case, spec):
        mask = torch.ones(1, 1, dtype=torch.bool).expand(case.q.shape[-2], case.k.shape[-2])
        one, other = run_attention(case, spec), run_attention(replace(case, attn_mask=mask), spec)
        for name in one._fields:
            assert_bitwise(actual=getattr(other, name), expected=getattr(one, name), what=name)

    @pytest.mark.parametrize("preset", PRESETS)
    @pytest.mark.parametrize("shape", [(70, 90), (1, 90), (70, 1), (3, 1, 90), (2, 1, 70, 90)])
    def test_masks_broadcast(self, preset, shape):
        c = case(seed=4, n_q=70, n_k=90, d=16, heads=(2, 3))
        mask = random_mask(5, shape, density=0.6)
        one = run_attention(replace(c, attn_mask=mask), PRESETS[preset])
        full = mask.expand(2, 3, 70, 90).clone()
        other = run_attention(replace(c, attn_mask=full), PRESETS[preset])
        for name in one._fields:
            assert_bitwise(actual=getattr(other, name), expected=getattr(one, name), what=name)

    @pytest.mark.parametrize("preset", PRESETS)
    def test_rows_that_attend_to_nothing_have_o_0_lse_minus_infinity_and_no_gradient(self, preset):
        mask = random_mask(6, (70, 90), density=0.6)
        mask[[0, 13, 64, 69]] = False
        c = case(seed=5, n_q=70, n_k=90, d=16, attn_mask=mask)
        nothing = ~mask.any(-1)
        t = run_trace(c, PRESETS[preset])
        for name in ("o", "dq", "ds"):
            assert not getattr(t, name)[:, :, nothing].any(), name
        assert bool((t.lse[:, :, nothing] == -torch.inf).all())


class TestPadding:
    """Queries that attend to no key, and keys that no query attends to, are padding."""

    @staticmethod
    def fill_padding(c: Case, value: float) -> Case:
        """The case with this value in all padding."""
        attends = c.attends.expand(*c.q.shape[:-1], c.k.shape[-2])
        padding_q, padding_k = ~attends.any(-1)[..., None], ~attends.any(-2)[..., None]
        return replace(
            c,
            q=c.q.masked_fill(padding_q, value),
            k=c.k.masked_fill(padding_k, value),
            v=c.v.masked_fill(padding_k, value),
            do=c.do.masked_fill(padding_q, value),
        )

    @given(
        cases(MODERATE, masks=("random", "causal"), heads=st.sampled_from([(1,), (2, 2)])),
        specs(),
        st.sampled_from([math.nan, math.inf, 3e38, -7.0]),
        st.integers(1, 40),
    )
    @examples(60)
    def test_values_in_padding_change_no_byte(self, case, spec, value, masked):
        """Some tokens are padding in one head only. Under a causal mask, some keys may be too."""
        if case.attn_mask is not None:
            mask = case.attn_mask.clone()
            mask[..., -masked:] = False
            mask[0, ..., :masked, :] = False
            case = replace(case, attn_mask=mask)
        one, other = run_attention(case, spec), run_attention(self.fill_padding(case, value), spec)
        for name in one._fields:
            assert_bitwise(actual=getattr(other, name), expected=getattr(one, name), what=name)

    @pytest.mark.parametrize("preset", PRESETS)
    def test_nan_in_padding_changes_no_byte_of_the_reference_and_the_trace(self, preset):
        mask = random_mask(8, (2, 1, 70, 90), density=0.5)
        mask[..., 80:], mask[..., 60:, :] = False, False
        c = case(seed=6, n_q=70, n_k=90, d=16, heads=(2, 3), attn_mask=mask)
        bad = self.fill_padding(c, math.nan)
        one, other = run_exact(c), run_exact(bad)
        for name in type(one).__slots__:
            if name != "dsinks":  # None without sinks
                assert_bitwise(actual=getattr(other, name), expected=getattr(one, name), what=name)
        spec = PRESETS[preset]
        one, other = run_trace(c, spec), run_trace(bad, spec)
        for name in TENSORS:
            assert_bitwise(actual=getattr(other, name), expected=getattr(one, name), what=name)
        for name, x in one.operands.items():
            y = other.operands[name]
            assert_bitwise(actual=y.codes, expected=x.codes, what=name)
            assert_bitwise(actual=y.scale, expected=x.scale, what=name)

    @pytest.mark.parametrize("preset", PRESETS)
    @pytest.mark.parametrize("smoothing", SMOOTHINGS)
    def test_a_padded_batch_gives_the_bytes_of_its_sequences_alone(self, preset, smoothing):
        """Two sequences are padded to one length and masked.

        Codes, scales and means depend on valid tokens only. Both sequences have the same number of
        blocks, because the order of float sums over tiles depends on it.
        """
        spec = replace(PRESETS[preset], smoothing=smoothing)
        lengths = (100, 120)
        c = case(seed=7, n_q=128, n_k=128, d=16, heads=(2, 3))
        valid = torch.arange(128) < torch.tensor(lengths)[:, None]
        mask = (valid[:, None, :, None] & valid[:, None, None, :]).expand(2, 1, 128, 128)
        together = run_attention(replace(c, attn_mask=mask), spec)
        for b, n in enumerate(lengths):
            alone = run_attention(c.map(lambda x: x[b, :, :n]), spec)  # noqa: B023
            for name in together._fields:
                whole = getattr(together, name)[b]
                assert_bitwise(
                    actual=whole[:, :n].contiguous(), expected=getattr(alone, name), what=name
                )
                assert not whole[:, n:].any(), name
