"""The kernels give the same bits under torch.compile, checkpointing and autocast."""

import functools

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from sagesim import FACTORED_QK, AttentionSpec
from sagesim_kernels import attention, attention_varlen
from sagesim_kernels.ops import backward_op, forward_op
from tests.support.assertions import assert_bitwise
from tests.support.inputs import Case
from tests.support.kernels import (
    DEVICE,
    FEW,
    HERE,
    SPECS,
    Results,
    assert_same,
    kernel_case,
    run_kernels,
)

pytestmark = [
    *HERE,
    pytest.mark.filterwarnings("ignore:TensorFloat32"),  # inductor's advice
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch's own, in 2.11
]

BACKENDS = ["aot_eager"] if DEVICE == "cpu" else ["aot_eager", "inductor"]
AUTOCAST = [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(attend, c: Case) -> Results:
    """As run_kernels, for a function of q, k and v that returns o and lse."""
    leaves = [x.detach().requires_grad_() for x in c.qkvdo[:3]]
    o, lse = attend(*leaves)
    grads = torch.autograd.grad((o, lse), leaves, (c.do, torch.ones_like(lse)))
    return Results(o.detach(), lse.detach(), *grads)


def eager(c: Case, spec: AttentionSpec, **options: object) -> Results:
    return run(lambda *x: attention(*x, spec=spec, return_lse=True, **options), c)


CALLS = {
    "plain": (False, False, -1, -1, None),
    "causal": (True, False, -1, -1, None),
    "lower_right": (True, True, -1, -1, None),
    "window_softcap": (False, True, 7, 3, 20.0),
}
"""is_causal, lower_right, left, right, softcap."""

FEW_CALLS = ("plain", "window_softcap")
"""Calls in which each argument has both of its kinds of values."""

CHECKED = [
    *(
        pytest.param(
            FEW["sagebwd"],
            call,
            id=f"sagebwd-{name}",
            marks=() if name in FEW_CALLS else pytest.mark.exhaustive,
        )
        for name, call in CALLS.items()
    ),
    pytest.param(FEW["q_smoothed"], CALLS["causal"], id="q_smoothed-causal"),
    pytest.param(FEW["fpa_fp16"], CALLS["causal"], id="fpa_fp16-causal"),
]


class TestOperators:
    """All four tests of opcheck pass: schema, autograd, fake tensors, dynamic shapes."""

    @staticmethod
    def check(operator, arguments) -> None:
        found = torch.library.opcheck(operator, arguments)
        assert len(found) == 4 and set(found.values()) == {"SUCCESS"}, found

    @staticmethod
    def tensors(*, tokens_first: bool = False) -> list[Tensor]:
        heads = (2, 2) if tokens_first else (1, 1)
        c = kernel_case(seed=0, n_q=20, n_k=33, d=16, d_v=24, heads=heads)
        if not tokens_first:
            return [*c.qkvdo]
        return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in c.qkvdo]

    @pytest.mark.slow
    @pytest.mark.parametrize(("spec", "call"), CHECKED)
    def test_forward(self, spec, call):
        leaves = [x.requires_grad_() for x in self.tensors()[:3]]
        for with_lse in (True, False):
            self.check(forward_op, (*leaves, *[None] * 8, spec.label(), 0.25, *call, with_lse))

    @pytest.mark.slow
    @pytest.mark.parametrize(("spec", "call"), CHECKED)
    def test_backward(self, spec, call):
        q, k, v, do = self.tensors()
        rest = (*[None] * 8, spec.label(), 0.25, *call)
        o, lse, lse2, k_mean = forward_op(q, k, v, *rest, True)
        d_lse = None if call == CALLS["plain"] else torch.ones_like(lse)
        self.check(backward_op, (do, d_lse, q, k, v, o, lse2, k_mean, *rest))

    @pytest.mark.slow
    @pytest.mark.parametrize("spec", [FEW["sagebwd"]], ids=["sagebwd"])
    def test_of_packed_sequences(self, spec):
        q, k, v, do = self.tensors()
        cu_q = torch.tensor([0, 5, 20], dtype=torch.int32, device=DEVICE)
        cu_k = torch.tensor([0, 30, 33], dtype=torch.int32, device=DEVICE)
        rest = (*[None] * 3, cu_q, cu_k, None, 15, 30, spec.label(), 0.25, *CALLS["lower_right"])
        o, lse, lse2, k_mean = forward_op(q, k, v, *rest, True)
        self.check(backward_op, (do, torch.ones_like(lse), q, k, v, o, lse2, k_mean, *rest))
        self.check(forward_op, (*(x.requires_grad_() for x in (q, k, v)), *rest, True))

    @pytest.mark.slow
    def test_of_tokens_before_heads_in_memory(self):
        q, k, v, do = self.tensors(tokens_first=True)
        rest = (*[None] * 8, FEW["sagebwd"].label(), 0.25, *CALLS["plain"])
        o, _, lse2, k_mean = forward_op(q, k, v, *rest, True)
        assert o.transpose(1, 2).is_contiguous()
        self.check(backward_op, (do, None, q, k, v, o, lse2, k_mean, *rest))
        self.check(forward_op, (*(x.requires_grad_() for x in (q, k, v)), *rest, True))

    @pytest.mark.slow
    def test_with_sinks_and_padding(self):
        q, k, v, do = self.tensors()
        label, sinks = FEW["sagebwd"].label(), torch.randn(1, device=DEVICE).requires_grad_()
        key_mask = torch.arange(33, device=DEVICE)[None] % 3 > 0
        for padding in ((key_mask, None), (None, torch.tensor([20], device=DEVICE))):
            rest = (*padding, *[None] * 5, label, 0.25, *CALLS["window_softcap"])
            o, lse, lse2, k_mean = forward_op(q, k, v, sinks.detach(), *rest, True)
            given = (do, torch.ones_like(lse), q, k, v, o, lse2, k_mean, sinks.detach(), *rest)
            self.check(backward_op, given)
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            self.check(forward_op, (*leaves, sinks, *rest, True))

    def test_without_tokens(self):
        c = kernel_case(seed=0, n_q=0, n_k=5, d=8)
        leaves = [x.requires_grad_() for x in c.qkvdo[:3]]
        label = FEW["sagebwd"].label()
        self.check(forward_op, (*leaves, *[None] * 8, label, 0.25, *CALLS["plain"], False))


@pytest.mark.slow
def test_the_data_may_decide_how_many_heads_there_are():
    def attend(x: Tensor, chosen: Tensor) -> Tensor:
        heads = x[chosen.nonzero()[:, 0]][None].permute(0, 2, 1, 3).contiguous()
        o = attention(heads, heads, heads, layout="NHD")
        assert isinstance(o, Tensor)
        return o * 1

    x = torch.randn(4, 20, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE).half()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        for heads in (1, 3):
            chosen = torch.arange(4, device=DEVICE) < heads
            assert_bitwise(actual=compiled(x, chosen), expected=attend(x, chosen), what="o")


@pytest.mark.parametrize("backend", BACKENDS)
class TestCompiled:
    @pytest.mark.slow
    @pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
    def test_whole_graphs_give_the_bytes_of_eager(self, spec, backend):
        c = kernel_case(torch.float16, seed=0, n_q=20, n_k=33, d=16, d_v=24)
        compiled = torch.compile(
            lambda *x: attention(*x, spec=spec, is_causal=True, return_lse=True),
            fullgraph=True,
            backend=backend,
        )
        assert_same(run(compiled, c), eager(c, spec, is_causal=True))

    @pytest.mark.slow
    def test_every_option_gives_the_bytes_of_eager(self, backend):
        """Without a graph break, and without a compilation for each value."""
        counter = CompileCounterWithBackend(backend)
        spec = FEW["sagebwd"]
        compiled = torch.compile(
            lambda *x, **options: attention(*x, spec=spec, return_lse=True, **options),
            fullgraph=True,
            backend=counter,
        )
        c = kernel_case(seed=0, n_q=20, n_k=33, d=16)
        for i in range(5):
            options = {
                "window": (7 + i, 3 + i),
                "causal_alignment": "lower_right",
                "softcap": 20.0 + i,
                "sinks": torch.full((1,), 0.5 + i, device=DEVICE),
                "key_mask": torch.arange(33, device=DEVICE)[None] % (i + 2) > 0,
            }
            found = run(lambda *x: compiled(*x, **options), c)  # noqa: B023
            assert_same(found, eager(c, spec, **options))
        assert counter.frame_count <= 2

    def test_a_softcap_that_is_an_integer(self, backend):
        """Is compiled once more when it changes, and no more."""
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(
            lambda *x, softcap: attention(*x, softcap=softcap), fullgraph=True, backend=counter
        )
        x = kernel_case(seed=0, n_q=20, n_k=33, d=16).qkvdo[:3]
        for softcap in (2, 3, 5):
            expected = attention(*x, softcap=float(softcap))
            assert_bitwise(actual=compiled(*x, softcap=softcap), expected=expected, what="o")
        assert counter.frame_count <= 2

    def test_tokens_before_heads(self, backend):
        c = kernel_case(seed=0, n_q=20, n_k=33, d=16, heads=(1, 2))
        c = c.map(lambda x: x.transpose(1, 2).contiguous())
        compiled = torch.compile(
            lambda *x: attention(*x, layout="NHD", return_lse=True), fullgraph=True, backend=backend
        )
        assert_same(run(compiled, c), eager(c, FACTORED_QK, layout="NHD"))

    @pytest.mark.slow
    def test_at_most_two_compilations_for_ten_lengths(self, backend):
        counter = CompileCounterWithBackend(backend)
        spec = FEW["sagebwd"]
        compiled = torch.compile(
            lambda *x: attention(*x, spec=spec, return_lse=True), fullgraph=True, backend=counter
        )
        for n in range(11, 21):
            c = kernel_case(seed=n, n_q=n, n_k=2 * n, d=16)
            assert_same(run(compiled, c), eager(c, spec))
        assert counter.frame_count <= 2

    @pytest.mark.slow
    def test_at_most_two_compilations_for_ten_batches_of_packed_sequences(self, backend):
        counter = CompileCounterWithBackend(backend)
        c = kernel_case(seed=0, n_q=40, n_k=40, d=16, heads=(1,))
        q, k, v = (x.transpose(0, 1).contiguous() for x in c.qkvdo[:3])
        compiled = torch.compile(attention_varlen, fullgraph=True, backend=counter)
        for n in range(11, 21):
            cu = torch.tensor([0, n, n + 15], dtype=torch.int32, device=DEVICE)
            arguments = (*(x[: n + 15] for x in (q, k, v)), cu, cu, 2 * n, 3 * n)
            expected = attention_varlen(*arguments)
            assert_bitwise(actual=compiled(*arguments), expected=expected, what="o")
        assert counter.frame_count <= 2

    @pytest.mark.slow
    def test_another_spec_is_compiled_anew_and_is_right(self, backend):
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(
            lambda *x, spec: attention(*x, spec=spec, return_lse=True),
            fullgraph=True,
            backend=counter,
        )
        c = kernel_case(seed=0, n_q=20, n_k=33, d=16)
        for spec in (FEW["sagebwd"], FEW["fpa_fp16"], FEW["sagebwd"]):
            found = run(lambda *x: compiled(*x, spec=spec), c)  # noqa: B023
            assert_same(found, eager(c, spec))
        assert counter.frame_count == 2

    @pytest.mark.parametrize("dtype", AUTOCAST)
    def test_under_autocast(self, backend, dtype):
        c = kernel_case(seed=0, n_q=20, n_k=33, d=16)
        compiled = torch.compile(
            lambda *x: attention(*x, return_lse=True), fullgraph=True, backend=backend
        )
        with torch.autocast(DEVICE, dtype=dtype):
            found = run(compiled, replace_do(c, dtype))
            expected = eager(replace_do(c, dtype), FACTORED_QK)
        assert found.o.dtype is dtype
        assert_same(found, expected)

    def test_refusals_are_the_same(self, backend):
        x = torch.zeros(1, 3, 257, device=DEVICE)
        compiled = torch.compile(lambda x: attention(x, x, x), backend=backend)
        with pytest.raises(ValueError, match="head size 257"):
            compiled(x)


def replace_do(c: Case, dtype: torch.dtype) -> Case:
    return Case(q=c.q, k=c.k, v=c.v, do=c.do.to(dtype))


class TestAutocast:
    @pytest.mark.parametrize("dtype", AUTOCAST)
    @pytest.mark.parametrize("spec", FEW.values(), ids=FEW)
    def test_casts_as_sdpa_does(self, spec, dtype):
        c = kernel_case(seed=0, n_q=20, n_k=33, d=16)
        expected = run_kernels(c.to(dtype), spec)
        q, k, v = (x.detach().requires_grad_() for x in c.qkvdo[:3])
        with torch.autocast(DEVICE, dtype=dtype):
            o, lse = attention(q, k, v, spec=spec, return_lse=True)
            sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        assert o.dtype is sdpa.dtype is dtype
        grads = torch.autograd.grad(o, (q, k, v), c.do.to(dtype))
        assert {x.dtype for x in grads} == {torch.float32}, "gradients have their leaves' dtype"
        narrow = (x.to(dtype) for x in grads)
        assert_same(Results(o.detach(), lse.detach(), *narrow), expected)

    def test_takes_inputs_of_several_dtypes(self):
        """A projection in half precision beside a float32 cache, as SDPA takes them."""
        c = kernel_case(seed=0, n_q=20, n_k=33, d=16)
        with torch.autocast(DEVICE, dtype=torch.float16):
            o = attention(c.q.half(), c.k, c.v)
        assert_bitwise(actual=o, expected=attention(c.q.half(), c.k.half(), c.v.half()), what="o")

    @pytest.mark.parametrize("dtype", AUTOCAST)
    def test_a_backward_under_autocast_is_the_same(self, dtype):
        c = kernel_case(seed=0, n_q=20, n_k=33, d=16)
        leaves = [x.detach().requires_grad_() for x in c.qkvdo[:3]]
        o, lse = attention(*leaves, return_lse=True)
        with torch.autocast(DEVICE, dtype=dtype):
            grads = torch.autograd.grad(o, leaves, c.do)
        found = Results(o.detach(), lse.detach(), *grads)
        assert_same(found, run_kernels(c, FACTORED_QK))


@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("spec", FEW.values(), ids=FEW)
def test_checkpointing_is_bit_equal(spec, use_reentrant):
    c = kernel_case(seed=0, n_q=33, n_k=20, d=16, is_causal=True)

    def attend(*x: Tensor) -> tuple[Tensor, Tensor]:
        return attention(*x, spec=spec, is_causal=True, return_lse=True)

    def checkpointed(c: Case) -> Results:
        leaves = [x.detach().requires_grad_() for x in c.qkvdo[:3]]
        o, lse = checkpoint(attend, *leaves, use_reentrant=use_reentrant)
        torch.autograd.backward((o, lse), (c.do, torch.ones_like(lse)))
        return Results(o.detach(), lse.detach(), *(x.grad for x in leaves))

    assert_same(checkpointed(c), eager(c, spec, is_causal=True))


def keep_flash_attention(_ctx: object, operator: object, *_: object, **__: object):
    """The rule of TRL 1.16: results of operators with flash_attn in their names are kept."""
    kept = "flash_attn" in str(operator)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def keep_unless_backward(_ctx: object, operator: object, *_: object, **__: object):
    """A rule that takes operators with bwd in their names for backwards."""
    kept = "attn" in str(operator) and "bwd" not in str(operator)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class CountForwards(TorchDispatchMode):
    """Counts how often the forward's operator runs."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.sagesim_kernels.flash_attn_forward.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", [keep_flash_attention, keep_unless_backward, None])
def test_selective_checkpointing_computes_the_forward_once(policy):
    c = kernel_case(seed=0, n_q=20, n_k=33, d=16)
    spec = FEW["sagebwd"]
    context = functools.partial(create_selective_checkpoint_contexts, policy) if policy else None

    def attend(*x: Tensor) -> tuple[Tensor, Tensor]:
        options = {"context_fn": context} if context else {}
        attended = functools.partial(attention, spec=spec, return_lse=True)
        return checkpoint(attended, *x, use_reentrant=False, **options)

    with CountForwards() as forwards:
        actual = run(attend, c)
    assert forwards.count == (1 if policy else 2)
    assert_same(actual, eager(c, spec))
