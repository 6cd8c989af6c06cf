import pytest
import torch
from torch import Tensor

from sagesim.emulator import QKNorm
from tests.support.assertions import assert_bitwise, assert_within_bound


def exact(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """The definition, in float64."""
    x = x.double()
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) / x.shape[-1] + eps) * gamma.double()


@pytest.fixture
def norm() -> QKNorm:
    random = torch.Generator().manual_seed(0)
    module = QKNorm(40)
    for gamma in module.parameters():
        gamma.data.copy_(torch.rand(40, generator=random) + 0.5)
    return module


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    q = torch.randn(2, 4, 9, 40, generator=random)
    k = torch.randn(2, 2, 7, 40, generator=random) * 100 + 50
    return q.to(dtype), k.to(dtype)


def test_is_the_definition_with_a_gamma_for_each(norm):
    """Each float32 operation has a relative error of 2**-24, in any order.

    There are 42 roundings under the root, which halves their error, and 4 others: the root, a
    quotient and two products.
    """
    q, k = inputs()
    assert not torch.equal(norm.gamma_q, norm.gamma_k)
    for x, found, gamma in zip((q, k), norm(q, k), (norm.gamma_q, norm.gamma_k), strict=True):
        reference = exact(x, gamma.detach(), norm.eps)
        bound = reference.abs() * (42 / 2 + 4) * 2.0**-24
        assert_within_bound(actual=found, exact=reference, bound=bound, what="norm")


def test_float64_stays_float64(norm):
    q, k = inputs(torch.float64)
    for x, found, gamma in zip((q, k), norm(q, k), (norm.gamma_q, norm.gamma_k), strict=True):
        reference = exact(x, gamma.detach(), norm.eps)
        bound = reference.abs() * (42 / 2 + 4) * 2.0**-52  # the reference rounds as well
        assert found.dtype is torch.float64
        assert_within_bound(actual=found, exact=reference, bound=bound, what="norm")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(norm, dtype):
    q, k = inputs(dtype)
    expected = (x.to(dtype) for x in norm(q.float(), k.float()))
    for found, once in zip(norm(q, k), expected, strict=True):
        assert_bitwise(actual=found, expected=once, what="norm")


def test_q_and_k_may_differ_in_dtype(norm):
    q, k = inputs()
    found = norm(q.half(), k)
    assert [x.dtype for x in found] == [torch.float16, torch.float32]


def test_a_power_of_two_times_the_inputs_changes_no_byte(norm):
    q, k = inputs()
    larger = QKNorm(40, eps=norm.eps * 2.0**20)
    larger.load_state_dict(norm.state_dict())
    for a, b in zip(norm(q, k), larger(q * 2.0**10, k * 2.0**10), strict=True):
        assert_bitwise(actual=b, expected=a, what="norm")


def test_tokens_of_zeros_stay_zero(norm):
    q, k = torch.zeros(1, 1, 3, 40, requires_grad=True), torch.zeros(1, 1, 3, 40)
    found, _ = norm(q, k)
    found.sum().backward()
    assert not found.any()
    assert q.grad.isfinite().all()


def test_gradients_reach_inputs_and_gammas(norm):
    """The loss is sum(w * norm(q)). Its derivative by gamma is the sum over tokens of w x / rms."""
    q, k = (x.double().requires_grad_() for x in inputs())
    norm = norm.double()
    assert torch.autograd.gradcheck(lambda q, k: norm(q, k), (q[:1, :1, :2], k[:1, :1, :2]))
    found, _ = norm(q, k)
    w = torch.randn_like(found)
    (found * w).sum().backward()
    reference = (exact(q.detach(), torch.ones(40), norm.eps) * w).sum((0, 1, 2))
    bound = torch.full_like(reference, 2.0**-40)
    assert_within_bound(actual=norm.gamma_q.grad, exact=reference, bound=bound, what="gamma_q")
    assert norm.gamma_k.grad is None


def test_gammas_start_at_one_and_repr_names_the_settings():
    norm = QKNorm(8)
    assert [name for name, _ in norm.named_parameters()] == ["gamma_q", "gamma_k"]
    for gamma in norm.parameters():
        assert_bitwise(actual=gamma.data, expected=torch.ones(8), what="gamma")
    assert repr(norm) == "QKNorm(8, eps=1e-06)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_dim": 0}, "head_dim=0"),
        ({"head_dim": 8, "eps": 0.0}, "eps=0.0"),
        ({"head_dim": 8, "eps": float("nan")}, "eps=nan"),
        ({"head_dim": 8, "eps": float("inf")}, "eps=inf"),
    ],
)
def test_invalid_settings_raise(arguments, message):
    with pytest.raises(ValueError, match=f"{message} is not"):
        QKNorm(**arguments)


def test_invalid_inputs_raise(as_installed, norm):
    q, k = inputs()
    with pytest.raises(ValueError, match=r"k of shape \(2, 2, 7, 20\) has no .*head_dim=40"):
        norm(q, k[..., :20])
    with pytest.raises(TypeError, match=r"q is torch\.int64"):
        norm(q.long(), k)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"head_dim": "x"}, "head_dim"),
        ({"head_dim": 8.5}, "head_dim"),
        ({"head_dim": True}, "head_dim is True; it must be an integer"),
        ({"head_dim": 8, "eps": "x"}, "eps"),
        ({"head_dim": 8, "eps": True}, "eps"),
    ],
)
def test_numbers_of_other_types(given, name):
    with pytest.raises(TypeError, match=name):
        QKNorm(**given)
