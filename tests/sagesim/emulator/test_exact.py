"""`exact` agrees with PyTorch's attention and autograd, and with the definitions."""

import math

import pytest
import torch
from hypothesis import given
from torch.nn.functional import scaled_dot_product_attention

from sagesim import exact
from tests.support import examples
from tests.support.assertions import assert_within_bound
from tests.support.calls import run_exact
from tests.support.inputs import MILD, case, random_mask
from tests.support.strategies import cases

U64 = 2.0**-53


def rounding(scale: torch.Tensor) -> torch.Tensor:
    """A bound for float64's rounding errors: 1e5 units roundoff of the largest number involved.

    A real mistake is at least as large as float32's rounding, 5e8 units roundoff of float64.
    """
    return 1e5 * U64 * scale.abs().max().clamp(min=1e-300).double().expand_as(scale)


@given(cases(MILD, masks=("none", "causal", "random")))
@examples(40)
def test_is_what_autograd_makes_of_pytorchs_attention(case):
    """SDPA gives NaN for queries that attend to nothing.

    Here it lets them attend to every key, with gradient 0, and their rows of o are set to 0.
    """
    q, k, v = (x.double().requires_grad_() for x in (case.q, case.k, case.v))
    some = case.attends.any(-1)
    mask = (case.attends | ~some[..., None]).expand(*case.q.shape[:-1], case.k.shape[-2])
    do = case.do.double() * some.expand(case.q.shape[:-1])[..., None]
    o = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    grads = torch.autograd.grad(o, (q, k, v), do)
    found = run_exact(case)
    o = o.detach() * some.expand(case.q.shape[:-1])[..., None]
    magnitude = {
        "o": v.detach(),
        "dq": found.dp.abs().amax() * k.detach().abs().amax() * torch.ones_like(grads[0]),
        "dk": found.dp.abs().amax() * q.detach().abs().amax() * torch.ones_like(grads[1]),
        "dv": case.do.double().abs().sum() * torch.ones_like(grads[2]),
    }
    logits = 1 + found.s[found.s.isfinite()].abs().amax() if found.s.isfinite().any() else 1.0
    for name, expected in zip(("o", "dq", "dk", "dv"), (o, *grads), strict=True):
        bound = rounding(magnitude[name]).amax() * logits
        assert_within_bound(actual=getattr(found, name), exact=expected, bound=bound, what=name)


def test_every_intermediate_of_a_case_computed_by_hand():
    """Two queries, two keys, head size 1. Row 0 of p is softmax([ln 3, 0]) = [3/4, 1/4]."""
    q = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    k = torch.tensor([[math.log(3)], [0.0]], dtype=torch.float64)
    v = torch.tensor([[4.0], [8.0]], dtype=torch.float64)
    do = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    x = exact(q, k, v, do)
    expected = {
        "s": [[math.log(3), 0], [0, 0]],
        "p": [[0.75, 0.25], [0.5, 0.5]],
        "o": [[5], [6]],
        "lse": [math.log(4), math.log(2)],
        "dp": [[4, 8], [8, 16]],
        "delta": [5, 12],
        "ds": [[-0.75, 0.75], [-2, 2]],
        "dq": [[-0.75 * math.log(3)], [-2 * math.log(3)]],
        "dk": [[-0.75], [0.75]],
        "dv": [[1.75], [1.25]],
    }
    for name, values in expected.items():
        wanted = torch.tensor(values, dtype=torch.float64)
        assert_within_bound(
            actual=getattr(x, name), exact=wanted, bound=torch.tensor(16 * U64 * 16), what=name
        )


def test_masked_entries_and_masked_rows_have_their_defined_values():
    mask = random_mask(0, (1, 1, 9, 7), density=0.5)
    mask[..., 4, :] = False
    x = run_exact(case(seed=0, n_q=9, n_k=7, d=4, attn_mask=mask))
    assert bool((x.s[~mask] == -math.inf).all())
    for name in ("p", "dp", "ds"):
        assert bool((getattr(x, name)[~mask] == 0).all()), name
    assert x.lse[..., 4].item() == -math.inf
    assert not x.o[..., 4, :].any() and not x.dq[..., 4, :].any()
    for name in ("o", "dq", "dk", "dv", "delta"):
        assert not bool(getattr(x, name).isnan().any()), name


def test_without_keys_o_is_0_and_lse_is_minus_infinity():
    x = run_exact(case(seed=0, n_q=3, n_k=0, d=4))
    assert not x.o.any() and not x.dq.any() and bool((x.lse == -math.inf).all())


def test_grouped_heads_are_repeated_heads():
    c = case(seed=1, n_q=5, n_k=6, d=4, heads=(2, 6))
    k, v = c.k[:, :2], c.v[:, :2]
    grouped = exact(c.q, k, v, c.do, enable_gqa=True)
    repeated = exact(c.q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), c.do)
    assert torch.equal(grouped.o, repeated.o) and torch.equal(grouped.dq, repeated.dq)
    assert torch.equal(grouped.dk, repeated.dk.unflatten(1, (2, 3)).sum(2))
    assert torch.equal(grouped.dv, repeated.dv.unflatten(1, (2, 3)).sum(2))


def test_scale_multiplies_the_logits_and_leading_axes_are_optional():
    c = case(seed=2, n_q=5, n_k=6, d=4, heads=())
    one, other = exact(*c.qkvdo), exact(c.q * 2, *c.qkvdo[1:], scale=0.25)
    assert torch.equal(one.o, other.o) and one.o.shape == (5, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_everything_is_float64_and_detached(dtype):
    c = case(seed=3, n_q=5, n_k=6, d=4).to(dtype)
    x = exact(c.q.requires_grad_(), *c.qkvdo[1:], sinks=torch.zeros(1).requires_grad_())
    for name in type(x).__slots__:
        value = getattr(x, name)
        assert value.dtype is torch.float64 and not value.requires_grad, name
