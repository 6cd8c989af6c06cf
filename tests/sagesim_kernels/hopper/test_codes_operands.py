"""Hopper's kernel that rounds operands to codes gives the bytes of the one that all GPUs run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sagesim import FACTORED, FACTORED_PV16, SAGEBWD, AttentionSpec, Granularity
from sagesim.problem import resolve_input16
from sagesim.spec import MAPS, OPERANDS
from sagesim_kernels.operands import KernelProblem, OperandCache, Packing
from tests.sagesim_kernels.hopper.marks import ON_HOPPER
from tests.support.assertions import assert_bitwise
from tests.support.kernels import DEVICE, poisoned

pytestmark = ON_HOPPER

FORWARD, BACKWARD = ("qk", "pv"), ("qk_recompute", "dv", "dq", "dk")

BY_TOKEN = {"lhs": Granularity.PerToken, "rhs": Granularity.PerToken}
SPECS: dict[str, AttentionSpec] = {
    "sagebwd": SAGEBWD,
    "factored": FACTORED,
    "factored_pv16": FACTORED_PV16,
    "codes of blocks and of channels": replace(SAGEBWD, dk=FACTORED.dk, dq=FACTORED.dq),
    "codes of tokens and of blocks": replace(SAGEBWD, qk_recompute=replace(SAGEBWD.qk, **BY_TOKEN)),
}


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of very different sizes in tokens and channels, with zeros.

    The first head of the first sequence has a NaN, and that of the last sequence an infinity. Other
    heads have none: of K, one reaches all tokens by the mean, and hides what else is wrong.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= 2.0 ** torch.randint(-12, 12, (*shape[:-1], 1), generator=generator)
    x *= 2.0 ** torch.randint(-12, 12, (shape[-1],), generator=generator)
    x[..., ::13, :] = 0.0
    if dtype == torch.float32:
        x[0, 0] *= 1e-42  # scales are subnormal, or their inverses overflow
        x[0, -1] *= 2e35
    x = x.to("cuda", dtype)
    x[0, 0, 5, 3], x[-1, 0, -1, 7] = float("nan"), float("inf")
    return x


def assert_same_codes(
    problem: KernelProblem, do: Tensor | None, sites: tuple[str, ...], quantize: Callable[..., Any]
) -> None:
    """Compare the codes and scales of all operands of these sites, memory in between included."""
    with poisoned():
        found, expected = OperandCache(problem, do), OperandCache(problem, do)
        found.quantize(*sites, by=quantize)
        expected.quantize(*sites)
    for site in sites:
        if not problem.spec.site(site).precision.is_scaled:
            continue
        for tensor in OPERANDS[site]:
            if tensor not in MAPS:
                x, y = found.get(site, tensor), expected.get(site, tensor)
                assert x._replace(ptr=0, scale=0) == y._replace(ptr=0, scale=0)
                assert_bitwise(actual=x.ptr, expected=y.ptr, what=f"codes of {tensor} of {site}")
                assert_bitwise(
                    actual=x.scale, expected=y.scale, what=f"scales of {tensor} of {site}"
                )


def problem_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    packing: Packing | None = None,
    *,
    is_causal: bool = False,
    lower_right: bool = False,
) -> KernelProblem:
    return KernelProblem.of(
        q,
        k,
        v,
        spec=resolve_input16(spec, q.dtype),
        scale=0.125,
        is_causal=is_causal,
        lower_right=lower_right,
        packing=packing,
    )


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda x: str(x)[6:]
)
@pytest.mark.parametrize(
    "sizes",
    [(33, 64), (64, 40), (64, 64), (72, 96), (128, 65), (128, 128)],
    ids=lambda x: f"d{x[0]}-{x[1]}",
)
@pytest.mark.parametrize("spec", SPECS)
def test_all_sequences_of_one_length(spec: str, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    from sagesim_kernels.hopper.codes_operands import quantize

    d, d_v = sizes
    for seed, (n_q, n_k, mask) in enumerate(
        (
            (200, 130, {}),
            (64, 128, {"is_causal": True}),  # no query attends to the last keys
            (193, 70, {"is_causal": True, "lower_right": True}),  # some queries attend to no key
            (17, 9, {}),
        )
    ):
        q = drawn(2, 4, n_q, d, dtype=dtype, seed=seed)
        k = drawn(2, 2, n_k, d, dtype=dtype, seed=seed + 10)
        v = drawn(2, 2, n_k, d_v, dtype=dtype, seed=seed + 20)
        do = drawn(2, 4, n_q, d_v, dtype=dtype, seed=seed + 30)
        if seed == 0:  # heads are innermost, and rows no whole vectors
            q, k, v, do = (
                x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1) for x in (q, k, v, do)
            )
        problem = problem_of(q, k, v, SPECS[spec], None, **mask)
        assert_same_codes(problem, None, FORWARD, quantize)
        assert_same_codes(problem, do, BACKWARD, quantize)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("spec", SPECS)
def test_packed_sequences(spec: str, d: int) -> None:
    from sagesim_kernels.hopper.codes_operands import quantize

    cu_q = torch.tensor([0, 0, 1, 130, 200], dtype=torch.int32, device=DEVICE)
    cu_k = torch.tensor([0, 70, 70, 135, 200], dtype=torch.int32, device=DEVICE)
    q, k, v, do = (drawn(1, 2, 200, d, dtype=torch.bfloat16, seed=i) for i in range(4))
    packing = Packing(cu_q, cu_k, 129, 70)
    for mask in ({}, {"is_causal": True, "lower_right": True}):
        problem = problem_of(q, k, v, SPECS[spec], packing, **mask)
        assert_same_codes(problem, None, FORWARD, quantize)
        assert_same_codes(problem, do, BACKWARD, quantize)
