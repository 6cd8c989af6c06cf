"""Check calls that are not traced, whose kernels write no codes of P and dS.

As in `contract`, no tolerance is chosen. Where the ball of a map lies between two ties, its code is
known all the same; in the few others it is one of two or more. The scale is known up to the ball of
the largest magnitude. So products of codes and scales have balls, and the results too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sagesim import AttentionSpec, Precision, Trace
from sagesim.problem import resolve_input16
from sagesim_kernels import KernelTrace, ampere, hopper
from sagesim_kernels.launching import forget_plans
from sagesim_kernels.operands import Extras, KernelProblem, logit_scale
from tests.sagesim_kernels.contract import VANISHING, Checker, Tally, emulate, emulated_case
from tests.sagesim_kernels.contract import run_kernels as run_traced
from tests.sagesim_kernels.error_balls import Ball
from tests.support.inputs import Case
from tests.support.kernels import Results, run_kernels


def rounds_maps(
    spec: AttentionSpec, *sites: str, to: Sequence[Precision] = (Precision.INT8,)
) -> bool:
    """Return whether P or dS is rounded to codes in some of these products."""
    return any(spec.site(site).precision in to for site in sites)


def has_codes_backward(case: Case, spec: AttentionSpec) -> bool:
    """Return whether a call that is not traced has a backward of its own, which writes no codes.

    It is in INT8; see `has_fp8_backward`.
    """
    problem = _problem(case, spec)
    by_ampere = rounds_maps(spec, "dv", "dq", "dk") and ampere.serves_backward(problem)
    by_hopper = hopper.serves_codes(problem) and not hopper.serves_fp8(problem.spec)
    return not problem.is_empty and (by_hopper or by_ampere)


def has_fp8_backward(case: Case, spec: AttentionSpec) -> bool:
    """Return whether a call that is not traced has a backward in FP8 of its own."""
    problem = _problem(case, spec)
    in_fp8 = hopper.serves_codes(problem) and hopper.serves_fp8(problem.spec)
    return not problem.is_empty and in_fp8


def has_codes_forward(case: Case, spec: AttentionSpec) -> bool:
    """Return whether a call that is not traced has a forward of its own, which writes no codes."""
    problem = _problem(case, spec)
    by_ampere = rounds_maps(spec, "pv") and ampere.serves_forward(problem)
    return not problem.is_empty and (hopper.serves_forward_in_codes(problem) or by_ampere)


def _problem(case: Case, spec: AttentionSpec) -> KernelProblem:
    return KernelProblem.of(
        case.q,
        case.k,
        case.v,
        spec=resolve_input16(spec, case.q.dtype),
        scale=logit_scale(case.q, case.scale),
        is_causal=case.is_causal,
        lower_right=case.causal_alignment == "lower_right",
        extras=Extras(case.window, case.key_mask, case.seqused_k, case.sinks, case.softcap),
    )


def check_with_call(case: Case, spec: AttentionSpec) -> Tally:
    """Check a trace, as `contract.check` does, and a call if other kernels compute it."""
    traced, on_cpu = run_traced(case, spec), emulated_case(case)
    sim = emulate(on_cpu, spec)
    tally = Checker(traced, on_cpu, sim).run()
    forward, backward = has_codes_forward(case, spec), has_codes_backward(case, spec)
    if forward or backward:
        found = Results(*(x.cpu() for x in run_kernels(case, spec)))
        check_call(found, traced, on_cpu, sim, forward=forward, backward=backward)
    if has_fp8_backward(case, spec):
        check_fp8_call(case, spec, sim)
    return tally


FEW = 0.005
"""The most by which gradients of equal scales and operands differ, relative to the root of the sum
of the squares of their terms, if logits are not huge: where a number is near a tie, its code may be
another one. A wrong scale of rows, or terms in another order, are errors of 3 % or more."""


def check_fp8_call(case: Case, spec: AttentionSpec, sim: Trace) -> None:
    """Check that Hopper's backward in FP8 returns almost what the portable kernels do.

    Those meet the contract. Both have the same forward, and operands and scales with the same bits.
    sim: the emulator's trace of the call.
    """
    found, twin = run_kernels(case, spec), results_of_other_kernels(case, spec)
    difference = _difference_of_p(sim)
    for name, size in _sizes_of_terms(case, spec, sim).items():
        x, y = (getattr(each, name).cpu().double() for each in (found, twin))
        assert torch.equal(x.isfinite(), y.isfinite()), name
        off = (x - y).nan_to_num(0.0, 0.0, 0.0).norm(dim=(-2, -1)) / size.clamp(min=1e-30)
        of_heads = difference.unflatten(1, (x.shape[1], -1)).amax(2)
        is_too_far = off > FEW + of_heads
        worst = float(off.masked_fill(~is_too_far, 0.0).max())
        assert not is_too_far.any(), f"{name}: {worst:.1e} from the portable kernels"


def _difference_of_p(sim: Trace) -> Tensor:
    """Return the largest relative difference of P between two implementations, for each head.

    docs/numerics.md, "Between implementations", lets them round S, L and S - L or leave a rounding
    out. So S - L differs by at most 2^-22 of the largest S and L, and P by a factor that is the
    exponential of this difference. Smoothing K changes L by at most the largest S.
    """
    s, lse = (x.cpu().double().nan_to_num(0.0, 0.0, 0.0).abs() for x in (sim.s, sim.lse))
    return torch.expm1((s.amax((-2, -1)) + lse.amax(-1)) * 2.0**-22)


def _sizes_of_terms(case: Case, spec: AttentionSpec, sim: Trace) -> dict[str, Tensor]:
    """Return the root of the sum of the squares of all terms of a gradient, for each head."""

    def squares(x: Tensor) -> Tensor:
        return x.cpu().double().square().nan_to_num(0.0, 0.0, 0.0)

    k = case.k.double()
    if spec.smoothing.k:
        k = k - k.nanmean(-2, keepdim=True)
    kv_heads = k.shape[1]
    groups = case.q.shape[1] // kv_heads
    p, ds, q, do = (squares(x) for x in (sim.p, sim.ds, case.q, case.do))
    k = squares(k).repeat_interleave(groups, 1)
    scale = logit_scale(case.q, case.scale) ** 2
    sums = {
        "dq": (ds @ k).sum((-2, -1)) * scale,
        "dk": (ds.mT @ q).sum((-2, -1)).unflatten(1, (kv_heads, groups)).sum(2) * scale,
        "dv": (p.mT @ do).sum((-2, -1)).unflatten(1, (kv_heads, groups)).sum(2),
    }
    return {name: x.sqrt() for name, x in sums.items()}


def results_of_other_kernels(case: Case, spec: AttentionSpec, **options: Any) -> Results:
    """Return the results of a call whose backward is not Hopper's."""
    forget_plans()
    try:
        with mock.patch.object(hopper, "serves_codes", lambda _: False):
            return run_kernels(case, spec, **options)
    finally:
        forget_plans()


def check_call(
    found: Results,
    traced: KernelTrace,
    case: Case,
    sim: Trace,
    *,
    forward: bool = False,
    backward: bool = True,
) -> None:
    """Check results whose codes of P and dS are not known.

    Args:
        found: results of a call.
        traced: of the same call. Only its codes of other operands are used.
        case: as `emulated_case` returns it.
        sim: of the emulator.
        forward: whether another kernel than the trace's computed the forward. If not, o and lse
            are those of the trace.
        backward: whether to check gradients. Maps are then INT8, with scales of tiles or of rows
            and columns.
    """
    if not forward:
        for name in ("o", "lse"):
            assert torch.equal(getattr(found, name), getattr(traced, name)), (
                f"{name} unlike a trace's"
            )
    results = {name: getattr(found, name) for name in ("o", "lse", "dq", "dk", "dv")}
    _CallChecker(replace(traced, **results), case, sim, forward=forward, backward=backward).run()


class _CallChecker(Checker):
    """Checks results without looking at the codes of P and dS, or at delta."""

    maximum_error = 2.0**-22
    """Forwards that write no codes subtract so much more than the maximum."""

    lost_weight = 2.0**-118
    """The largest weight of a row may be 2^-8 there, and exponentials below 2^-126 are 0 on a
    GPU."""

    def __init__(
        self, found: KernelTrace, case: Case, sim: Trace, *, forward: bool, backward: bool
    ) -> None:
        super().__init__(found, case, sim)
        self._has_forward, self._has_backward = forward, backward

    def _codes_of_p(self, high: Ball) -> Ball:
        if not self._has_forward:
            return super()._codes_of_p(high)
        first, last = (
            self._round("pv", end).clamp(-127, 127) for end in (high.lowest, high.highest)
        )
        return Ball((first + last) / 2, (last - first) / 2)

    def _delta(self) -> None:
        if self._has_backward:
            super()._delta()
            self.ds = self.ds_of_any  # the call's delta is another one than the trace's

    def _backward(self) -> None:
        if self._has_backward:
            super()._backward()

    def _inside(self, name: str, ball: Ball, is_free: Tensor | None = None) -> None:
        if name != "delta":
            super()._inside(name, ball, is_free)

    def _codes(
        self, site: str, x: Ball, only_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes and scales of a map, and the radius of their products, from the map x."""
        if only_scale is not None:
            return super()._codes(site, x, only_scale)  # of the forward
        least, most = self._amax(x, self.spec.site(site).lhs)
        low = (least.clamp(min=VANISHING) / 127).float().double()
        high = torch.maximum((most / 127).float().double(), low)
        scale = Ball((low + high) / 2, (high - low) / 2)
        y = x.over(scale).rounded(3)
        y = y.widened(y.size * 2.0**-149 / low)
        first, last = (self._round(site, end).clamp(-127, 127) for end in (y.lowest, y.highest))
        codes = Ball((first + last) / 2, (last - first) / 2)
        products = codes.times(scale)
        # If 127 / amax overflows, all codes are 0.
        products = products.widened(products.size.masked_fill(least > VANISHING, 0.0))
        is_known = most.isfinite() & products.mid.isfinite()
        radius = products.radius.masked_fill(~is_known, torch.inf)
        vanishes = most <= VANISHING
        is_zero = vanishes | ~is_known
        return (
            codes.mid.masked_fill(is_zero, 0.0),
            scale.mid.masked_fill(is_zero, 1.0),
            radius.masked_fill(vanishes, 0.0),
        )
