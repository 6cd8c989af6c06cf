"""Calls for kernels that run on the CPU from their PTX, and how their results are checked."""

from collections.abc import Container, Iterable
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import sagesim
from sagesim import FACTORED_QK, AttentionSpec, Precision
from tests.sagesim_kernels.contract import OUTPUTS, as_kernel_trace, check_trace
from tests.sagesim_kernels.exactness import assert_as_exact_as_the_emulator
from tests.sagesim_kernels.untraced import check_call, rounds_maps
from tests.support.assertions import assert_sqnr_at_least
from tests.support.inputs import Case
from tests.support.kernels import Results
from tests.support.many_steps import ManySteps
from tests.support.ptx_worker import KernelRun, PtxRunner

FP8 = (Precision.FP8_E4M3, Precision.FP8_E5M2)


def parameters(cases: Iterable[Any], combined: Container[Any]) -> list[Any]:
    """Return parameters of a test for these cases. CI leaves out those that are combined.

    combined: cases whose features other cases have as well.
    """
    marks = {True: pytest.mark.exhaustive, False: ()}
    return [
        pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=marks[x in combined])
        for x in cases
    ]


class Call(NamedTuple):
    spec: str
    n_q: int
    n_k: int
    d: int = 64
    heads: int = 1
    heads_k: int = 1
    is_causal: bool = False
    scale: float | None = None
    dtype: torch.dtype = torch.bfloat16
    window: tuple[int, int] = (-1, -1)
    lower_right: bool = False
    dead_keys: tuple[range, ...] = ()  #: that a key mask excludes
    used_keys: int | None = None  #: as `seqused_k`
    sink: float | None = None
    softcap: float | None = None

    @property
    def problem(self) -> Case:
        """The call. Queries that attend to no key and keys of no query are NaN."""
        dead, used = list(chain(*self.dead_keys)), self.used_keys
        key_mask = torch.ones(1, self.n_k, dtype=torch.bool)
        key_mask[:, dead] = False
        key_mask[:, used:] &= used is None
        problem = Case(
            **self.tensors(),
            enable_gqa=self.heads != self.heads_k,
            is_causal=self.is_causal,
            scale=self.scale,
            window=self.window,
            causal_alignment="lower_right" if self.lower_right else "upper_left",
            key_mask=None if bool(key_mask.all()) else key_mask,
            seqused_k=None if used is None else torch.tensor([used], dtype=torch.int32),
            sinks=None if self.sink is None else torch.full((self.heads,), self.sink),
            softcap=self.softcap,
        )
        visible = sagesim.exact(problem).p[0, 0] > 0
        for tensors, live in (("kv", visible.any(0)), (("q", "do"), visible.any(1))):
            for name in tensors:
                getattr(problem, name)[:, :, ~live] = torch.nan
        return problem

    @property
    def options(self) -> dict[str, Any]:
        """The options of `PtxRunner.run`."""
        names = ("is_causal", "scale", "window", "lower_right", "softcap")
        options = {name: getattr(self, name) for name in names}
        return options | {"has_many_steps": isinstance(self.d, ManySteps)}

    def tensors(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)

        def draw(heads: int, tokens: int) -> Tensor:
            return torch.randn(1, heads, tokens, self.d, generator=generator).to(self.dtype)

        shapes = {
            "q": (self.heads, self.n_q),
            "k": (self.heads_k, self.n_k),
            "v": (self.heads_k, self.n_k),
            "do": (self.heads, self.n_q),
        }
        return {name: draw(*shape) for name, shape in shapes.items()}


def check_results(runner: PtxRunner, call: Call, capability: int = 80) -> KernelRun:
    """Check that results are as exact as the emulator's, and that they meet the contract.

    They do so for any codes of P and dS that it allows, because these kernels do not write them. In
    FP8 the contract is checked with codes only, and so not here.
    """
    tensors, spec = call.tensors(), AttentionSpec.parse(call.spec)
    assert (call.window, call.softcap) == ((-1, -1), None), "see `check_masked_results`"
    found = runner.run(tensors, spec, capability=capability, **call.options)
    options = {"is_causal": call.is_causal, "scale": call.scale}
    problem = Case(**tensors, enable_gqa=call.heads != call.heads_k, **options)
    emulated = assert_as_exact_as_the_emulator(found, problem, spec)
    if rounds_maps(spec, "dv", "dq", "dk", to=FP8):
        return found
    traced = as_kernel_trace(emulated)
    forward, backward = rounds_maps(spec, "pv"), rounds_maps(spec, "dv", "dq", "dk")
    if not forward:
        traced = replace(traced, o=found.o, lse=found.lse)
    if forward or backward:
        results = Results(*(getattr(found, name) for name in Results._fields))
        check_call(results, traced, problem, emulated, forward=forward, backward=backward)
    else:
        outputs = {result: getattr(found, result) for result in OUTPUTS}
        check_trace(replace(traced, **outputs), problem, spec)
    return found


def check_masked_results(runner: PtxRunner, call: Call, capability: int = 80) -> KernelRun:
    """Check that results are as exact as the emulator's where tokens without influence are NaN."""
    problem, spec = call.problem, AttentionSpec.parse(call.spec)
    extras = {"seqused_k": problem.seqused_k, "sinks": problem.sinks}
    if problem.seqused_k is None:
        extras["key_mask"] = problem.key_mask
    tensors = {name: getattr(problem, name) for name in ("q", "k", "v", "do")}
    tensors |= {name: x for name, x in extras.items() if x is not None}
    found = runner.run(tensors, spec, capability=capability, **call.options)
    emulated = assert_as_exact_as_the_emulator(found, problem, spec)
    if problem.sinks is not None:
        assert emulated.dsinks is not None
        exact = emulated.dsinks.double()
        assert_sqnr_at_least(actual=found.d_sinks, exact=exact, floor_db=40, what="d_sinks")
    return found


def check_rows_that_fail(
    runner: PtxRunner, of: str, key: int, d: int = 64, capability: int = 80
) -> KernelRun:
    """Check O where a fixed reference does not fit some rows; see `operands.fixed_reference`.

    of: "logits": in some rows, the logit of one key is far above all others. "values": V is so
    large that P V overflows where P is far above 1.
    """
    tensors, spec = Call("factored_qk", 300, 400, d=d, heads=2).tensors(), FACTORED_QK
    tensors["k"][0, 0, key] *= 30.0 if of == "logits" else 8.0
    if of == "values":
        tensors["v"] *= 2.0**118
        tensors["do"] *= 2.0**-118
    found = runner.run(tensors, spec, capability=capability)
    emulated = sagesim.trace(**tensors, enable_gqa=True, spec=spec)
    for name, floor_db in (("o", 45), ("lse", 110)):
        exact = getattr(emulated, name).double()
        assert_sqnr_at_least(actual=getattr(found, name), exact=exact, floor_db=floor_db, what=name)
    return found
