"""`exact_backward` is what autograd makes of the forward's own P, straight through its rounding."""

import math
from dataclasses import replace

import pytest
import torch

from sagesim import SAGEBWD, AttentionSpec, compare, exact, exact_backward, trace
from tests.support.assertions import assert_bitwise, assert_within_bound
from tests.support.inputs import case, random_mask

U64 = 2.0**-53


def straight_through(x, t):
    """dq, dk, dv by autograd in float64, if the forward's rounding of S has derivative 1."""
    q, k, v = (each.double().requires_grad_() for each in (x.q, x.k, x.v))
    groups = q.shape[-3] // k.shape[-3]
    keys, values = (each.repeat_interleave(groups, -3) for each in (k, v))
    s = q @ keys.mT / math.sqrt(q.shape[-1])
    some = x.attends.any(-1)[..., None]
    forward = t.s.double()
    if x.softcap is not None:  # the logits that the forward capped
        forward = x.softcap * torch.atanh(forward / x.softcap)
    s = s + (forward - s).detach().masked_fill(~x.attends, 0.0)
    if x.softcap is not None:
        s = x.softcap * torch.tanh(s / x.softcap)
    s = s.masked_fill(~(x.attends | ~some), -math.inf)
    if x.sinks is not None:  # a column that takes part in the softmax and has no value
        column = x.sinks.double()[:, None, None].expand(*s.shape[:-1], 1)
        p = torch.softmax(torch.cat([s, column], -1), -1)[..., :-1] * some
    else:
        p = torch.softmax(s, -1) * some
    o = p @ values
    return o.detach(), *torch.autograd.grad(o, (q, k, v), x.do.double())


CASES = {
    "full": {},
    "causal": {"is_causal": True},
    "window, softcap and sinks": {"is_causal": True},
    "more queries than keys": {"n_q": 50, "n_k": 20, "is_causal": True},
}


@pytest.mark.parametrize("label", ["sagebwd", "factored smooth=qk", "sage_forward", "fpa"])
@pytest.mark.parametrize("name", [*CASES, "mask", "grouped"])
def test_is_what_autograd_makes_of_the_forwards_logits(label, name):
    x = case(**({"seed": 1, "n_q": 40, "n_k": 40, "d": 8} | CASES.get(name, {})))
    if name == "mask":
        mask = random_mask(0, (1, 1, 40, 40), density=0.5)
        mask[..., 4, :] = False
        x = case(seed=1, n_q=40, n_k=40, d=8, attn_mask=mask)
    elif name == "grouped":
        x = case(seed=1, n_q=40, n_k=40, d=8, heads=(2, 6))
        x = type(x)(q=x.q, k=x.k[:, :2], v=x.v[:, :2], do=x.do, enable_gqa=True)
    elif name == "window, softcap and sinks":
        sinks = torch.tensor([1.0, -2.0], dtype=torch.float64)[: x.q.shape[-3]]
        x = replace(x, window=(11, -1), softcap=20.0, sinks=sinks)
    # In float64, what the spec does not round is computed in float64, P too.
    x = x.map(lambda each: 3 * each.double())
    t = trace(x, spec=AttentionSpec.parse(label))
    found = exact_backward(x, t)
    for what, expected in zip(("o", "dq", "dk", "dv"), straight_through(x, t), strict=True):
        bound = 1e6 * U64 * expected.abs().max().expand_as(expected)
        assert_within_bound(
            actual=getattr(found, what), exact=expected, bound=bound, what=f"{name}: {what}"
        )


def test_s_p_and_l_are_the_forwards_and_the_rest_is_not():
    x = case(seed=2, n_q=40, n_k=40, d=8, is_causal=True)
    t = trace(x, spec=SAGEBWD)
    found = compare(t, exact_backward(x, t)).overall
    assert [found[name].rel_l2 for name in ("s", "p", "lse")] == [0, 0, 0]
    assert all(found[name].rel_l2 > 1e-4 for name in ("o", "delta", "ds", "dq", "dk", "dv"))


def test_the_exact_forward_gives_the_exact_gradients():
    x = case(seed=3, n_q=20, n_k=30, d=8)
    expected = exact(x)
    for name in set(type(expected).__slots__) - {"dsinks"}:
        actual = getattr(exact_backward(x, expected), name)
        assert_bitwise(actual=actual, expected=getattr(expected, name), what=name)


def test_rounding_qk_alike_in_both_passes_is_no_error():
    """Rounding it in the forward alone is one."""
    x = case(seed=4, n_q=64, n_k=64, d=16).map(lambda each: 3 * each.double())
    alike = AttentionSpec.parse("fpa qk=int8@block,block qk_recompute=int8@block,block")
    forward = AttentionSpec.parse("fpa qk=int8@block,block")
    for spec, own in ((alike, False), (forward, True)):
        t = trace(x, spec=spec)
        assert compare(t, exact(x)).overall["dq"].rel_l2 > 1e-2
        assert (compare(t, exact_backward(x, t)).overall["dq"].rel_l2 > 1e-6) is own


def test_a_forward_of_another_problem_raises():
    t = trace(case(seed=5, n_q=8, n_k=8, d=4), spec=SAGEBWD)
    with pytest.raises(ValueError, match=r"p of the forward has shape .*8, 8.*9, 8"):
        exact_backward(case(seed=5, n_q=9, n_k=8, d=4), t)
    with pytest.raises(TypeError, match="forward"):
        exact_backward(case(seed=5, n_q=8, n_k=8, d=4), None)
    with pytest.raises(TypeError, match="problem"):
        exact_backward(t.o, t)
