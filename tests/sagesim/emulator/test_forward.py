"""The forward: exact if nothing is rounded, smoothing, and the paper's Algorithms 1 and 2."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sagesim import FACTORED, FPA, SAGEBWD, SITES, Precision, Smoothing, Trace, with_precision
from tests.support import examples, float32_bound, paper_algorithms
from tests.support.assertions import assert_bitwise, assert_within_bound
from tests.support.calls import run_attention, run_exact, run_trace
from tests.support.inputs import MODERATE, Case, case, constant, gaussian, offset
from tests.support.strategies import blocks, cases, specs

U = 2.0**-24
UNQUANTIZED = specs(precisions=[Precision.FP32], smoothings=st.just(Smoothing()))
SMOOTHED = specs(precisions=[Precision.FP32])


class TestUnquantized:
    """A spec with FP32 at every site computes attention, for all blocks, granularities, seeds."""

    @given(cases(MODERATE), UNQUANTIZED)
    @examples(60)
    def test_o_and_gradients_are_within_the_bound_of_float32(self, case, spec):
        exact = run_exact(case)
        bound = float32_bound.of(case, exact)
        found = run_attention(case, spec)
        for name in found._fields:
            assert_within_bound(
                actual=getattr(found, name),
                exact=getattr(exact, name),
                bound=getattr(bound, name),
                what=name,
            )

    @pytest.mark.parametrize("site", SITES)
    def test_one_site_in_16_bit_exceeds_the_bound(self, site):
        """A bound that a rounded site meets would prove nothing."""
        c = case(seed=1, n_q=64, n_k=64, d=16)
        exact = run_exact(c)
        bound = float32_bound.of(c, exact)
        found = run_trace(c, with_precision(FPA, Precision.FP16, site))
        name = {"qk": "o", "pv": "o", "qk_recompute": "dv", "dp": "dq"}.get(site, site)
        with pytest.raises(AssertionError, match="exceed the bound"):
            assert_within_bound(
                actual=getattr(found, name),
                exact=getattr(exact, name),
                bound=getattr(bound, name),
                what=name,
            )

    @pytest.mark.parametrize("twin", ["lost mask", "scale of a padded head", "masked key"])
    def test_the_bound_rejects_broken_attention(self, twin):
        c = case(seed=2, n_q=40, n_k=40, d=40, is_causal=True)
        exact = run_exact(c)
        bound = float32_bound.of(c, exact)
        broken = {
            "lost mask": replace(c, is_causal=False),
            "scale of a padded head": replace(c, scale=64**-0.5),
            "masked key": replace(
                c, is_causal=False, attn_mask=torch.ones(40, 40).tril().bool().roll(1, 1)
            ),
        }[twin]
        with pytest.raises(AssertionError, match="exceed the bound"):
            assert_within_bound(
                actual=run_attention(broken, FPA).o, exact=exact.o, bound=bound.o, what="o"
            )


class TestSmoothing:
    @given(cases(MODERATE), SMOOTHED)
    @examples(60)
    def test_smoothing_does_not_change_fp32_attention(self, case, spec):
        """The terms that smoothing subtracts are added back, also to the logsumexp."""
        exact = run_exact(case)
        bound = float32_bound.of(case, exact, smoothing=spec.smoothing, block_q=spec.block_q)
        found = run_trace(case, spec)
        for name in ("o", "lse", "dq", "dk", "dv"):
            assert_within_bound(
                actual=getattr(found, name),
                exact=getattr(exact, name),
                bound=getattr(bound, name),
                what=name,
            )

    @pytest.mark.parametrize("twin", ["no shift", "no bias of q in s", "no bias of q in dk"])
    def test_a_missing_smoothing_term_exceeds_the_bound(self, twin):
        """There are three terms that have to be added back; each is larger than the bound."""
        smoothing = Smoothing(q=True, k=True)
        c = case(seed=3, n_q=70, n_k=70, d=16, kinds=(shifted, shifted, gaussian, gaussian))
        exact = run_exact(c)
        bound = float32_bound.of(c, exact, smoothing=smoothing)
        q, k = c.q.double(), c.k.double()
        k_mean = k.mean(-2, keepdim=True)
        q_mean = torch.cat([b.mean(-2, keepdim=True).expand_as(b) for b in q.split(64, -2)], -2)
        match twin:
            case "no shift":
                name, lost = "lse", (q @ k_mean.mT).squeeze(-1) / 4
            case "no bias of q in s":
                s = exact.s - q_mean @ (k - k_mean).mT / 4
                name, lost = "o", exact.o - torch.softmax(s, -1) @ c.v.double()
            case _:
                name, lost = "dk", exact.ds.mT @ q_mean / 4
        found = getattr(run_trace(c, replace(FPA, smoothing=smoothing)), name)
        limits = {"exact": getattr(exact, name), "bound": getattr(bound, name), "what": name}
        assert_within_bound(actual=found, **limits)
        with pytest.raises(AssertionError, match="exceed the bound"):
            assert_within_bound(actual=found - lost, **limits)

    @pytest.mark.parametrize("preset", [SAGEBWD, FACTORED], ids=["sagebwd", "factored"])
    @given(seed=st.integers(0, 2**32 - 1), n=st.sampled_from([1, 15, 64, 130]))
    @examples(20)
    def test_a_constant_added_to_k_changes_no_byte_of_o_and_gradients(self, preset, seed, n):
        """k and the constant are multiples of 1/8 and the mean is exact in float32.

        K minus its mean is therefore bit-identical.
        """
        c = case(seed=seed, n_q=n, n_k=64, d=16)
        k = (c.k * 8).round() / 8
        one = run_trace(replace(c, k=k), preset)
        other = run_trace(replace(c, k=k + 16), preset)
        for name in ("o", "dq", "dk", "dv", "delta"):
            assert_bitwise(actual=getattr(other, name), expected=getattr(one, name), what=name)
        assert_bitwise(
            actual=other.operands["qk.k"].codes, expected=one.operands["qk.k"].codes, what="codes"
        )
        # The logsumexp is that of the logits before smoothing, which change by q . 16 / sqrt(d).
        # Each lse is a sum of two numbers and of a dot product of 16 terms.
        q_abs = c.q.double().abs().sum(-1) / 4
        size = 18 * q_abs + one.lse.abs().double() + other.lse.abs().double()
        assert_within_bound(
            actual=other.lse.double() - one.lse.double(),
            exact=16 * c.q.double().sum(-1) / 4,
            bound=2 * (16 + 4) * U * size,
            what="change of lse",
        )

    def test_without_smoothing_the_constant_does_reach_the_codes(self):
        c = case(seed=0, n_q=64, n_k=64, d=16)
        spec = replace(SAGEBWD, smoothing=Smoothing())
        one, other = run_attention(c, spec), run_attention(replace(c, k=c.k + 16), spec)
        assert not torch.equal(one.o, other.o)

    def test_constant_keys_average_the_values(self):
        """K minus its mean is zero, so P is uniform and O is the mean of V for every query."""
        c = case(seed=0, n_q=5, n_k=64, d=16, kinds=(gaussian, constant, gaussian, gaussian))
        t = run_trace(c, SAGEBWD)
        assert not t.operands["qk.k"].codes.any()
        v_hat = t.operands["pv.v"].dequantize().double()
        assert_within_bound(
            actual=t.o,
            exact=v_hat.mean(-2, keepdim=True).expand(t.o.shape),
            bound=8 * U * v_hat.abs().amax(),
            what="o",
        )


def shifted(rng, shape):
    """Normal numbers plus a constant, so that the mean is about as large as the deviation."""
    return gaussian(rng, shape) + constant(rng, shape)


def paper_case(n_q: int, n_k: int) -> Case:
    """K has a mean far from zero, so that smoothing matters."""
    kinds = (gaussian, offset, gaussian, gaussian)
    return case(seed=n_q * 1000 + n_k, n_q=n_q, n_k=n_k, d=40, kinds=kinds)


def run_paper(c: Case, scheme: paper_algorithms.Scheme, block_q: int, block_k: int):
    arrays = [x[0, 0].numpy() for x in c.qkvdo]
    return paper_algorithms.attention(*arrays, scheme=scheme, block_q=block_q, block_k=block_k)


def code_differences(t: Trace, paper: paper_algorithms.Result, name: str) -> torch.Tensor:
    return (t.operands[name].codes[0, 0].int() - torch.from_numpy(paper.codes[name])).abs()


MAP_OPERANDS = ("pv.p", "dv.p", "dq.ds", "dk.ds")
TOKEN_OPERANDS = (
    "qk.q",
    "qk.k",
    "qk_recompute.q",
    "qk_recompute.k",
    "pv.v",
    "dv.do",
    "dq.k",
    "dk.q",
)


@pytest.mark.parametrize(
    ("spec", "scheme"),
    [
        (with_precision(SAGEBWD, Precision.FP16, "dp"), paper_algorithms.PAPER),
        (with_precision(FACTORED, Precision.FP16, "dp"), paper_algorithms.FACTORED),
    ],
    ids=["sagebwd", "factored"],
)
@pytest.mark.parametrize(
    ("n_q", "n_k", "block_q", "block_k"),
    [(128, 128, 64, 64), (130, 200, 64, 64), (97, 65, 32, 16), (15, 130, 128, 64), (1, 1, 64, 64)],
)
class TestThePapersAlgorithms:
    """The emulator agrees with Algorithms 1 and 2, which compute tiles with an online softmax."""

    @pytest.fixture
    def both(self, spec, scheme, n_q, n_k, block_q, block_k):
        c = paper_case(n_q, n_k)
        t = run_trace(c, replace(spec, block_q=block_q, block_k=block_k))
        return t, run_paper(c, scheme, block_q, block_k)

    def test_codes_and_scales_of_tokens_are_the_same_bytes(self, both):
        t, paper = both
        for name in TOKEN_OPERANDS:
            found = t.operands[name]
            codes = torch.from_numpy(paper.codes[name]).to(torch.int8)
            assert_bitwise(actual=found.codes[0, 0], expected=codes, what=f"codes of {name}")
            assert_bitwise(
                actual=found.scale[0, 0].expand(codes.shape).contiguous(),
                expected=torch.from_numpy(paper.scales[name]),
                what=f"scale of {name}",
            )

    def test_codes_of_maps_differ_by_1_in_at_most_a_thousandth(self, both):
        """The exp of numpy and of torch differ in the last bits."""
        t, paper = both
        assert set(t.operands) == {*MAP_OPERANDS, *TOKEN_OPERANDS}
        for name in MAP_OPERANDS:
            difference = code_differences(t, paper, name)
            assert difference.max() <= 1, name
            assert int(difference.count_nonzero()) <= difference.numel() / 1000, name

    def test_outputs_differ_by_what_the_operands_differ_by(self, both):
        """Products are integer sums of codes, so results differ by what dequantized operands do.

        The bound adds float32's rounding: two scales, the sum over at most 13 tiles, the row sum of
        n_k exponentials and its logarithm (n_k roundings, and 2 per tile), and the division.
        """
        t, paper = both
        ours = {n: t.operands[n].dequantize()[0, 0].double() for n in t.operands}
        theirs = {n: torch.from_numpy(paper.codes[n] * paper.scales[n].astype(float)) for n in ours}
        n = sum(t.s.shape[-2:])
        # The codes of pv.p are those of exp(S - row max); o is divided by the row sum.
        s = t.s[0, 0].double()
        row_sum = torch.exp(s - s.amax(-1, keepdim=True)).sum(-1, keepdim=True)
        for name, left, right, transposed, factor in (
            ("o", "pv.p", "pv.v", False, 1 / row_sum),
            ("dv", "dv.p", "dv.do", True, 1.0),
            ("dq", "dq.ds", "dq.k", False, 40**-0.5),
            ("dk", "dk.ds", "dk.q", True, 40**-0.5),
        ):
            difference, size = (ours[left] - theirs[left]).abs(), ours[left].abs()
            if transposed:
                difference, size = difference.mT, size.mT
            right_abs = ours[right].abs()
            assert_within_bound(
                actual=getattr(t, name)[0, 0],
                exact=torch.from_numpy(getattr(paper, name)).double(),
                bound=factor * (difference @ right_abs + (n + 64) * U * (size @ right_abs))
                + 2.0**-126,
                what=name,
            )

    def test_the_logsumexp_is_the_same(self, both):
        """Up to float32's rounding errors.

        These are those of a sum of n_k exponentials, a dot product of 40 terms, and a few roundings
        of numbers no larger than the logits before and after smoothing.
        """
        t, paper = both
        size = 2 * t.s[0, 0].double().abs().amax(-1) + 16
        assert_within_bound(
            actual=t.lse[0, 0],
            exact=torch.from_numpy(paper.lse).double(),
            bound=(40 + t.s.shape[-1] + 16) * U * size,
            what="lse",
        )


@pytest.mark.parametrize("twin", ["swapped blocks", "no smoothing", "padded scale", "one tile"])
def test_the_comparison_with_the_paper_rejects_planted_bugs(twin):
    """Each planted bug changes more than a thousandth of the codes of some operand."""
    c = paper_case(100, 100)
    paper = run_paper(c, paper_algorithms.PAPER, 64, 32)
    right = with_precision(replace(SAGEBWD, block_q=64, block_k=32), Precision.FP16, "dp")
    wrong_spec, wrong_case = {
        "swapped blocks": (replace(right, block_q=32, block_k=64), c),
        "no smoothing": (replace(right, smoothing=Smoothing()), c),
        "padded scale": (right, replace(c, scale=64**-0.5)),
        "one tile": (replace(right, block_q=128, block_k=128), c),
    }[twin]
    for spec, arguments, is_right in ((right, c, True), (wrong_spec, wrong_case, False)):
        t = run_trace(arguments, spec)
        shares = [
            int(d.count_nonzero()) / d.numel()
            for d in (code_differences(t, paper, name) for name in MAP_OPERANDS)
        ]
        assert (max(shares) <= 1e-3) == is_right, shares


class TestRows:
    @given(cases(MODERATE), specs())
    @examples(30)
    def test_rows_that_attend_to_nothing_are_zero(self, case, spec):
        t = run_trace(case, spec)
        nothing = ~case.attends.expand(t.s.shape).any(-1)
        assert bool((t.o[nothing] == 0).all()) and bool((t.dq[nothing] == 0).all())
        assert bool((t.lse[nothing] == -torch.inf).all())
        assert not bool(t.o.isnan().any())

    @given(seed=st.integers(0, 99), block=blocks)
    @examples(20)
    def test_a_single_key_gets_all_of_the_attention(self, seed, block):
        """p has code 127 and scale 1/127, so o is V's dequantized row up to three roundings."""
        c = case(seed=seed, n_q=20, n_k=1, d=8)
        t = run_trace(c, replace(SAGEBWD, block_q=block, block_k=block))
        assert bool((t.operands["pv.p"].codes == 127).all())
        v_hat = t.operands["pv.v"].dequantize().double().expand(t.o.shape)
        assert_within_bound(actual=t.o, exact=v_hat, bound=4 * U * v_hat.abs(), what="o")
