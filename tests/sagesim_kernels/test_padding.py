"""Nothing of padded keys is read, and nothing of the queries of a sequence without keys.

On Hopper, TMA loads what is not copied from where the caller stored it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sagesim.spec import FACTORED, FACTORED_QK, FP8_GRADIENTS, SAGEBWD, AttentionSpec
from sagesim_kernels import attention
from tests.support.assertions import assert_bitwise
from tests.support.kernels import DEVICE, HERE

pytestmark = HERE

SPECS = {
    "factored_qk": FACTORED_QK,
    "sagebwd, PV in 16 bit": replace(SAGEBWD, pv=FACTORED_QK.pv),
    "factored, PV in 16 bit": replace(FACTORED, pv=FACTORED_QK.pv),
    "fp8_gradients": FP8_GRADIENTS,
}
"""On Hopper, other forwards compute P in INT8 with padding and without."""

USED = (70, 0, 200, 131)
NAMES = ("o", "dq", "dk", "dv")


def _inputs(d: int, layout: str) -> list[Tensor]:
    """q, k, v and do, with two heads of q for one of k. All but do are slices of one tensor."""
    generator = torch.Generator().manual_seed(d)
    shape = (len(USED), 2, 3, max(USED), d) if layout == "HND" else (len(USED), max(USED), 3, 2, d)
    together = torch.randn(shape, generator=generator).to(DEVICE, torch.float16)
    q, k, v = (together if layout == "HND" else together.transpose(1, 3)).unbind(2)
    do = torch.randn(q.shape, generator=generator).to(DEVICE, torch.float16)
    return [q, k[:, :1], v[:, :1], do]


def _run(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, spec: AttentionSpec, **options: object
) -> list[Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = attention(q, k, v, spec=spec, enable_gqa=True, **options)
    assert isinstance(o, Tensor)
    return [o, *torch.autograd.grad(o, (q, k, v), do)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("name", "d"), [*((name, 64) for name in SPECS), ("factored_qk", 192)])
def test_a_sequence_has_the_bits_that_it_has_alone(
    name: str, d: int, layout: str, is_causal: bool
) -> None:
    """Padding is NaN, and so is what belongs to a sequence without keys."""
    q, k, v, do = _inputs(d, layout)
    for b, used in enumerate(USED):
        k[b, :, used:] = v[b, :, used:] = torch.nan
        if used == 0:
            q[b] = do[b] = torch.nan
    used = torch.tensor(USED, device=DEVICE)
    found = _run(q, k, v, do, SPECS[name], is_causal=is_causal, seqused_k=used)
    for b, count in enumerate(USED):
        of_b = {n: x[b : b + 1] for n, x in zip(NAMES, found, strict=True)}
        if count == 0:
            assert not any(x.any() for x in of_b.values())
            continue
        alone = [q[b : b + 1], *(x[b : b + 1, :, :count] for x in (k, v)), do[b : b + 1]]
        expected = _run(*alone, SPECS[name], is_causal=is_causal)
        for n, x in zip(NAMES, expected, strict=True):
            mine = of_b[n]
            if n in ("dk", "dv"):
                assert not mine[:, :, count:].any()
                mine = mine[:, :, :count]
            assert_bitwise(actual=mine, expected=x, what=f"{n} of sequence {b}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "d"), [*((name, 64) for name in SPECS), ("factored_qk", 192)])
def test_a_key_mask_without_a_causal_mask(name: str, d: int) -> None:
    """Queries are not copied: of a sequence without keys, whose queries are NaN, none is loaded."""
    q, k, v, do = _inputs(d, "NHD")
    keys = torch.arange(max(USED))
    live = torch.stack([keys < 70, keys < 0, keys % 3 != 1, keys >= 131]).to(DEVICE)
    q[1] = do[1] = torch.nan
    expected = _run(q, k, v, do, SPECS[name], key_mask=live)
    assert not any(x[1].any() for x in expected)
    assert all(x.isfinite().all() for x in expected)
    for x in (k, v):
        x.masked_fill_(~live[:, None, :, None], torch.nan)
    found = _run(q, k, v, do, SPECS[name], key_mask=live)
    for n, x, y in zip(NAMES, found, expected, strict=True):
        assert_bitwise(actual=x, expected=y, what=n)


@pytest.mark.exhaustive
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("n_q", "n_k"), [(60, 100), (20, 128), (127, 128)])
def test_keys_after_the_last_query_of_a_causal_mask(n_q: int, n_k: int, d: int) -> None:
    """On Hopper keys are copied, and queries are not: one program computes all of dQ."""
    q, k, v, do = _inputs(d, "HND")
    q, k, v, do = q[:, :, :n_q], k[:, :, :n_k], v[:, :, :n_k], do[:, :, :n_q]
    k[:, :, n_q:] = v[:, :, n_q:] = torch.nan
    found = _run(q, k, v, do, FACTORED_QK, is_causal=True)
    expected = _run(q, k[:, :, :n_q], v[:, :, :n_q], do, FACTORED_QK, is_causal=True)
    for n, x, y in zip(NAMES, found, expected, strict=True):
        assert_bitwise(actual=x[:, :, :n_q], expected=y, what=n)
        assert not x[:, :, n_q:].any()
