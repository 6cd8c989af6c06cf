"""The operands of a forward, prepared in one launch, on a GPU or on the CPU from its PTX.

The expected means, codes and scales are those of the kernels for one job each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sagesim import AttentionSpec
from sagesim_kernels.operands import KernelProblem, OperandCache
from sagesim_kernels.ops import _resolve
from tests.sagesim_kernels.layouts import stored_rows, viewed
from tests.sagesim_kernels.preparation.on_the_cpu import on_the_cpu
from tests.sagesim_kernels.preparation.same_codes import assert_same_codes
from tests.support.assertions import assert_bitwise
from tests.support.kernels import DEVICE
from tests.support.ptx_worker import PreparedRun, PtxRunner, prepared, problem_of

N = 200
"""Tokens of some calls: three blocks and a part of one."""


class Call(NamedTuple):
    """A call with two heads of K and V for four of Q."""

    n_q: int
    n_k: int
    d: int = 40
    dtype: torch.dtype = torch.bfloat16
    words: str = ""  #: of the spec
    batch: int = 2
    is_causal: bool = False
    lower_right: bool = False
    window: tuple[int, int] = (-1, -1)
    starts: tuple[int, ...] = ()  #: of packed sequences, and the end of the last one
    seqused_k: tuple[int, ...] = ()
    unmasked: tuple[range, ...] = ()  #: of a key mask, for each sequence
    view: str = ""
    capability: int = 80

    @property
    def spec(self) -> AttentionSpec:
        return _resolve(AttentionSpec.parse(f"factored_qk {self.words}").label(), self.dtype)

    def tensors(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = {"q": (4, self.n_q), "k": (2, self.n_k), "v": (2, self.n_k)}
        found = {
            name: torch.randn(self.batch, *shape, self.d, generator=generator).to(self.dtype) + 1
            for name, shape in shapes.items()
        }
        if self.starts:
            found["cu_q"] = found["cu_k"] = torch.tensor(self.starts, dtype=torch.int32)
        if self.seqused_k:
            found["seqused_k"] = torch.tensor(self.seqused_k, dtype=torch.int32)
        if self.unmasked:
            mask = torch.zeros(self.batch, self.n_k, dtype=torch.bool)
            for row, keys in zip(mask, self.unmasked, strict=True):
                row[list(keys)] = True
            found["key_mask"] = mask
        return found

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("is_causal", "lower_right", "window")}

    def problem(self, tensors: dict[str, Tensor]) -> KernelProblem:
        return problem_of(tensors, self.spec, scale=1.0, **self.options)


CALLS = {
    "several tiles of keys": Call(70, 300),
    "float16, causal": Call(65, N, dtype=torch.float16, is_causal=True),
    "float32": Call(N, 70, dtype=torch.float32, is_causal=True, lower_right=True),
    "Hopper": Call(70, 300, capability=90),
    "many heads": Call(130, 130, batch=4),
    "few tokens": Call(1, 3, d=16),
    "128 channels": Call(70, 150, d=128),
    "72 channels": Call(130, 70, d=72, dtype=torch.float32),
    "packed": Call(330, 330, batch=1, starts=(0, 100, 100, 330)),
    "window": Call(130, 130, window=(40, 0)),
    "used keys": Call(130, 130, batch=3, seqused_k=(65, 0, 130)),
    "key mask": Call(65, N, batch=3, unmasked=(range(0, N, 3), range(0), range(70, 90))),
    "scales of keys": Call(70, 150, words="qk=int8@token,token"),
    "scales of blocks of queries": Call(150, 70, words="qk=int8@block,block"),
    "half away": Call(70, 150, words="round=half_away", capability=90),
    "stochastic": Call(150, 150, words="round=stochastic@5", capability=90),
    **{view: Call(65, N, view=view) for view in ("offset", "stride", "transposed")},
    "strides that 8 divides and 16 does not": Call(65, N, view="both divisors"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_means_codes_and_scales_on_a_gpu(name: str) -> None:
    call = CALLS[name]
    tensors = {name: x.to(DEVICE) for name, x in call.tensors().items()}
    problem = call.problem(tensors)
    for x in "qkv":
        tensors[x] = viewed(tensors[x], call.view)
    check(prepared(call.problem(tensors)), OperandCache(problem), problem)


@on_the_cpu
@pytest.mark.parametrize("name", CALLS)
def test_means_codes_and_scales(runner: PtxRunner, name: str) -> None:
    call = CALLS[name]
    tensors = call.tensors()
    problem = call.problem(tensors)
    for x in "qkv":
        tensors[x] = viewed(tensors[x], call.view)
    check(from_ptx(runner, call, tensors), OperandCache(problem), problem)


@on_the_cpu
def test_a_token_that_no_query_attends_to_has_no_influence(runner: PtxRunner) -> None:
    """Nor has a query that attends to no key."""
    call = Call(N, N, window=(10, 0), lower_right=True, batch=1, seqused_k=(100,))
    tensors = call.tensors()
    problem = call.problem({name: x.clone() for name, x in tensors.items()})
    tensors["k"][:, :, 100:] = torch.nan
    tensors["q"][:, :, 110:] = torch.nan
    check(from_ptx(runner, call, tensors), OperandCache(problem), problem)


@on_the_cpu
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_reaches_the_scales_of_its_head(
    runner: PtxRunner, number: float
) -> None:
    call = Call(70, 150)
    tensors = call.tensors()
    expected = from_ptx(runner, call, tensors)
    tensors["k"][0, 1, 149, 7] = number
    tensors["q"][1, 2, 69, 7] = number
    found = from_ptx(runner, call, tensors)
    assert not bool(found.k_mean[0, 1, 0, 7].isfinite())
    for name in ("q", "k"):
        problem = call.problem(tensors)
        rows = stored_rows(getattr(problem, name), None)
        scale, before = (getattr(x, f"{name}_scale").flatten(1) for x in (found, expected))
        written = rows if name == "q" else rows[::64] // 64
        scale, before = scale[:, written], before[:, written]
        spoilt = torch.zeros_like(scale, dtype=torch.bool)
        if name == "q":
            spoilt[2, 128 + 69] = True
        else:
            spoilt[1, :3] = True
        assert bool(scale[spoilt].isnan().all())
        assert_bitwise(actual=scale[~spoilt], expected=before[~spoilt], what=f"scales of {name}")


def from_ptx(runner: PtxRunner, call: Call, tensors: dict[str, Tensor]) -> PreparedRun:
    return runner.prepare(tensors, call.spec, capability=call.capability, **call.options)


def check(found: PreparedRun, expected: OperandCache, problem: KernelProblem) -> None:
    assert expected.k_mean is not None
    assert_bitwise(actual=found.k_mean, expected=expected.k_mean.ptr, what="mean of K")
    for name in ("q", "k"):
        assert_same_codes(found, expected.get("qk", name), name, problem)
