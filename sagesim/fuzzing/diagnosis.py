"""Diagnosis of wrong outputs: where the error may be, and which mistakes would explain them.

A site is one of the seven products of attention; `sagesim.SITES` lists their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sagesim.fuzzing.cases import FuzzCase
from sagesim.fuzzing.mistakes import Mistake, mistakes
from sagesim.fuzzing.tolerance import ORDER, Contract
from sagesim.spec import AttentionSpec

_SMALL: Final = 10.0
"""If an output differs by less than this factor of what is allowed, the same error may be hidden in
the allowed difference of another output."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where the first wrong intermediate may be computed, inferred from the outputs."""

    names: tuple[str, ...]
    """Of `sagesim.SITES`; several if the outputs do not tell them apart. "dsinks" if only the
    gradient of the sinks is wrong, which no product computes."""
    words: str  #: the computations that may be wrong
    reason: str  #: which outputs differ, and why they imply this


def infer(failing: Sequence[Mapping[str, float]]) -> Site:
    """Infer where the error is that reaches exactly these outputs, if there is only one.

    O depends on qk and pv. dV depends on dv and on P, which depends on qk_recompute and, through L,
    on qk. dQ and dK depend on all sites except each other's and dv. The gradient of the sinks
    depends on L and delta; it decides only if no other output differs.

    Args:
        failing: for each failing case, `Difference.ratio` of each output. All cases are needed,
            because in a small case an error may be invisible in some outputs.
    """
    worst = {name: max(case[name] for case in failing) for name in ("o", "dv", "dq", "dk")}
    o, dv, dq, dk = (ratio > 1 for ratio in worst.values())
    match o, dv, dq, dk:
        case True, True, _, _:
            return Site(
                ("qk",),
                "S = QKᵀ, its scale, mask, smoothing or softmax, or which heads are read",
                "o and dv, which share only P, differ in some of the failing cases",
            )
        case True, False, False, False:
            return Site(
                ("pv",),
                "O = PV, or the division of O by the row sum",
                "only o differs; dv, which uses the same P, is right in every case",
            )
        case True, False, _, _:
            return Site(
                ("pv", "dp"),
                "O = PV, the division of O by the row sum, or V, which dP = dO Vᵀ reads as well",
                "dv, which uses the same P, is right in every case; o differs, and dq or dk, "
                "which use o in delta, and V in dP",
            )
        case False, True, True, _:
            return Site(
                ("qk_recompute",),
                "S = QKᵀ in the backward, the L that is subtracted from it, or dO",
                "dv and dq, which share P and dO, differ; o is right in every case",
            )
        case False, True, False, True:
            return Site(
                ("dv", "dk"),
                "dV = Pᵀ dO and dK = dSᵀ Q: their sums over queries or over a group of heads",
                "dv and dk, the sums over queries, differ; o and dq are right in every case",
            )
        case False, True, False, False:
            return Site(("dv",), "dV = Pᵀ dO", "only dv differs, in every case")
        case False, False, True, True:
            return Site(
                ("dp", "dq", "dk"),
                "dP = dO Vᵀ, delta, dS = P (dP - delta), or the rounding of dS",
                "dq and dk, which share dS, differ; o and dv are right in every case",
            )
        case False, False, False, False:
            return Site(
                ("dsinks",),
                "d sinks = -sum over the rows of P_sink delta",
                "only dsinks differs, in every case",
            )
        case _:
            return _one_gradient("dq" if dq else "dk", max(worst.values()))


def _one_gradient(name: str, ratio: float) -> Site:
    """The site if only dq or only dk differs."""
    other = "dk" if name == "dq" else "dq"
    words = "dQ = dS K" if name == "dq" else "dK = dSᵀ Q"
    words += f", or the rounding of dS for {name}"
    reason = f"only {name} differs, in every case"
    if ratio >= _SMALL:
        return Site((name,), words, reason)
    return Site(
        (name, "dp"),
        f"{words}; or dS itself, delta or dP",
        f"{reason}; the difference is so small that {other} may hide it",
    )


def factor(kernel: Tensor, emulator: Tensor) -> float | None:
    """The constant factor between the kernel's tensor and the emulator's, both to within 2%.

    None if the tensors are not proportional, or if the factor is 1.
    """
    a, b = kernel.double().flatten(), emulator.double().flatten()
    norm = float(b @ b)
    if norm == 0 or not math.isfinite(norm) or not bool(a.isfinite().all()):
        return None
    c = float(a @ b) / norm
    if float((a - c * b).norm()) > 0.02 * abs(c) * math.sqrt(norm) or abs(c - 1) < 0.02:
        return None
    return c


def explanations(
    spec: AttentionSpec,
    failing: Sequence[tuple[FuzzCase, Mapping[str, Tensor]]],
    device: str | torch.device,
    *,
    at_most: int = 3,
    progress: Callable[[], None] = lambda: None,
) -> tuple[str, ...]:
    """Find the mistakes that reproduce the kernel's outputs in every failing case.

    Args:
        spec: the spec that the kernel should compute.
        failing: cases and the kernel's outputs for them.
        device: the device to compute on.
        at_most: largest number of explanations. More would only show that the cases do not
            distinguish between mistakes.
        progress: called after each mistake.

    Returns:
        the mistakes in words.
    """
    found: list[str] = []
    before = [_worst(Contract(case, spec, device), outputs) for case, outputs in failing]

    def reproduces(mistake: Mistake) -> bool:
        for (case, outputs), (name, error) in zip(failing, before, strict=True):
            contract = Contract(case, mistake.spec, device, mistake.change)
            # Comparing is slow, and cannot succeed if the mistake brings the emulator no closer.
            if not contract.rms_error(name, outputs[name]) < error:
                return False
            if any(d.is_outside for d in contract.compare(outputs).values()):
                return False
        return True

    for mistake in mistakes(spec) if failing else ():
        progress()
        if reproduces(mistake):
            found.append(mistake.words)
        if len(found) == at_most:
            break
    return tuple(found)


def _worst(contract: Contract, outputs: Mapping[str, Tensor]) -> tuple[str, float]:
    """The output that differs most, and its RMS difference from the emulator's."""
    differences = contract.compare(outputs)
    name = max(differences, key=lambda name: differences[name].ratio)
    return name, contract.rms_error(name, outputs[name])


def multiples(
    spec: AttentionSpec,
    failing: Sequence[tuple[FuzzCase, Mapping[str, Tensor]]],
    device: str | torch.device,
) -> dict[str, str]:
    """The outputs that are a multiple of the emulator's in every failing case, and the factors."""
    contracts = [Contract(case, spec, device) for case, _ in failing]
    found: dict[str, str] = {}
    for name in ORDER:
        if not failing or any(name not in outputs for _, outputs in failing):
            continue  # dsinks, if a case has no sinks
        factors = {
            factor(out[name], getattr(contract.emulator, name))
            for contract, (_, out) in zip(contracts, failing, strict=True)
        }
        if None not in factors:
            found[name] = " or ".join(sorted({f"{c:.3g}" for c in factors}))
    return found
