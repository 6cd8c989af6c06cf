"""A backward that is prepared in one pass, on a GPU or on the CPU from PTX.

The expected codes, statistics and units are those of the kernels for one job each.
"""

from __future__ import annotations

import pytest
import torch

from sagesim_kernels.operands import compute_k_means
from sagesim_kernels.ops import _resolve
from sagesim_kernels.preparation import has_one_pass
from tests.sagesim_kernels.preparation.backward_calls import Call, check, expected_of
from tests.sagesim_kernels.preparation.on_the_cpu import on_the_cpu
from tests.support.ptx_worker import PtxRunner, prepared_backward

CALLS = {
    "float32": Call(130, 130, dtype=torch.float32),
    "float16, causal": Call(65, 200, dtype=torch.float16, mask="upper_left", has_d_lse=True),
    "keys before the queries": Call(65, 200, dtype=torch.float32, mask="lower_right"),
    "queries without keys": Call(200, 70, mask="lower_right"),
    "unsmoothed": Call(70, 70, d=36, d_v=33, mask="upper_left", is_smooth=False),
    "Hopper": Call(70, 130, mask="lower_right", tile=128, capability=90),
    "window": Call(130, 130, batch=3, window=(40, -1)),
    "window on both sides": Call(65, 200, mask="lower_right", window=(10, 70)),
    "used keys": Call(130, 130, batch=3, seqused_k=(65, 0, 130)),
    "key mask": Call(65, 200, batch=3, mask="lower_right", has_key_mask=True),
    "packed": Call(130, 130, batch=1, mask="upper_left", starts=(0, 100, 100, 130)),
    "packed, window": Call(
        200, 200, batch=1, mask="lower_right", window=(70, -1), starts=(0, 130, 200)
    ),
    "72 channels": Call(70, 130, d=72, d_v=72, mask="upper_left"),
    "128 and 80 channels": Call(70, 130, d=128, d_v=80),
    "80 and 128 channels": Call(70, 70, d=80, d_v=128),
    "scales of blocks of queries": Call(
        130, 70, 128, 128, words="qk=int8@block,block qk_recompute=int8@block,block"
    ),
    "stochastic": Call(70, 70, words="round=stochastic@5", capability=90),
    "sums to which threads add": Call(70, 130, d=80, d_v=80, by_tma=False),
    "NaN in K": Call(200, 240, mask="lower_right", is_smooth=False, broken=("k", torch.nan)),
    "NaN in V": Call(200, 200, mask="upper_left", broken=("v", torch.nan)),
    "infinite dO": Call(200, 200, dtype=torch.float16, broken=("do", torch.inf)),
    "strides": Call(65, 130, views=("offset", "stride", "transposed", "both divisors", "stride")),
    "other strides": Call(65, 130, views=("transposed", "both divisors", "offset", "offset", "")),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_on_a_gpu(name: str) -> None:
    check_call(None, CALLS[name])


@on_the_cpu
@pytest.mark.parametrize("name", CALLS)
def test_on_the_cpu(runner: PtxRunner, name: str) -> None:
    check_call(runner, CALLS[name])


@on_the_cpu
def test_tokens_without_influence(runner: PtxRunner) -> None:
    """Queries that attend to no key, and keys that no query attends to."""
    call = Call(200, 200, batch=1, window=(10, 0), mask="lower_right", seqused_k=(100,))
    tensors, gradients = call.tensors(), call.gradients()
    gradients["lse2"][..., 110:] = torch.inf
    problem = call.problem(tensors)
    gradients["k_mean"] = compute_k_means(problem).ptr
    expected = expected_of(problem, **gradients)
    spoilt = {name: x.clone() for name, x in (tensors | gradients).items()}
    for name, first in (("k", 100), ("v", 100), ("q", 110), ("o", 110), ("do", 110)):
        spoilt[name][:, :, first:] = torch.nan
    found = runner.prepare_backward(spoilt, call.spec, **call.options, by_tma=True, tile=64)
    check(found, expected, call, problem, gradients["lse2"])


@pytest.mark.parametrize(
    "words",
    [
        "qk=bf16",
        "qk=int8@token,token",
        "qk=int8@token,token qk_recompute=int8@token,token",
        "qk=bf16 qk_recompute=bf16",
        "dv=int8@tile_column,block",
        "dp=fp16",
        "dq=fp16",
        "delta=p",
        "smooth=qk",
    ],
)
def test_what_is_not_prepared_in_one_pass(words):
    assert not has_one_pass(_resolve(f"factored_qk {words}", torch.bfloat16))


def check_call(runner: PtxRunner | None, call: Call) -> None:
    """Compare the two preparations. runner: None runs the kernels on a GPU."""
    assert has_one_pass(call.spec)
    tensors, gradients = call.tensors(), call.gradients()
    problem = call.problem(tensors)
    if call.is_smooth:
        gradients["k_mean"] = compute_k_means(problem).ptr
    expected = expected_of(problem, **gradients)
    tensors, gradients = call.viewed(tensors), call.viewed(gradients)
    if runner is None:
        found = prepared_backward(
            call.problem(tensors), **gradients, by_tma=call.by_tma, tile=call.tile
        )
    else:
        found = runner.prepare_backward(
            tensors | gradients,
            call.spec,
            by_tma=call.by_tma,
            tile=call.tile,
            capability=call.capability,
            **call.options,
        )
    check(found, expected, call, problem, gradients["lse2"])
