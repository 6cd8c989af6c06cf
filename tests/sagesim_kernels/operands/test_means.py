"""Means of K, beside sums in float64."""

from __future__ import annotations

import pytest
import torch

from sagesim import FACTORED_QK
from sagesim_kernels.operands import Extras, KernelProblem, compute_k_means
from sagesim_kernels.ops import _resolve
from tests.support.assertions import assert_bitwise
from tests.support.kernels import DEVICE, HERE

pytestmark = HERE


@pytest.mark.parametrize("masked_by", ["nothing", "key_mask", "seqused_k"])
def test_several_programs_divide_the_sums_of_a_head(masked_by: str) -> None:
    n, d = 2100, 200
    generator = torch.Generator().manual_seed(0)
    k = (torch.randn(2, 1, n, d, generator=generator) + 1).to(DEVICE)
    live = torch.ones(2, n, dtype=torch.bool)
    extras = Extras()
    if masked_by == "key_mask":
        live = torch.rand(2, n, generator=generator) < 0.5
        extras = Extras(key_mask=live.to(DEVICE))
    elif masked_by == "seqused_k":
        live[1, 1500:] = False
        extras = Extras(seqused_k=live.sum(1, dtype=torch.int32).to(DEVICE))
    spec = _resolve(FACTORED_QK.label(), torch.float32)
    problem = KernelProblem.of(
        k, k, k, spec=spec, scale=1.0, is_causal=False, lower_right=False, extras=extras
    )
    weights = live.double()[:, None, :, None]
    expected = (k.cpu().double() * weights).sum(2, keepdim=True) / weights.sum(2, keepdim=True)
    found = compute_k_means(problem).ptr.cpu()
    assert_bitwise(actual=found, expected=expected.float(), what="means")
