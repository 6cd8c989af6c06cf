"""The contract of fuzzing: how far o and the gradients may differ from the emulator's.

The allowed difference of an element is the sum of two parts:

    last place   one unit in the last place of the dtype, plus the float32 error of the sum that
                 computes the element; see `sagesim.fuzzing.noise.Float32Errors`
    noise        `NOISE_FACTOR` times the largest change of the emulator's own output in `RUNS` runs
                 with noise that `docs/numerics.md` allows; see `sagesim.fuzzing.noise.AllowedNoise`

Both the maximum and the root mean square of the difference over a tensor must be within what is
allowed. The noise adapts to the case: it is as small as float32 errors if rounding has little
effect (a row that attends to one key, a tensor of zeros), and large if rounding has a large effect
(logits in the thousands, dS that consists of rounding errors). No constant is fitted to a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sagesim.emulator import Hooks, Passes, Recorder, exact, flatten, plain_float32, run
from sagesim.fuzzing.calls import Outputs
from sagesim.fuzzing.cases import FuzzCase
from sagesim.fuzzing.changes import NO_CHANGE, Both, Change
from sagesim.fuzzing.noise import AllowedNoise, Float32Errors
from sagesim.spec import AttentionSpec

ORDER: Final = ("o", "dv", "dq", "dk", "dsinks")
"""The outputs in the order in which they are computed."""

_MAPS: Final = ("s", "p_recompute", "dp", "ds")

RUNS: Final = 4
"""Number of runs with noise: two with independent signs, two with one sign per map."""

NOISE_FACTOR: Final = 2.0
"""Allowed change relative to the largest of `RUNS` runs with noise. The kernel's own deviation is
another random draw and may be larger than those, because a few codes can dominate it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference of one output from the emulator's, or what is wrong with a tensor.

    A tensor with a `problem` is not compared.
    """

    tensor: str  #: an output, or an input that the kernel overwrote
    problem: str = ""  #: an input that was overwritten, an invalid o, or a missing gradient
    measure: str = "max"  #: "max" or "rms", whichever has the larger ratio
    found: float = math.inf  #: |kernel - emulator|: at `worst`, or its root mean square
    allowed: float = 0.0  #: the largest allowed value of `found`
    worst: tuple[int, ...] = ()  #: index of the element with the largest ratio
    kernel: float = math.nan  #: the kernel's value at `worst`
    emulator: float = math.nan  #: the emulator's value at `worst`

    @property
    def ratio(self) -> float:
        """found / allowed; above 1 the contract is broken."""
        if self.found == 0:
            return 0.0
        return self.found / self.allowed if self.allowed else math.inf

    @property
    def is_outside(self) -> bool:
        """Whether this breaks the contract."""
        return bool(self.problem) or not self.found <= self.allowed


class Contract:
    """The emulator's outputs for a case, and the allowed differences from them.

    change: a change of the emulator; the contract is then that of a kernel with this change.
    """

    def __init__(
        self,
        case: FuzzCase,
        spec: AttentionSpec,
        device: str | torch.device,
        change: Change = NO_CHANGE,
    ) -> None:
        self._original, self._change = case.problem(device), change
        self._problem = change.problem(self._original)
        self._x = change.layout(flatten(self._problem, spec), self._problem)
        self._do = self._problem.gradient.to(self._x.dtype)
        recorder = Recorder(self._x, maps=frozenset(_MAPS), operands=False)
        passes = run(self._x, self._do, Both(self._hooks(), recorder))
        self.emulator = self._finish(passes)
        lse = passes.lse_smoothed.masked_fill(passes.lse_smoothed.isinf(), 0.0)
        maps = recorder.maps | {"p": (recorder.maps["s"] - lse[..., None]).exp()}
        with plain_float32(self._do.device.type):
            self._errors = Float32Errors(self._x, self._do, passes.o, passes.lse, maps)
        errors = change.outputs(self._errors.outputs, self._original)
        self._last_place = Outputs(
            *(_last_place(y) + e.double() for y, e in zip(self.emulator, errors, strict=True))
        )
        self._noise: dict[str, tuple[float, float]] | None = None

    def _hooks(self) -> Hooks:
        return self._change.hooks(self._x, self._problem)

    def _finish(self, passes: Passes) -> Outputs:
        """The outputs as the kernel returns them: changed, and in the dtypes of the inputs."""
        dsinks = passes.dsinks
        if dsinks is None:
            dsinks = passes.o.new_zeros(self._x.heads[-1], dtype=torch.float32)
        outputs = Outputs(passes.o, passes.dq, passes.dk, passes.dv, dsinks)
        changed = self._change.outputs(outputs, self._original)
        of_q = {name: x.to(self._original.q.dtype) for name, x in changed._asdict().items()}
        sinks = self._original.sinks
        of_sinks = changed.dsinks if sinks is None else changed.dsinks.to(sinks.dtype)
        return Outputs(**(of_q | {"dsinks": of_sinks}))

    def compare(self, kernel: Mapping[str, Tensor]) -> dict[str, Difference]:
        """Compare the kernel's outputs with the emulator's; the result is in `ORDER`."""
        return {name: self._compare(name, kernel[name]) for name in ORDER if name in kernel}

    def _compare(self, name: str, found: Tensor) -> Difference:
        sim: Tensor = getattr(self.emulator, name)
        error, last_place = _error(found, sim), getattr(self._last_place, name)
        last_place_rms, noise_max, noise_rms = _rms(last_place), 0.0, 0.0
        # The runs with noise are slow, and not needed if the first part alone allows the error.
        if bool((error > last_place).any()) or _rms(error) > last_place_rms:
            noise_max, noise_rms = (NOISE_FACTOR * x for x in self.noise[name])
        ratio = (error / (last_place + noise_max)).nan_to_num(0.0, math.inf)
        index = int(ratio.flatten().argmax())
        by_max = (error.flatten()[index].item(), last_place.flatten()[index].item() + noise_max)
        by_rms = (_rms(error), last_place_rms + noise_rms)
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

    def rms_error(self, name: str, found: Tensor) -> float:
        """Root mean square of the difference of an output; infinite if an element is not finite."""
        return _rms(_error(found, getattr(self.emulator, name)))

    @property
    def noise(self) -> dict[str, tuple[float, float]]:
        """Change of each output by the allowed noise: (maximum, RMS), the largest of `RUNS` runs.

        Computed on first use.
        """
        if self._noise is None:
            self._noise = dict.fromkeys(ORDER, (0.0, 0.0))
            for seed in range(RUNS):
                hooks = Both(AllowedNoise(self._x, self._errors, seed), self._hooks())
                passes = run(self._x, self._do, hooks)
                noisy = self._finish(passes)
                for name, (largest, rms) in self._noise.items():
                    change = _error(getattr(noisy, name), getattr(self.emulator, name))
                    change = change.nan_to_num(0.0, 0.0)
                    self._noise[name] = max(largest, _max(change)), max(rms, _rms(change))
        return self._noise

    def rounding(self, name: str) -> float:
        """RMS error of the emulator's output against float64: the error of the spec itself."""
        reference = exact(self._original)
        found, expected = getattr(self.emulator, name), getattr(reference, name)
        return 0.0 if expected is None else _rms(_error(found, expected))


def _error(found: Tensor, sim: Tensor) -> Tensor:
    """|found - sim| in float64; infinite if only found is not finite, 0 if sim is not finite.

    sim is not finite if 16 bits overflow. The largest finite number is then as good a result.
    """
    error = (found.double() - sim.double()).abs().nan_to_num(math.inf, math.inf)
    return error.masked_fill(~sim.isfinite(), 0.0)


def _last_place(x: Tensor) -> Tensor:
    """One unit in the last place of each element of x, in float64."""
    info = torch.finfo(x.dtype)
    exponent = torch.frexp(x.double().nan_to_num(0.0, 0.0, 0.0)).exponent - 1
    step = torch.exp2(exponent.double()) * info.eps
    return step.clamp_(min=info.smallest_normal * info.eps)


def _max(x: Tensor) -> float:
    return x.max().item()


def _rms(x: Tensor) -> float:
    """Root mean square; infinite if an element is infinite."""
    largest = _max(x.abs())
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * (x / largest).square().mean().sqrt().item()
