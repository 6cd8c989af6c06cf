"""Tests that need a GPU: bfloat16, large addresses, CUDA graphs, streams and inductor.

The other tests of this folder run on a GPU too, if there is one.
"""

import fcntl
import gc
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from sagesim import CAUSAL_SAFE, FACTORED_QK, FPA_BF16, FPA_FP16, SAGEBWD, AttentionSpec
from sagesim_kernels import attention, attention_varlen
from tests.support.assertions import assert_bitwise, assert_within_budget
from tests.support.calls import Outputs, run_exact
from tests.support.inputs import Case
from tests.support.kernels import FEW, SPECS, Results, assert_same, kernel_case, run_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch's own, in 2.11
]

NAMES = ("o", "dq", "dk", "dv")


@pytest.fixture(autouse=True, scope="module")
def autograd_thread_has_a_context() -> None:
    """cuBLAS warns where it is the first to use the device in autograd's thread."""
    (torch.ones(1, device="cuda", requires_grad=True) * 2).backward()


class TestUnquantized:
    """Without INT8 the kernels are as accurate as SDPA: model sizes, both 16-bit formats."""

    @pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    @pytest.mark.parametrize("spec", [FPA_FP16, FPA_BF16], ids=["fp16", "bf16"])
    @pytest.mark.parametrize(
        ("n_q", "n_k", "d", "is_causal"),
        [
            (128, 128, 64, False),
            (257, 257, 64, True),
            (1000, 1000, 128, True),
            (130, 1000, 40, False),
            (1000, 130, 80, False),
            (300, 300, 96, True),
            (200, 200, 256, True),
            (4097, 4097, 64, True),
        ],
    )
    def test_error_is_at_most_that_of_sdpa(self, n_q, n_k, d, is_causal, spec, backend):
        dtype = torch.bfloat16 if spec is FPA_BF16 else torch.float16
        c = kernel_case(dtype, seed=0, n_q=n_q, n_k=n_k, d=d, heads=(1, 2), is_causal=is_causal)
        leaves = [x.detach().requires_grad_() for x in c.qkvdo[:3]]
        with sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(*leaves, is_causal=is_causal)
        yardstick = Outputs(o.detach(), *torch.autograd.grad(o, leaves, c.do))
        found, exact = run_kernels(c, spec), run_exact(c)
        for name in NAMES:
            assert_within_budget(
                actual=getattr(found, name),
                exact=getattr(exact, name),
                yardstick=getattr(yardstick, name),
                factor=2.0 if name == "o" else 3.0,
                band=0.0,
                what=name,
            )

    @pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
    def test_is_finite_at_a_long_sequence(self, spec):
        c = kernel_case(
            torch.bfloat16, seed=0, n_q=4097, n_k=4097, d=64, heads=(1, 2), is_causal=True
        )
        for name, x in run_kernels(c, spec)._asdict().items():
            assert bool(x.isfinite().all()), name


class TestBeyondInt32:
    """Tensors may have more than 2**31 elements. Tests need tens of gigabytes: one runs at a
    time."""

    @pytest.fixture(autouse=True)
    def alone_on_the_device(self):
        with (Path(tempfile.gettempdir()) / "sagebwd-large-tests.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
            gc.collect()
            torch.cuda.empty_cache()

    @pytest.mark.parametrize("spec", FEW.values(), ids=FEW)
    @pytest.mark.parametrize("strides", [(2**26, 1), (1, 2**28)], ids=["tokens", "channels"])
    def test_offsets_of_few_tokens(self, spec, strides):
        """Tokens or channels so far apart that one head spans more than 2**31 elements."""
        c = kernel_case(torch.float16, seed=0, n_q=40, n_k=40, d=16)
        extent = 39 * strides[0] + 15 * strides[1] + 1
        memory = torch.empty(4, extent, dtype=torch.float16, device="cuda")
        far = Case(
            **{
                name: row.as_strided(x.shape, (0, 0, *strides), row.storage_offset()).copy_(x)
                for name, row, x in zip(("q", "k", "v", "do"), memory, c.qkvdo, strict=True)
            }
        )
        assert_same(run_kernels(far, spec), run_kernels(c, spec))

    @pytest.mark.parametrize("layout", ["HND", "NHD"])
    @pytest.mark.parametrize("spec", FEW.values(), ids=FEW)
    def test_many_heads(self, spec, layout):
        """Each tensor has more than 2**31 elements; the last head and one in the middle give what
        they give alone."""
        b, h, n, d = 1025, 256, 128, 64
        shape = (b, h, n, d) if layout == "HND" else (b, n, h, d)
        one = kernel_case(torch.float16, seed=0, n_q=n, n_k=n, d=d)
        tensors = [torch.zeros(shape, dtype=torch.float16, device="cuda") for _ in range(4)]
        assert tensors[0].numel() > 2**31
        places = [(b - 1, h - 1), (b // 2, 3)]
        for x, y in zip(tensors, one.qkvdo, strict=True):
            heads_first = x if layout == "HND" else x.transpose(1, 2)
            for i, j in places:
                heads_first[i, j] = y[0, 0]
        c = Case(**dict(zip(("q", "k", "v", "do"), tensors, strict=True)))
        found, alone = run_kernels(c, spec, layout=layout), run_kernels(one, spec)
        if layout == "NHD":
            found = Results(*(x if i == 1 else x.transpose(1, 2) for i, x in enumerate(found)))
        for i, j in places:
            assert_same(Results(*(x[i, j] for x in found)), Results(*(x[0, 0] for x in alone)))
        assert not found.o[0, 0].any() and not found.dk[-1, -2].any()

    @pytest.mark.parametrize("spec", [SAGEBWD, FACTORED_QK], ids=["sagebwd", "factored_qk"])
    def test_many_tokens_in_one_packed_batch(self, spec):
        """Codes of all sequences form one row of more than 2**31 / 64 tokens; the last sequence
        gives what it gives alone."""
        n, sequences, d = 1024, 33_000, 64
        one = kernel_case(torch.float16, seed=0, n_q=n, n_k=n, d=d, heads=(1,))
        q, k, v, do = (x.transpose(0, 1) for x in one.qkvdo)
        packed = []
        for x in (q, k, v):
            y = torch.zeros(sequences * n, 1, d, dtype=torch.float16, device="cuda")
            y[-n:] = x
            packed.append(y.requires_grad_())
        assert packed[0].numel() > 2**31
        cu = torch.arange(0, sequences + 1, dtype=torch.int32, device="cuda") * n
        o = attention_varlen(*packed, cu, cu, n, n, spec=spec)
        (o[-n:] * do).sum().backward()
        alone = run_kernels(one, spec)
        found = (o.detach(), *(x.grad for x in packed))
        for name, x in zip(NAMES, found, strict=True):
            expected = getattr(alone, name).transpose(0, 1)
            assert_bitwise(actual=x[-n:], expected=expected, what=name)

    @pytest.mark.parametrize("shape", [(70_000, 1), (1, 70_000)], ids=["batch", "heads"])
    def test_more_heads_than_a_grid_has_rows(self, shape):
        """A launch has at most 65,535 programs on its second and third axis; more heads are
        computed, or raise a ValueError that names their number."""
        c = kernel_case(torch.float16, seed=0, n_q=4, n_k=4, d=16, heads=shape)
        try:
            found = run_kernels(c, SAGEBWD)
        except ValueError as refusal:
            assert "70000" in str(refusal) or "70,000" in str(refusal)
            return
        last = run_kernels(c.map(lambda x: x[-1:, -1:].clone()), SAGEBWD)
        assert_same(Results(*(x[-1:, -1:] for x in found)), last)


class TestGraphs:
    """The kernels run in CUDA graphs, on side streams and on devices that are not current."""

    @pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
    def test_a_replay_is_eager_on_new_inputs(self, spec):
        first, second = (
            kernel_case(torch.float16, seed=s, n_q=300, n_k=200, d=64, heads=(2,)) for s in (0, 1)
        )
        static = first.map(torch.clone)
        leaves = [x.requires_grad_() for x in static.qkvdo[:3]]

        def step() -> Results:
            o, lse = attention(*leaves, spec=spec, return_lse=True)
            grads = torch.autograd.grad((o, lse), leaves, (static.do, torch.ones_like(lse)))
            return Results(o.detach(), lse.detach(), *grads)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for c in (second, first):
            with torch.no_grad():
                for x, y in zip(static.qkvdo, c.qkvdo, strict=True):
                    x.copy_(y)
            graph.replay()
            ones = torch.ones(c.q.shape[:-1], device="cuda")
            assert_same(captured, run_kernels(c, spec, d_lse=ones))

    @pytest.mark.parametrize("spec", FEW.values(), ids=FEW)
    def test_a_side_stream(self, spec):
        """All work is on the caller's stream: after what it did to the inputs, and without waiting
        for other streams."""
        c = kernel_case(torch.float16, seed=0, n_q=300, n_k=200, d=64, heads=(2,))
        expected = run_kernels(c, spec)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            late = c.map(lambda x: torch.zeros_like(x).copy_(x))
            found = run_kernels(late, spec)
        stream.synchronize()
        assert_same(found, expected)

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    @pytest.mark.parametrize("spec", FEW.values(), ids=FEW)
    def test_a_device_that_is_not_the_current_one(self, spec):
        c = kernel_case(torch.float16, seed=0, n_q=70, n_k=40, d=64, heads=(2,))
        with torch.cuda.device(0):
            found = run_kernels(c.map(lambda x: x.to("cuda:1")), spec)
            assert torch.cuda.current_device() == 0
        assert {x.device.index for x in found} == {1}
        assert_same(Results(*(x.to(c.q.device) for x in found)), run_kernels(c, spec))

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # PyTorch calls it a prototype
    @pytest.mark.parametrize("spec", FEW.values(), ids=FEW)
    def test_nothing_waits_for_the_device(self, spec):
        c = kernel_case(torch.float16, seed=0, n_q=70, n_k=40, d=64, heads=(2,), is_causal=True)
        cu = torch.tensor([0, 30, 70], dtype=torch.int32, device="cuda")
        packed = c.q.transpose(0, 1).contiguous().requires_grad_()

        def both() -> None:
            run_kernels(c, spec)
            attention_varlen(packed, packed, packed, cu, cu, 40, 40, spec=spec).sum().backward()

        both()
        try:
            torch.cuda.set_sync_debug_mode("error")
            both()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore::UserWarning")  # inductor's advice on settings
class TestCompiled:
    """torch.compile of a layer, also with inductor's own CUDA graphs, changes no more than
    rounding."""

    @pytest.mark.parametrize("heads", [4, 1])
    @pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
    def test_a_layer(self, mode, heads):
        """Uses the default spec; one head of size 64 runs Hopper's kernels on Hopper."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, 70, 64, generator=generator).cuda().half()
        w = (torch.randn(3, 64, 64, generator=generator) / 8).cuda().half()

        def layer(x: Tensor, w: Tensor) -> Tensor:
            q, k, v = (x @ y for y in w)
            split = [y.unflatten(-1, (heads, -1)) for y in (q, k, v)]
            return attention(*split, layout="NHD", is_causal=True).flatten(-2)

        compiled = torch.compile(layer, fullgraph=True, mode=mode)
        for _ in range(3):
            results = []
            for f in (layer, compiled):
                leaves = [y.detach().clone().requires_grad_() for y in (x, w)]
                o = f(*leaves)
                results.append([o.detach().clone(), *torch.autograd.grad(o.sum(), leaves)])
            for name, found, expected in zip(("o", "dx", "dw"), *reversed(results), strict=True):
                assert_within_budget(
                    actual=found,
                    exact=expected.double(),
                    yardstick=expected,
                    factor=1.0,
                    band=2.0**-6,
                    what=name,
                )

    @pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
    def test_a_softcap_that_changes(self, mode):
        """The first value is a constant of the graph, later ones are not."""
        c = kernel_case(torch.float16, seed=0, n_q=70, n_k=70, d=64, heads=(2,))
        compiled = torch.compile(attention, fullgraph=True, mode=mode)
        leaves = [x.requires_grad_() for x in c.qkvdo[:3]]
        for softcap in (20.0, 20.0, 30.0, 0.5, 0.5, 20.0):
            results = []
            for f in (compiled, attention):
                torch.compiler.cudagraph_mark_step_begin()
                o = f(*leaves, softcap=softcap)
                grads = torch.autograd.grad(o, leaves, c.do)
                results.append([x.detach().clone() for x in (o, *grads)])
            for name, actual, expected in zip(NAMES, *results, strict=True):
                assert_bitwise(actual=actual, expected=expected, what=name)


class TestRefusals:
    def test_tensors_on_a_cpu(self):
        x = torch.zeros(2, 3, 8)
        with pytest.raises(ValueError, match=r"are on cpu.*CUDA"):
            attention(x, x, x)

    @pytest.mark.parametrize("cu", [[0, 5, 3, 7], [1, 7], [0, 6], [0, 8], [0, 2**31 - 1]])
    def test_beginnings_that_do_not_describe_the_tensor(self, cu, compile_alike):
        """Raises a device-side assertion, after which a process cannot use the device: its own
        process."""
        script = f"""
{compile_alike}
import torch
from sagesim_kernels import attention_varlen
x = torch.zeros(7, 1, 8, device="cuda", dtype=torch.float16)
cu = torch.tensor({cu}, dtype=torch.int32, device="cuda")
good = torch.tensor([0] + [7] * (len(cu) - 1), dtype=torch.int32, device="cuda")
attention_varlen(x, x, x, cu, good, 7, 7)
torch.cuda.synchronize()
"""
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        found = subprocess.run(
            [sys.executable, "-c", script], check=False, capture_output=True, text=True, env=env
        )
        assert found.returncode != 0
        assert "device-side assert" in found.stderr or "cu_seqlens_q" in found.stderr


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    "spec",
    [SAGEBWD, CAUSAL_SAFE, FACTORED_QK, FPA_BF16],
    ids=["sagebwd", "safe", "factored_qk", "bf16"],
)
def test_checkpointing_under_autocast_is_bit_equal(
    spec: AttentionSpec, use_reentrant: bool
) -> None:
    """A checkpointed layer under autocast to bfloat16 gives the bits of one that is not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2, 300, 64, generator=generator).cuda()
    w = torch.randn(64, 192, generator=generator).cuda() / 8

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return attention(*(x @ w).chunk(3, -1), spec=spec, is_causal=True)

    results = []
    for again in (False, True):
        leaves = [y.detach().clone().requires_grad_() for y in (x, w)]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            how = {"use_reentrant": use_reentrant}
            o = checkpoint(layer, *leaves, **how) if again else layer(*leaves)
        assert o.dtype is torch.bfloat16
        o.float().square().sum().backward()
        results.append([o.detach(), *(y.grad for y in leaves)])
    for name, found, expected in zip(("o", "dx", "dw"), *reversed(results), strict=True):
        assert_bitwise(actual=found, expected=expected, what=name)


def test_half_precision_inputs_of_6e4_stay_finite() -> None:
    """Outliers of 6e4 give a finite o and lse, in both 16-bit formats."""
    for dtype in (torch.float16, torch.bfloat16):
        c = kernel_case(dtype, seed=0, n_q=300, n_k=300, d=64, is_causal=True)
        for x in (c.q, c.k, c.v):
            x[..., 17, 5] = 6e4
        for name, spec in SPECS.items():
            o, lse = attention(*c.qkvdo[:3], spec=spec, is_causal=True, return_lse=True)
            assert bool(o.isfinite().all()) and bool((lse > -math.inf).all()), name
