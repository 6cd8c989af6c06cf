"""Check gradients of calls that are not traced, whose kernels write no codes of P and dS.

As in `contract`, no tolerance is chosen. Where the ball of a map lies between two ties, its code is
known all the same; in the few others it is one of two or more. The scale is known up to the ball of
the largest magnitude. So products of codes and scales have balls, and the gradients too.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sagesim import AttentionSpec, Delta, Trace
from sagesim.problem import resolve_input16
from sagesim_kernels import KernelTrace, hopper
from sagesim_kernels.operands import Extras, KernelProblem, logit_scale
from tests.sagesim_kernels.contract import VANISHING, Checker, Tally, emulate, emulated_case
from tests.sagesim_kernels.contract import run_kernels as run_traced
from tests.sagesim_kernels.error_balls import Ball
from tests.support.inputs import Case
from tests.support.kernels import Results, run_kernels


def has_codes_backward(case: Case, spec: AttentionSpec) -> bool:
    """Return whether Hopper's backward in codes computes a call that is not traced."""
    problem = KernelProblem.of(
        case.q,
        case.k,
        case.v,
        spec=resolve_input16(spec, case.q.dtype),
        scale=logit_scale(case.q, case.scale),
        is_causal=case.is_causal,
        lower_right=case.causal_alignment == "lower_right",
        extras=Extras(case.window, case.key_mask, case.seqused_k, case.sinks, case.softcap),
    )
    return not problem.is_empty and hopper.serves_codes(problem)


def check_with_call(case: Case, spec: AttentionSpec) -> Tally:
    """Check a trace, as `contract.check` does, and the gradients of a call if it has others."""
    traced, on_cpu = run_traced(case, spec), emulated_case(case)
    sim = emulate(on_cpu, spec)
    tally = Checker(traced, on_cpu, sim).run()
    if has_codes_backward(case, spec):
        found = run_kernels(case, spec)
        check_gradients(Results(*(x.cpu() for x in found)), traced, on_cpu, sim)
    return tally


def check_gradients(found: Results, traced: KernelTrace, case: Case, sim: Trace) -> None:
    """Check gradients whose codes of P and dS are not known.

    Maps are INT8, with scales of tiles or of rows and columns. A trace on the same GPU has the same
    forward.

    Args:
        found: results of a call.
        traced: of the same call. Only its o, lse, delta and codes of other operands are used.
        case: as `emulated_case` returns it.
        sim: of the emulator.
    """
    for name in ("o", "lse"):
        assert torch.equal(getattr(found, name), getattr(traced, name)), f"{name} unlike a trace's"
    gradients = {name: getattr(found, name) for name in ("dq", "dk", "dv")}
    _UntracedChecker(replace(traced, **gradients), case, sim).run()


class _UntracedChecker(Checker):
    """Checks gradients without looking at the codes of the maps of the backward."""

    def _delta(self) -> None:
        super()._delta()
        if self.spec.delta is Delta.FROM_P:
            self.ds = self.ds_of_any  # the call's delta is another sum than the trace's

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
