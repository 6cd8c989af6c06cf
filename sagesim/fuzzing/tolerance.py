"""When does another implementation agree with the emulator? The contract for a black box.

Only o, dq, dk and dv are seen. An element may differ from the emulator's by

    floor    one unit in the last place of the dtype, plus float32's error in the sum that it
             is: elementwise, see `sagesim.fuzzing.noise.Errors`
    spread   `SLACK` times what the emulator's own result moves by when everything is done to it
             that `docs/numerics.md` leaves open; see `sagesim.fuzzing.noise.Freedoms`. The largest
             of `RUNS` runs, as a maximum and as a root mean square over the tensor

and both the maximum and the root mean square have to hold. Where rounding decides nothing (a row
that attends to one key, a tensor of zeros) the spread is as small as float32's, and where it
decides everything (logits in the thousands, dS that is nothing but rounding errors) the spread
grows with it: no constant here was fitted to a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sagesim.emulator import exact, flatten, plain_float32, run, trace
from sagesim.fuzzing.cases import FuzzCase, Outputs
from sagesim.fuzzing.noise import Errors, Freedoms
from sagesim.spec import AttentionSpec

ORDER: Final = ("o", "dv", "dq", "dk")
"""The outputs in the order in which they are computed."""

RUNS: Final = 4
"""Runs with noise: two of independent signs, two of one sign throughout."""

SLACK: Final = 2.0
"""An implementation's deviation is a draw of its own, of which few flipped codes may be most: it
may be twice the largest of `RUNS` others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far one tensor is from the emulator's."""

    tensor: str
    problem: str = ""  #: what is wrong with it besides its numbers: its shape, dtype or absence
    measure: str = "max"  #: or "rms": the one that is further out of what is allowed
    found: float = math.inf  #: |kernel - emulator|: at `worst`, or root mean square
    allowed: float = 0.0  #: likewise
    worst: tuple[int, ...] = ()  #: coordinates of the element that is furthest out
    kernel: float = math.nan  #: there
    emulator: float = math.nan  #: there

    @property
    def ratio(self) -> float:
        """found over allowed; above 1 is a difference."""
        if self.found == 0:
            return 0.0
        return self.found / self.allowed if self.allowed else math.inf

    @property
    def is_outside(self) -> bool:
        """Whether this breaks the contract."""
        return bool(self.problem) or not self.found <= self.allowed


class Contract:
    """What the emulator computes for a case, and how far from it one may be."""

    def __init__(self, case: FuzzCase, spec: AttentionSpec, device: str | torch.device) -> None:
        self._problem = case.problem(device)
        self._x = flatten(self._problem, spec)
        t = trace(self._problem, spec=spec)
        self.emulator = Outputs(t.o, t.dq, t.dk, t.dv)
        with plain_float32(self._problem.q.device.type):
            self._errors = Errors(self._x, self._problem.gradient, t)
        self._floor = Outputs(
            *(
                _last_place(y) + e.double()
                for y, e in zip(self.emulator, self._errors.outputs, strict=True)
            )
        )
        self._spread: dict[str, tuple[float, float]] | None = None

    def compare(self, kernel: Mapping[str, Tensor | None]) -> dict[str, Difference]:
        """Every output, in `ORDER`."""
        return {name: self._compare(name, kernel[name]) for name in ORDER}

    def _compare(self, name: str, found: Tensor | None) -> Difference:
        sim: Tensor = getattr(self.emulator, name)
        if problem := _problem(found, sim):
            return Difference(tensor=name, problem=problem)
        assert found is not None
        error, floor = _error(found, sim), getattr(self._floor, name)
        floor_rms, top, rms = _rms(floor), 0.0, 0.0
        if bool((error > floor).any()) or _rms(error) > floor_rms:
            top, rms = (SLACK * x for x in self.spread[name])
        excess = (error / (floor + top)).nan_to_num(0.0, math.inf)
        index = int(excess.flatten().argmax())
        by_max = (error.flatten()[index].item(), floor.flatten()[index].item() + top)
        by_rms = (_rms(error), floor_rms + rms)
        use_rms = by_rms[0] * by_max[1] > by_max[0] * by_rms[1]
        return Difference(
            tensor=name,
            measure="rms" if use_rms else "max",
            found=(by_rms if use_rms else by_max)[0],
            allowed=(by_rms if use_rms else by_max)[1],
            worst=tuple(int(i) for i in torch.unravel_index(torch.tensor(index), sim.shape)),
            kernel=found.flatten()[index].item(),
            emulator=sim.flatten()[index].item(),
        )

    @property
    def spread(self) -> dict[str, tuple[float, float]]:
        """By output, the largest maximum and root mean square of `RUNS` runs with noise; computed
        when it is first asked for."""
        if self._spread is None:
            self._spread = dict.fromkeys(ORDER, (0.0, 0.0))
            for seed in range(RUNS):
                noise = Freedoms(self._x, self._errors, seed)
                noisy = run(self._x, self._problem.gradient, noise)
                for name, (top, rms) in self._spread.items():
                    error = _error(getattr(noisy, name), getattr(self.emulator, name))
                    error = error.nan_to_num(0.0, 0.0)
                    self._spread[name] = max(top, _max(error)), max(rms, _rms(error))
        return self._spread

    def rounding(self, name: str) -> float:
        """Root mean square of the emulator's own error against float64: what the spec costs."""
        reference = exact(self._problem)
        return _rms(_error(getattr(self.emulator, name), getattr(reference, name)))


def _problem(found: Tensor | None, sim: Tensor) -> str:
    """What is wrong with an output besides its numbers."""
    if found is None:
        return "no gradient"
    for what in ("shape", "dtype", "device"):
        ours, theirs = getattr(found, what), getattr(sim, what)
        if ours != theirs:
            if what == "shape":
                ours, theirs = tuple(ours), tuple(theirs)
            return f"{what} {ours}, not {theirs}"
    return ""


def _error(found: Tensor, sim: Tensor) -> Tensor:
    """|found - sim| in float64: infinite where only found is no number, and 0 where sim is none,
    as where 16 bit overflow: a neighbour of the largest number would do as well there."""
    error = (found.double() - sim.double()).abs().nan_to_num(math.inf, math.inf)
    return error.masked_fill(~sim.isfinite(), 0.0)


def _last_place(x: Tensor) -> Tensor:
    """The distance from |x| to the next number of its dtype, float64; 0 where it is none."""
    info = torch.finfo(x.dtype)
    exponent = torch.frexp(x.double().nan_to_num(0.0, 0.0, 0.0)).exponent - 1
    step = torch.exp2(exponent.double()) * info.eps
    return step.clamp_(min=info.smallest_normal * info.eps)


def _max(x: Tensor) -> float:
    return x.max().item()


def _rms(x: Tensor) -> float:
    """Root of the mean square, infinite as soon as one element is."""
    top = _max(x.abs())
    if top == 0 or not math.isfinite(top):
        return top
    return top * (x / top).square().mean().sqrt().item()
