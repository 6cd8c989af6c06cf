"""Diagnosis of wrong outputs: which matmul is wrong, and which mistakes would explain them.

A site is one of the seven matmuls of attention; `sagesim.SITES` lists their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from sagesim.fuzzing.cases import FuzzCase
from sagesim.fuzzing.tolerance import ORDER, Contract
from sagesim.spec import (
    HALF_AWAY,
    HALF_EVEN,
    OPERANDS,
    PRESETS,
    SITES,
    AttentionSpec,
    Delta,
    Granularity,
    Precision,
    Smoothing,
    with_precision,
)

_WORDS: Final = {
    "qk": "S = QKᵀ, its scale, mask, smoothing or softmax",
    "pv": "O = PV, or the division of O by the row sum",
    "qk_recompute": "S = QKᵀ in the backward, or the L that is subtracted from it",
    "dv": "dV = Pᵀ dO, or the sum over a group of heads",
    "dp": "dP = dO Vᵀ, or delta, or the P in dS = P (dP - delta)",
    "dq": "dQ = dS K",
    "dk": "dK = dSᵀ Q",
}


@dataclass(frozen=True, slots=True)
class Site:
    """The site that computes the first wrong intermediate, inferred from the outputs."""

    name: str  #: one of `sagesim.SITES`
    reason: str  #: which outputs differ, and why they imply this site

    @property
    def words(self) -> str:
        """The computations that belong to the site."""
        return _WORDS[self.name]


def infer(outside: Mapping[str, int]) -> Site:
    """Infer the site whose error reaches exactly these outputs.

    O depends on qk and pv. dV depends on dv and on P, which depends on qk_recompute and, through L,
    on qk. dQ and dK depend on all sites except each other's and dv.

    Args:
        outside: number of cases in which each output is outside the contract. All failing cases
            are counted, because in a small case an error may be invisible in some outputs.
    """
    o, dv, dq, dk = (outside.get(name, 0) > 0 for name in ("o", "dv", "dq", "dk"))
    match o, dv, dq, dk:
        case True, True, _, _:
            return Site("qk", "o and dv differ, and P is all that they share")
        case True, False, _, _:
            return Site("pv", "o differs; dv, which uses the same P, does not")
        case False, True, True, _:
            return Site("qk_recompute", "o is right; dv and dq, which share P, differ")
        case False, True, False, True:
            return Site("dv", "o and dq are right; dv and dk, sums over queries, differ")
        case False, True, False, False:
            return Site("dv", "only dv differs")
        case False, False, True, True:
            return Site("dp", "o and dv are right, and so is P; dq and dk, which share dS, differ")
        case False, False, True, False:
            return Site("dq", "only dq differs; dk, which uses the same dS, does not")
        case _:
            return Site("dk", "only dk differs; dq, which uses the same dS, does not")


def factor(kernel: Tensor | None, emulator: Tensor) -> float | None:
    """The constant factor between the kernel's tensor and the emulator's, both to within 2%.

    None if the tensors are not proportional, or if the factor is 1.
    """
    if kernel is None or kernel.shape != emulator.shape:
        return None
    a, b = kernel.double().flatten(), emulator.double().flatten()
    norm = float(b @ b)
    if norm == 0 or not math.isfinite(norm) or not bool(a.isfinite().all()):
        return None
    c = float(a @ b) / norm
    if float((a - c * b).norm()) > 0.02 * abs(c) * math.sqrt(norm) or abs(c - 1) < 0.02:
        return None
    return c


@dataclass(frozen=True, slots=True)
class Mistake:
    """A likely mistake of a kernel, as the spec and case that the kernel would compute instead."""

    words: str
    spec: AttentionSpec
    case: Callable[[FuzzCase], FuzzCase] = lambda case: case


def mistakes(spec: AttentionSpec) -> Iterator[Mistake]:
    """Mistakes that an implementation of `spec` may contain, the most likely first."""
    for name, preset in PRESETS.items():
        blocks = {"block_q": spec.block_q, "block_k": spec.block_k}
        yield Mistake(f"another spec: {name!r}", replace(preset, **blocks))
    yield Mistake("no causal mask", spec, lambda case: replace(case, is_causal=False))
    yield Mistake("the logits are not scaled", spec, lambda case: replace(case, scale=1.0))
    yield Mistake("the scale argument is ignored", spec, lambda case: replace(case, scale=None))
    yield Mistake("1/sqrt of the head size padded to a power of two", spec, _padded_scale)
    smoothing = spec.smoothing
    for q, k in ((smoothing.q, not smoothing.k), (not smoothing.q, smoothing.k)):
        yield _other("smoothing", replace(spec, smoothing=Smoothing(q=q, k=k)))
    for rounding in (HALF_EVEN, HALF_AWAY):
        yield _other("rounding", replace(spec, rounding=rounding))
    other = Delta.FROM_P if spec.delta is Delta.FROM_O else Delta.FROM_O
    yield _other("delta", replace(spec, delta=other))
    for block_q, block_k in (
        (spec.block_k, spec.block_q),
        *((spec.block_q, size) for size in (16, 32, 64, 128)),
        *((size, spec.block_k) for size in (16, 32, 64, 128)),
        *((size, size) for size in (16, 32, 64, 128)),
    ):
        yield _other("blocks", replace(spec, block_q=block_q, block_k=block_k))
    for site in SITES:
        for precision in (Precision.INT8, Precision.INPUT16, Precision.FP32):
            yield _other("precision", with_precision(spec, precision, site))
    for site in SITES:
        matmul = spec.site(site)
        if not matmul.precision.is_scaled:
            continue
        for side, tensor in zip(("lhs", "rhs"), OPERANDS[site], strict=True):
            for how in Granularity:
                if how.is_map == (tensor in ("p", "ds")):
                    changed = replace(matmul, **{side: how})
                    yield _other(f"scales of {tensor}", replace(spec, **{site: changed}))


def explanations(
    spec: AttentionSpec,
    failing: Sequence[tuple[FuzzCase, Mapping[str, Tensor | None]]],
    device: str | torch.device,
    *,
    at_most: int = 3,
) -> tuple[str, ...]:
    """Find the mistakes that reproduce the kernel's outputs in every failing case.

    Args:
        spec: the spec that the kernel should compute.
        failing: cases and the kernel's outputs for them.
        device: the device to compute on.
        at_most: largest number of explanations. More would only show that the cases do not
            distinguish between mistakes.

    Returns:
        explanations in words: outputs that are a multiple of the emulator's, then `mistakes`.
    """
    found: list[str] = []
    contracts = [Contract(case, spec, device) for case, _ in failing]
    for name in ORDER:
        factors = {
            factor(out[name], getattr(contract.emulator, name))
            for contract, (_, out) in zip(contracts, failing, strict=True)
        }
        if None not in factors:
            words = " or ".join(sorted({f"{c:.3g}" for c in factors}))
            found.append(f"{name} is the emulator's times {words}")
    for mistake in mistakes(spec):
        if len(found) == at_most:
            break
        changed = [(mistake.case(case), case, outputs) for case, outputs in failing]
        if mistake.spec == spec and all(new == case for new, case, _ in changed):
            continue
        if all(_agrees(Contract(new, mistake.spec, device), out) for new, _, out in changed):
            found.append(mistake.words)
    return tuple(found)


def _agrees(contract: Contract, outputs: Mapping[str, Tensor | None]) -> bool:
    return not any(d.is_outside for d in contract.compare(outputs).values())


def _other(what: str, spec: AttentionSpec) -> Mistake:
    return Mistake(f"other {what}: {spec.label()!r}", spec)


def _padded_scale(case: FuzzCase) -> FuzzCase:
    if case.scale is not None:
        return case
    return replace(case, scale=(1 << (case.d - 1).bit_length()) ** -0.5)
