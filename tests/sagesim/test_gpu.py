"""The emulator on a GPU computes what it computes on a CPU, on tensor cores, without waiting."""

import pytest
import torch

from sagesim import FACTORED, PRESETS, SAGEBWD, AttentionSpec, attention, trace
from sagesim.emulator import Operand, uniform
from sagesim.emulator.matmul import map_by_tokens
from sagesim.spec import Precision
from tests.support.assertions import assert_bitwise

pytestmark = pytest.mark.gpu

TOKEN_OPERANDS = ("q", "k", "v", "do")


@pytest.fixture(autouse=True, scope="module")
def autograd_thread_has_a_context() -> None:
    """cuBLAS warns where it is the first to use the device in autograd's thread."""
    (torch.ones(1, device="cuda", requires_grad=True) * 2).backward()


def problem(seed: int = 0, tokens: int = 300) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 1, 3, tokens, 64, generator=generator)


@pytest.mark.parametrize("keys", [64, 128, 1024])
def test_integer_sums_on_tensor_cores_are_exact(keys: int) -> None:
    generator = torch.Generator().manual_seed(keys)
    p = torch.randint(-127, 128, (2, 96, keys), generator=generator)
    v = torch.randint(-127, 128, (2, keys, 64), generator=generator)
    p[0], v[0] = 127, -127  # the largest sum there is
    one = torch.ones(1, 1, 1, 1, 1, device="cuda")
    left = Operand(p.float().cuda()[:, None, :, None], one, Precision.INT8)
    right = Operand(v.float().cuda()[:, None, :, None], one, Precision.INT8)
    product = map_by_tokens(left, right)
    assert_bitwise(actual=product.cpu(), expected=(p @ v).float(), what="sum of codes")


@pytest.mark.parametrize("name", ["sagebwd", "factored", "sagebwd_all_int8"])
def test_codes_and_scales_agree_with_the_cpu(name: str) -> None:
    x = problem()
    cpu = trace(*x, spec=PRESETS[name], is_causal=True)
    gpu = trace(*x.cuda(), spec=PRESETS[name], is_causal=True)
    for key, ours in cpu.operands.items():
        theirs = gpu.operands[key]
        if key.rpartition(".")[2] in TOKEN_OPERANDS:
            assert_bitwise(actual=theirs.codes.cpu(), expected=ours.codes, what=key)
            assert_bitwise(actual=theirs.scale.cpu(), expected=ours.scale, what=key)
        else:
            apart = (theirs.codes.cpu().int() - ours.codes.int()).abs()
            assert apart.max() <= 1, key
            assert (apart > 0).double().mean() <= 1e-3, key


def test_stochastic_draws_agree_with_the_cpu() -> None:
    for tensor in ("q", "ds"):
        cpu = uniform(7, tensor, 50, 70, 3, torch.device("cpu"))
        gpu = uniform(7, tensor, 50, 70, 3, torch.device("cuda"))
        assert_bitwise(actual=gpu.cpu(), expected=cpu, what=tensor)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # PyTorch calls it a prototype
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_does_not_wait_for_the_device_and_repeats(name: str, dtype: torch.dtype) -> None:
    def run() -> list[torch.Tensor]:
        q, k, v = (y.detach().requires_grad_() for y in x[:3])
        o = attention(q, k, v, spec=PRESETS[name], is_causal=True)
        return [o.detach(), *torch.autograd.grad(o, (q, k, v), x[3])]

    x = problem().to("cuda", dtype)
    first = run()
    try:
        torch.cuda.set_sync_debug_mode("error")
        second = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for once, again in zip(first, second, strict=True):
        assert once.isfinite().all()
        assert_bitwise(actual=again, expected=once, what="repeat")


@pytest.mark.parametrize("spec", [SAGEBWD, FACTORED])
def test_heads_do_not_affect_each_other(spec: AttentionSpec) -> None:
    x = problem().cuda()
    together = trace(*x, spec=spec)
    alone = trace(*x[:, :, 1:2], spec=spec)
    for name in ("o", "dq", "dk", "dv"):
        expected = getattr(together, name)[:, 1:2]
        assert_bitwise(actual=getattr(alone, name), expected=expected, what=name)
