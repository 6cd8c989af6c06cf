"""Kernels with scales from bounds: the contract, padding, NaN, and what is invariant."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

import sagesim
from sagesim import FP8_GRADIENTS, AttentionSpec, Precision
from sagesim.emulator.row_bounds import TOP_CODES
from sagesim_kernels import attention, attention_varlen
from sagesim_kernels import trace as kernel_trace
from sagesim_kernels.launching import forget_plans, launch
from sagesim_kernels.operands import formats
from sagesim_kernels.operands.row_bounds import norms, quotient, sum_pairwise
from tests.sagesim_kernels.contract import check, run_kernels
from tests.support.assertions import assert_bitwise
from tests.support.combinations import crossed
from tests.support.inputs import NASTY, Case, gaussian
from tests.support.kernels import DEVICE, HERE, kernel_case

pytestmark = HERE

ON_CPU = DEVICE == "cpu"

SPECS = {
    label: AttentionSpec.parse(label)
    for label in (
        "fp8_gradients",
        "fp8_gradients dv=int8@row_bound,block_channel block=64x64",
        "fp8_gradients dq=fp8_e5m2@row_bound,block_channel dk=int8@row_bound,block smooth=qk "
        "delta=p round=stochastic@5 block=32x128",
    )
}
SHAPE = {"n_q": 70, "n_k": 90, "d": 24, "d_v": 16}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "label"), list(zip(NASTY, itertools.cycle(SPECS), strict=False)))
def test_the_contract_on_nasty_inputs(kind: str, label: str) -> None:
    build = NASTY[kind]
    c = kernel_case(seed=1, kinds=(build, gaussian, build, gaussian), **SHAPE)
    check(replace(c, is_causal=True), SPECS[label])


CALLS = {
    "grouped, window": {"window": (20, 5), "causal_alignment": "upper_left"},
    "lower right": {"is_causal": True, "causal_alignment": "lower_right"},
    "softcap, scale": {"softcap": 3.0, "scale": -0.4},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_the_contract_on_masks(name: str) -> None:
    """Blocks of 256 queries with a partial one, of two heads."""
    c = kernel_case(seed=2, n_q=300, n_k=70, d=40, heads=(1, 2), dtype=torch.bfloat16)
    c = replace(c, k=c.k[:, :1], v=c.v[:, :1], enable_gqa=True, **CALLS[name])
    check(c, FP8_GRADIENTS)


def test_the_contract_with_sinks_and_padding() -> None:
    """V of padded keys is huge. It must be in no bound."""
    c = kernel_case(seed=3, n_q=20, n_k=70, d=16, heads=(2, 1))
    key_mask = torch.arange(70, device=DEVICE) < torch.tensor([[33], [60]], device=DEVICE)
    c = replace(c, key_mask=key_mask, sinks=torch.tensor([0.5], device=DEVICE))
    huge = replace(c, v=torch.where(key_mask[:, None, :, None], c.v, 1e30))
    check(huge, FP8_GRADIENTS)
    found, expected = (kernel_trace(x, spec=FP8_GRADIENTS) for x in (huge, c))
    for name in ("dq", "dk", "dv"):
        assert_bitwise(actual=getattr(found, name), expected=getattr(expected, name), what=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("tensor", "of_spec"),
    crossed(["q", "k", "v", "do"], list(zip(SPECS, (math.nan, math.inf, math.nan), strict=True))),
)
def test_what_is_not_finite_reaches_what_it_reaches_in_the_emulator(
    tensor: str, of_spec: tuple[str, float]
) -> None:
    label, bad = of_spec
    spec = SPECS[label]
    c = kernel_case(seed=0, n_q=70, n_k=50, d=16)
    x = getattr(c, tensor).clone()
    x[..., 25, 3] = bad
    c = replace(c, **{tensor: x}, window=(20, 5), causal_alignment="upper_left")
    found, expected = kernel_trace(c, spec=spec), sagesim.trace(c, spec=spec)
    for name in ("o", "dq", "dk", "dv"):
        a, b = (getattr(y, name).isfinite().cpu() for y in (found, expected))
        assert torch.equal(a, b), name
    assert not bool(found.dk.isfinite().all())


@pytest.mark.slow
def test_packed_sequences_and_heads_are_computed_alone() -> None:
    """The bounds of a sequence, and the scales of its long blocks, are its own."""
    lengths = (130, 3, 257)
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int().to(DEVICE)
    c = kernel_case(seed=4, n_q=390, n_k=390, d=16, heads=(1, 2))
    packed = [x[0].transpose(0, 1).detach().requires_grad_() for x in (c.q, c.k, c.v)]
    do = c.do[0].transpose(0, 1)
    longest = max(lengths)
    options = {"spec": FP8_GRADIENTS, "window": (40, 0), "causal_alignment": "upper_left"}
    o = attention_varlen(*packed, starts, starts, longest, longest, **options)
    grads = torch.autograd.grad(o, packed, do)
    begin = 0
    for length in lengths:
        part = slice(begin, begin + length)
        begin += length
        alone = [x.detach()[part].transpose(0, 1)[1:].requires_grad_() for x in packed]
        one = attention(*alone, **options)
        assert isinstance(one, torch.Tensor)
        expected = torch.autograd.grad(one, alone, do[part].transpose(0, 1)[1:])
        for name, x, y in zip(("dq", "dk", "dv"), grads, expected, strict=True):
            assert_bitwise(actual=x[part, 1:].transpose(0, 1), expected=y, what=name)


def test_a_power_of_two_in_do_changes_no_code() -> None:
    """Bounds, top codes and scales follow a gain of dO."""
    c = kernel_case(seed=5, **SHAPE)
    found, expected = (run_kernels(x, FP8_GRADIENTS) for x in (replace(c, do=c.do * 2.0**20), c))
    for name in ("dv.do", "dk.q", "dv.p", "dq.ds"):
        a, b = (x.operands[name].codes.view(torch.int8) for x in (found, expected))
        assert_bitwise(actual=a, expected=b, what=name)
    for name in ("dq", "dk", "dv"):
        a, b = getattr(found, name) / 2.0**20, getattr(expected, name)
        assert_bitwise(actual=a, expected=b, what=name)


@pytest.mark.skipif(not ON_CPU, reason="a GPU has one format")
def test_gpus_without_fp8_compute_the_same_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As float16 numbers. The interpreter adds products of both alike."""
    c = kernel_case(seed=6, **SHAPE)
    cases = {
        label: run_kernels(c, AttentionSpec.parse(label))
        for label in (
            "fp8_gradients block=64x64",
            "fp8_gradients round=half_away dq=fp8_e5m2 dk=fp8_e5m2",
        )
    }
    monkeypatch.setattr(formats, "multiplies_fp8", lambda: False)
    forget_plans()
    for label, expected in cases.items():
        found = run_kernels(c, AttentionSpec.parse(label))
        for name, x in expected.operands.items():
            y = found.operands[name]
            assert y.codes.dtype is x.codes.dtype
            same = y.codes.double() == x.codes.double()
            assert bool(same.all()), (label, name)
            assert_bitwise(actual=y.scale, expected=x.scale, what=name)
        for name in ("dq", "dk", "dv"):
            a, b = getattr(found, name), getattr(expected, name)
            assert float((a - b).norm() / b.norm()) < 1e-6
    forget_plans()


@triton.jit
def _reduce_kernel(x, sums, of_rows, SIZE: tl.constexpr):
    at = tl.arange(0, 4)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tile = tl.load(x + at)
    tl.store(sums + tl.arange(0, 4), sum_pairwise(tile))
    tl.store(of_rows + tl.arange(0, 4), norms(tile))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("exponent", [-140, -126, -3, 0, 90, 127])
def test_norms_are_those_of_the_emulator(exponent: int) -> None:
    """Bit for bit: of subnormal numbers, and of squares beyond float32."""
    from sagesim.emulator.quantization import Operand
    from sagesim.emulator.row_bounds import _norms, _sum_pairwise

    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(exponent))
    x = torch.ldexp(x / x.abs().max(), torch.tensor(exponent))
    x[3] = 0.0
    sums, of_rows = torch.empty(4, device=DEVICE), torch.empty(4, device=DEVICE)
    launch(_reduce_kernel, (1,), x.to(DEVICE), sums, of_rows, 64)
    tiles = Operand(x[None, None, :, None], None, Precision.FP32)
    assert_bitwise(actual=of_rows.cpu()[None], expected=_norms(tiles), what="norms")
    assert_bitwise(actual=sums.cpu()[:, None], expected=_sum_pairwise(x), what="sums")


@triton.jit
def _divide_kernel(x, divisor, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + at, quotient(tl.load(x + at), tl.load(divisor + tl.zeros((1, 1), tl.int32))))


@pytest.mark.parametrize("divisor", sorted({x for tops in TOP_CODES.values() for x in tops}))
def test_quotients_by_top_codes_are_correctly_rounded(divisor: float) -> None:
    """Of every mantissa. A division of PyTorch is correctly rounded on a CPU."""
    x = torch.arange(2**23, 2**24).float()
    out = torch.empty_like(x, device=DEVICE)
    size = 2**20 if DEVICE == "cpu" else 1024
    launch(
        _divide_kernel,
        (2**23 // size,),
        x.to(DEVICE),
        torch.tensor([divisor]).to(DEVICE),
        out,
        size,
    )
    assert_bitwise(actual=out.cpu(), expected=x / divisor, what=f"quotients by {divisor}")


@pytest.mark.parametrize("precision", TOP_CODES)
def test_top_codes_are_those_of_the_emulator(precision: Precision) -> None:
    how = formats.format_of(precision).value
    count = formats.count_of_tops(how)
    assert tuple(formats.top_code(how, i) for i in range(count)) == TOP_CODES[precision]


def test_codes_are_traced_by_their_names() -> None:
    c: Case = kernel_case(seed=7, n_q=20, n_k=33, d=16)
    found = kernel_trace(c, spec=FP8_GRADIENTS)
    assert found.operands["dv.p"].codes.dtype is torch.float8_e4m3fn
    assert found.operands["dq.k"].codes.dtype is torch.float8_e4m3fn
    assert found.operands["qk.q"].codes.dtype is torch.int8
