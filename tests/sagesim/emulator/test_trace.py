"""`trace` gives the bytes of `attention`, and its intermediates agree with each other."""

import copy
import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from sagesim import (
    FPA,
    PRESETS,
    SAGEBWD,
    SITES,
    Delta,
    Granularity,
    Precision,
    Smoothing,
    attribute,
    exact_backward,
    quantize,
    trace,
    with_precision,
)
from sagesim.spec import MAPS, OPERANDS
from tests.support import examples, float32_bound
from tests.support.assertions import assert_bitwise, assert_within_bound
from tests.support.calls import run_attention, run_exact, run_trace
from tests.support.inputs import MILD, MODERATE, NASTY, case, random_mask
from tests.support.strategies import cases, specs

U = 2.0**-24
OUTPUTS = ("o", "dq", "dk", "dv")


@given(cases(MILD), specs())
@examples(60)
def test_outputs_are_the_bytes_of_attention(case, spec):
    found, expected = run_trace(case, spec), run_attention(case, spec)
    for name in OUTPUTS:
        assert_bitwise(actual=getattr(found, name), expected=getattr(expected, name), what=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("preset", PRESETS)
def test_outputs_are_the_bytes_of_attention_in_every_dtype(preset, dtype):
    c = case(seed=0, n_q=70, n_k=90, d=16, heads=(2, 1), is_causal=True).to(dtype)
    found, expected = run_trace(c, PRESETS[preset]), run_attention(c, PRESETS[preset])
    for name in OUTPUTS:
        assert_bitwise(actual=getattr(found, name), expected=getattr(expected, name), what=name)
    compute = torch.float64 if dtype is torch.float64 else torch.float32
    for name in ("s", "p", "lse", "delta", "dp", "ds", "s_recompute", "p_recompute"):
        assert getattr(found, name).dtype is compute, name


@pytest.mark.parametrize("preset", PRESETS)
def test_autocast_casts_as_it_does_for_attention(preset):
    c, spec = case(seed=0, n_q=70, n_k=90, d=16, heads=(2,)), PRESETS[preset]
    narrow = c.to(torch.bfloat16)
    expected, of_attention = run_trace(narrow, spec), run_attention(narrow, spec)
    reference, own = run_exact(narrow), exact_backward(narrow, expected)
    with torch.autocast("cpu", torch.bfloat16):
        found, exactly = run_trace(c, spec), run_exact(c)
        own_under_autocast, errors = exact_backward(c, found), attribute(c, base=spec).errors
    for name in OUTPUTS:
        expected_output = getattr(of_attention, name)
        assert_bitwise(actual=getattr(found, name), expected=expected_output, what=name)
    for name in ("s", "dp", "ds"):
        for a, b in ((found, expected), (exactly, reference), (own_under_autocast, own)):
            assert_bitwise(actual=getattr(a, name), expected=getattr(b, name), what=name)
    assert errors == attribute(narrow, base=spec).errors


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_trace_can_be_copied(copied):
    c = case(seed=0, n_q=9, n_k=9, d=8, heads=(2,))
    found = run_trace(c, SAGEBWD)
    other = copied(found)
    assert other.spec == found.spec and other.vanished == found.vanished
    assert_bitwise(actual=other.ds, expected=found.ds, what="ds")
    for name, x in found.operands.items():
        assert_bitwise(actual=other.operands[name].codes, expected=x.codes, what=name)


@pytest.mark.parametrize("preset", ["sagebwd", "fpa"])
def test_no_tensor_of_a_trace_requires_a_gradient(preset):
    c = case(seed=0, n_q=9, n_k=9, d=8, heads=(2,))
    leaves = (x.requires_grad_() for x in (c.q, c.k, c.v))
    found = trace(*leaves, c.do, spec=PRESETS[preset])
    tensors = {name: x for name in found.__slots__ if isinstance(x := getattr(found, name), Tensor)}
    assert len(tensors) > 10
    assert [name for name, x in tensors.items() if x.requires_grad] == []


@given(cases(NASTY), specs(precisions=[Precision.INT8], same_recompute=True))
@examples(40)
def test_every_int8_operand_is_codes_in_range_times_a_scale(case, spec):
    t = run_trace(case, spec)
    assert set(t.operands) == {f"{site}.{tensor}" for site in SITES for tensor in OPERANDS[site]}
    for name, x in t.operands.items():
        assert x.codes.dtype is torch.int8 and x.scale.dtype is torch.float32
        assert x.codes.min() >= -127 and x.codes.max() <= 127, name
        # The scale of pv.p is exp(tile row max - row max) / 127, which may underflow.
        assert bool((x.scale >= 0).all()) if name == "pv.p" else bool((x.scale > 0).all()), name
        assert x.scale.isfinite().all(), name
        assert torch.broadcast_shapes(x.codes.shape, x.scale.shape) == x.codes.shape
        assert x.dequantize().shape == x.codes.shape


@pytest.mark.parametrize("precision", [Precision.FP8_E4M3, Precision.FP8_E5M2])
def test_fp8_operands_are_float8(precision):
    t = run_trace(case(seed=0, n_q=20, n_k=30, d=8), with_precision(SAGEBWD, precision))
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[precision]
    assert {x.codes.dtype for x in t.operands.values()} == {dtype}
    for name, x in t.operands.items():
        assert x.codes.float().isfinite().all(), name


def follows_a_bound(spec, name: str) -> bool:
    """Whether an operand has scales per row bound, or rows multiplied by them.

    `operands/test_row_bounds.py` compares these with docs/numerics.md.
    """
    site, tensor = name.split(".")
    if spec.site(site).lhs is not Granularity.PerRowBound:
        return False
    return tensor in MAPS or site in ("dv", "dk")


def recompute_as_forward(spec):
    """The spec with qk_recompute rounded as qk.

    Otherwise P = exp(S - L) may overflow (docs/numerics.md), and no bound would hold.
    """
    return replace(spec, qk_recompute=spec.qk)


@given(cases(MILD), specs(precisions=[Precision.INT8, Precision.FP16, Precision.FP32]))
@examples(40)
def test_operands_dequantize_to_what_was_quantized(case, spec):
    """Up to half a scale, or one scale in stochastic rounding, plus float32's rounding.

    Unsmoothed q, k, v and do are the inputs, ds is in the trace, and dv.p is its p_recompute.
    """
    spec = recompute_as_forward(replace(spec, smoothing=Smoothing()))
    t = run_trace(replace(case, enable_gqa=False), spec)
    # Padding is zero: queries that attend to nothing, and keys that no query attends to.
    valid_q, valid_k = (case.attends.expand(t.s.shape).any(axis)[..., None] for axis in (-1, -2))
    q, do = (x.where(valid_q, 0.0) for x in (case.q, case.do))
    k, v = (x.where(valid_k, 0.0) for x in (case.k, case.v))
    sources = {"q": q, "k": k, "v": v, "do": do, "ds": t.ds}
    scales = 0.5 if spec.rounding.seed is None else 1.0
    for name, x in t.operands.items():
        tensor = name.split(".")[1]
        if name == "pv.p" or follows_a_bound(spec, name):
            continue  # pv.p is not normalised, and the trace has no such tensor
        source = t.p_recompute if tensor == "p" else sources[tensor]
        scale = x.scale.double().expand(x.codes.shape)
        # inverse, product and scale are rounded once each; see test_quantize.
        underflow = 127 * 2.0**-126
        assert_within_bound(
            actual=x.codes.double() * scale,
            exact=source.double(),
            bound=scale * (scales + 1.001 * 3 * U * 127) + underflow,
            what=name,
        )


SCALED_SPECS = specs(precisions=[Precision.INT8, Precision.FP8_E4M3, Precision.FP8_E5M2])


@given(cases(MODERATE, masks=("none", "causal")), SCALED_SPECS)
@examples(40)
def test_operands_are_what_quantize_makes_of_their_tensors(case, spec):
    """With the granularity, block size and random stream of each operand."""
    n_q, n_k = case.q.shape[-2], case.k.shape[-2]
    if case.is_causal and n_k > n_q:  # keys beyond the last query are padding
        case = replace(case, k=case.k[..., :n_q, :], v=case.v[..., :n_q, :])
    spec = recompute_as_forward(replace(spec, smoothing=Smoothing()))
    t = run_trace(case, spec)
    sources = dict(zip(("q", "k", "v", "do"), case.qkvdo, strict=True))
    sources |= {"p": t.p_recompute, "ds": t.ds}
    for name, found in t.operands.items():
        site, tensor = name.split(".")
        if name == "pv.p" or follows_a_bound(spec, name):
            continue  # pv.p is not normalised, and the trace has no such tensor
        matmul = spec.site(site)
        granularity = matmul.lhs if OPERANDS[site][0] == tensor else matmul.rhs
        size = spec.block_k if tensor in ("k", "v") else spec.block_q
        expected = quantize(
            sources[tensor],
            granularity,
            block=(spec.block_q, spec.block_k) if granularity.is_map else size,
            precision=matmul.precision,
            rounding=spec.rounding,
            tensor=tensor,
        )
        # Adding 0 turns the -0 of float8 into 0, which masked entries have in the trace.
        codes = (x.codes.float() + 0 for x in (found, expected))
        assert_bitwise(actual=next(codes), expected=next(codes), what=f"codes of {name}")
        # Tiles beyond the diagonal of a causal map have codes 0 and scale 1 in the trace.
        nonzero = found.codes.float() != 0
        scales = (x.scale.expand(nonzero.shape)[nonzero] for x in (found, expected))
        assert_bitwise(actual=next(scales), expected=next(scales), what=f"scale of {name}")


@given(cases(MILD), specs())
@examples(40)
def test_ds_is_p_times_dp_minus_delta_and_masked_entries_have_their_values(case, spec):
    t = run_trace(case, recompute_as_forward(spec))
    attends = case.attends.expand(t.s.shape)
    assert bool((t.s[~attends] == -math.inf).all())
    assert bool((t.s_recompute[~attends] == -math.inf).all())
    for name in ("p", "p_recompute", "dp", "ds"):
        assert bool((getattr(t, name)[~attends] == 0).all()), name
    p, dp, delta = t.p_recompute.double(), t.dp.double(), t.delta.double()[..., None]
    product = p * (dp - delta)
    assert_within_bound(
        actual=t.ds,
        exact=product.masked_fill(~attends, 0),
        bound=1.001 * 2 * U * p * ((dp - delta).abs()) + 2.0**-149,
        what="ds",
    )
    some = attends.any(-1)
    assert torch.equal(t.lse == -math.inf, ~some)


@given(cases(MODERATE), specs())
@examples(30)
def test_rows_of_p_sum_to_1(case, spec):
    """Up to float32's rounding of a sum of n_k exponentials, of the logsumexp L, and of S - L.

    L and S - L are rounded relative to S. The constant that smoothing subtracts from S is at most
    as large as the largest possible S.
    """
    t = run_trace(case, spec)
    d, n_k = case.q.shape[-1], case.k.shape[-2]
    largest = 2 * float((case.q.abs().double() @ case.k.abs().double().mT).amax()) / d**0.5
    rounding = 1.01 * U * (n_k + 32 + 8 * largest)
    assert_within_bound(
        actual=t.p.sum(-1),
        exact=case.attends.expand(t.p.shape).any(-1).double(),
        bound=torch.tensor(rounding),
        what="row sums of p",
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_recomputed_logits_equal_the_forwards_if_qk_recompute_equals_qk(preset):
    spec = PRESETS[preset]
    t = run_trace(case(seed=3, n_q=100, n_k=90, d=40, is_causal=True), spec)
    if spec.qk == spec.qk_recompute:
        assert_bitwise(actual=t.s_recompute, expected=t.s, what="s_recompute")
        codes = t.operands
        if spec.qk.precision is Precision.INT8:
            for tensor in ("q", "k"):
                forward, again = codes[f"qk.{tensor}"], codes[f"qk_recompute.{tensor}"]
                assert_bitwise(actual=again.codes, expected=forward.codes, what=tensor)
                assert_bitwise(actual=again.scale, expected=forward.scale, what=tensor)
    else:
        assert not torch.equal(t.s_recompute, t.s)


@given(cases(MODERATE))
@examples(30)
def test_an_unquantized_trace_agrees_with_exact(case):
    exact = run_exact(case)
    bound = float32_bound.of(case, exact)
    t = run_trace(case, FPA)
    for name in ("o", "dq", "dk", "dv", "lse"):
        assert_within_bound(
            actual=getattr(t, name),
            exact=getattr(exact, name),
            bound=getattr(bound, name),
            what=name,
        )


def test_operands_k_and_v_have_the_heads_of_k_and_maps_those_of_q():
    c = case(seed=4, n_q=20, n_k=30, d=8, heads=(2, 6))
    c = replace(c, k=c.k[:, :2], v=c.v[:, :2], enable_gqa=True)
    t = run_trace(c, SAGEBWD)
    assert t.operands["qk.k"].codes.shape == (2, 2, 30, 8)
    assert t.operands["pv.v"].codes.shape == (2, 2, 30, 8)
    assert t.operands["qk.q"].codes.shape == (2, 6, 20, 8)
    assert t.operands["dq.ds"].codes.shape == t.ds.shape == (2, 6, 20, 30)
    for name in ("k", "v"):
        alone = run_trace(replace(c, q=c.q[:, ::3], do=c.do[:, ::3], enable_gqa=False), SAGEBWD)
        site = {"k": "qk", "v": "pv"}[name]
        assert_bitwise(
            actual=t.operands[f"{site}.{name}"].codes.contiguous(),
            expected=alone.operands[f"{site}.{name}"].codes,
            what=name,
        )


@pytest.mark.parametrize(
    "smoothing", [Smoothing(), Smoothing(q=True), Smoothing(k=True), Smoothing(q=True, k=True)]
)
@pytest.mark.parametrize(("n_q", "n_k"), [(0, 5), (5, 0), (0, 0)])
def test_empty_sequences_have_empty_maps_and_no_operands(n_q, n_k, smoothing):
    t = run_trace(case(seed=0, n_q=n_q, n_k=n_k, d=8), replace(SAGEBWD, smoothing=smoothing))
    assert t.s.shape == t.ds.shape == (1, 1, n_q, n_k) and t.operands == {}
    assert t.o.shape == (1, 1, n_q, 8) and not t.o.any() and not t.dk.any()


@pytest.mark.parametrize("heads", [(), (3,), (2, 1, 2)])
def test_any_number_of_leading_axes_is_accepted(heads):
    t = run_trace(case(seed=0, n_q=6, n_k=5, d=8, heads=heads), SAGEBWD)
    assert t.s.shape == (*heads, 6, 5) and t.lse.shape == t.delta.shape == (*heads, 6)
    assert t.operands["dk.q"].codes.shape == (*heads, 6, 8)


def test_tensors_are_detached_and_operands_are_read_only():
    c = case(seed=0, n_q=6, n_k=5, d=8)
    t = trace(c.q.requires_grad_(), *c.qkvdo[1:], spec=SAGEBWD)
    assert not t.o.requires_grad and not t.dq.requires_grad
    with pytest.raises(TypeError):
        t.operands["qk.q"] = t.operands["qk.k"]


@pytest.mark.parametrize(
    "do", [torch.zeros(1, 1, 6, 9), torch.zeros(1, 1, 6, 8, dtype=torch.float16)]
)
def test_the_error_names_a_gradient_of_another_shape_or_dtype(as_installed, do):
    c = case(seed=0, n_q=6, n_k=5, d=8)
    with pytest.raises(ValueError, match=r"do is .*; the gradient of o is torch\.float32") as error:
        trace(c.q, c.k, c.v, do, spec=SAGEBWD)
    assert str(tuple(do.shape)) in str(error.value) and str(do.dtype) in str(error.value)


def test_delta_from_p_is_the_row_sum_of_p_times_dp():
    """Up to float32's rounding of n_k products and their sum."""
    c = case(seed=5, n_q=70, n_k=130, d=16, attn_mask=random_mask(1, (70, 130), density=0.5))
    t = run_trace(c, replace(SAGEBWD, delta=Delta.FROM_P))
    terms = t.p_recompute.double() * t.dp.double()
    assert_within_bound(
        actual=t.delta,
        exact=terms.sum(-1),
        bound=1.001 * (130 + 1) * U * terms.abs().sum(-1),
        what="delta",
    )
