"""On a GPU the emulator gives the codes of a CPU, uses tensor cores, and never synchronizes."""

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
    """Create a CUDA context in autograd's thread; else cuBLAS does it and warns."""
    (torch.ones(1, device="cuda", requires_grad=True) * 2).backward()


def problem(seed: int = 0, tokens: int = 300) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 1, 3, tokens, 64, generator=generator)


@pytest.mark.parametrize("keys", [64, 128, 1024])
def test_integer_sums_on_tensor_cores_are_exact(keys: int) -> None:
    generator = torch.Generator().manual_seed(keys)
    p = torch.randint(-127, 128, (2, 96, keys), generator=generator)
    v = torch.randint(-127, 128, (2, keys, 64), generator=generator)
    p[0], v[0] = 127, -127  # the sum of the largest magnitude
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
    for key, expected in cpu.operands.items():
        found = gpu.operands[key]
        if key.rpartition(".")[2] in TOKEN_OPERANDS:
            assert_bitwise(actual=found.codes.cpu(), expected=expected.codes, what=key)
            assert_bitwise(actual=found.scale.cpu(), expected=expected.scale, what=key)
        else:
            difference = (found.codes.cpu().int() - expected.codes.int()).abs()
            assert difference.max() <= 1, key
            assert (difference > 0).double().mean() <= 1e-3, key


def test_random_numbers_agree_with_the_cpu() -> None:
    for tensor in ("q", "ds"):
        cpu = uniform(7, tensor, 50, 70, 3, torch.device("cpu"))
        gpu = uniform(7, tensor, 50, 70, 3, torch.device("cuda"))
        assert_bitwise(actual=gpu.cpu(), expected=cpu, what=tensor)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # it is a prototype in PyTorch
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_never_synchronizes_and_two_runs_give_the_same_bytes(name: str, dtype: torch.dtype) -> None:
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
    for expected, found in zip(first, second, strict=True):
        assert expected.isfinite().all()
        assert_bitwise(actual=found, expected=expected, what="second run")


@pytest.mark.parametrize("spec", [SAGEBWD, FACTORED])
def test_heads_do_not_affect_each_other(spec: AttentionSpec) -> None:
    x = problem().cuda()
    together = trace(*x, spec=spec)
    alone = trace(*x[:, :, 1:2], spec=spec)
    for name in ("o", "dq", "dk", "dv"):
        expected = getattr(together, name)[:, 1:2]
        assert_bitwise(actual=getattr(alone, name), expected=expected, what=name)
