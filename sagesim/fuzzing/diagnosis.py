"""From outputs that differ to the product that is wrong: what is inferred, and in which words."""

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
    "pv": "O = PV, or the sum that O is divided by",
    "qk_recompute": "S = QKᵀ in the backward, or the L it is compared with",
    "dv": "dV = Pᵀ dO, or the sum over a group of heads",
    "dp": "dP = dO Vᵀ, or delta, or P where dS is made of it",
    "dq": "dQ = dS K",
    "dk": "dK = dSᵀ Q",
}


@dataclass(frozen=True, slots=True)
class Site:
    """Where the first wrong number is made, as far as outputs can tell."""

    name: str  #: one of `sagesim.SITES`
    reason: str  #: the outputs that say so

    @property
    def words(self) -> str:
        """What is computed there."""
        return _WORDS[self.name]


def infer(outside: Mapping[str, int]) -> Site:
    """The site whose error shows in just these outputs.

    O is made of qk and pv; dV of P, which is made of qk_recompute (or qk, through L), and of
    nothing that pv, dp, dq or dk compute; dQ and dK of all but each other.

    Args:
        outside: how many cases each output was outside the contract in; together, because a
            single small case may hide in one output what another shows.
    """
    o, dv, dq, dk = (outside.get(name, 0) > 0 for name in ("o", "dv", "dq", "dk"))
    match o, dv, dq, dk:
        case True, True, _, _:
            return Site("qk", "o and dv differ, and they share nothing but P")
        case True, False, _, _:
            return Site("pv", "o differs; dv, made of the same P, does not")
        case False, True, True, _:
            return Site("qk_recompute", "o is right; dv and dq, which share P, differ")
        case False, True, False, True:
            return Site("dv", "o and dq are right; dv and dk, sums over queries, differ")
        case False, True, False, False:
            return Site("dv", "nothing but dv differs")
        case False, False, True, True:
            return Site("dp", "o and dv, hence P, are right; dq and dk, which share dS, differ")
        case False, False, True, False:
            return Site("dq", "nothing but dq differs; dk, made of the same dS, does not")
        case _:
            return Site("dk", "nothing but dk differs; dq, made of the same dS, does not")


def factor(kernel: Tensor | None, emulator: Tensor) -> float | None:
    """The number that the emulator's tensor is to be multiplied by to give the kernel's; None
    where there is none, to 2 %, or where it is 1."""
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
class Suspect:
    """Another computation, which a kernel may have mistaken for the one it was asked for."""

    words: str
    spec: AttentionSpec
    case: Callable[[FuzzCase], FuzzCase] = lambda case: case


def suspects(spec: AttentionSpec) -> Iterator[Suspect]:
    """Computations one mistake away from `spec`, the plainest first."""
    for name, preset in PRESETS.items():
        blocks = {"block_q": spec.block_q, "block_k": spec.block_k}
        yield Suspect(f"another spec: {name!r}", replace(preset, **blocks))
    yield Suspect("no causal mask", spec, lambda case: replace(case, is_causal=False))
    yield Suspect("the logits are not scaled", spec, lambda case: replace(case, scale=1.0))
    yield Suspect("the scale argument is ignored", spec, lambda case: replace(case, scale=None))
    yield Suspect("1/sqrt of the head size padded to a power of two", spec, _padded_scale)
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
    """Of the `suspects`, those that the kernel's outputs agree with in every failing case.

    Args:
        failing: cases, and what the kernel computed for them.
        at_most: as many are given; further ones would only say that the cases cannot tell.
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
    for suspect in suspects(spec):
        if len(found) == at_most:
            break
        changed = [(suspect.case(case), case, outputs) for case, outputs in failing]
        if suspect.spec == spec and all(now == case for now, case, _ in changed):
            continue
        if all(_agrees(Contract(now, suspect.spec, device), out) for now, _, out in changed):
            found.append(suspect.words)
    return tuple(found)


def _agrees(contract: Contract, outputs: Mapping[str, Tensor | None]) -> bool:
    return not any(d.is_outside for d in contract.compare(outputs).values())


def _other(what: str, spec: AttentionSpec) -> Suspect:
    return Suspect(f"other {what}: {spec.label()!r}", spec)


def _padded_scale(case: FuzzCase) -> FuzzCase:
    if case.scale is not None:
        return case
    return replace(case, scale=(1 << (case.d - 1).bit_length()) ** -0.5)
