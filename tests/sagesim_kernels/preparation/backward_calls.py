"""Calls whose backward is prepared by one kernel, and by the kernels for one job each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sagesim import AttentionSpec, Smoothing
from sagesim_kernels.operands import (
    DqSums,
    KernelProblem,
    OperandCache,
    Rows,
    RowStatistics,
    compute_delta_from_o,
    compute_units,
    padded,
)
from sagesim_kernels.ops import _resolve
from tests.sagesim_kernels.layouts import stored_rows, stored_tokens, viewed
from tests.sagesim_kernels.preparation.same_codes import assert_same_codes
from tests.support.assertions import assert_bitwise
from tests.support.kernels import DEVICE
from tests.support.ptx_worker import PreparedBackward, problem_of

SCALE = 0.2
HEADS = 4
"""Of Q. K and V have two."""


class Call(NamedTuple):
    """A call of a backward."""

    n_q: int
    n_k: int
    d: int = 40
    d_v: int = 56
    dtype: torch.dtype = torch.bfloat16
    mask: str = "full"
    batch: int = 2
    window: tuple[int, int] = (-1, -1)
    starts: tuple[int, ...] = ()  #: of packed sequences, and the end of the last one
    seqused_k: tuple[int, ...] = ()
    has_key_mask: bool = False
    has_d_lse: bool = False
    is_smooth: bool = True
    words: str = ""  #: of the spec
    views: tuple[str, ...] = ()  #: of q, k, v, o and do; see `layouts.viewed`
    by_tma: bool = True  #: whether TMA adds the sums of dQ
    tile: int = 64  #: keys that a product of dQ sums over
    broken: tuple[str, float] | None = None  #: a tensor of which one number is this one
    softcap: float | None = None
    capability: int = 80

    @property
    def spec(self) -> AttentionSpec:
        spec = AttentionSpec.parse(f"factored_qk {self.words}")
        if not self.is_smooth:
            spec = replace(spec, smoothing=Smoothing())
        return _resolve(spec.label(), self.dtype)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "scale": SCALE,
            "is_causal": self.mask != "full",
            "lower_right": self.mask == "lower_right",
            "window": self.window,
        }

    @property
    def summed(self) -> int:
        """Channels of sums of dQ that are set to 0. Those of padding come last."""
        padding = padded(self.d)
        return min(-(-self.d // 8) * 8, padding) if self.by_tma else padding

    def tensors(self) -> dict[str, Tensor]:
        """Q, K, V and what masks them."""
        found = {
            "q": tokens(self.batch, HEADS, self.n_q, self.d, dtype=self.dtype, seed=0),
            "k": tokens(self.batch, 2, self.n_k, self.d, dtype=self.dtype, seed=1),
            "v": tokens(self.batch, 2, self.n_k, self.d_v, dtype=self.dtype, seed=2),
        }
        if self.starts:
            found["cu_q"] = found["cu_k"] = torch.tensor(self.starts, dtype=torch.int32)
        if self.seqused_k:
            found["seqused_k"] = torch.tensor(self.seqused_k, dtype=torch.int32)
        if self.has_key_mask:
            generator = torch.Generator().manual_seed(8)
            found["key_mask"] = torch.rand(self.batch, self.n_k, generator=generator) < 0.5
        return {name: x.to(DEVICE) for name, x in self._broken(found).items()}

    def _broken(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of which one may have a number that is not finite, in token 100 of a head."""
        if self.broken is not None and self.broken[0] in tensors:
            tensors[self.broken[0]][0, 1, 100, 7] = self.broken[1]
        return tensors

    def gradients(self) -> dict[str, Tensor]:
        """O, dO and the row statistics of the forward."""
        shape = (self.batch, HEADS, self.n_q)
        found = {
            "o": tokens(*shape, self.d_v, dtype=self.dtype, seed=3),
            "do": tokens(*shape, self.d_v, dtype=self.dtype, seed=4),
            "lse2": tokens(*shape, dtype=torch.float32, seed=9),
        }
        found["lse2"][..., 5] = torch.inf  # a query that attends to no key
        if self.has_d_lse:
            found["d_lse"] = tokens(*shape, dtype=torch.float32, seed=10)
        return self._broken(found)

    def problem(self, tensors: dict[str, Tensor]) -> KernelProblem:
        return problem_of(tensors, self.spec, softcap=self.softcap, **self.options)

    def viewed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of tokens with the strides of the call, and all others."""
        views = dict(zip(("q", "k", "v", "o", "do"), self.views, strict=False))
        return {n: viewed(x, views[n]) if n in views else x for n, x in tensors.items()}


class Expected(NamedTuple):
    """What the kernels for one job each compute."""

    delta: Tensor
    unit: Tensor
    operands: OperandCache


def tokens(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) + 1).to(DEVICE, dtype)


def expected_of(
    problem: KernelProblem,
    o: Tensor,
    do: Tensor,
    lse2: Tensor,
    *,
    k_mean: Tensor | None = None,
    d_lse: Tensor | None = None,
) -> Expected:
    """Run the kernels for one job each. The arguments are those of `prepared_backward`."""
    statistics = RowStatistics(Rows.of(lse2), Rows.of(torch.full_like(lse2, -7.0)))
    sums = DqSums.by_tma(problem, padded(problem.q.shape[3]))
    sums.unit.fill_(-7.0)
    operands = OperandCache(problem, do, k_mean=k_mean)
    operands.quantize("qk_recompute")
    rows = None if d_lse is None else Rows.of(d_lse)
    compute_delta_from_o(problem, o, do, statistics, rows)
    used = {
        "q": operands.get("qk_recompute", "q"),
        "k": operands.get("qk_recompute", "k"),
        "do": operands.get("dp", "do"),
        "v": operands.get("dp", "v"),
        "k_right": operands.get("dq", "k"),
    }
    in_parts = operands.k_mean if problem.extras.softcap is not None else None
    compute_units(problem, used, in_parts, statistics, None, sums)
    return Expected(statistics.delta.ptr, sums.unit, operands)


def check(
    found: PreparedBackward, expected: Expected, call: Call, problem: KernelProblem, lse2: Tensor
) -> None:
    assert_bitwise(actual=found.delta, expected=expected.delta, what="delta")
    assert_bitwise(actual=found.unit, expected=expected.unit, what="units")
    for name in ("q", "k"):
        assert_same_codes(found, expected.operands.get("qk_recompute", name), name, problem)
    check_row_stats(found, call, problem, lse2)


def check_row_stats(
    found: PreparedBackward, call: Call, problem: KernelProblem, lse2: Tensor
) -> None:
    """Check the statistics, in blocks of 64 queries, and that the sums are 0."""
    rows = stored_rows(problem.q, problem.cu_q)
    per_scale = found.unit.shape[1] // found.q_scale.shape[1]
    scale = found.q_scale[..., 0][:, rows // per_scale]
    statistics = found.row_stats.view(HEADS, -1, 4, 64)
    blocks = statistics[:, rows[::64] // 64]
    of_all = SCALE * (1.4426950408889634 if call.softcap is None else 1 / call.softcap)
    factor = scale * torch.tensor(of_all, device=scale.device)
    assert_bitwise(actual=blocks[:, :, 0].flatten(1), expected=factor, what="factors")
    unit, inverse = found.unit[:, rows], blocks[:, :, 3].flatten(1)
    expected = torch.where(unit.isnan(), inverse, 1 / unit)  # any number where the unit is NaN
    assert_bitwise(actual=inverse, expected=expected, what="inverse units")
    sums = found.sums.view(HEADS, found.unit.shape[1] // 64, -1)[:, rows[::64] // 64]
    assert not bool(sums[..., : 64 * call.summed].any())
    stored = stored_tokens(problem.q, problem.cu_q)
    of_tokens = statistics[:, stored // 64, :, stored % 64]
    for index, each in ((1, -lse2), (2, found.delta)):
        expected = each.transpose(0, 1).flatten(1)
        actual = of_tokens.transpose(0, 1)[..., index]
        assert_bitwise(actual=actual, expected=expected, what=f"statistic {index}")
    behind = torch.tensor(sorted({*rows.tolist()} - {*stored.tolist()}), device=rows.device)
    of_behind = statistics[:, behind // 64, 1, behind % 64]
    assert bool((of_behind == -torch.inf).all())
    if call.by_tma:
        parts = found.deltas.view(torch.bfloat16).double().view(HEADS, -1, 8)
        minus_delta = 0.0 - found.delta.transpose(0, 1).flatten(1).double()
        assert_bitwise(actual=parts[:, stored].sum(2), expected=minus_delta, what="parts of delta")
        assert bool(parts[:, behind].isfinite().all())  # P is 0 there, and 0 times a NaN is NaN
