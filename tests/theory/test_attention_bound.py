"""Errors of emulator and kernels stay within `theory.attention_bound`."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import sagesim
import sagesim_kernels
from sagesim import AttentionSpec
from tests.support import examples
from tests.support.assertions import assert_within_bound
from theory import attention_bound
from theory.fp8_sums import BLACKWELL, HOPPER, tensor_core_sum

LABELS = (
    "sagebwd",
    "factored",
    "factored_pv16",
    "sagebwd_all_int8",
    "sage_forward",
    "factored_qk",
    "causal_safe",
    "fpa_fp16",
    "sagebwd smooth=qk",
    "factored smooth=none round=stochastic@3",
    "factored block=32x128 round=half_away",
    "fp8_gradients",
    "fp8_gradients smooth=qk block=32x64 dq=fp8_e5m2 dk=fp8_e5m2",
    "fp8_gradients round=stochastic@3 dv=int8@row_bound,block_channel block=64x64",
    "fp8_gradients qk=input16 qk_recompute=input16 dq=int8 dk=int8",
    "sagebwd pv=fp8_e4m3 dv=fp8_e5m2 dp=fp8_e4m3",
)
OUTPUTS = ("o", "dq", "dk", "dv")


KINDS = {
    "ordinary": lambda q, k, v, do: (q, k, v, do),
    "outlier_channels": lambda q, k, v, do: (
        torch.cat([16 * q[..., :1], q[..., 1:]], -1),
        torch.cat([k[..., :1] + 16, k[..., 1:]], -1),
        torch.cat([v[..., :-1], 16 * v[..., -1:]], -1),
        torch.cat([16 * do[..., :1, :], do[..., 1:, :]], -2),
    ),
    "one_hot_p": lambda q, k, v, do: (8 * q, 8 * k, v, do),
    "near_ties": lambda q, k, v, do: tuple((4 * x).round() / 4 for x in (q, k, v, do)),
    "tiny": lambda q, k, v, do: (1e-4 * q, 1e-4 * k, 1e-3 * v, 1e-3 * do),
    "large": lambda q, k, v, do: (
        q,
        k,
        8 * v,
        8 * do,
    ),  # FP16 may overflow for much larger dP
    "constant_k": lambda q, k, v, do: (q, k[..., :1, :].expand_as(k), v, do),
}


def problem(
    seed: int, n: int, d: int, sigma: float, dtype: torch.dtype, kind: str = "ordinary"
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = torch.randn(4, 1, 2, n, d, generator=generator)
    k = k + torch.randn(1, 2, 1, d, generator=generator) * sigma
    return [x.to(dtype) for x in KINDS[kind](q * sigma, k * sigma, v, do)]


def assert_bound(computed, inputs, spec, options, may_overflow=False) -> None:
    """Assert that every output of an implementation is within the bound.

    may_overflow: if True and the bound is infinite because a 16-bit site may overflow, Hypothesis
        draws another example.
    """
    bound = attention_bound(*inputs, spec=spec, **options)
    if may_overflow:
        assume(all(bool(getattr(bound, name).isfinite().all()) for name in OUTPUTS))
    exact = sagesim.exact(*inputs, **options)
    for name in OUTPUTS:
        actual, true, limit = getattr(computed, name), getattr(exact, name), getattr(bound, name)
        assert_within_bound(actual=actual, exact=true, bound=limit, what=f"{name}, {spec.label()}")


CASES = {
    "label": st.sampled_from(LABELS),
    "seed": st.integers(0, 2**32 - 1),
    "n": st.sampled_from((1, 2, 17, 40, 65)),
    "d": st.sampled_from((8, 32, 40, 64)),
    "sigma": st.sampled_from((0.1, 1.0, 3.0)),
    "dtype": st.sampled_from((torch.float16, torch.float32)),
    "kind": st.sampled_from(sorted(KINDS)),
    "data": st.data(),
}


@st.composite
def options(draw: st.DrawFn, n: int) -> dict[str, Any]:
    """Options of a call with 2 heads of n queries and keys; half of them are a causal mask alone
    or none."""
    found: dict[str, Any] = {"is_causal": draw(st.booleans())}
    if draw(st.booleans()):
        return found
    side = st.just(-1) | st.integers(0, 40)
    found |= {
        "window": (draw(side), draw(side)),
        "softcap": draw(st.sampled_from((None, 2.0, 30.0))),
    }
    if draw(st.booleans()):
        found["seqused_k"] = torch.tensor([draw(st.integers(0, n))])
    if draw(st.booleans()):
        sink = st.floats(-5, 5) | st.floats(20, 120)
        found["sinks"] = torch.tensor([draw(sink), draw(sink)])
    return found


@pytest.mark.slow
@examples(300)
@given(**CASES)
def test_the_emulator_stays_within_the_bound(label, seed, n, d, sigma, dtype, kind, data):
    given = data.draw(options(n))
    inputs, spec = problem(seed, n, d, sigma, dtype, kind), AttentionSpec.parse(label)
    computed = sagesim.trace(*inputs, spec=spec, **given)
    assert_bound(computed, inputs, spec, given, may_overflow=kind != "ordinary")


KERNEL_LABELS = [x for x in LABELS if sagesim_kernels.supports(AttentionSpec.parse(x))]


@pytest.mark.slow
@examples(10)
@given(**(CASES | {"label": st.sampled_from(KERNEL_LABELS)}))
def test_the_kernels_stay_within_the_bound(label, seed, n, d, sigma, dtype, kind, data):
    given = data.draw(options(n))
    inputs, spec = problem(seed, n, d, sigma, dtype, kind), AttentionSpec.parse(label)
    computed = sagesim_kernels.trace(*inputs, spec=spec, **given)
    assert_bound(computed, inputs, spec, given, may_overflow=kind != "ordinary")


ABOVE = (0.0, 10.0, 30.0, 60.0, 100.0)
"""How far a sink is above the largest logit. From 87 on, P is below the normal float32 numbers."""


@pytest.mark.parametrize("is_causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("label", ("factored_qk", "sagebwd", "factored", "fpa", "fp8_gradients"))
def test_the_bound_holds_if_a_sink_takes_nearly_all_weight(label, is_causal):
    """In float32 outputs, of which 16 bit would hide the error."""
    inputs, spec = problem(0, 96, 32, 1.0, torch.float32), AttentionSpec.parse(label)
    largest = sagesim.exact(*inputs).s.amax()
    for above in ABOVE:
        options = {"is_causal": is_causal, "sinks": (largest + above).float().expand(2)}
        assert_bound(sagesim.trace(*inputs, spec=spec, **options), inputs, spec, options)


def test_the_bound_of_the_kernels_holds_if_a_sink_takes_nearly_all_weight():
    """GPUs flush an exponential below 2^-126 to 0."""
    inputs = problem(0, 40, 16, 1.0, torch.float32)
    largest = sagesim.exact(*inputs).s.amax()
    for label in ("factored_qk", "factored"):
        for above in ABOVE[2:]:
            spec = AttentionSpec.parse(label)
            options = {"sinks": (largest + above).float().expand(2)}
            computed = sagesim_kernels.trace(*inputs, spec=spec, **options)
            assert_bound(computed, inputs, spec, options)


@pytest.mark.parametrize(
    ("pv", "bits", "holds"), (("int8", 119, True), ("int8", 110, False), ("bf16", 119, False))
)
def test_the_bound_holds_if_an_int8_pv_drops_a_tile_far_below_the_row_maximum(pv, bits, holds):
    """Kernels may take the factor exp(m' - m) of a tile as 0 below 2^-118, and not above. What is
    left is the O of a V that is 0 in the tile."""
    q, k, v = torch.zeros(3, 1, 1, 128, 32)
    q[..., 0], v[..., 64:, :] = 8.0, 2.0**100
    k[..., :64, 0], k[..., 0, 0] = -9.0, bits * math.log(2) / 8
    kept = v * (torch.arange(128) < 64)[:, None]
    q, k, v, kept, do = (
        x.bfloat16().float() for x in (q, k, v, kept, torch.full_like(v, 2.0**-60))
    )
    label = f"sagebwd qk=fp16 qk_recompute=fp16 smooth=none pv={pv}"
    spec, options = AttentionSpec.parse(label), {"scale": 1.0}
    exact, bound = (
        sagesim.exact(q, k, v, do, **options),
        attention_bound(q, k, v, do, spec=spec, **options),
    )
    dropped = sagesim.trace(q, k, kept, do, spec=spec, **options)
    assert bool(((dropped.o - exact.o).abs() <= bound.o).all()) == holds


@pytest.mark.parametrize("label", LABELS[:3])
def test_the_bound_is_smaller_than_the_output(label):
    """In a small problem with ordinary logits. A larger bound would be useless."""
    inputs, spec = problem(0, 32, 16, 0.5, torch.float32), AttentionSpec.parse(label)
    bound, exact = attention_bound(*inputs, spec=spec), sagesim.exact(*inputs)
    assert float(bound.o.square().mean()) < float(exact.o.square().mean())


@pytest.mark.parametrize("scales", ("tile", "tile_column"))
def test_the_bound_holds_for_rows_of_different_size_that_share_a_scale_in_pv(scales):
    """Row 0 attends mostly to a key of the second tile. Its weights in the first tile are half
    a code of the shared scale. The other rows are divided by a row sum of 16, row 0 is not."""
    q, k, v = torch.zeros(3, 1, 1, 32, 8)
    q[..., 0, 0], k[..., 20, 0], k[..., 21:, 0], v[..., :16, :] = 5.8, math.sqrt(8), -30, 1
    spec = AttentionSpec.parse(f"fpa pv=int8@{scales},head block=16x16")
    inputs = (q, k, v, torch.ones_like(v))
    assert_bound(sagesim.trace(*inputs, spec=spec), inputs, spec, {})


@pytest.mark.parametrize("label", ("fpa qk=int8@block,block", "fpa qk_recompute=int8@token,token"))
def test_the_bound_holds_if_p_exceeds_1_in_the_backward(label):
    """With large logits, and qk and qk_recompute rounded differently."""
    generator, spec = torch.Generator().manual_seed(0), AttentionSpec.parse(label)
    for _ in range(10):
        q, k, v, do = torch.randn(4, 1, 1, 3, 40, generator=generator)
        inputs = (12 * q, 12 * k, v, do)
        assert_bound(sagesim.trace(*inputs, spec=spec), inputs, spec, {})


def summed_by_tensor_cores(trace, block: int, how) -> torch.Tensor:
    """dV from the codes of P and dO, with the sums of a block of queries by instructions."""
    p, do = (trace.operands[f"dv.{name}"] for name in ("p", "do"))
    dv = torch.zeros_like(trace.dv, dtype=torch.float64)
    for start in range(0, p.codes.shape[-2], block):
        rows = slice(start, start + block)
        left, right = (x.codes[..., rows, :].double().mT for x in (p, do))
        sums = tensor_core_sum(left[..., :, None, :], right[..., None, :, :], how)
        value, code = do.dequantize()[..., rows, :].double(), do.codes[..., rows, :].double()
        at = code.abs().flatten(-2).argmax(-1, keepdim=True)
        scale = value.flatten(-2).gather(-1, at) / code.flatten(-2).gather(-1, at)
        dv += sums * scale[..., None]
    return dv


@pytest.mark.parametrize("how", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
def test_the_bound_holds_for_fp8_sums_of_tensor_cores(how):
    """They lose more than float32 sums. What they lose is within the bound of the instruction."""
    spec = AttentionSpec.parse("fp8_gradients block=64x64")
    for kind in ("ordinary", "tiny", "outlier_channels"):
        inputs = problem(1, 130, 8, 0.5, torch.float32, kind)
        trace, exact = sagesim.trace(*inputs, spec=spec), sagesim.exact(*inputs)
        dv = summed_by_tensor_cores(trace, 64, how)
        float32 = attention_bound(*inputs, spec=spec)
        bound = attention_bound(*inputs, spec=spec, instruction=how)
        assert_within_bound(actual=dv, exact=exact.dv, bound=bound.dv, what=f"dv, {kind}")
        lost, allowed = (dv - trace.dv).abs(), bound.dv - float32.dv
        assert_within_bound(
            actual=dv, exact=trace.dv.double(), bound=allowed + 1e-5 * trace.dv.abs(), what=kind
        )
        assert bool((bound.dq > float32.dq).any()) and bool((bound.dk > float32.dk).any())
        assert float(lost.norm()) > 0


def test_the_scale_of_a_row_bound_is_larger_than_the_largest_element_of_its_row_gives():
    """A bound that follows from the largest |dS| of a row is exceeded."""
    inputs = problem(0, 3, 32, 0.2, torch.float32)
    exact = sagesim.exact(*inputs)
    for how, holds in (("row_bound", True), ("row", False)):
        computed = sagesim.trace(*inputs, spec=AttentionSpec.parse("fpa dq=int8@row_bound,block"))
        limit = attention_bound(*inputs, spec=AttentionSpec.parse(f"fpa dq=int8@{how},block"))
        assert bool(((computed.dq - exact.dq).abs() <= limit.dq).all()) == holds


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_result_with_a_wrong_scale_exceeds_the_bound(name):
    inputs, spec = problem(0, 64, 32, 0.2, torch.float32), AttentionSpec.parse("factored")
    bound, exact = attention_bound(*inputs, spec=spec), sagesim.exact(*inputs)
    wrong = getattr(sagesim.trace(*inputs, spec=spec), name) * 1.5
    with pytest.raises(AssertionError, match="exceed the bound"):
        assert_within_bound(
            actual=wrong, exact=getattr(exact, name), bound=getattr(bound, name), what=name
        )


@pytest.mark.parametrize("kind", ["grouped", "mask", "more keys", "more queries"])
@pytest.mark.parametrize("label", LABELS)
def test_the_bound_holds_for_grouped_heads_and_masks(kind, label):
    """For the emulator. Padding is in no mean and no scale, whatever it holds."""
    n_q, n_k = {"more keys": (40, 70), "more queries": (70, 40)}.get(kind, (70, 70))
    generator = torch.Generator().manual_seed(5)
    q, do = torch.randn(2, 1, 4, n_q, 16, generator=generator)
    k, v = torch.randn(2, 1, 2 if kind == "grouped" else 4, n_k, 16, generator=generator)
    mask = None
    if kind == "mask":
        mask = torch.rand(4, n_q, n_k, generator=generator) < 0.7
        mask[..., 50:] = False
        mask[2, 10:20] = False
        k[..., 50:, :], v[..., 50:, :] = 1e4, -1e4
    call = sagesim.AttentionProblem(
        q=q,
        k=k,
        v=v,
        do=do,
        is_causal=kind.startswith("more"),
        attn_mask=mask,
        enable_gqa=kind == "grouped",
    )
    spec = AttentionSpec.parse(label)
    bound, exact = attention_bound(call, spec=spec), sagesim.exact(call)
    computed = sagesim.trace(call, spec=spec)
    for name in OUTPUTS:
        actual, true, limit = (getattr(x, name) for x in (computed, exact, bound))
        assert_within_bound(actual=actual, exact=true, bound=limit, what=f"{name}, {label}")
        assert bool((limit < 1e3).all()), "padding does not widen the bound"


EIGHT_BIT = ("sagebwd", "factored", "factored_qk", "fp8_gradients")


@pytest.mark.parametrize("label", EIGHT_BIT)
def test_the_bound_is_finite_where_p_underflows_and_errors_of_logits_are_in_the_hundreds(label):
    """P is below the float64 numbers, and exp of the error above them."""
    inputs, spec = problem(0, 64, 64, 50.0, torch.float32), AttentionSpec.parse(label)
    assert bool((sagesim.exact(*inputs).p == 0).any())
    assert_bound(sagesim.trace(*inputs, spec=spec), inputs, spec, {})


def test_the_bound_of_two_keys_of_which_one_has_all_weight_is_finite():
    q, k = torch.tensor([[[[100.0]]]]), torch.tensor([[[[2000.0], [-2000.0]]]])
    inputs, options = (q, k, torch.ones_like(k), torch.ones_like(q)), {"scale": 1.0}
    computed = sagesim.trace(*inputs, spec=sagesim.SAGEBWD, **options)
    assert_bound(computed, inputs, sagesim.SAGEBWD, options)


def test_the_bound_with_a_sink_is_finite_where_the_share_of_the_sink_underflows():
    inputs = problem(0, 64, 64, 50.0, torch.float32)
    options = {"sinks": torch.full((2,), -1000.0)}
    computed = sagesim.trace(*inputs, spec=sagesim.SAGEBWD, **options)
    assert_bound(computed, inputs, sagesim.SAGEBWD, options)


@pytest.mark.parametrize(
    "label", ["fpa_fp16", "fpa_fp16 dv=fp8_e4m3@row_bound,block", "fpa qk=fp16"]
)
def test_the_bound_is_infinite_and_not_nan_if_a_matmul_in_16_bits_overflows(label):
    """1e5 is infinite in FP16, and times the K of 0 it is NaN."""
    q = torch.zeros(1, 1, 4, 8)
    q[0, 0, 0, 0] = 1e5
    inputs = (q, torch.zeros_like(q), torch.ones_like(q), torch.ones_like(q))
    spec = AttentionSpec.parse(label)
    bound, computed = attention_bound(*inputs, spec=spec), sagesim.trace(*inputs, spec=spec)
    for name in OUTPUTS:
        limit, found = getattr(bound, name), getattr(computed, name)
        assert not bool(limit.isnan().any()), name
        assert bool(limit[~found.isfinite()].isinf().all()), name
    assert bound.o.isinf()[0, 0, :, 0].tolist() == [True, False, False, False]


def test_the_bound_is_infinite_if_p_may_overflow():
    """Rounded differently in both passes, errors of logits above 88 make P infinite in float32."""
    inputs = problem(0, 64, 64, 150.0, torch.float32)
    bound = attention_bound(*inputs, spec=sagesim.SAGE_FORWARD)
    computed = sagesim.trace(*inputs, spec=sagesim.SAGE_FORWARD)
    assert not bool(computed.dv.isfinite().all())
    assert bool(bound.dv[~computed.dv.isfinite()].isinf().all())
    assert bool(bound.o.isfinite().all())
    assert not any(bool(getattr(bound, name).isnan().any()) for name in OUTPUTS)


def test_the_bound_is_infinite_if_an_output_overflows():
    """dV is a sum of 64 times 2000, which FP16 does not represent."""
    q, k = torch.zeros(1, 1, 64, 8), torch.zeros(1, 1, 1, 8)
    inputs = [x.half() for x in (q, k, torch.ones_like(k), torch.full_like(q, 2000.0))]
    bound = attention_bound(*inputs, spec=sagesim.FPA)
    assert bool(sagesim.trace(*inputs, spec=sagesim.FPA).dv.isinf().all())
    assert bool(bound.dv.isinf().all())
    assert bool(bound.o.isfinite().all())


def test_float64_tensors_raise():
    inputs = problem(0, 8, 8, 1.0, torch.float64)
    with pytest.raises(TypeError, match=r"torch.float64.*x\.float\(\)"):
        attention_bound(*inputs, spec=sagesim.SAGEBWD)


def test_unsupported_problems_raise():
    inputs = problem(0, 8, 8, 1.0, torch.float32)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        attention_bound(
            inputs[0],
            inputs[1][:, :1],
            inputs[2][:, :1],
            inputs[3],
            spec=sagesim.SAGEBWD,
        )
    assert math.isfinite(float(attention_bound(*inputs, spec=sagesim.SAGEBWD).o.max()))
