"""Eager calls of tensors and derivatives that PyTorch treats specially."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from sagesim import AttentionSpec
from sagesim_kernels import attention, trace
from tests.support.assertions import assert_bitwise
from tests.support.kernels import DEVICE, HERE

pytestmark = HERE

GENERATOR = torch.Generator().manual_seed(0)
Q, K, V, DO = torch.randn(4, 1, 2, 33, 16, generator=GENERATOR).to(DEVICE).unbind()


def negated(x: Tensor) -> Tensor:
    """-x, of which only PyTorch's negative bit differs from x in memory."""
    found = torch.complex(torch.zeros_like(x), x).conj().imag
    assert found.is_neg()
    return found


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
def test_a_negative_bit_is_a_sign(name: str) -> None:
    sinks = torch.tensor([0.5, -1.0], device=DEVICE)
    given = {"q": Q, "k": K, "v": V, "sinks": sinks}
    found = attention(**given | {name: negated(given[name])})
    assert_bitwise(actual=found, expected=attention(**given | {name: -given[name]}), what="o")


def test_a_negative_bit_of_the_gradient_is_a_sign() -> None:
    q = Q.clone().requires_grad_()
    o = attention(q, K, V)
    seen: list[bool] = []
    o.register_hook(lambda do: seen.append(do.is_neg()))
    (found,) = torch.autograd.grad(torch.complex(0 * o, o).conj().imag, q, DO, retain_graph=True)
    (wanted,) = torch.autograd.grad(o, q, -DO)
    assert_bitwise(actual=found, expected=wanted, what="dq")
    assert seen, "the gradient did not reach o"


def test_a_negative_bit_is_a_sign_in_a_trace() -> None:
    found = trace(negated(Q), K, V, negated(DO))
    wanted = trace(-Q, K, V, -DO)
    for name in ("o", "dq", "dk", "dv"):
        assert_bitwise(actual=getattr(found, name), expected=getattr(wanted, name), what=name)


def dual() -> None:
    with forward_ad.dual_level():
        attention(forward_ad.make_dual(Q, DO), K, V)


def jvp() -> None:
    torch.func.jvp(lambda v: attention(Q, K, v), (V,), (DO,))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own call
@pytest.mark.parametrize("call", [dual, jvp])
def test_forward_mode_derivatives_are_refused(call: Callable[[], None]) -> None:
    with pytest.raises(RuntimeError, match="attention has no forward-mode derivative"):
        call()


BY_FUNCTIONS: dict[str, Callable[[], object]] = {
    "grad": lambda: torch.func.grad(lambda q: attention(q, K, V).sum())(Q),
    "vjp": lambda: torch.func.vjp(lambda k: attention(Q, k, V), K)[1](DO),
    "jacrev": lambda: torch.func.jacrev(lambda v: attention(Q, K, v))(V),
    "grad of vmap": lambda: torch.func.grad(
        lambda q: torch.vmap(lambda x: attention(x, K[0], V[0]))(q).sum()
    )(Q),
    "vmap of grad": lambda: torch.vmap(torch.func.grad(lambda q: attention(q, K[0], V[0]).sum()))(
        Q
    ),
    "sinks": lambda: torch.func.grad(lambda s: attention(Q, K, V, sinks=s).sum())(Q[0, :, 0, 0]),
}


@pytest.mark.parametrize("call", BY_FUNCTIONS)
def test_differentiation_by_functions_is_refused(call: str) -> None:
    with pytest.raises(RuntimeError, match=r"by torch\.func; grad, vjp and jacrev are not"):
        BY_FUNCTIONS[call]()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_tensor_that_has_left_a_transform_has_its_numbers(requires_grad: bool) -> None:
    left: list[Tensor] = []

    def keep(q: Tensor) -> Tensor:
        left.append(q)
        return q.sum()

    torch.func.grad(keep)(Q)
    k = K.clone().requires_grad_(requires_grad)
    assert_bitwise(actual=attention(left[0], k, V), expected=attention(Q, k, V), what="o")


def test_tensors_without_tangents_are_computed_inside_a_dual_level() -> None:
    expected = attention(Q, K, V)
    with forward_ad.dual_level():
        assert_bitwise(actual=attention(Q, K, V), expected=expected, what="o")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_several_gradients_at_once() -> None:
    q = Q.clone().requires_grad_()
    o = attention(q, K, V)
    several = torch.stack([DO, -2 * DO])
    (found,) = torch.autograd.grad(o, q, several, is_grads_batched=True, retain_graph=True)
    for got, do in zip(found, several, strict=True):
        (wanted,) = torch.autograd.grad(o, q, do, retain_graph=True)
        assert_bitwise(actual=got, expected=wanted, what="dq")


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace_records_the_operators() -> None:
    traced = torch.jit.trace(lambda q: attention(q, K, V), (Q,), check_trace=False)
    assert_bitwise(actual=traced(DO), expected=attention(DO, K, V), what="o")


@pytest.mark.parametrize("spec", ["sagebwd", "factored_qk"])
def test_a_hook_may_return_saved_tensors_with_other_strides(spec: str) -> None:
    def transposed(x: Tensor) -> Tensor:
        return x.mT.contiguous() if x.ndim >= 2 else x

    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    o = attention(*leaves, spec=AttentionSpec.parse(spec))
    expected = torch.autograd.grad(o, leaves, DO)
    with torch.autograd.graph.saved_tensors_hooks(transposed, lambda x: x.mT if x.ndim >= 2 else x):
        o = attention(*leaves, spec=AttentionSpec.parse(spec))
    for name, got, wanted in zip("qkv", torch.autograd.grad(o, leaves, DO), expected, strict=True):
        assert_bitwise(actual=got, expected=wanted, what=f"d{name}")
