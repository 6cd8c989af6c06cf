"""Predicts the time of attention on a card from counted instructions.

A kernel's time is the time of its loop over tiles of the map. For a tile of 64 x 64 elements each
unit of a multiprocessor needs a number of clocks: its work over its rate. The model takes

    clocks = (tensor^p + shared^p + l2^p + special^p + (stall x front)^p)^(1/p) + spilled x waits
    front = max(issue, fp32, integer)
    waits = accesses to spilled registers / programs

The sum with the power p is above the largest of the five, by little if one of them is much larger
than the others, and below their sum: units overlap in part. `stall` is how many clocks pass for
each in which a scheduler issues, because its few warps wait. `spilled` is how many pass for an
access to a spilled register. Meanwhile the other programs of the multiprocessor run. p, `stall` and
`spilled` are fitted on measured runs. Everything else is counted, documented or assumed. The work
before and after the loops is modelled by its bytes over the bandwidth of the memory.

Bank conflicts, latencies, the last wave of programs and clocks below the boost clock are not
modelled: what they cost on average is part of the fitted numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sagesim_kernels.cards.card import (
    REGISTERS,
    SCHEDULERS,
    SHARED_BYTES,
    SHUFFLES,
    SPECIAL,
    Card,
)

WARP: Final = 32
OVERLAPPED: Final = ("tensor", "shared", "l2", "special")
FRONT: Final = ("issue", "fp32", "integer")
_SYSTEMS: Final = 1024
"""Bytes of shared memory that the system takes for each program."""

_FLOP: Final = {"16816": 4096, "1688": 2048, "16832": 8192, "8816": 2048}
"""Operations of an instruction that multiplies matrices, by the shape in its opcode."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The numbers that no source gives."""

    power: float  #: p: 1 if units never overlap, infinite if they always do
    stall: float  #: clocks for each in which a scheduler issues
    spilled: float  #: clocks for an access to a spilled register


@dataclass(frozen=True, slots=True)
class Shape:
    """The problem: all heads of all sequences together."""

    heads: int
    tokens: int
    head_size: int
    is_causal: bool

    @property
    def elements(self) -> int:
        """Of one of q, k, v, o and their gradients."""
        return self.heads * self.tokens * self.head_size


def clocks(card: Card, counts: Mapping[str, float], moved: Mapping[str, float]) -> dict[str, float]:
    """Return the clocks that each unit of a multiprocessor needs.

    Args:
        counts: instructions of warps by class; see `tests/support/opcodes.py`.
        moved: bytes by class.

    Raises:
        ValueError: if an instruction that multiplies matrices is not known.
    """
    tensor = 0.0
    for unit, count in counts.items():
        if "MMA." in unit:
            tensor += count * _tensor_clocks(card, unit)
    return {
        "tensor": tensor,
        "shared": (moved.get("shared", 0) + moved.get("copy", 0) + moved.get("local", 0))
        / SHARED_BYTES
        + counts.get("shuffle", 0) * WARP / SHUFFLES,
        "l2": sum(moved.get(unit, 0) for unit in ("copy", "global", "atomic", "spilled"))
        / card.l2_bytes,
        "special": counts.get("xu", 0) * WARP / SPECIAL
        + counts.get("f2i", 0) * WARP / card.conversions,
        "issue": sum(counts.values()) / SCHEDULERS,
        # Half of the float32 lanes multiply integers; the A100 has no others.
        "fp32": counts.get("fp32", 0) * WARP / card.fp32 + counts.get("imad", 0) * WARP / 64,
        "integer": counts.get("alu", 0) * WARP / card.integer,
    }


def _tensor_clocks(card: Card, unit: str) -> float:
    kind, _, shape = unit.partition(".")
    rate = {"HMMA": card.flop_16, "IMMA": card.flop_int8}.get(kind)
    if rate is None or shape not in _FLOP:
        raise ValueError(f"the rate of {unit} on {card.name} is not known")
    return _FLOP[shape] / rate


def _parts(by_unit: Mapping[str, float], fit: Fit) -> dict[str, float]:
    """The terms of the sum: the units that overlap, and the slowest of the front by its name."""
    front = max(FRONT, key=lambda u: by_unit[u])
    return {u: by_unit[u] for u in OVERLAPPED} | {front: fit.stall * by_unit[front]}


def tile_clocks(by_unit: Mapping[str, float], fit: Fit) -> float:
    """Return the clocks of a tile from those of each unit."""
    parts = _parts(by_unit, fit).values()
    largest = max(parts)
    powers = sum((part / largest) ** fit.power for part in parts)
    return largest * powers ** (1 / fit.power) + fit.spilled * by_unit["spilled"]


def bound(by_unit: Mapping[str, float], fit: Fit) -> str:
    """Return the unit that takes the most of a tile's clocks."""
    parts = _parts(by_unit, fit)
    return max(parts, key=lambda u: parts[u])


@functools.cache
def blocks(tokens: int, rows: int, columns: int, is_causal: bool) -> tuple[int, int]:
    """Return how many blocks of rows x columns elements are computed without and with a mask.

    >>> blocks(256, 64, 64, False), blocks(256, 64, 64, True), blocks(256, 128, 64, True)
    ((16, 0), (6, 4), (2, 4))
    """
    whole = masked = 0
    for first in range(0, tokens, rows):
        last = min(first + rows, tokens) - 1
        unmasked = (first + 1) // columns if is_causal else -(-tokens // columns)
        computed = last // columns + 1 if is_causal else unmasked
        whole += unmasked
        masked += computed - unmasked
    return whole, masked


def programs_of(card: Card, row: Mapping[str, Any]) -> int:
    """Return how many programs of a kernel a multiprocessor runs at a time.

    row: of docs/data/instructions.json. FlashAttention-2's rows have no size of shared memory; its
        tiles are such that registers limit its programs.
    """
    programs = REGISTERS // (row["registers"] * row["warps"] * WARP)
    if row["shared"] is not None:
        programs = min(programs, card.shared_kb * 1024 // (row["shared"] + _SYSTEMS))
    return max(1, programs)


def missed_share(card: Card, row: Mapping[str, Any]) -> float:
    """Return the share of the bytes of spilled registers that the L1 cache does not hold.

    The programs of a multiprocessor leave the L1 cache what they do not use as shared memory. If
    their spilled registers need more, the rest passes through the L2 cache.

    row: of docs/data/instructions.json. FlashAttention-2's rows have no size of shared memory; its
        few spilled registers are taken to fit.
    """
    if row["shared"] is None or not row["stack"]:
        return 0.0
    programs = programs_of(card, row)
    needed = programs * row["warps"] * WARP * row["stack"]
    left = card.l1_kb * 1024 - programs * (row["shared"] + _SYSTEMS)
    return max(0.0, 1 - left / needed)


def loop_clocks(card: Card, row: Mapping[str, Any]) -> dict[str, float]:
    """Return `clocks` of a 64 x 64 tile, and the waits for spilled registers as "spilled".

    row: of docs/data/instructions.json.
    """
    moved = dict(row["bytes"])
    moved["spilled"] = missed_share(card, row) * moved.get("local", 0)
    waits = row["counts"].get("local", 0) / SCHEDULERS / programs_of(card, row)
    return clocks(card, row["counts"], moved) | {"spilled": waits}


def loops_ms(card: Card, rows: Iterable[Mapping[str, Any]], shape: Shape, fit: Fit) -> float:
    """Return the time of the loops of kernels, in milliseconds.

    rows: of docs/data/instructions.json, all for the head size and mask of the shape.
    """
    total = 0.0
    kernels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        kernels.setdefault(row["kernel"], []).append(row)
    for loops in kernels.values():
        by_name = {row["loop"]: tile_clocks(loop_clocks(card, row), fit) for row in loops}
        first = next(iter(by_name.values()))
        m, n = map(int, loops[0]["tile"].split("x"))
        whole, masked = blocks(shape.tokens, m, n, shape.is_causal)
        tiles = m * n / 64**2
        unmasked_clocks = by_name.get("unmasked", first)
        masked_clocks = by_name.get("masked", first)
        total += (whole * unmasked_clocks + masked * masked_clocks) * tiles
    return shape.heads * total / (card.multiprocessors * card.boost_ghz * 1e6)


def other_ms(card: Card, bytes_per_element: float, shape: Shape) -> float:
    """Return the time of the work before and after the loops, in milliseconds."""
    return shape.elements * bytes_per_element / (card.memory_gb_s * 1e6)
