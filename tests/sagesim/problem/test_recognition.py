"""A mask in the form of a tensor is recognised if options give the same mask, and only then."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sagesim import AttentionProblem
from sagesim.problem import NO_WINDOW, boolean_mask, recognised
from tests.support import examples


def problem(n_q: int, n_k: int, mask: torch.Tensor | None = None, **options) -> AttentionProblem:
    q, k = torch.zeros(2, 3, n_q, 4), torch.zeros(2, 3, n_k, 4)
    return AttentionProblem(q=q, k=k, v=k, do=None, attn_mask=mask, **options)


def full(x: AttentionProblem) -> torch.Tensor:
    return x.attends.expand(2, 1, x.q.shape[2], x.k.shape[2])


sides = st.just(-1) | st.integers(0, 12)


@given(
    n_q=st.integers(1, 9),
    n_k=st.integers(1, 9),
    is_causal=st.booleans(),
    alignment=st.sampled_from(("upper_left", "lower_right")),
    window=st.tuples(sides, sides),
    padding=st.none() | st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=2),
    floating=st.booleans(),
)
@examples(300)
def test_masks_of_the_options_are_recognised(
    n_q, n_k, is_causal, alignment, window, padding, floating
):
    options = {"is_causal": is_causal, "causal_alignment": alignment, "window": window}
    if padding is not None:
        options["key_mask"] = torch.tensor(padding[:2])[:, :n_k]
    mask = full(problem(n_q, n_k, **options))
    given = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if floating else mask
    found = recognised(problem(n_q, n_k, given))
    assert torch.equal(full(found), mask)
    # A band may keep only diagonals that have no key of their own: then no window says so.
    if found.attn_mask is not None:
        assert found.attn_mask.dtype is torch.bool
        assert alignment == "lower_right" or is_causal or window != NO_WINDOW


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32 - 1))
@examples(200)
def test_any_mask_keeps_its_meaning(n_q, n_k, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(2, 1, n_q, n_k, generator=generator) < 0.7
    assert torch.equal(full(recognised(problem(n_q, n_k, mask))), mask)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (torch.ones(5, 5).bool().tril(), {"is_causal": True, "window": NO_WINDOW}),
        (torch.ones(5, 5).bool(), {"is_causal": False, "window": NO_WINDOW}),
        (
            torch.ones(5, 5).bool().tril().triu(-2),
            {"is_causal": False, "window": (2, 0), "key_mask": None},
        ),
    ],
)
def test_what_models_pass_gets_the_plainest_options(mask, expected):
    found = recognised(problem(5, 5, mask))
    assert found.attn_mask is None
    for name, value in expected.items():
        assert getattr(found, name) == value


def test_a_padded_causal_batch_is_causal_with_key_padding():
    keys = torch.tensor([[True] * 5, [False, False, True, True, True]])
    mask = torch.ones(5, 5).bool().tril() & keys[:, None, None]
    found = recognised(problem(5, 5, mask))
    assert found.is_causal and torch.equal(found.key_mask, keys)


@pytest.mark.parametrize("of_heads", [torch.Tensor.clone, lambda mask: mask])
def test_a_mask_that_is_repeated_for_each_head_is_that_of_one(of_heads):
    """nn.TransformerEncoder merges masks into one with all heads."""
    keys = torch.tensor([[True] * 5, [False, False, True, True, True]])
    mask = torch.ones(5, 5).bool().tril() & keys[:, None, None]
    found = recognised(problem(5, 5, of_heads(mask.expand(2, 3, 5, 5))))
    assert found.attn_mask is None
    assert found.is_causal and torch.equal(found.key_mask, keys)


def test_a_mask_of_single_heads_or_with_holes_stays():
    per_head = torch.ones(1, 3, 5, 5).bool()
    per_head[0, 1, 2, 2] = False
    assert recognised(problem(5, 5, per_head)).attn_mask is not None
    assert recognised(problem(5, 5, per_head[:, 1:2])).attn_mask is not None
    causal = torch.ones(1, 3, 5, 5).bool().tril()
    causal[0, 2] = True
    assert recognised(problem(5, 5, causal)).attn_mask is causal


def test_only_constant_masks_of_0_and_infinity_become_boolean():
    """A bias that is learned may be 0 now; its gradient must not get lost."""
    zeros = torch.zeros(3, 3)
    assert boolean_mask(zeros).dtype is torch.bool
    assert boolean_mask(zeros + 0.5).dtype is torch.float32
    assert boolean_mask(zeros - 1e30).dtype is torch.float32
    assert boolean_mask(zeros.clone().requires_grad_()).dtype is torch.float32
