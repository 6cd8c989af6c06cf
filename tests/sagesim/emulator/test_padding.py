"""Values in padding change no result.

Padding is keys that no query attends to, and queries that attend to no key.
"""

import pytest
import torch

from sagesim import PRESETS, AttentionSpec, attention, compare, exact, trace
from tests.support.assertions import assert_bitwise

SPECS = [
    *PRESETS,
    "sagebwd smooth=qk",
    "factored smooth=qk round=stochastic@3",
    "sagebwd qk=int8@head,channel qk_recompute=int8@head,channel",
]
LENGTHS = (70, 130)


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences padded to 130 tokens, and the mask that hides padding as query and key."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 2, 2, 130, 16, generator=generator)
    valid = torch.arange(130) < torch.tensor(LENGTHS)[:, None]
    return x, (valid[:, None, :, None] & valid[:, None, None, :])


def outputs(x: torch.Tensor, label: str, **call) -> dict[str, torch.Tensor]:
    q, k, v = (y.clone().requires_grad_() for y in x[:3])
    o = attention(q, k, v, spec=AttentionSpec.parse(label), **call)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), x[3])
    return {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("value", [1e6, -3e38, float("nan"), float("inf")])
@pytest.mark.parametrize("label", SPECS)
def test_values_in_padding_change_no_byte(label, value):
    x, mask = problem()
    filled = x.clone()
    filled[:, 0, :, LENGTHS[0] :] = value
    expected, found = (outputs(y, label, attn_mask=mask) for y in (x, filled))
    for name in expected:
        assert_bitwise(actual=found[name], expected=expected[name], what=name)


@pytest.mark.parametrize("label", SPECS)
def test_keys_beyond_a_causal_mask_are_padding(label):
    x, _ = problem()
    filled = x.clone()
    filled[1:3, :, :, 70:] = float("nan")
    calls = []
    for y in (x, filled):
        q, k, v = (z.clone() for z in y[:3])
        q, do = q[:, :, :70], x[3][:, :, :70]
        leaves = [z.requires_grad_() for z in (q, k, v)]
        o = attention(*leaves, spec=AttentionSpec.parse(label), is_causal=True)
        calls.append([o.detach(), *torch.autograd.grad(o, leaves, do)])
    for one, other in zip(*calls, strict=True):
        assert_bitwise(actual=other, expected=one, what="o, dq, dk or dv")


@pytest.mark.parametrize("label", ["sagebwd", "factored", "sagebwd smooth=qk"])
def test_codes_and_scales_are_those_of_the_sequence_alone(label):
    x, mask = problem()
    n, spec = LENGTHS[0], AttentionSpec.parse(label)
    padded = trace(*x, spec=spec, attn_mask=mask)
    alone = trace(*x[:, :1, :, :n], spec=spec)
    for key, expected in alone.operands.items():
        if key.rpartition(".")[2] not in ("q", "k", "v", "do"):
            continue
        found = padded.operands[key]
        codes = found.codes[:1, :, :n]
        assert_bitwise(actual=codes.contiguous(), expected=expected.codes, what=key)
        assert_bitwise(
            actual=found.scale[:1, :, :n].expand_as(codes).contiguous(),
            expected=expected.scale.expand_as(codes).contiguous(),
            what=key,
        )


def test_trace_and_reference_agree_with_nan_in_padding():
    x, mask = problem()
    filled = x.clone()
    filled[:, 0, :, LENGTHS[0] :] = float("nan")
    spec = AttentionSpec.parse("fpa")
    found = compare(trace(*filled, spec=spec, attn_mask=mask), exact(*filled, attn_mask=mask))
    for name, error in found.overall.items():
        assert error.rel_l2 < 1e-5, name
