"""`attention`: its gradients, the arguments it accepts, and what must not change a result."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.gradcheck import GradcheckError

from sagesim import (
    CAUSAL_SAFE,
    FACTORED_PV16,
    FACTORED_QK,
    FPA,
    FPA_BF16,
    PRESETS,
    SAGEBWD,
    SITES,
    Delta,
    Precision,
    Rounding,
    Smoothing,
    attention,
    with_precision,
)
from sagesim.emulator import forward, matmul, quantization, tiling
from tests.support import examples
from tests.support.assertions import assert_bitwise, assert_within_bound
from tests.support.calls import Outputs, run_attention, run_exact, run_trace
from tests.support.inputs import MILD, MODERATE, NASTY, Case, case, gaussian, random_mask
from tests.support.strategies import cases, seeds, specs

U = 2.0**-24
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ALL_INT8 = specs(precisions=[Precision.INT8], same_recompute=True)


def assert_same(actual: Outputs, expected: Outputs) -> None:
    for name in Outputs._fields:
        assert_bitwise(actual=getattr(actual, name), expected=getattr(expected, name), what=name)


class TestGradients:
    """A spec that rounds nothing computes attention, and its backward is the derivative."""

    @pytest.mark.slow
    @given(
        seed=seeds,
        n_q=st.integers(1, 5),
        n_k=st.integers(1, 5),
        d=st.integers(1, 3),
        d_v=st.integers(1, 3),
        mask=st.sampled_from(["none", "causal", "random"]),
        spec=specs(precisions=[Precision.FP32], blocks=st.sampled_from([1, 2, 3, 64])),
        scale=st.sampled_from([None, 0.5, -1.5]),
    )
    @examples(200)
    def test_gradcheck_on_200_shapes(self, seed, n_q, n_k, d, d_v, mask, spec, scale):
        """In float64, with and without smoothing, with delta from O and from P.

        fast_mode compares central differences along random directions. The next test compares
        whole Jacobians.
        """
        c = case(seed=seed, n_q=n_q, n_k=n_k, d=d, d_v=d_v, heads=(1,), scale=scale)
        if mask == "random":
            c = replace(c, attn_mask=random_mask(seed, (n_q, n_k), density=0.6))
        c = replace(c, is_causal=mask == "causal")
        leaves = [x.double().requires_grad_() for x in (c.q, c.k, c.v)]
        assert torch.autograd.gradcheck(
            lambda q, k, v: attention(replace(c, q=q, k=k, v=v), spec=spec), leaves, fast_mode=True
        )

    @pytest.mark.parametrize(
        "smoothing", [Smoothing(), Smoothing(q=True, k=True)], ids=["plain", "qk"]
    )
    @pytest.mark.parametrize("delta", Delta)
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_gradcheck_of_whole_jacobians(self, smoothing, delta, is_causal):
        c = case(seed=0, n_q=5, n_k=4, d=2, d_v=3, heads=(1,))
        leaves = [x.double().requires_grad_() for x in (c.q, c.k, c.v)]
        spec = replace(FPA, smoothing=smoothing, delta=delta, block_q=2, block_k=3)
        assert torch.autograd.gradcheck(
            lambda *x: attention(*x, spec=spec, is_causal=is_causal), leaves
        )

    def test_gradcheck_rejects_a_quantized_backward(self):
        """The gradients of an INT8 backward are not the derivative of an FP32 forward."""
        spec = replace(FPA, dk=SAGEBWD.dk)
        c = case(seed=0, n_q=4, n_k=4, d=3, heads=(1,))
        leaves = [x.double().requires_grad_() for x in (c.q, c.k, c.v)]
        with pytest.raises(GradcheckError, match="Jacobian mismatch"):
            torch.autograd.gradcheck(lambda *x: attention(*x, spec=spec), leaves)

    @given(cases(MILD), specs(precisions=[Precision.FP32]))
    @examples(30)
    def test_float64_inputs_are_computed_in_float64(self, case, spec):
        """The bound is 1e4 times float64's rounding of the largest number, far below float32's."""
        case = case.to(torch.float64)
        found, exact = run_attention(case, spec), run_exact(case)
        logits = (case.q.abs() @ case.k.abs().mT).amax() + 1
        top = case.do.abs().amax() * case.v.abs().amax() * 130
        size = {
            "o": case.v.abs().amax(),
            "dq": top * case.k.abs().amax(),
            "dk": top * case.q.abs().amax() * 130,
            "dv": case.do.abs().amax() * 130,
        }
        for name in Outputs._fields:
            assert_within_bound(
                actual=getattr(found, name),
                exact=getattr(exact, name),
                bound=1e4 * 2.0**-53 * logits * size[name],
                what=name,
            )

    @pytest.mark.parametrize("loss", [torch.sum, lambda o: o.square().sum()], ids=["sum", "square"])
    @pytest.mark.parametrize("wanted", ["q", "k", "v"])
    def test_differentiating_twice_raises_and_never_drops_a_term(self, loss, wanted):
        """A gradient penalty must not silently become 0.

        In the loss `sum` the gradient of o does not depend on the inputs; in `square` it does.
        """
        inputs = dict(zip("qkv", case(seed=0, n_q=3, n_k=4, d=4).qkvdo[:3], strict=True))
        leaves = [x.requires_grad_() for x in inputs.values()]
        o = attention(*leaves)
        (gradient,) = torch.autograd.grad(loss(o), inputs[wanted], create_graph=True)
        with pytest.raises(RuntimeError, match="differentiated twice"):
            gradient.square().sum().backward()

    @pytest.mark.parametrize("transform", ["grad", "vjp", "vmap"])
    def test_transforms_of_functions_are_refused(self, transform):
        q, k, v, do = (x[None] for x in case(seed=0, n_q=3, n_k=4, d=4).qkvdo)
        calls = {
            "grad": lambda: torch.func.grad(lambda q: attention(q, k, v).sum())(q),
            "vjp": lambda: torch.func.vjp(lambda q: attention(q, k, v), q)[1](do),
            "vmap": lambda: torch.vmap(attention)(q, k, v),
        }
        with pytest.raises(RuntimeError, match=r"inside a transform of torch\.func; grad, vjp"):
            calls[transform]()

    @pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
    def test_gradients_of_some_inputs_alone(self, wanted):
        c = case(seed=1, n_q=20, n_k=30, d=8)
        expected = run_attention(c, FACTORED_QK)[1:]
        leaves = [x.requires_grad_(i in wanted) for i, x in enumerate(c.qkvdo[:3])]
        o = attention(*leaves)
        found = torch.autograd.grad(o, [leaves[i] for i in wanted], c.do)
        for i, gradient in zip(wanted, found, strict=True):
            assert_bitwise(actual=gradient, expected=expected[i], what=f"gradient {i}")

    def test_without_gradients_the_output_is_the_same(self):
        c = case(seed=1, n_q=20, n_k=30, d=8)
        with torch.no_grad():
            o = attention(c.q, c.k, c.v)
        assert not o.requires_grad
        assert_bitwise(actual=o, expected=run_attention(c, FACTORED_QK).o, what="o")


STRIDES = {
    "tokens before heads": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2),
    "channels before tokens": lambda x: x.mT.contiguous().mT,
    "slice": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 4))[..., 1:-4, 3:-2],
    "every other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "reversed heads": lambda x: x.flip(-3).contiguous()[..., torch.tensor([1, 0]), :, :],
    "offset": lambda x: torch.cat([x.new_zeros(7), x.flatten()])[7:].view(x.shape),
}
"""Each gives a tensor of equal values with another memory layout."""


class TestInvariance:
    @pytest.mark.parametrize("preset", PRESETS)
    @pytest.mark.parametrize("n", [1, 15, 64, 130])
    def test_a_head_alone_gives_the_same_bytes(self, preset, n):
        c = case(seed=n, n_q=n, n_k=n, d=40, heads=(2, 3), is_causal=True)
        together = run_attention(c, PRESETS[preset])
        for b in range(2):
            for h in range(3):
                alone = run_attention(c.map(lambda x: x[b, h].clone()), PRESETS[preset])  # noqa: B023
                assert_same(alone, Outputs(*(x[b, h] for x in together)))

    @given(cases(MILD, heads=st.just((2, 2)), masks=("none", "causal")), specs())
    @examples(40)
    def test_a_head_alone_gives_the_same_bytes_under_any_spec(self, case, spec):
        together = run_attention(case, spec)
        alone = run_attention(case.map(lambda x: x[1, 0].clone()), spec)
        assert_same(alone, Outputs(*(x[1, 0] for x in together)))

    @pytest.mark.parametrize("preset", ["sagebwd", "factored", "fpa", "fpa_bf16"])
    def test_groups_of_heads_give_the_bytes_of_a_head_alone(self, preset):
        c = case(seed=1, n_q=64, n_k=64, d=8, heads=(300,))
        together = run_attention(c, PRESETS[preset])
        for h in (0, 7, 255, 256, 299):
            alone = run_attention(c.map(lambda x: x[h].clone()), PRESETS[preset])  # noqa: B023
            assert_same(alone, Outputs(*(x[h] for x in together)))

    @pytest.mark.parametrize(
        "spec",
        [SAGEBWD, replace(SAGEBWD, rounding=Rounding.stochastic(3))],
        ids=["half_even", "stochastic"],
    )
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_the_size_of_a_panel_changes_no_code_and_no_scale(self, monkeypatch, spec, is_causal):
        """The number of query blocks in a panel affects memory, not results."""
        c = case(seed=2, n_q=300, n_k=300, d=16, is_causal=is_causal)
        one = run_trace(c, spec)
        monkeypatch.setattr(tiling, "_PANEL_ENTRIES", 1)
        other = run_trace(c, spec)
        for name in one.operands:
            a, b = one.operands[name], other.operands[name]
            assert_bitwise(actual=b.codes, expected=a.codes, what=name)
            assert_bitwise(actual=b.scale, expected=a.scale, what=name)
        for name in ("o", "lse", "dq"):
            assert_bitwise(actual=getattr(other, name), expected=getattr(one, name), what=name)

    @pytest.mark.parametrize("preset", PRESETS)
    @pytest.mark.parametrize("strides", STRIDES)
    def test_strides_change_no_byte(self, preset, strides):
        """This includes the strides of do, which autograd passes on unchanged."""
        c = case(seed=3, n_q=70, n_k=130, d=40, heads=(2, 2))
        expected = run_attention(c, PRESETS[preset])
        assert_same(run_attention(c.map(STRIDES[strides]), PRESETS[preset]), expected)

    @pytest.mark.parametrize("preset", PRESETS)
    def test_a_storage_offset_changes_no_byte_if_nothing_is_padded(self, preset):
        """Float32 products on a CPU add in an order that depends on the alignment of memory."""
        c = case(seed=3, n_q=64, n_k=64, d=16, heads=(2,))
        expected = run_attention(c, PRESETS[preset])
        assert_same(run_attention(c.map(STRIDES["offset"]), PRESETS[preset]), expected)

    @pytest.mark.parametrize("preset", PRESETS)
    @pytest.mark.parametrize("axis", [-4, -3, -2, -1])
    def test_expanded_inputs_give_the_same_bytes(self, preset, axis):
        """One axis of q, k and v has stride 0, and do is that of `o.sum().backward()`."""
        c = case(seed=4, n_q=70, n_k=70, d=40, heads=(2, 2))
        expanded = c.map(lambda x: x.narrow(axis, 0, 1).expand(x.shape))
        expanded = replace(expanded, do=torch.ones(()).expand(c.do.shape))
        expected = run_attention(expanded.map(torch.Tensor.contiguous), PRESETS[preset])
        assert_same(run_attention(expanded, PRESETS[preset]), expected)

    @pytest.mark.parametrize("preset", PRESETS)
    def test_packed_qkv_gives_the_same_bytes(self, preset):
        packed = torch.randn(2, 50, 3, 4, 16, generator=torch.Generator().manual_seed(0))
        q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
        c = Case(q=q, k=k, v=v, do=q.flip(-1))
        assert_same(
            run_attention(c, PRESETS[preset]),
            run_attention(c.map(torch.Tensor.contiguous), PRESETS[preset]),
        )

    @given(cases(NASTY), specs())
    @examples(40)
    def test_inputs_are_never_changed(self, case, spec):
        before = [x.clone() for x in case.qkvdo]
        mask = None if case.attn_mask is None else case.attn_mask.clone()
        run_attention(case, spec)
        run_trace(case, spec)
        for x, y, name in zip(case.qkvdo, before, ("q", "k", "v", "do"), strict=True):
            assert_bitwise(actual=x, expected=y, what=name)
        if mask is not None:
            assert_bitwise(actual=case.attn_mask, expected=mask, what="mask")

    @pytest.mark.parametrize("preset", PRESETS)
    @pytest.mark.parametrize("kv_heads", [1, 2, 3])
    def test_grouped_heads_are_repeated_heads(self, preset, kv_heads):
        """o and dq are the same bytes; dk and dv are float32 sums over each group."""
        c = case(seed=5, n_q=40, n_k=70, d=16, heads=(2, 6), is_causal=True)
        groups = 6 // kv_heads
        k, v = c.k[:, :kv_heads], c.v[:, :kv_heads]
        grouped = run_attention(replace(c, k=k, v=v, enable_gqa=True), PRESETS[preset])
        wide = replace(c, k=k.repeat_interleave(groups, 1), v=v.repeat_interleave(groups, 1))
        repeated = run_attention(wide, PRESETS[preset])
        for name in ("o", "dq"):
            assert_bitwise(
                actual=getattr(grouped, name), expected=getattr(repeated, name), what=name
            )
        for name in ("dk", "dv"):
            parts = getattr(repeated, name).unflatten(1, (kv_heads, groups))
            assert_within_bound(
                actual=getattr(grouped, name),
                exact=parts.double().sum(2),
                bound=groups * U * parts.double().abs().sum(2),
                what=name,
            )

    @given(cases(MODERATE), specs())
    @examples(30)
    def test_two_runs_give_the_same_bytes(self, case, spec):
        assert_same(run_attention(case, spec), run_attention(case, spec))

    @given(cases(MODERATE, masks=("none", "causal")), specs(), st.integers(-20, 20))
    @examples(40)
    def test_a_power_of_two_times_v_or_do_multiplies_results_exactly(self, case, spec, exponent):
        """o is linear in V, and dv in dO.

        FP16 would underflow at some of these gains, so its sites use BF16.
        """
        spec = replace(
            spec,
            **{
                site: replace(spec.site(site), precision=Precision.BF16)
                for site in SITES
                if spec.site(site).precision in (Precision.FP16, Precision.INPUT16)
            },
        )
        gain = 2.0**exponent
        one = run_attention(case, spec)
        louder = run_attention(replace(case, v=case.v * gain), spec)
        assert_same(louder, Outputs(one.o * gain, one.dq * gain, one.dk * gain, one.dv))
        steeper = run_attention(replace(case, do=case.do * gain), spec)
        assert_same(steeper, Outputs(one.o, one.dq * gain, one.dk * gain, one.dv * gain))

    @given(cases(MODERATE), specs(roundings=st.just(SAGEBWD.rounding)))
    @examples(30)
    def test_negated_inputs_negate_results(self, case, spec):
        one = run_attention(case, spec)
        mirrored = run_attention(replace(case, q=-case.q, k=-case.k), spec)
        for name, sign in (("o", 1), ("dq", -1), ("dk", -1), ("dv", 1)):
            expected = sign * getattr(one, name)
            assert torch.equal(getattr(mirrored, name), expected), name  # 0 and -0 are equal
        negative = run_attention(replace(case, v=-case.v), spec)
        for name, sign in (("o", -1), ("dq", -1), ("dk", -1), ("dv", 1)):
            assert torch.equal(getattr(negative, name), sign * getattr(one, name)), name

    def test_memory_around_the_tokens_is_not_read(self):
        """Memory right before and right after the tokens of each head holds NaN."""
        c = case(seed=6, n_q=70, n_k=70, d=16)
        guarded = c.map(
            lambda x: torch.nn.functional.pad(x, (0, 0, 5, 60), value=math.nan)[..., 5:-60, :]
        )
        assert_same(run_attention(guarded, SAGEBWD), run_attention(c, SAGEBWD))


class TestStochasticRounding:
    def test_equal_seeds_give_equal_bytes_and_other_seeds_do_not(self):
        c = case(seed=0, n_q=64, n_k=64, d=16)
        one, same, other = (
            run_attention(c, replace(SAGEBWD, rounding=Rounding.stochastic(s))) for s in (1, 1, 2)
        )
        assert_same(one, same)
        assert not torch.equal(one.o, other.o) and not torch.equal(one.dk, other.dk)

    def test_random_numbers_are_the_same_in_all_heads_and_longer_sequences(self):
        """Blocks that both sequences contain have the same codes, of tokens and of maps.

        The causal mask gives these blocks the same softmax in both sequences.
        """
        spec = replace(
            SAGEBWD, rounding=Rounding.stochastic(5), smoothing=Smoothing(), delta=Delta.FROM_P
        )
        short = case(seed=1, n_q=128, n_k=128, d=16, is_causal=True)
        extra = case(seed=2, n_q=100, n_k=100, d=16)
        long = Case(
            **{
                name: torch.cat([x, y], -2)
                for name, x, y in zip(("q", "k", "v", "do"), short.qkvdo, extra.qkvdo, strict=True)
            },
            is_causal=True,
        )
        twice = long.map(lambda x: x.repeat(1, 2, 1, 1))
        one, other = run_trace(short, spec), run_trace(twice, spec)
        for name, x in one.operands.items():
            y = other.operands[name]
            rows, columns = x.codes.shape[-2:]
            for head in range(2):
                assert_bitwise(
                    actual=y.codes[:, head, :rows, :columns].contiguous(),
                    expected=x.codes[:, 0].contiguous(),
                    what=f"{name} of head {head}",
                )

    def test_the_mean_over_seeds_approaches_the_unrounded_product(self):
        """The mean of o over 400 seeds lies within 6 standard deviations of the exact o.

        Only V has a rounding error, and o is linear in V's codes. The standard deviation of a code
        is at most half a scale.
        """
        c = case(seed=3, n_q=4, n_k=32, d=4)
        spec = with_precision(FPA, Precision.INT8, "pv")
        # q = 0 makes the rows of P uniform. Every code of P is then 127, without an error.
        c = replace(c, q=torch.zeros_like(c.q))
        exact = c.v.double().mean(-2, keepdim=True).expand(1, 1, 4, 4)
        runs = 400
        total = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
        for seed in range(runs):
            rounding = Rounding.stochastic(seed)
            total += run_attention(c, replace(spec, rounding=rounding)).o.double()
        scale = c.v.abs().amax().double() / 127
        deviation = scale / 2 / math.sqrt(32 * runs)
        bound = (6 * deviation + 64 * U * c.v.abs().amax()).expand_as(exact)
        assert_within_bound(actual=total / runs, exact=exact, bound=bound, what="mean of o")
        nearest = run_attention(c, spec).o
        with pytest.raises(AssertionError, match="exceed"):
            assert_within_bound(actual=nearest, exact=exact, bound=bound, what="o, half-even")


class TestShapes:
    @pytest.mark.parametrize("preset", PRESETS)
    @pytest.mark.parametrize(("n_q", "n_k"), [(0, 5), (5, 0), (0, 0), (1, 1), (1, 130), (130, 1)])
    def test_short_and_empty_sequences(self, preset, n_q, n_k):
        c = case(seed=0, n_q=n_q, n_k=n_k, d=16, d_v=24, heads=(2, 1))
        found = run_attention(c, PRESETS[preset])
        assert found.o.shape == c.do.shape
        for gradient, x in zip(found[1:], c.qkvdo, strict=False):
            assert gradient.shape == x.shape and gradient.isfinite().all()
        if 0 in (n_q, n_k):
            assert not any(bool(x.any()) for x in found)

    @pytest.mark.parametrize("smoothing", [Smoothing(q=True), Smoothing(q=True, k=True)])
    @pytest.mark.parametrize(("n_q", "n_k"), [(0, 5), (5, 0)])
    def test_empty_sequences_can_be_smoothed(self, n_q, n_k, smoothing):
        c = case(seed=0, n_q=n_q, n_k=n_k, d=16)
        assert not run_attention(c, replace(SAGEBWD, smoothing=smoothing)).o.any()

    @pytest.mark.parametrize("heads", [(0,), (2, 0), (0, 3)])
    def test_zero_heads_are_accepted(self, heads):
        c = case(seed=0, n_q=5, n_k=6, d=8, heads=heads)
        assert run_attention(c, SAGEBWD).dq.shape == (*heads, 5, 8)

    @pytest.mark.parametrize("heads", [(), (3,), (1, 2), (2, 1, 2)])
    def test_any_number_of_leading_axes_is_accepted(self, heads):
        c = case(seed=0, n_q=5, n_k=6, d=8, heads=heads)
        found = run_attention(c, SAGEBWD)
        flat = run_attention(c.map(lambda x: x.reshape(-1, *x.shape[-2:])), SAGEBWD)
        assert_same(Outputs(*(x.reshape(-1, *x.shape[-2:]) for x in found)), flat)

    @pytest.mark.parametrize("d", [1, 3, 40, 72, 80, 96, 256])
    def test_the_default_scale_is_that_of_the_given_head_size(self, d):
        c = case(seed=0, n_q=20, n_k=20, d=d)
        one, other = run_attention(c, FPA), run_attention(replace(c, scale=1 / math.sqrt(d)), FPA)
        assert_same(one, other)
        padded = replace(c, scale=1 / math.sqrt(d + 16))
        assert not torch.equal(run_attention(padded, FPA).o, one.o)


class TestDtypes:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("preset", PRESETS)
    def test_outputs_have_the_inputs_dtype(self, preset, dtype):
        found = run_attention(case(seed=0, n_q=9, n_k=10, d=8).to(dtype), PRESETS[preset])
        assert {x.dtype for x in found} == {dtype}

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_input16_is_the_inputs_own_16_bit_format(self, dtype):
        """For wider inputs it is FP16 in QK and its recomputation, and BF16 elsewhere."""
        c = case(seed=0, n_q=50, n_k=60, d=8).to(dtype)
        spec = with_precision(FPA, Precision.INPUT16)
        expected = with_precision(FPA, Precision.FP16)
        if dtype is torch.bfloat16:
            expected = with_precision(FPA, Precision.BF16)
        elif dtype is not torch.float16:
            expected = with_precision(expected, Precision.BF16, "pv", "dv", "dp", "dq", "dk")
        assert_same(run_attention(c, spec), run_attention(c, expected))
        # All bfloat16 numbers of this size are numbers of FP16; P and dS are not.
        for site in ("dv", "dq", "dk") if dtype is torch.bfloat16 else SITES:
            is_fp16 = expected.site(site).precision is Precision.FP16
            other = Precision.BF16 if is_fp16 else Precision.FP16
            twin = run_trace(c, with_precision(expected, other, site))
            same = run_trace(c, spec)
            tensors = ("s", "o", "ds", "dq", "dk", "dv")
            assert any(not torch.equal(getattr(twin, t), getattr(same, t)) for t in tensors)

    @pytest.mark.parametrize("preset", ["sagebwd", "factored", "factored_qk", "causal_safe"])
    def test_small_gradients_of_float32_are_not_lost(self, preset):
        """Gradients of a mean over many tokens: FP16 holds none of them, and BF16 all."""
        c = case(seed=0, n_q=50, n_k=60, d=8)
        small = replace(c, do=c.do * 2.0**-40)
        one, found = run_attention(c, PRESETS[preset]), run_attention(small, PRESETS[preset])
        assert_same(found, Outputs(one.o, *(x * 2.0**-40 for x in one[1:])))
        in_fp16 = with_precision(PRESETS[preset], Precision.FP16, "dp", "dq", "dk", "dv")
        assert not run_attention(small, in_fp16).dq.any()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("preset", ["sagebwd", "factored", "fpa"])
    def test_16_bit_inputs_are_computed_in_float32_and_outputs_rounded_once(self, dtype, preset):
        spec = PRESETS[preset]
        if preset != "fpa":
            input16 = Precision.BF16 if dtype is torch.bfloat16 else Precision.FP16
            spec = with_precision(spec, input16, "dp")
        spec = replace(spec, delta=Delta.FROM_P)  # otherwise o is rounded before delta
        c = case(seed=1, n_q=50, n_k=60, d=8).to(dtype)
        found, wide = run_attention(c, spec), run_attention(c.to(torch.float32), spec)
        assert_same(found, Outputs(*(x.to(dtype) for x in wide)))


class TestCallersSettings:
    CASE = case(seed=0, n_q=70, n_k=90, d=64, heads=(2,), is_causal=True)

    @pytest.mark.parametrize("preset", PRESETS)
    def test_autocast_casts_as_sdpa_does(self, preset):
        expected = run_attention(self.CASE.to(torch.bfloat16), PRESETS[preset])
        q, k, v = (x.clone().requires_grad_() for x in self.CASE.qkvdo[:3])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            o = attention(q, k, v, spec=PRESETS[preset], is_causal=True)
            sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        assert o.dtype is sdpa.dtype is torch.bfloat16
        grads = torch.autograd.grad(o, (q, k, v), self.CASE.do.bfloat16())
        assert {x.dtype for x in grads} == {torch.float32}, "gradients have their leaves' dtype"
        assert_same(Outputs(o.detach(), *(g.bfloat16() for g in grads)), expected)
        for gradient, narrow in zip(grads, expected[1:], strict=True):
            assert_bitwise(actual=gradient, expected=narrow.float(), what="gradient")

    def test_autocast_leaves_float64_alone(self):
        c = self.CASE.to(torch.float64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            o = attention(c.q, c.k, c.v, spec=FPA, is_causal=True)
        assert_bitwise(actual=o, expected=run_attention(c, FPA).o, what="o")

    @pytest.mark.parametrize("preset", ["fpa", "sagebwd"])
    def test_a_backward_under_autocast_is_the_same(self, preset):
        expected = run_attention(self.CASE, PRESETS[preset])
        leaves = [x.clone().requires_grad_() for x in self.CASE.qkvdo[:3]]
        o = attention(*leaves, spec=PRESETS[preset], is_causal=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            grads = torch.autograd.grad(o, leaves, self.CASE.do)
        assert_same(Outputs(o.detach(), *grads), expected)

    @pytest.mark.parametrize("preset", ["fpa", "sagebwd", "factored"])
    @pytest.mark.parametrize("setting", ["high", "medium"])
    def test_float32_matmul_precision_changes_no_byte_and_is_restored(self, preset, setting):
        """Products smaller than 256 tokens of 256 channels ignore the setting.

        With "medium", a CPU that supports it multiplies this one in bfloat16. `has_effect` checks
        that it does.
        """
        c = case(seed=1, n_q=256, n_k=256, d=256, heads=(1,))
        expected, product = run_attention(c, PRESETS[preset]), c.q @ c.k.mT
        torch.set_float32_matmul_precision(setting)
        try:
            has_effect = not torch.equal(c.q @ c.k.mT, product)
            found, traced = run_attention(c, PRESETS[preset]), run_trace(c, PRESETS[preset])
            assert torch.get_float32_matmul_precision() == setting
        finally:
            torch.set_float32_matmul_precision("highest")
        assert_same(found, expected)
        assert_same(Outputs(traced.o, traced.dq, traced.dk, traced.dv), expected)
        if setting == "medium" and torch.cpu._is_avx512_bf16_supported():
            assert has_effect, "the setting changed nothing, so this test proves nothing"

    @pytest.mark.slow
    @pytest.mark.parametrize("value", ["tf32", "bf16", "none"])
    def test_fp32_precision_changes_no_byte_and_is_restored(self, value):
        """In a process of its own, because PyTorch does not allow both kinds of setting in one."""
        script = f"""
import torch
from sagesim import attention, FPA
g = torch.Generator().manual_seed(0)
q, k, v = torch.randn(3, 1, 256, 256, generator=g)  # smaller products ignore the settings
before = attention(q, k, v, spec=FPA)
settings = [torch.backends.mkldnn.matmul]
if {value!r} != "bf16":
    settings.append(torch.backends.cuda.matmul)
for setting in settings:
    setting.fp32_precision = {value!r}
assert torch.equal(attention(q, k, v, spec=FPA), before)
assert all(setting.fp32_precision == {value!r} for setting in settings)
"""
        subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, env=os.environ)

    def test_settings_are_restored_if_the_call_raises(self):
        torch.set_float32_matmul_precision("high")
        try:
            with pytest.raises(ValueError, match="do is"):
                run_trace(replace(self.CASE, do=self.CASE.do.half()), FPA)
            assert torch.get_float32_matmul_precision() == "high"
        finally:
            torch.set_float32_matmul_precision("highest")

    @pytest.mark.parametrize("threads", [1, 2])
    def test_threads_change_no_int8_code(self, threads):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            t = run_trace(self.CASE, SAGEBWD)
        finally:
            torch.set_num_threads(before)
        reference = run_trace(self.CASE, SAGEBWD)
        for name in ("qk.q", "qk.k", "pv.v", "dv.do", "pv.p"):
            assert_bitwise(
                actual=t.operands[name].codes, expected=reference.operands[name].codes, what=name
            )


class TestNumbers:
    @given(cases(NASTY), ALL_INT8)
    @examples(150)
    def test_finite_inputs_of_int8_specs_give_finite_outputs(self, case, spec):
        """Regions of zeros, subnormal numbers, outliers of 6e4, constant keys, masked rows."""
        for name, x in zip(Outputs._fields, run_attention(case, spec), strict=True):
            assert bool(x.isfinite().all()), name

    @pytest.mark.parametrize("preset", ["sagebwd", "sagebwd_all_int8", "factored"])
    @given(case=cases(NASTY))
    @examples(30)
    def test_finite_inputs_of_int8_presets_give_finite_outputs(self, preset, case):
        for name, x in zip(Outputs._fields, run_attention(case, PRESETS[preset]), strict=True):
            assert bool(x.isfinite().all()), name

    @pytest.mark.parametrize("preset", ["sagebwd_all_int8", "sagebwd", "factored", "fpa"])
    @pytest.mark.parametrize("tensor", ["q", "k", "v", "do"])
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_nan_and_infinity_reach_the_output(self, preset, tensor, bad):
        """No code hides it: the row of the bad element is not finite in a result."""
        c = case(seed=0, n_q=70, n_k=70, d=8)
        x = getattr(c, tensor).clone()
        x[..., 66, 3] = bad
        found = run_attention(replace(c, **{tensor: x}), PRESETS[preset])
        output = {"q": "o", "k": "o", "v": "o", "do": "dv"}[tensor]
        assert not bool(getattr(found, output).isfinite().all())
        row = getattr(found, {"q": "o", "k": "dk", "v": "o", "do": "dq"}[tensor])[..., 66, :]
        assert not bool(row.isfinite().all())

    @pytest.mark.parametrize("preset", ["sagebwd_all_int8", "sagebwd", "factored", "fpa"])
    @pytest.mark.parametrize("tensor", ["q", "k", "v", "do"])
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_masked_entry_carries_no_nan(self, preset, tensor, bad):
        """A NaN of a token reaches no block of tokens that is masked from it."""
        spec = replace(PRESETS[preset], smoothing=Smoothing())
        c = replace(case(seed=0, n_q=256, n_k=256, d=8), is_causal=True)
        x = getattr(c, tensor).clone()
        x[..., 100, 3] = bad
        found = run_attention(replace(c, **{tensor: x}), spec)
        for name in ("o", "dq"):
            assert bool(getattr(found, name)[..., :64, :].isfinite().all()), name
        if tensor in ("q", "do"):
            for name in ("dk", "dv"):
                assert bool(getattr(found, name)[..., 128:, :].isfinite().all()), name

    @pytest.mark.parametrize("preset", ["sagebwd_all_int8", "sagebwd", "factored", "fpa"])
    @pytest.mark.parametrize("tensor", ["q", "k", "v", "do"])
    @pytest.mark.parametrize("bad", [1.0, 3e38, math.nan, math.inf])
    def test_looking_for_a_nan_changes_no_byte(self, monkeypatch, preset, tensor, bad):
        """A CPU looks for a NaN or an extreme scale. A GPU assumes that there is one."""
        c = case(seed=0, n_q=130, n_k=130, d=8, is_causal=True)
        x = getattr(c, tensor).clone()
        x[..., 66, 3] = bad
        c = replace(c, **{tensor: x})
        found = run_attention(c, PRESETS[preset])
        for module in (quantization, forward, matmul):
            monkeypatch.setattr(module, "may_hold", lambda condition: True)
        for name, ours in zip(Outputs._fields, run_attention(c, PRESETS[preset]), strict=True):
            expected = getattr(found, name)
            assert bool((ours.isfinite() == expected.isfinite()).all()), name
            assert bool((ours == expected)[expected.isfinite()].all()), name

    @pytest.mark.parametrize("preset", sorted(PRESETS))
    def test_nothing_depends_on_numbers_that_only_a_device_knows(self, preset):
        """Tensors on the meta device have no numbers, and looking at one raises."""
        q, k, v, do = torch.randn(4, 1, 2, 130, 16, device="meta")
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = attention(*leaves, spec=PRESETS[preset], is_causal=True)
        assert o.shape == q.shape and o.device == q.device
        for x, gradient in zip(leaves, torch.autograd.grad(o, leaves, do), strict=True):
            assert gradient.shape == x.shape

    @pytest.mark.parametrize("preset", ["sagebwd_all_int8", "sagebwd", "factored", "fpa"])
    @pytest.mark.parametrize("tensor", ["q", "k", "v"])
    def test_large_finite_inputs_give_finite_outputs(self, preset, tensor):
        """No scale is multiplied in an order that overflows if the result does not."""
        spec = with_precision(PRESETS[preset], Precision.FP32, "dp")
        c = case(seed=0, n_q=70, n_k=70, d=16)
        c = replace(c, **{tensor: 1e37 * getattr(c, tensor)}, do=1e-3 * c.do)
        if tensor == "v":
            c = replace(c, do=1e-37 * c.do)
        for name, x in zip(Outputs._fields, run_attention(c, spec), strict=True):
            assert bool(x.isfinite().all()), name

    @pytest.mark.parametrize("preset", ["sagebwd", "factored", "fpa_fp16", "causal_safe"])
    def test_a_causal_mask_as_a_tensor_gives_the_bits_of_is_causal(self, preset):
        """A kernel engineer passes one or the other."""
        c = replace(case(seed=0, n_q=300, n_k=300, d=40), is_causal=True)
        given = replace(c, is_causal=False, attn_mask=c.attends)
        expected, actual = (run_attention(x, PRESETS[preset]) for x in (c, given))
        for name in Outputs._fields:
            a, b = getattr(actual, name), getattr(expected, name)
            assert_bitwise(actual=a, expected=b, what=name)

    def test_an_outlier_changes_no_code_of_other_blocks(self):
        """Each block has its own scale."""
        c = case(seed=1, n_q=64, n_k=192, d=16)
        k = c.k.clone()
        k[..., 100, 5] = 6e4
        spec = replace(SAGEBWD, smoothing=Smoothing())
        codes = [run_trace(replace(c, k=x), spec).operands["qk.k"].codes for x in (c.k, k)]
        for block in (slice(0, 64), slice(128, 192)):
            assert torch.equal(codes[0][..., block, :], codes[1][..., block, :])
        assert int(codes[1][..., 64:128, :].count_nonzero()) == 1


class TestInvalidArguments:
    """Each error names the value at fault."""

    Q = torch.zeros(2, 3, 8)

    def assert_raises(self, error, words, q=Q, k=Q, v=Q, **options):
        with pytest.raises(error) as raised:
            attention(q, k, v, **options)
        for word in words:
            assert word in str(raised.value), raised.value

    def test_different_dtypes(self, as_installed):
        self.assert_raises(TypeError, ["torch.float32", "torch.float16"], k=self.Q.half())

    @pytest.mark.parametrize("scale", [torch.tensor(0.3), torch.nn.Parameter(torch.ones(()))])
    def test_a_tensor_as_scale(self, as_installed, scale):
        self.assert_raises(TypeError, ["scale", "torch.float32", "number"], scale=scale)

    def test_a_string_as_scale(self, as_installed):
        self.assert_raises(TypeError, ["scale", "'0.5'"], scale="0.5")

    def test_integers_under_autocast(self, as_installed):
        x = self.Q.long()
        with torch.autocast("cpu", torch.bfloat16):
            self.assert_raises(TypeError, ["torch.int64"], q=x, k=x, v=x)

    @pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn])
    def test_dtypes_that_are_not_floats(self, as_installed, dtype):
        x = self.Q.to(dtype)
        self.assert_raises(TypeError, [str(dtype)], q=x, k=x, v=x)

    @pytest.mark.parametrize(
        ("q", "k", "v", "words"),
        [
            ((8,), (3, 8), (3, 8), ["(8,)"]),
            ((2, 3, 8), (2, 3, 9), (2, 3, 8), ["head sizes", "(2, 3, 9)"]),
            ((2, 3, 0), (2, 3, 0), (2, 3, 8), ["head size 0"]),
            ((2, 3, 8), (2, 3, 8), (2, 3, 0), ["head size 0"]),
            ((2, 3, 8), (2, 4, 8), (2, 3, 8), ["k and v", "(2, 4, 8)"]),
            ((2, 3, 8), (1, 3, 8), (1, 3, 8), ["enable_gqa=True", "(1, 3, 8)"]),
            ((2, 3, 8), (3, 8), (3, 8), ["batch axes", "(3, 8)"]),
            ((2, 2, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8), ["batch axes", "(1, 2, 3, 8)"]),
        ],
    )
    def test_shapes(self, as_installed, q, k, v, words):
        q, k, v = (torch.zeros(shape) for shape in (q, k, v))
        self.assert_raises(ValueError, words, q=q, k=k, v=v)

    @pytest.mark.parametrize("kv_heads", [0, 2, 4])
    def test_numbers_of_heads_that_are_no_multiple(self, as_installed, kv_heads):
        k = torch.zeros(kv_heads, 3, 8)
        q = torch.zeros(3, 3, 8)
        self.assert_raises(ValueError, ["multiple", "(3, 3, 8)"], q=q, k=k, v=k, enable_gqa=True)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int64])
    def test_masks_that_are_not_boolean(self, as_installed, dtype):
        """Additive masks are not supported, and are not interpreted as boolean ones."""
        mask = torch.ones(3, 3, dtype=dtype)
        self.assert_raises(ValueError, ["attn_mask", str(dtype), "boolean"], attn_mask=mask)

    @pytest.mark.parametrize("shape", [(4, 3), (3, 4), (3, 3, 3), (1, 2, 3, 3), (2, 1)])
    def test_masks_that_do_not_broadcast(self, as_installed, shape):
        mask = torch.ones(shape, dtype=torch.bool)
        self.assert_raises(ValueError, ["attn_mask", str(shape), "(2, 3, 3)"], attn_mask=mask)

    def test_a_mask_together_with_is_causal(self):
        mask = torch.ones(3, 3, dtype=torch.bool)
        self.assert_raises(ValueError, ["attn_mask", "is_causal"], attn_mask=mask, is_causal=True)

    @pytest.mark.parametrize("option", ["dropout_p", "mask", "causal"])
    def test_unknown_arguments(self, as_installed, option):
        self.assert_raises(TypeError, [option], **{option: 0.1})


def test_errors_of_presets_fall_with_precision():
    """Each step up in precision lowers the error of every result, on one problem."""
    c = case(seed=9, n_q=256, n_k=256, d=64, kinds=(gaussian,) * 4)
    exact = run_exact(c)

    def error(spec, name) -> float:
        found = getattr(run_attention(c, spec), name).double()
        return float((found - getattr(exact, name)).norm() / getattr(exact, name).norm())

    for name in Outputs._fields:
        errors = [error(s, name) for s in (SAGEBWD, FACTORED_PV16, FPA_BF16, FPA)]
        if name == "o":
            errors = errors[:1] + errors[2:]
        assert np.all(np.diff(errors) < 0), (name, errors)
    assert error(CAUSAL_SAFE, "dq") < error(SAGEBWD, "dq")
