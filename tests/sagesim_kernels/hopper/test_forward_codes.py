"""Hopper's forward with P in codes: beside the portable kernel, and the same bits of every call.

No trace reaches it, because a trace needs the codes. On another GPU the portable kernel would run
instead, so these tests are skipped there.
"""

import math
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from sagesim import FACTORED, SAGEBWD, AttentionSpec
from sagesim_kernels import attention, attention_varlen, hopper
from tests.sagesim_kernels.hopper.marks import ON_HOPPER
from tests.support.assertions import assert_bitwise
from tests.support.inputs import Case
from tests.support.kernels import DEVICE, all_served, kernel_case, poisoned

pytestmark = [
    *ON_HOPPER,
    pytest.mark.usefixtures("is_served"),
]

SPECS = {
    "sagebwd": SAGEBWD,
    "factored": FACTORED,
    "mixed": replace(SAGEBWD, pv=FACTORED.pv, qk=replace(SAGEBWD.qk, lhs=FACTORED.qk.lhs)),
}
"""A scale for each block, for each token and channel, and for each token of Q and channel of V."""

MASKS = {
    "full": {},
    "upper_left": {"is_causal": True},
    "lower_right": {"is_causal": True, "causal_alignment": "lower_right"},
}

each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
each_size = pytest.mark.parametrize("d", [64, 128], ids=lambda d: f"d{d}")


@pytest.fixture
def is_served(unplanned, monkeypatch: pytest.MonkeyPatch):
    """Fail the test if another kernel ran, except in `portable`."""
    with all_served(monkeypatch, hopper, "serves_forward_in_codes"):
        yield


def run(c: Case, spec: AttentionSpec, **options) -> tuple[Tensor, Tensor]:
    """Return o and lse."""
    options = {"return_lse": True, "enable_gqa": True} | options
    return attention(c.q, c.k, c.v, spec=spec, **(c.kernel_options | options))


def portable(c: Case, spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch, **options):
    with monkeypatch.context() as patch:
        patch.setattr(hopper, "serves_forward_in_codes", lambda _: False)
        return run(c, spec, **options)


def assert_close(
    found: tuple[Tensor, Tensor],
    twin: tuple[Tensor, Tensor],
    limit: float = 0.001,
    largest: float = 0.0,
) -> None:
    """Assert that outputs differ by codes of P that differ by 1, and by rounding.

    limit: of the relative difference; rounding to 16 bit adds to it. largest: magnitude of the
    logits without the mean of K. The logsumexp is rounded as one of them, and gets the mean back.
    """
    (o, lse), (twin_o, twin_lse) = found, twin
    assert torch.equal(lse.isinf(), twin_lse.isinf())
    live = lse.isfinite()
    off = (lse - twin_lse)[live].abs()
    rounding = 1e-5 * (1 + twin_lse[live].abs()) + 2.0**-21 * largest
    assert bool((off <= rounding).all()), float((off - rounding).max())
    x, y = o.double(), twin_o.double()
    assert bool(x.isfinite().all())
    limit += 0.0 if o.dtype == torch.float32 else 2.0**-8
    assert float((x - y).norm()) <= limit * float(y.norm()), float((x - y).norm() / y.norm())


@pytest.mark.parametrize("lengths", [(1, 1), (64, 65), (129, 513), (700, 333)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("d", [40, 64, 72, 128], ids=lambda d: f"d{d}")
@each_spec
def test_outputs_are_those_of_the_portable_kernel(spec, d, mask, lengths, monkeypatch):
    n_q, n_k = lengths
    dtype = {40: torch.bfloat16, 72: torch.float16}.get(d, torch.float32)
    c = kernel_case(dtype, seed=1, n_q=n_q, n_k=n_k, d=d, heads=(2, 4))
    found = run(c, spec, **MASKS[mask])
    assert_close(found, portable(c, spec, monkeypatch, **MASKS[mask]))


@pytest.mark.parametrize("growth", [40.0, -40.0, -4.0, 0.5], ids=str)
@each_spec
def test_any_growth_of_the_maxima(spec, growth, monkeypatch):
    """The logits of each block of keys are higher or lower than those of the block before."""
    c = kernel_case(torch.float32, seed=2, n_q=130, n_k=700, d=64, heads=(2, 2))
    c.q[..., 0] = 8.0
    added = growth * torch.arange(700, device=c.k.device) / 64
    c.k[..., 0] += added
    largest = float(added.abs().max())  # 8 times it, by the scale of 1/8 of the logits
    assert_close(run(c, spec), portable(c, spec, monkeypatch), largest=largest)


@each_size
@each_spec
def test_large_logits(spec, d, monkeypatch):
    """Codes do not overflow although exponents, of 2^20 and more, are rounded to 1/8."""
    c = kernel_case(torch.float32, seed=3, n_q=200, n_k=300, d=d, heads=(1, 2))
    found = run(c, spec, scale=1e5)
    assert_close(found, portable(c, spec, monkeypatch, scale=1e5), limit=0.05)


@pytest.mark.parametrize("mask", ["full", "upper_left"])
@each_size
@each_spec
def test_repeated_runs_give_the_same_bits(spec, d, mask):
    """Stores of float32 rows take long, so that a consumer is far ahead of another one."""
    c = kernel_case(torch.float32, seed=4, n_q=4000, n_k=4000, d=d, heads=(4, 16))
    once = run(c, spec, **MASKS[mask])
    assert bool(once[0].isfinite().all())
    for _ in range(60):
        for x, y in zip(run(c, spec, **MASKS[mask]), once, strict=True):
            assert_bitwise(actual=x, expected=y, what="o or lse")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("d", [40, 64, 128], ids=lambda d: f"d{d}")
@each_spec
def test_a_sequence_has_the_same_bits_alone_in_a_batch_and_packed(spec, d, mask):
    """The other packed sequences are empty, longer, shorter, or contain NaN."""
    lengths_q = (300, 0, 65, 1, 513, 64, 70, 130)
    lengths_k = (300, 40, 200, 1, 400, 0, 129, 77)
    options = {"spec": spec, "enable_gqa": True, **MASKS[mask]}
    q = torch.randn(sum(lengths_q), 4, d, device=DEVICE).bfloat16()
    k, v = (torch.randn(sum(lengths_k), 2, d, device=DEVICE).bfloat16() for _ in range(2))
    spoilt = 4
    for x, lengths in ((q, lengths_q), (k, lengths_k), (v, lengths_k)):
        x.split(lengths)[spoilt][7] = -math.nan
    cu_q, cu_k = (
        torch.tensor([0, *accumulate(x)], dtype=torch.int32, device=DEVICE)
        for x in (lengths_q, lengths_k)
    )
    o = attention_varlen(q, k, v, cu_q, cu_k, max(lengths_q), max(lengths_k), **options)
    for i, part in enumerate(o.split(lengths_q)):
        if i == spoilt or 0 in (lengths_q[i], lengths_k[i]):
            continue
        one = [x.split(n)[i] for x, n in ((q, lengths_q), (k, lengths_k), (v, lengths_k))]
        for copies in (1, 3):
            batch = [x.transpose(0, 1).expand(copies, -1, -1, -1).contiguous() for x in one]
            for found in attention(*batch, **options):
                assert_bitwise(actual=part.transpose(0, 1), expected=found, what=f"{i}")


@each_size
@each_spec
def test_memory_is_written_before_it_is_read(spec, d):
    c = kernel_case(torch.bfloat16, seed=5, n_q=129, n_k=513, d=d, heads=(2, 4))
    once = run(c, spec)
    with poisoned():
        for x, y in zip(run(c, spec), once, strict=True):
            assert_bitwise(actual=x, expected=y, what="o or lse")


@each_spec
def test_strides_do_not_change_any_bit(spec):
    c = kernel_case(torch.bfloat16, seed=6, n_q=300, n_k=257, d=72, heads=(2, 4), is_causal=True)
    expected, _ = run(c, spec)
    for lay_out in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.nn.functional.pad(x, (1, 2, 3, 1))[..., 3:-1, 1:-2],
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        assert_bitwise(actual=run(c.map(lay_out), spec)[0], expected=expected, what="o")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("tensor", ["q", "k", "v"])
@each_spec
def test_nan_and_infinity_reach_the_rows_that_they_do_with_the_portable_kernel(
    spec, tensor, value, monkeypatch
):
    c = kernel_case(torch.bfloat16, seed=7, n_q=300, n_k=300, d=64, heads=(2, 2), is_causal=True)
    getattr(c, tensor)[0, 1, 70, 5] = value
    found, twin = run(c, spec), portable(c, spec, monkeypatch)
    assert torch.equal(found[0].isfinite(), twin[0].isfinite())
    assert torch.equal(found[1].isnan(), twin[1].isnan())
    assert bool(found[0][0, 0].isfinite().all())


@each_spec
def test_a_query_without_keys_gets_no_nan_of_its_block(spec):
    c = kernel_case(torch.bfloat16, seed=8, n_q=333, n_k=100, d=64, heads=(2, 2))
    c.k[..., 0, :] = math.nan
    o, lse = run(c, spec, **MASKS["lower_right"])
    assert not bool(o[..., :233, :].any()) and bool((lse[..., :233] == -math.inf).all())
    assert bool(o[..., 233:, :].isnan().all())
