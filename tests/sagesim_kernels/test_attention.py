"""`sagesim_kernels.attention`: accuracy, valid inputs, and what must not change results."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sagesim import (
    CAUSAL_SAFE,
    FACTORED,
    FACTORED_PV16,
    FACTORED_QK,
    FPA_BF16,
    FPA_FP16,
    PRESETS,
    SAGEBWD,
    Precision,
    Smoothing,
)
from sagesim_kernels import attention
from sagesim_kernels.operands import Extras, KernelProblem, Packing
from tests.support import examples
from tests.support.assertions import assert_bitwise, assert_within_bound, assert_within_budget
from tests.support.calls import Outputs, run_attention, run_exact, run_trace
from tests.support.combinations import crossed
from tests.support.inputs import (
    NASTY,
    Case,
    constant,
    gaussian,
    offset,
    subnormal,
    tiny_gain,
    zero_block,
    zeros,
)
from tests.support.kernels import (
    DEVICE,
    DTYPES,
    FEW,
    HERE,
    SPECS,
    Results,
    assert_same,
    kernel_case,
    run_kernels,
)
from tests.support.strategies import cases

pytestmark = HERE

U = 2.0**-24
NAMES = ("o", "dq", "dk", "dv")
not_a_number = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
"""Numpy, on which the interpreter is built, warns if a kernel computes with NaN or infinities."""


@pytest.fixture(autouse=True, scope="module")
def autograd_thread_has_a_context() -> None:
    """cuBLAS warns if it is the first to use the device in autograd's thread."""
    (torch.ones(1, device=DEVICE, requires_grad=True) * 2).backward()


def sdpa(case: Case) -> Outputs:
    """PyTorch's own attention, in the dtype of the case."""
    leaves = [x.detach().requires_grad_() for x in case.qkvdo[:3]]
    with sdpa_kernel(SDPBackend.MATH):
        o = F.scaled_dot_product_attention(*leaves, is_causal=case.is_causal)
    return Outputs(o.detach(), *torch.autograd.grad(o, leaves, case.do))


def assert_no_worse(found: object, exact: object, yardstick: object, *, band: float) -> None:
    """At most twice the yardstick's error in o, and three times in the gradients."""
    for name in NAMES:
        assert_within_budget(
            actual=getattr(found, name),
            exact=getattr(exact, name),
            yardstick=getattr(yardstick, name),
            factor=2.0 if name == "o" else 3.0,
            band=band,
            what=name,
        )


class TestUnquantized:
    """Without INT8 the kernels are as accurate as SDPA."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("shape", "call"),
        crossed(
            [
                (15, 17, 8, 24),
                (16, 33, 40, 40),
                (63, 64, 80, 72),
                (64, 63, 96, 96),
                (65, 130, 64, 64),
                (130, 65, 72, 16),
                (65, 129, 128, 128),
                (31, 20, 192, 128),
                (20, 31, 256, 256),
                (200, 257, 32, 32),
            ],
            [(dtype, mask) for dtype in (torch.float16, torch.bfloat16) for mask in (False, True)],
        ),
    )
    def test_error_is_at_most_that_of_sdpa(self, shape, call):
        """At most twice SDPA's error in o and three times in gradients, plus the unit roundoff.
        SDPA's math backend rounds its results alone; the kernels round P and dS as well."""
        (n_q, n_k, d, d_v), (dtype, is_causal) = shape, call
        c = kernel_case(
            dtype, seed=n_q, n_q=n_q, n_k=n_k, d=d, d_v=d_v, heads=(2,), is_causal=is_causal
        )
        spec = FPA_BF16 if dtype is torch.bfloat16 else FPA_FP16
        band = torch.finfo(dtype).eps / 2
        assert_no_worse(run_kernels(c, spec), run_exact(c), sdpa(c), band=band)

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_lse_is_that_of_float32(self, is_causal):
        """Three roundings to float32: the scaled logits, the logarithm to base 2, the natural
        one."""
        c = kernel_case(torch.float16, seed=0, n_q=70, n_k=130, d=64, is_causal=is_causal)
        s = (c.q.float() @ c.k.float().mT / 8).masked_fill(~c.attends.to(DEVICE), -math.inf)
        assert_within_budget(
            actual=run_kernels(c, FPA_FP16).lse,
            exact=run_exact(c).lse,
            yardstick=s.logsumexp(-1),
            factor=2.0,
            band=3 * U,
            what="lse",
        )

    @pytest.mark.parametrize("scale", [-1.5, 0.0, 0.01, 1.0])
    def test_the_scale_is_the_callers(self, scale):
        c = kernel_case(torch.float16, seed=1, n_q=20, n_k=33, d=16, scale=scale)
        found, exact = run_kernels(c, FPA_FP16), run_exact(c)
        other = run_attention(c, FPA_FP16)
        assert_no_worse(found, exact, other, band=2.0**-11)

    @pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
    def test_one_key_gives_its_value(self, spec):
        """o = v, up to half a step of its codes, the rounding to 16 bit, and that of the
        division."""
        c = kernel_case(torch.float16, seed=0, n_q=5, n_k=1, d=16)
        found, v = run_kernels(c, spec), c.v.double()
        unit = v.abs().amax() / 127 * (0.0 if spec.label().startswith("fpa") else 0.5)
        of_v = 2.0**-8 if spec.pv.precision is Precision.BF16 else 0.0
        bound = (unit + (2.0**-10 + of_v) * v.abs()).expand(found.o.shape)
        assert_within_bound(actual=found.o, exact=v.expand(found.o.shape), bound=bound, what="o")


LENGTHS = st.sampled_from([1, 2, 15, 33, 64])
SMALL = {f.__name__: f for f in (gaussian, zero_block, constant, zeros, tiny_gain, subnormal)}
"""Kinds of input that stay in the range of half precision, and so do their gradients."""

IN_INT8 = {
    name: replace(spec, block_q=32, block_k=32)
    for name, spec in {
        "sagebwd": SAGEBWD,
        "factored": FACTORED,
        "factored_pv16": FACTORED_PV16,
        "q_smoothed": replace(FACTORED, smoothing=Smoothing(q=True, k=True)),
    }.items()
}
"""Specs with small blocks, so that one block may be all zeros and another not."""


class TestFinite:
    """Finite inputs give finite outputs, and NaN or infinities reach the output."""

    @staticmethod
    def check(found: Results, blind: Tensor | None = None) -> None:
        """All results are finite; lse is -inf exactly where a query attends to no key."""
        for name in NAMES:
            assert bool(getattr(found, name).isfinite().all()), name
        alone = found.lse == -math.inf
        assert bool((found.lse.isfinite() | alone).all())
        if blind is not None:
            assert bool((alone == blind).all())

    @pytest.mark.slow
    @not_a_number
    @pytest.mark.parametrize(
        ("tensor", "spec"), crossed(["q", "k", "v", "do"], ["sagebwd", "factored", "fpa_fp16"])
    )
    @pytest.mark.parametrize(
        ("bad", "is_causal"), [(math.nan, True), (math.inf, True), ("large", False)]
    )
    def test_results_are_finite_where_those_of_the_emulator_are(self, spec, tensor, bad, is_causal):
        """Kernels may multiply the zeros of masked entries in tiles of up to 128 x 128."""
        c = kernel_case(seed=1, n_q=130, n_k=130, d=16, heads=(1,), is_causal=is_causal)
        x = getattr(c, tensor)
        if bad == "large":
            x *= 1e30  # beyond FP16, and bounds on the rows of dQ stay finite
        else:
            x[..., x.shape[-2] // 2, 3] = bad
        found, spec = run_kernels(c, PRESETS[spec]), PRESETS[spec]
        least, most = (
            run_trace(c, replace(spec, block_q=block, block_k=block))
            for block in (spec.block_q, 128)
        )
        for name in ("o", "dq", "dk", "dv"):
            bad_, least_, most_ = (~getattr(y, name).isfinite() for y in (found, least, most))
            if name == "dq":  # the unit of a row is that of all its channels
                most_ = most_.any(-1, keepdim=True)
            assert not bool((least_ & ~bad_).any()), f"{name} hides a NaN or an infinity"
            assert not bool((bad_ & ~most_).any()), f"{name} is NaN or infinite without reason"

    @pytest.mark.slow
    @given(
        case=cases(
            NASTY,
            heads=st.just((1,)),
            lengths=LENGTHS,
            head_sizes=st.just(40),
            masks=("none", "causal"),
        ),
        name=st.sampled_from(sorted(IN_INT8)),
        alignment=st.sampled_from(["upper_left", "lower_right"]),
    )
    @examples(12)
    def test_hard_inputs(self, case, name, alignment):
        """Zero regions, subnormals, outliers of 6e4, constant keys, tiny gains, queries without
        keys."""
        case = case.map(lambda x: x.to(DEVICE))
        n_q, n_k = case.q.shape[-2], case.k.shape[-2]
        rows = torch.arange(n_q, device=DEVICE)
        blind = rows + n_k - n_q < 0
        if not case.is_causal or alignment == "upper_left":
            blind = torch.zeros_like(blind)
        found = run_kernels(case, IN_INT8[name], causal_alignment=alignment)
        self.check(found, blind.expand(found.lse.shape))
        for x in (found.o, found.dq):
            assert not x[..., blind, :].any()

    @pytest.mark.slow
    @given(
        case=cases(
            SMALL,
            heads=st.just((1,)),
            lengths=LENGTHS,
            head_sizes=st.just(40),
            masks=("none", "causal"),
        ),
        name=st.sampled_from(sorted(SPECS)),
        dtype=st.sampled_from(DTYPES),
    )
    @examples(8)
    def test_small_inputs_in_any_dtype(self, case, name, dtype):
        self.check(run_kernels(case.map(lambda x: x.to(DEVICE, dtype)), SPECS[name]))

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "gain"), crossed([*IN_INT8], [2.0**-60, 2.0**60]))
    def test_gains_of_q_and_k_beyond_half_precision(self, name, gain):
        """Codes do not depend on the range: gains of Q and K that cancel change only gradients."""
        spec = IN_INT8[name]
        c = kernel_case(seed=0, n_q=33, n_k=20, d=16)
        found = run_kernels(replace(c, q=c.q * gain, k=c.k / gain), spec)
        self.check(found)
        assert_same(found, run_kernels(c, spec), "o", "lse", "dv")

    @pytest.mark.slow
    @not_a_number
    @pytest.mark.parametrize(("tensor", "name"), crossed(["q", "k", "v", "do"], [*FEW]))
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_what_is_not_finite_reaches_the_output(self, name, tensor, bad):
        """Codes do not hide it: the row of the output that uses it is not finite."""
        spec = FEW[name]
        c = kernel_case(seed=0, n_q=20, n_k=20, d=8)
        x = getattr(c, tensor).clone()
        x[..., 16, 3] = bad
        found = run_kernels(replace(c, **{tensor: x}), spec)
        output = {"q": "o", "k": "o", "v": "o", "do": "dv"}[tensor]
        assert not bool(getattr(found, output).isfinite().all())
        row = getattr(found, {"q": "o", "k": "dk", "v": "o", "do": "dq"}[tensor])[..., 16, :]
        assert not bool(row.isfinite().all())

    @not_a_number
    @pytest.mark.parametrize("spec", FEW.values(), ids=FEW)
    def test_a_gradient_of_lse_that_is_not_a_number_reaches_dq(self, spec):
        c = kernel_case(seed=0, n_q=20, n_k=20, d=8)
        d_lse = torch.zeros(c.q.shape[:-1], device=DEVICE).index_fill(
            -1, torch.tensor([7], device=DEVICE), math.nan
        )
        assert bool(run_kernels(c, spec, d_lse=d_lse).dq[..., 7, :].isnan().any())


class TestShapes:
    """Any lengths, head sizes and leading axes are computed."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("lengths", "name"),
        crossed(
            [
                (2, 2, False),
                (15, 65, True),
                (65, 15, True),
                (16, 16, False),
                (63, 31, False),
                (64, 64, True),
                (31, 128, False),
                (127, 64, False),
                (129, 100, True),
                (257, 33, True),
                (2, 257, False),
            ],
            ["sagebwd", "q_smoothed"],
        ),
    )
    def test_lengths(self, name, lengths):
        n_q, n_k, is_causal = lengths
        self.check(name, seed=n_q, n_q=n_q, n_k=n_k, d=16, is_causal=is_causal)

    @pytest.mark.slow
    def test_a_thousand_tokens(self):
        self.check("sagebwd", seed=0, n_q=130, n_k=1000, d=16)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("sizes", "name"),
        crossed(
            [
                *((1, 1), (8, 8), (16, 16), (40, 40), (72, 72), (80, 80), (96, 96), (128, 128)),
                *((192, 192), (256, 256), (8, 130), (130, 8), (129, 8), (131, 67), (255, 3)),
                *((192, 128), (33, 5), (67, 131)),
            ],
            ["sagebwd", "factored", "fpa_fp16"],
        ),
    )
    def test_head_sizes(self, name, sizes):
        """The logit scale is that of the true head size, never of a padded one."""
        d, d_v = sizes
        self.check(name, seed=d, n_q=20, n_k=33, d=d, d_v=d_v)

    @staticmethod
    def check(name: str, **shape: object) -> None:
        """As accurate as the emulator, up to codes of P and dS that differ by 1."""
        c = kernel_case(**shape)
        assert_no_worse(
            run_kernels(c, SPECS[name]), run_exact(c), run_attention(c, SPECS[name]), band=2.0**-11
        )

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("lengths", "name"), crossed([(0, 5), (5, 0), (0, 0), (1, 1), (1, 70), (70, 1)], [*FEW])
    )
    def test_short_and_empty_sequences(self, name, lengths):
        (n_q, n_k), spec = lengths, FEW[name]
        c = kernel_case(seed=0, n_q=n_q, n_k=n_k, d=16, d_v=24, heads=(2, 1))
        found = run_kernels(c, spec, d_lse=torch.ones(c.q.shape[:-1], device=DEVICE))
        assert found.o.shape == c.do.shape and found.lse.shape == c.q.shape[:-1]
        for gradient, x in zip(found[2:], c.qkvdo, strict=False):
            assert gradient.shape == x.shape and gradient.isfinite().all()
        if 0 in (n_q, n_k):
            assert not any(bool(x.any()) for x in (found.o, *found[2:]))
            assert bool((found.lse == -math.inf).all())

    @pytest.mark.parametrize("n_k", [0, 5])
    def test_statistics_are_float32_whatever_the_default(self, n_k):
        c = kernel_case(torch.float16, seed=0, n_q=5, n_k=n_k, d=8)
        torch.set_default_dtype(torch.float64)
        try:
            found = run_kernels(c, SPECS["factored"])
        finally:
            torch.set_default_dtype(torch.float32)
        assert found.lse.dtype is torch.float32
        assert all(x.dtype is torch.float16 for x in (found.o, *found[2:]))

    @pytest.mark.parametrize("heads", [(0,), (2, 0), (0, 3)])
    def test_no_heads(self, heads):
        c = kernel_case(seed=0, n_q=5, n_k=6, d=8, heads=heads)
        assert run_kernels(c, SPECS["sagebwd"]).dq.shape == (*heads, 5, 8)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("heads", "name"), crossed([(), (2,), (1, 2), (1, 2, 1)], ["sagebwd", "fpa_fp16"])
    )
    def test_any_number_of_leading_axes(self, name, heads):
        c = kernel_case(seed=0, n_q=5, n_k=6, d=8, heads=heads)
        found = run_kernels(c, SPECS[name])
        flat = run_kernels(c.map(lambda x: x.reshape(1, -1, *x.shape[-2:])), SPECS[name])
        assert_same(found, Results(*(y.reshape(x.shape) for x, y in zip(found, flat, strict=True))))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("spec", FEW.values(), ids=FEW)
    def test_outputs_have_the_inputs_dtype_and_lse_is_float32(self, spec, dtype):
        found = run_kernels(kernel_case(dtype, seed=0, n_q=9, n_k=10, d=8), spec)
        assert {x.dtype for x in found._replace(lse=found.o)} == {dtype}
        assert found.lse.dtype is torch.float32

    def test_the_return_type_follows_return_lse_alone(self):
        c = kernel_case(seed=0, n_q=9, n_k=10, d=8)
        o, lse = attention(c.q, c.k, c.v, return_lse=True)
        assert_bitwise(actual=attention(c.q, c.k, c.v), expected=o, what="o")
        assert lse.shape == c.q.shape[:-1]


STRIDES = {
    "tokens before heads": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2),
    "channels before tokens": lambda x: x.mT.contiguous().mT,
    "slice": lambda x: F.pad(x, (3, 2, 1, 4))[..., 1:-4, 3:-2],
    "every other channel": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "every third token": lambda x: x.repeat_interleave(3, -2)[..., ::3, :],
    "offset": lambda x: torch.cat([x.new_zeros(7), x.flatten()])[7:].view(x.shape),
}
"""The same values in other memory layouts."""


def strided_case(heads: int = 1, d: int = 24) -> Case:
    return kernel_case(seed=3, n_q=20, n_k=33, d=d, heads=(heads,))


of_each_spec = pytest.mark.parametrize("spec", FEW.values(), ids=FEW)


class TestStrides:
    """Strides of q, k, v and do change no bit."""

    @pytest.mark.slow
    @pytest.mark.parametrize(("strides", "name"), crossed([*STRIDES], [*FEW]))
    def test_of_all_tensors(self, name, strides):
        c, spec = strided_case(2 if "heads" in strides else 1), FEW[name]
        assert_same(run_kernels(c.map(STRIDES[strides]), spec), run_kernels(c, spec))

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "d"), crossed([*FEW], [20, 24]))
    def test_of_heads_within_channels(self, name, d):
        """PyTorch keeps this order of axes when it pads channels to whole vectors."""
        c, spec = strided_case(3, d).map(lambda x: x[None]), FEW[name]
        inner = c.map(lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1))
        assert inner.q.stride(1) == 1
        assert_same(run_kernels(inner, spec), run_kernels(c, spec))

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "axis"), crossed([*FEW], [-3, -2, -1]))
    def test_of_0(self, name, axis):
        """Expanded inputs, and the do of `o.sum().backward()`."""
        c = strided_case(2).map(lambda x: x.narrow(axis, 0, 1).expand(x.shape))
        c, spec = replace(c, do=torch.ones((), device=DEVICE).expand(c.do.shape)), FEW[name]
        assert_same(run_kernels(c, spec), run_kernels(c.map(torch.Tensor.contiguous), spec))

    @of_each_spec
    def test_of_a_sum(self, spec):
        c = strided_case()
        leaf = c.q.detach().requires_grad_()
        attention(leaf, c.k, c.v, spec=spec).sum().backward()
        expected = run_kernels(replace(c, do=torch.ones_like(c.do)), spec).dq
        assert_bitwise(actual=leaf.grad, expected=expected, what="dq")

    @of_each_spec
    def test_of_packed_qkv(self, spec):
        generator = torch.Generator().manual_seed(0)
        packed = torch.randn(1, 20, 3, 2, 16, generator=generator).to(DEVICE)
        q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
        c = Case(q=q, k=k, v=v, do=q.flip(-1))
        assert_same(run_kernels(c, spec), run_kernels(c.map(torch.Tensor.contiguous), spec))

    @of_each_spec
    def test_of_tokens_before_heads(self, spec):
        """layout="NHD" transposes inputs, outputs and gradients, but not lse."""
        c = strided_case(2).map(lambda x: x[None])
        nhd = c.map(lambda x: x.transpose(1, 2).contiguous())
        d_lse = torch.randn(c.q.shape[:-1], generator=torch.Generator().manual_seed(1)).to(DEVICE)
        found = run_kernels(nhd, spec, d_lse=d_lse, layout="NHD")
        expected = run_kernels(c, spec, d_lse=d_lse)
        assert found.o.is_contiguous() and found.dq.is_contiguous()
        assert_same(Results(*(x if x.ndim == 3 else x.transpose(1, 2) for x in found)), expected)

    @of_each_spec
    def test_outputs_and_gradients_have_the_order_of_heads_and_tokens_of_their_inputs(self, spec):
        c = strided_case(2).map(lambda x: x[None])
        found = run_kernels(c.map(torch.Tensor.contiguous), spec)
        assert all(x.is_contiguous() for x in (found.o, found.dq, found.dk, found.dv))
        q, do = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (c.q, c.do))
        mixed = Case(q=q, k=c.k.contiguous(), v=c.v.mT.contiguous().mT, do=do)
        again = run_kernels(mixed, spec)
        assert again.o.transpose(1, 2).is_contiguous()
        assert again.dq.transpose(1, 2).is_contiguous()
        assert again.dk.is_contiguous()
        assert_same(again, found)

    def test_the_order_in_memory_of_unusual_inputs(self):
        x = torch.randn(3, 2, 20, 2, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        leaves = [x.half().transpose(0, 1).detach().requires_grad_() for _ in range(3)]
        o = attention(*leaves, layout="NHD")
        assert o.is_contiguous()
        heads = x[0, :, :, :1].half().transpose(1, 2)
        k = heads.expand(2, 2, 20, 32).detach().requires_grad_()
        q = k.detach().clone().requires_grad_()
        found = torch.autograd.grad(attention(q, k, k, spec=FACTORED).sum(), (q, k))
        assert all(each.is_contiguous() for each in found)

    def test_an_output_may_be_changed_in_place(self):
        """A recorded call returns no view, like a call that repeats it."""
        x = torch.randn(1, 20, 2, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE).half()
        for _ in range(2):
            q, k, v = (x.transpose(1, 2).detach().requires_grad_() for _ in range(3))
            o = attention(q, k, v, spec=FACTORED)
            assert isinstance(o, torch.Tensor)
            o *= 2.0
            torch.autograd.grad(o.sum(), (q, k, v))

    @of_each_spec
    def test_of_the_gradient_of_lse(self, spec):
        c = strided_case(2)
        d_lse = torch.randn(20, 2, generator=torch.Generator().manual_seed(1)).to(DEVICE).mT
        expected = run_kernels(c, spec, d_lse=d_lse.contiguous())
        assert_same(run_kernels(c, spec, d_lse=d_lse), expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("heads", [(2,), (1, 2), (2, 1, 1)], ids=["3-D", "4-D", "5-D"])
def test_layouts_of_any_number_of_axes(layout, heads):
    """The result has the axes of q."""
    c = kernel_case(seed=3, n_q=5, n_k=6, d=8, d_v=16, heads=heads)
    expected = run_kernels(c, SPECS["sagebwd"])
    if layout == "NHD":
        c = c.map(lambda x: x.transpose(-3, -2))
        expected = Results(*(x if i == 1 else x.transpose(-3, -2) for i, x in enumerate(expected)))
    assert_same(run_kernels(c, SPECS["sagebwd"], layout=layout), expected)


@pytest.mark.parametrize("spec", FEW.values(), ids=FEW)
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_never_changed(spec, dtype):
    """Neither forward nor backward writes to q, k, v, do or the gradient of lse."""
    c = kernel_case(dtype, seed=4, n_q=33, n_k=20, d=16, kinds=(offset, offset, gaussian, gaussian))
    d_lse = torch.ones(c.q.shape[:-1], device=DEVICE)
    before, before_lse = c.map(torch.clone), d_lse.clone()
    run_kernels(c, spec, d_lse=d_lse)
    for x, y, name in zip(c.qkvdo, before.qkvdo, ("q", "k", "v", "do"), strict=True):
        assert_bitwise(actual=x, expected=y, what=name)
    assert_bitwise(actual=d_lse, expected=before_lse, what="d_lse")


class TestGradients:
    """Gradients are right for any subset of inputs and outputs; second derivatives raise."""

    @pytest.mark.slow
    @pytest.mark.parametrize(("wanted", "name"), crossed([(0,), (1,), (2,), (0, 2)], [*FEW]))
    def test_of_some_inputs_alone(self, name, wanted):
        spec = FEW[name]
        c = kernel_case(seed=1, n_q=20, n_k=30, d=8)
        expected = run_kernels(c, spec)[2:]
        leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(c.qkvdo[:3])]
        o = attention(*leaves, spec=spec)
        found = torch.autograd.grad(o, [leaves[i] for i in wanted], c.do)
        for i, gradient in zip(wanted, found, strict=True):
            assert_bitwise(actual=gradient, expected=expected[i], what=f"gradient {i}")

    def test_without_gradients_the_output_is_the_same(self):
        c = kernel_case(seed=1, n_q=20, n_k=30, d=8)
        with torch.no_grad():
            o, lse = attention(c.q, c.k, c.v, return_lse=True)
        assert not o.requires_grad and not lse.requires_grad
        expected = run_kernels(c, FACTORED_QK)
        assert_bitwise(actual=o, expected=expected.o, what="o")
        assert_bitwise(actual=lse, expected=expected.lse, what="lse")

    @staticmethod
    def exact(case: Case, d_lse: Tensor) -> Outputs:
        """Gradients from both outputs, by PyTorch's autograd in float64."""
        q, k, v = (x.detach().double().requires_grad_() for x in case.qkvdo[:3])
        s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~case.attends.to(DEVICE), -math.inf)
        o = s.softmax(-1) @ v
        outputs, gradients = (o, s.logsumexp(-1)), (case.do.double(), d_lse.double())
        return Outputs(o.detach(), *torch.autograd.grad(outputs, (q, k, v), gradients))

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
    def test_through_lse(self, spec, is_causal):
        """As accurate as the emulator's gradients through o alone. If K is smoothed, keys are far
        from zero, so that their mean matters in dq."""
        kinds = (gaussian, offset if spec.smoothing.k else gaussian, gaussian, gaussian)
        c = kernel_case(seed=2, n_q=33, n_k=70, d=16, kinds=kinds, is_causal=is_causal)
        d_lse = torch.randn(c.q.shape[:-1], generator=torch.Generator().manual_seed(1)).to(DEVICE)
        found, exact = run_kernels(c, spec, d_lse=d_lse), self.exact(c, d_lse)
        plain, sim = run_exact(c), run_attention(c, spec)
        yardstick = Outputs(
            *(getattr(exact, n) + getattr(sim, n) - getattr(plain, n) for n in NAMES)
        )
        assert_no_worse(found, exact, yardstick, band=2.0**-11)

    @pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
    def test_through_lse_alone(self, spec):
        """A loss of lse alone gives the same gradients as one in which o has a zero gradient."""
        c = kernel_case(seed=2, n_q=33, n_k=20, d=16)
        leaves = [x.detach().requires_grad_() for x in c.qkvdo[:3]]
        _, lse = attention(*leaves, spec=spec, return_lse=True)
        found = torch.autograd.grad(lse, leaves, torch.ones_like(lse))
        expected = run_kernels(
            replace(c, do=torch.zeros_like(c.do)), spec, d_lse=torch.ones_like(lse)
        )
        for gradient, name in zip(found, ("dq", "dk", "dv"), strict=True):
            assert_bitwise(actual=gradient, expected=getattr(expected, name), what=name)
        assert found[0].any() and found[1].any() and not found[2].any()

    @pytest.mark.parametrize("wanted", ["q", "k", "v"])
    @pytest.mark.parametrize("output", ["o", "lse"])
    @pytest.mark.parametrize("loss", [torch.sum, lambda o: o.square().sum()], ids=["sum", "square"])
    def test_twice_raises(self, loss, output, wanted):
        """A gradient penalty must not silently become 0, whether or not do depends on the
        inputs."""
        c = kernel_case(seed=0, n_q=3, n_k=4, d=4)
        inputs = {name: getattr(c, name).requires_grad_() for name in "qkv"}
        o, lse = attention(*inputs.values(), return_lse=True)
        loss = loss(o if output == "o" else lse)
        (gradient,) = torch.autograd.grad(loss, inputs[wanted], create_graph=True)
        with pytest.raises(RuntimeError, match="differentiated twice"):
            gradient.square().sum().backward()

    @pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
    def test_memory_saved_for_the_backward_is_linear_in_the_tokens(self, spec):
        """Saved are q, k, v and o, one float32 a query, and the mean of K: no map, code or copy."""
        c = kernel_case(torch.float16, seed=0, n_q=300, n_k=200, d=16)
        leaves = [x.detach().requires_grad_() for x in c.qkvdo[:3]]
        kept: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            o = attention(*leaves, spec=spec)
        own = {x.untyped_storage().data_ptr() for x in (*leaves, o)}
        assert {x.untyped_storage().data_ptr() for x in leaves} <= set(kept)
        mean = 4 * 16 if spec.smoothing.k else 0
        assert sum(size for at, size in kept.items() if at not in own) == 4 * 300 + mean


class TestPadding:
    """Memory around the tokens, and tokens without attention, change no result."""

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "is_causal"), crossed([*FEW], [False, True]))
    def test_memory_around_the_tokens_is_not_read(self, name, is_causal):
        """The memory around channels, tokens and heads is full of NaN."""
        spec = FEW[name]
        c = kernel_case(seed=6, n_q=90, n_k=103, d=24, heads=(2,), is_causal=is_causal)
        guarded = c.map(lambda x: F.pad(x, (8, 9, 5, 60, 1, 1), value=math.nan)[1:-1, 5:-60, 8:-9])
        assert_same(run_kernels(guarded, spec), run_kernels(c, spec))

    @pytest.mark.parametrize("spec", [*SPECS.values(), CAUSAL_SAFE], ids=[*SPECS, "causal_safe"])
    def test_keys_beyond_the_last_query(self, spec):
        """Under the upper left mask, no query attends to them: they change nothing, and get
        zeros."""
        c = kernel_case(seed=6, n_q=40, n_k=150, d=16, is_causal=True)
        for x in (c.k, c.v):
            x[..., 40:, :] = math.nan
        found = run_kernels(c, spec)
        short = run_kernels(replace(c, k=c.k[..., :40, :], v=c.v[..., :40, :]), spec)
        for name in ("dk", "dv"):
            assert not getattr(found, name)[..., 40:, :].any(), name
        assert_same(found._replace(dk=found.dk[..., :40, :], dv=found.dv[..., :40, :]), short)

    @pytest.mark.slow
    @not_a_number
    @pytest.mark.parametrize("spec", ["causal_safe", "factored_qk", "sagebwd", "fpa_fp16"])
    @pytest.mark.parametrize(
        ("n_q", "n_k", "alignment", "block", "bad", "token", "first"),
        [
            (64, 96, "lower_right", 64, "k", 64, 32),
            (64, 64, "upper_left", 32, "k", 40, 32),
            (64, 32, "lower_right", 64, "q", 63, 32),
        ],
        ids=["a later block", "half a tile", "no keys"],
    )
    def test_nan_reaches_only_queries_that_attend_to_it(
        self, spec, n_q, n_k, alignment, block, bad, token, first
    ):
        """NaN reaches queries that share its scale or attend to it, and no earlier ones."""
        spec = replace(PRESETS[spec], smoothing=Smoothing(), block_k=block)
        c = kernel_case(seed=6, n_q=n_q, n_k=n_k, d=32, is_causal=True)
        expected = run_kernels(c, spec, causal_alignment=alignment)
        getattr(c, bad)[..., token, 0] = math.nan
        found = run_kernels(c, spec, causal_alignment=alignment)
        for name in ("o", "lse"):
            before, after = (getattr(x, name)[:, :, :first] for x in (expected, found))
            assert_bitwise(actual=after, expected=before, what=name)
        assert bool(found.o[:, :, -1].isnan().all())

    @pytest.mark.slow
    @not_a_number
    @pytest.mark.parametrize("spec", [*SPECS.values(), CAUSAL_SAFE], ids=[*SPECS, "causal_safe"])
    def test_queries_that_attend_to_nothing(self, spec):
        """Under the lower right mask, neither they nor gradients of their o and lse reach any
        result."""
        c = kernel_case(seed=6, n_q=90, n_k=20, d=16, is_causal=True)
        d_lse = torch.ones(c.q.shape[:-1], device=DEVICE)
        expected = run_kernels(c, spec, d_lse=d_lse, causal_alignment="lower_right")
        for bad in (1.0, math.nan, -math.inf):
            for x in (c.q, c.do, d_lse[..., None]):
                x[..., :70, :] = bad
            found = run_kernels(c, spec, d_lse=d_lse, causal_alignment="lower_right")
            assert_same(found, expected)
        assert not found.o[..., :70, :].any() and not found.dq[..., :70, :].any()
        assert bool((found.lse[..., :70] == -math.inf).all())
        assert found.dq[..., 70:, :].any() and found.o[..., 70:, :].any()


class TestCausality:
    """Later tokens change earlier rows only through shared scales."""

    CUT = 70

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("preset", "alignment"),
        crossed(["causal_safe", "factored", "fpa_fp16", "sagebwd"], ["upper_left", "lower_right"]),
    )
    def test_of_later_tokens_on_earlier_rows(self, preset, alignment):
        """They change no bit in unquantized specs and CAUSAL_SAFE, and do in specs that share a
        scale between them."""
        c = kernel_case(seed=7, n_q=130, n_k=130, d=16, is_causal=True)
        later = kernel_case(seed=8, n_q=60, n_k=60, d=16).map(lambda x: x * 3)
        changed = Case(
            **{
                name: torch.cat([getattr(c, name)[..., : self.CUT, :], getattr(later, name)], -2)
                for name in ("q", "k", "v", "do")
            },
            is_causal=True,
        )
        before, after = (
            run_kernels(x, PRESETS[preset], causal_alignment=alignment) for x in (c, changed)
        )
        earlier = [
            Results(
                *(x[..., : self.CUT] if i == 1 else x[..., : self.CUT, :] for i, x in enumerate(r))
            )
            for r in (before, after)
        ]
        if preset in ("fpa_fp16", "causal_safe"):
            assert_same(earlier[1], earlier[0], "o", "lse", "dq")
        else:
            for name in ("o", "dq"):
                assert not torch.equal(getattr(earlier[1], name), getattr(earlier[0], name)), name


def test_tokens_behind_the_last_set_no_scale():
    """All logits are far below 0, so that padding would have the largest entry of a tile of P or
    dS."""
    c = kernel_case(seed=0, n_q=129, n_k=65, d=16)
    c.q.uniform_(0.9, 1.1)
    c.k.uniform_(-2.2, -1.8)
    spec = replace(SAGEBWD, smoothing=Smoothing())
    assert_no_worse(run_kernels(c, spec), run_exact(c), run_attention(c, spec), band=1e-3)


def test_the_two_causal_alignments_differ_only_where_lengths_do():
    c = kernel_case(seed=9, n_q=20, n_k=20, d=8, is_causal=True)
    spec = SPECS["sagebwd"]
    assert_same(run_kernels(c, spec, causal_alignment="lower_right"), run_kernels(c, spec))
    longer = replace(c, q=c.q[..., :12, :], do=c.do[..., :12, :])
    one, other = (
        run_kernels(longer, spec, causal_alignment=a) for a in ("upper_left", "lower_right")
    )
    assert not torch.equal(one.o, other.o)


@pytest.mark.parametrize(("n_q", "n_k"), [(20, 33), (33, 20), (70, 130), (130, 70)])
def test_lower_right_is_the_mask_of_flash_attention(n_q, n_k):
    """Query i attends to keys 0..i + n_k - n_q."""
    c = kernel_case(torch.float16, seed=9, n_q=n_q, n_k=n_k, d=16, is_causal=True)
    mask = torch.ones(n_q, n_k, dtype=torch.bool, device=DEVICE).tril(n_k - n_q)
    masked = replace(c, is_causal=False, attn_mask=mask)
    for name in ("fpa_fp16", "factored"):
        assert_no_worse(
            run_kernels(c, SPECS[name], causal_alignment="lower_right"),
            run_exact(masked),
            run_attention(masked, SPECS[name]),
            band=2.0**-11,
        )


@pytest.mark.parametrize("window", [(2**31 - 1, -1), (-1, 2**31 - 1), (2**29, 2**62)])
def test_a_window_of_more_keys_than_32_bits_count_is_none(window):
    c = kernel_case(seed=9, n_q=100, n_k=70, d=8)
    found = run_kernels(c, SPECS["factored"], window=window, causal_alignment="lower_right")
    assert_same(found, run_kernels(c, SPECS["factored"]))


@pytest.mark.parametrize("side", [2**29, 2**30])
@pytest.mark.parametrize("is_left", [False, True])
def test_a_window_that_32_bits_do_not_count_is_refused_unless_it_covers_every_key(is_left, side):
    """The tensors have no memory. The last query is `side` keys after the first of side + 1."""

    def window_of(tokens: int, packing: Packing | None = None) -> tuple[int, int]:
        x = torch.empty(1, 1, tokens, 64, dtype=torch.float16, device="meta")
        extras = Extras(window=(side, -1) if is_left else (-1, side))
        problem = KernelProblem.of(
            x,
            x,
            x,
            spec=SPECS["factored"],
            scale=1.0,
            is_causal=False,
            lower_right=False,
            packing=packing,
            extras=extras,
        )
        assert (problem.lengths.left is None) == (problem.extras.window[0] == -1)
        return problem.extras.window

    assert window_of(side + 1) == (-1, -1)
    with pytest.raises(ValueError, match=f"window is .*{side}"):
        window_of(side + 2)
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    assert window_of(side + 2, Packing(cu, cu, side, side)) == (-1, -1)
    with pytest.raises(ValueError, match=f"window is .*{side}"):
        window_of(side + 2, Packing(cu, cu, 1, side + 2))
