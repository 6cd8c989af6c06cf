"""A step: one contender on one problem."""

import pytest
import torch

from sagesim import FACTORED, FACTORED_PV16, exact
from sagesim_kernels import attention
from sagesim_kernels.bench.cases import PASSES
from sagesim_kernels.bench.contenders import contender
from sagesim_kernels.bench.step import Step, laid_out
from tests.sagesim_kernels.bench.fakes import explicit
from tests.support.assertions import assert_bitwise, assert_sqnr_at_least
from tests.support.kernels import DEVICE, HERE

pytestmark = HERE


def step(attend, n=40, d=16, dtype=torch.float16):
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn((4, 1, 2, n, d), generator=generator).to(DEVICE, dtype)
    q, k, v, do = (laid_out(x.clone(), tokens_first=False) for x in tensors)
    return Step(attend, *(x.requires_grad_() for x in (q, k, v)), do)


def test_results_are_attention_and_its_gradients():
    one = step(explicit, dtype=torch.float64)
    found, true = one.results(), exact(one.q, one.k, one.v, one.do)
    for name, x in found.items():
        assert_sqnr_at_least(actual=x, exact=getattr(true, name), floor_db=250, what=name)
        assert not x.requires_grad


def test_passes():
    one = step(explicit)
    gradients = one.both()
    for which in PASSES:
        result = one.prepared(which)()
        if which == "forward":
            expected = one.forward().detach()
            assert_bitwise(actual=result.detach(), expected=expected, what=which)
        else:
            for actual, expected in zip(result, gradients, strict=True):
                assert_bitwise(actual=actual, expected=expected, what=which)


@pytest.mark.parametrize("spec", [FACTORED, FACTORED_PV16], ids=["delta from P", "delta from O"])
def test_saved_bytes_of_the_kernels(spec):
    """q, k, v, four bytes a row, the mean of K, and o if delta comes from it (docs/kernels.md)."""
    one = step(lambda q, k, v: attention(q, k, v, spec=spec))
    size, rows = one.q.numel() * 2, 40 * 2
    saved = 3 * size + 4 * rows + 2 * 16 * 4 + (size if spec is FACTORED_PV16 else 0)
    assert one.saved_bytes() == saved


def test_shared_storage_is_counted_once():
    """x.square() saves x, and the product saves two views of it."""
    one = step(lambda q, k, v: q.square() + q.flip(0) * 0 + q[:1] * q[:1])
    assert one.saved_bytes() == one.q.numel() * 2


def test_layouts():
    x = torch.randn(2, 3, 5, 4, requires_grad=True)
    first = laid_out(x, tokens_first=True)
    assert first.transpose(1, 2).is_contiguous() and first.shape == x.shape
    assert laid_out(first, tokens_first=False).is_contiguous()
    assert first.is_leaf and not first.requires_grad
    assert_bitwise(actual=first, expected=x.detach(), what="tokens first")


def test_a_contender_of_ours_is_made_from_its_label():
    one = step(contender("factored").make(40, False, torch.device(DEVICE)))
    expected = attention(one.q, one.k, one.v, spec=FACTORED)
    assert_bitwise(actual=one.forward().detach(), expected=expected.detach(), what="o")


def test_a_contender_of_ours_serves_groups_of_queries():
    q, k, v = torch.randn(1, 4, 40, 16), *torch.randn(2, 1, 2, 24, 16)
    attend = contender("factored").make(40, False, torch.device(DEVICE))
    q, k, v = (x.to(DEVICE, torch.float16) for x in (q, k, v))
    expected = attention(q, k, v, spec=FACTORED, enable_gqa=True)
    assert_bitwise(actual=attend(q, k, v), expected=expected, what="o")
