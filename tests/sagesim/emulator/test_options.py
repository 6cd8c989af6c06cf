"""Windows, key padding, sinks and softcaps against their definitions, computed by autograd."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import sagesim
from sagesim import FPA, SAGEBWD, AttentionProblem, Smoothing, exact, trace
from tests.support import examples
from tests.support.assertions import assert_bitwise, assert_within_bound

HEADS, GROUPS, D = 4, 2, 8
SMOOTHED = replace(FPA, smoothing=Smoothing(q=True, k=True), block_q=16, block_k=16)
NAMES = ("o", "dq", "dk", "dv", "dsinks")


@st.composite
def options(draw: st.DrawFn, n_q: int, n_k: int) -> dict[str, Any]:
    """Options in every combination that means something; tensors are drawn from a seed."""
    side = st.just(-1) | st.integers(0, 60)
    found: dict[str, Any] = {
        "is_causal": draw(st.booleans()),
        "causal_alignment": draw(st.sampled_from(("upper_left", "lower_right"))),
        "window": (draw(side), draw(side)),
        "softcap": draw(st.none() | st.sampled_from((1.0, 4.0, 50.0))),
        "enable_gqa": True,
    }
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    padding = draw(st.sampled_from(("none", "key_mask", "seqused_k")))
    if padding == "key_mask":
        found["key_mask"] = torch.rand(2, n_k, generator=generator) < 0.6
    elif padding == "seqused_k":
        found["seqused_k"] = torch.randint(0, n_k + 1, (2,), generator=generator)
    if draw(st.booleans()):
        found["sinks"] = torch.randn(HEADS, generator=generator, dtype=torch.float64) * 3
    return found


def attends(n_q: int, n_k: int, given: dict[str, Any]) -> Tensor:
    """Which keys each query attends to, bool [2, 1, n_q, n_k], one comparison an entry."""
    offset = n_k - n_q if given["causal_alignment"] == "lower_right" else 0
    left, right = given["window"]
    allowed = torch.zeros(2, 1, n_q, n_k, dtype=torch.bool)
    for b in range(2):
        for i in range(n_q):
            for j in range(n_k):
                ahead = j - (i + offset)
                sees = not (given["is_causal"] and ahead > 0)
                sees &= left < 0 or ahead >= -left
                sees &= right < 0 or ahead <= right
                if given.get("key_mask") is not None:
                    sees &= bool(given["key_mask"][b, j])
                if given.get("seqused_k") is not None:
                    sees &= j < int(given["seqused_k"][b])
                allowed[b, 0, i, j] = sees
    return allowed


def by_definition(tensors: tuple[Tensor, ...], given: dict[str, Any]) -> dict[str, Tensor]:
    """Outputs and gradients by autograd from the definition, in float64."""
    q, k, v, do = tensors
    sinks = given.get("sinks")
    leaves = [x.clone().requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
    q, k, v = leaves[:3]
    s = q @ k.repeat_interleave(GROUPS, 1).mT / math.sqrt(D)
    if (cap := given["softcap"]) is not None:
        s = cap * torch.tanh(s / cap)
    allowed = attends(q.shape[2], k.shape[2], given)
    e = s.masked_fill(~allowed, -1e4).exp() * allowed
    total = e.sum(-1, keepdim=True)
    alone = total == 0
    if sinks is not None:
        total = total + leaves[3].exp()[:, None, None]
    o = (e / total.masked_fill(alone, 1.0)) @ v.repeat_interleave(GROUPS, 1)
    found = (o.detach(), *torch.autograd.grad(o, leaves, do))
    return dict(zip(NAMES, found, strict=False))


def assert_near(actual: Tensor, exact: Tensor, what: str) -> None:
    """Assert equality up to the float64 errors of sums of at most a few hundred terms."""
    bound = 1e-9 * (1 + exact.abs().masked_fill(exact.isinf(), 0.0))
    assert_within_bound(actual=actual, exact=exact, bound=bound, what=what)


def tensors(seed: int, n_q: int, n_k: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, n_q), (HEADS // GROUPS, n_k), (HEADS // GROUPS, n_k), (HEADS, n_q))
    q, k, v, do = (
        torch.randn(2, *shape, D, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return q, k + 1.0, v, do  # a mean of K that smoothing has to put back


@given(
    n_q=st.sampled_from((1, 16, 37, 50)),
    n_k=st.sampled_from((1, 20, 37, 64)),
    seed=st.integers(0, 2**20),
    spec=st.sampled_from((FPA, SMOOTHED)),
    data=st.data(),
)
@examples(60)
def test_emulator_and_exact_meet_the_definition(n_q, n_k, seed, spec, data):
    given = data.draw(options(n_q, n_k))
    q, k, v, do = tensors(seed, n_q, n_k)
    expected = by_definition((q, k, v, do), given)
    of_exact = exact(q, k, v, do, **given)
    leaves = {name: x.clone().requires_grad_() for name, x in (("q", q), ("k", k), ("v", v))}
    if "sinks" in given:
        leaves["sinks"] = given["sinks"].clone().requires_grad_()
    o = sagesim.attention(**{**given, **leaves}, spec=spec)
    found = dict(zip(NAMES, (o, *torch.autograd.grad(o, list(leaves.values()), do)), strict=False))
    traced = trace(q, k, v, do, spec=spec, **given)
    for name, x in expected.items():
        assert_near(getattr(of_exact, name), x, f"exact's {name}")
        assert_near(found[name].detach(), x, f"the emulator's {name}")
    for name in ("s", "p", "lse", "dp", "ds", "delta"):
        assert_near(getattr(traced, name), getattr(of_exact, name), name)


@given(seed=st.integers(0, 2**20), data=st.data())
@examples(20)
def test_nothing_of_padding_reaches_a_result(seed, data):
    """NaN in padded keys and values changes no bit, under quantization and smoothing too."""
    n_q, n_k = 40, 70
    given = data.draw(options(n_q, n_k).filter(lambda x: "key_mask" in x or "seqused_k" in x))
    q, k, v, do = (x.float() for x in tensors(seed, n_q, n_k))
    spec = replace(SAGEBWD, block_q=16, block_k=16)
    padding = ~AttentionProblem.of(q, k, v, **given).key_mask[:, None, :, None]
    runs = [
        trace(q, k.masked_fill(padding, fill), v.masked_fill(padding, fill), do, spec=spec, **given)
        for fill in (0.0, math.nan, 1e30)
    ]
    for other in runs[1:]:
        for name in ("o", "lse", "dq", "dk", "dv"):
            assert torch.equal(getattr(other, name), getattr(runs[0], name)), name


def test_padding_at_the_end_changes_nothing_but_the_blocks():
    """A padded sequence gives the results of the shorter one, bit for bit."""
    q, k, v, do = (x[:1].float() for x in tensors(0, 64, 64))
    short = trace(q, k[:, :, :40], v[:, :, :40], do, spec=SAGEBWD, enable_gqa=True)
    padded = trace(q, k, v, do, spec=SAGEBWD, enable_gqa=True, seqused_k=torch.tensor([40]))
    assert torch.equal(padded.o, short.o)
    assert torch.equal(padded.dk[:, :, :40], short.dk)
    assert not padded.dk[:, :, 40:].any()


def test_a_huge_sink_takes_everything_and_nothing_overflows():
    q, k, v, do = (x.float() for x in tensors(0, 8, 8))
    found = trace(q, k, v, do, spec=SAGEBWD, enable_gqa=True, sinks=torch.full((HEADS,), 500.0))
    assert torch.equal(found.o, torch.zeros_like(found.o))
    assert_near(found.lse, torch.full_like(found.lse, 500.0, dtype=torch.float64), "lse")
    for x in (found.dq, found.dk, found.dv, found.dsinks):
        assert bool(x.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_of_the_sinks_is_rounded_once(dtype):
    """The terms of float32 are summed over rows and sequences in float64."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        q, k, v, do = torch.randn(4, 3, 2, 40, 16, generator=generator)
        sinks = torch.randn(2, generator=generator).to(dtype).requires_grad_()
        sagesim.attention(q, k, v, spec=FPA, sinks=sinks).backward(do)
        found = trace(q, k, v, do, spec=FPA, sinks=sinks)
        p_sink = (sinks.detach().float()[:, None] - found.lse).exp()
        expected = -(p_sink * found.delta).double().sum(-1).sum(0)
        for gradient in (sinks.grad, found.dsinks):
            assert_bitwise(actual=gradient, expected=expected.to(dtype), what="dsinks")


@pytest.mark.usefixtures("as_installed")
class TestErrors:
    """Each message names the argument and the value at fault."""

    @pytest.mark.parametrize(
        ("given", "error", "words"),
        [
            ({"window": (3, 0)}, ValueError, r"window=\(3, 0\) and different numbers"),
            ({"window": (-2, 0)}, ValueError, r"window is \(-2, 0\)"),
            ({"window": 5}, TypeError, "window is 5"),
            ({"causal_alignment": "left"}, ValueError, "causal_alignment is 'left'"),
            ({"softcap": 0.0}, ValueError, "softcap is 0.0"),
            ({"softcap": -1.0}, ValueError, "softcap is -1.0"),
            ({"softcap": torch.ones(())}, TypeError, "softcap is tensor"),
            ({"sinks": torch.ones(3)}, ValueError, r"sinks has shape \(3,\)"),
            ({"sinks": torch.ones(HEADS).int()}, TypeError, "sinks is torch.int32"),
            ({"key_mask": torch.ones(2, 5).bool()}, ValueError, r"key_mask has shape \(2, 5\)"),
            ({"key_mask": torch.ones(2, 9)}, TypeError, "key_mask is torch.float32"),
            ({"seqused_k": torch.tensor([3, 10])}, ValueError, r"seqused_k is \[3, 10\]"),
            ({"seqused_k": torch.tensor([3.0, 1])}, TypeError, "seqused_k is torch.float32"),
            (
                {"key_mask": torch.ones(2, 9).bool(), "seqused_k": torch.tensor([1, 1])},
                ValueError,
                "key_mask and seqused_k are both given",
            ),
            (
                {"attn_mask": torch.ones(8, 9).bool(), "key_mask": torch.ones(2, 9).bool()},
                ValueError,
                "attn_mask and key_mask exclude each other",
            ),
            ({"attn_mask": [[True]]}, TypeError, r"attn_mask is \[\[True\]\]; it must be a tensor"),
            ({"attn_mask": np.ones((8, 9), bool)}, TypeError, "attn_mask is array"),
            (
                {"attn_mask": torch.ones(8, 9, device="meta").bool()},
                ValueError,
                "attn_mask is on meta, q on cpu",
            ),
            (
                {"attn_mask": torch.ones(8, 8).bool()},
                ValueError,
                r"attn_mask of shape \(8, 8\) does not broadcast to \(2, 4, 8, 9\)",
            ),
            (
                {"attn_mask": torch.ones(8, 9).bool(), "is_causal": True},
                ValueError,
                "attn_mask and is_causal exclude each other",
            ),
        ],
    )
    def test_a_wrong_option_is_named(self, given, error, words):
        q, k, v, _ = tensors(0, 8, 9)
        with pytest.raises(error, match=words):
            sagesim.attention(q, k, v, spec=FPA, enable_gqa=True, **given)

    def test_lengths_of_tensors_without_tokens(self):
        x = torch.ones(3)
        with pytest.raises(ValueError, match=r"q, k and v need \[..., tokens, head size\]"):
            sagesim.attention(x, x, x, spec=FPA, seqused_k=torch.tensor(3))
