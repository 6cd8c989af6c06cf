"""Arguments that no call of the kernels can have are refused, after any call that went before."""

import re

import numpy as np
import pytest
import torch

from sagesim import FACTORED_QK, AttentionProblem
from sagesim_kernels import attention, attention_varlen, default_spec, pays_off, supports
from sagesim_kernels.launching import forget_plans
from tests.sagesim_kernels.kernel_cases import DEVICE

pytestmark = pytest.mark.usefixtures("as_installed")

Q, K, V = (
    torch.randn(3, 1, 1, 33, 16, generator=torch.Generator().manual_seed(0))
    .half()
    .to(DEVICE)
    .unbind()
)


@pytest.mark.parametrize(
    ("good", "bad", "error", "words"),
    [
        ({"softcap": 1.0}, {"softcap": True}, TypeError, "softcap is True"),
        ({"scale": 1.0}, {"scale": True}, TypeError, "scale is True"),
        ({"window": (4, 0)}, {"window": (4.0, 0)}, TypeError, "window is (4.0, 0)"),
        ({"is_causal": True}, {"is_causal": 1}, TypeError, "is_causal is 1; it must be True"),
        ({"enable_gqa": False}, {"enable_gqa": 0}, TypeError, "enable_gqa is 0; it must be True"),
        ({}, {"scale": float("nan")}, ValueError, "scale is nan"),
        ({}, {"key_mask": [True] * 33}, TypeError, "key_mask is [True, "),
        ({}, {"spec": "sagebwd"}, TypeError, "spec is 'sagebwd'"),
        ({"return_lse": True}, {"return_lse": 1}, TypeError, "return_lse is 1; it must be True"),
        ({"return_lse": True}, {"return_lse": []}, TypeError, "return_lse is []; it must be True"),
    ],
)
def test_an_equal_value_of_another_type_is_refused_after_a_good_call(good, bad, error, words):
    attention(Q, K, V, **good)
    with pytest.raises(error, match=re.escape(words)):
        attention(Q, K, V, **bad)


def test_zeros_of_both_signs_are_one_scale():
    """Calls of equal options share a plan, so their results have the same bits."""
    q = Q.clone().requires_grad_()
    signs = []
    for scale in (-0.0, 0.0):
        forget_plans()
        (dq,) = torch.autograd.grad(attention(q, K[:, :, :0], V[:, :, :0], scale=scale).sum(), q)
        signs.append(dq.signbit())
    assert torch.equal(*signs)


@pytest.mark.parametrize("wide", [(2**70, 0), (0, 2**70)])
def test_a_window_may_be_wider_than_64_bits(wide):
    o = attention(Q, K, V, window=wide)
    assert torch.equal(o, attention(Q, K, V, window=tuple(-1 if x else 0 for x in wide)))
    traced = torch.func.vmap(lambda q: attention(q, K, V, window=wide))(Q[None])
    assert torch.equal(traced[0], o)


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU, reading them would wait for the device")
@pytest.mark.parametrize("used", [-3, 34, -(2**32) + 5])
def test_lengths_on_a_cpu_are_checked(used):
    with pytest.raises(ValueError, match=re.escape(f"seqused_k is [{used}]; lengths must be in")):
        attention(Q, K, V, seqused_k=torch.tensor([used]))


def test_an_integer_softcap_is_a_number():
    assert torch.equal(attention(Q, K, V, softcap=3), attention(Q, K, V, softcap=3.0))


@pytest.mark.parametrize(
    ("q", "words"),
    [
        (None, "q is None"),
        (np.zeros((1, 1, 33, 16)), "q is a numpy.ndarray"),
        (AttentionProblem(q=Q, k=K, v=V, do=None), "q is a sagesim.problem.attention_problem.Att"),
        (torch.nested.nested_tensor([Q[0, 0]], layout=torch.jagged), "q is a nested tensor"),
    ],
    ids=["none", "numpy", "problem", "nested"],
)
def test_only_dense_tensors(q, words):
    with pytest.raises(TypeError, match=words):
        attention(q, K, V)


@pytest.mark.parametrize("name", ["k", "v"])
def test_k_and_v_are_dense_tensors(name):
    with pytest.raises(TypeError, match=f"{name} is None; it must be a torch.Tensor"):
        attention(Q, **{"k": K, "v": V} | {name: None})


def test_a_list_that_is_no_window_needs_no_alignment():
    o = attention(Q, K[:, :, :20], V[:, :, :20])
    assert torch.equal(attention(Q, K[:, :, :20], V[:, :, :20], window=[-1, -1]), o)


def test_two_tensors_of_lengths_need_an_alignment():
    q, k, v = (x[0].transpose(0, 1) for x in (Q, K, V))
    cu = torch.tensor([0, 33], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=re.escape("window=(3, 3) needs causal_alignment")):
        attention_varlen(q, k, v, cu, cu.clone(), 33, 33, window=(3, 3))


def test_arguments_of_other_functions():
    with pytest.raises(TypeError, match=r"dtype is 'half'; it must be a torch.dtype"):
        supports(FACTORED_QK, dtype="half")
    with pytest.raises(TypeError, match=r"q_shape is a tensor; pass q\.shape"):
        pays_off(Q, Q.shape)
    with pytest.raises(ValueError, match="device is 'gpu'; it must be a CUDA device"):
        default_spec("gpu")
