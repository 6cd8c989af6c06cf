"""Judge a kernel on a case: run it, and compare its outputs with the emulator's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sagesim.fuzzing.calls import INPUTS
from sagesim.fuzzing.cases import FuzzCase, call_with
from sagesim.fuzzing.tolerance import ORDER, Contract, Difference
from sagesim.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of running a case."""

    case: FuzzCase
    error: str | None = None  #: type and message of the exception, if the kernel raised one
    kind: str | None = None
    """The type of the exception, RuntimeError for all kinds of it; "crash" if the process ended."""
    differences: Mapping[str, Difference] = field(default_factory=dict[str, Difference])
    """By tensor: inputs that were overwritten, then outputs. Empty if the kernel raised."""

    @property
    def symptoms(self) -> frozenset[str]:
        """The tensors outside the contract, or the kind of the error."""
        if self.kind is not None:
            return frozenset({self.kind})
        return frozenset(name for name, d in self.differences.items() if d.is_outside)

    @property
    def is_numeric(self) -> bool:
        """Whether all outputs could be compared, and no input was overwritten."""
        return self.error is None and not any(d.problem for d in self.differences.values())

    def ratio(self, symptom: str) -> float:
        """`Difference.ratio` of a tensor; for the kind of an error infinite, if it is this one."""
        if symptom in self.differences:
            return self.differences[symptom].ratio
        return math.inf if symptom in self.symptoms else 0.0


def precedence(symptom: str) -> int:
    """Sort key: errors first, then inputs, then outputs in the order of computation."""
    tensors = (*INPUTS, *ORDER)
    return tensors.index(symptom) if symptom in tensors else -1


def judge(
    case: FuzzCase,
    attention: Callable[..., Tensor],
    spec: AttentionSpec,
    device: str | torch.device,
) -> Outcome:
    """Run a case in this process. An exception of the kernel, and its exit, are outcomes."""
    try:
        called = call_with(case, attention, device)
    except (Exception, SystemExit) as error:  # whatever the kernel raises is to be reported
        # A fault of a device is raised by PyTorch or Triton, whichever notices it first. Both raise
        # kinds of RuntimeError.
        name = type(error).__name__
        kind = "RuntimeError" if isinstance(error, RuntimeError) else name
        return Outcome(case, error=f"{name}: {error}", kind=kind)
    compared = Contract(case, spec, device).compare(called.outputs)
    found = {name: Difference(tensor=name, problem=p) for name, p in called.problems.items()}
    found = compared | found
    return Outcome(case, differences={name: found[name] for name in sorted(found, key=precedence)})
