"""The time of a forward and a backward on a card: which loops run, and what runs beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from sagesim.spec import OPERANDS, PRESETS, AttentionSpec, Delta, Precision
from sagesim_kernels.cards.card import Card
from sagesim_kernels.cards.model import (
    Fit,
    Shape,
    bound,
    loop_clocks,
    loops_ms,
    other_ms,
    tile_clocks,
)

FLASH: Final = "flash"
"""The name of FlashAttention-2 in the place of a spec."""

FLASH_COPIES: Final = 20
"""Bytes that PyTorch copies in a backward for each element of q, by a profile on an H100 (0.1 ms
for 16.8M elements) of which no record is kept."""

Rows = Sequence[Mapping[str, Any]]
"""Rows of docs/data/instructions.json and instructions_flash.json."""


class Times(NamedTuple):
    """Of one pass, in milliseconds."""

    loops: float
    other: float

    @property
    def total(self) -> float:
        return self.loops + self.other


def is_forward(kernel: str) -> bool:
    return kernel in ("forward_kernel", "ampere_forward", "flash_fwd_kernel")


def flash_tile(card: Card, forward: bool, head_size: int, is_causal: bool) -> str:
    """Return the tile of FlashAttention-2's kernel: see `scripts/flash_library.py`."""
    if not forward:
        fits = card.capability in ((8, 0), (9, 0))  # 144 KB of shared memory a block
        if head_size == 64:
            return "128x128" if fits else "64x128"
        return "64x128" if fits else "64x64"
    if head_size == 64:
        return "128x128"
    if card.capability in ((8, 6), (8, 9)):
        return "64x64" if is_causal else "128x32"
    return "128x64"


def loops_of(
    card: Card, rows: Rows, spec: str, shape: Shape, *, forward: bool, code: int | None = None
) -> list[Mapping[str, Any]]:
    """Return the rows of the loops that a pass runs.

    Args:
        spec: the name of a preset, or `FLASH`.
        code: the capability that our kernels are compiled for; the card's by default.

    Raises:
        ValueError: if there are none.
    """
    found = [
        row
        for row in rows
        if row["spec"] == spec
        and row["head_size"] == shape.head_size
        and row["is_causal"] == shape.is_causal
        and is_forward(row["kernel"]) == forward
        and (spec == FLASH or row["capability"] == (code or card.code))
    ]
    if spec == FLASH:
        tile = flash_tile(card, forward, shape.head_size, shape.is_causal)
        found = [row for row in found if row["tile"] == tile]
    if not found:
        raise ValueError(f"no loops of {spec} for {card.name}, {shape}, forward={forward}")
    return found


def other_bytes(spec: AttentionSpec | None, *, forward: bool) -> float:
    """Return the bytes beside the loops for each element of q, in work linear in the tokens.

    Each kernel reads its operands and writes its results once. 16-bit tensors have two bytes an
    element.

    Args:
        spec: None for FlashAttention-2 as PyTorch calls it.
    """
    # Around the loops: q, k, v and o; or q, k, v, dO, dK and dV.
    result = 8 if forward else 12
    if not forward:
        result += 4 + 6  # the sums of dQ: cleared, then read and written as dQ
    if spec is None:
        # delta reads o and dO.
        return result if forward else result + 4 + FLASH_COPIES
    sites = ("qk", "pv") if forward else ("qk_recompute", "dv", "dp", "dq", "dk")
    coded = {
        (tensor, how)
        for site in sites
        if (matmul := spec.site(site)).precision is Precision.INT8
        for tensor, how in zip(OPERANDS[site], (matmul.lhs, matmul.rhs), strict=True)
        if tensor not in ("p", "ds")
    }
    result += 3 * len(coded)  # reads 16 bit, writes 8 bit
    if forward:
        return result + (2 if spec.smoothing.k else 0)
    if spec.delta is not Delta.FROM_O:
        return result + 8  # the bounds of the sums of dQ read k, v, q and dO
    if {tensor for tensor, _ in coded} == {"q", "k"}:
        return result + 6  # where q and k are rounded, bounds and delta read v, o and dO as well
    return result + 8 + 4  # delta reads o and dO


def predict(
    card: Card,
    rows: Rows,
    spec: str,
    shape: Shape,
    fit: Fit,
    *,
    forward: bool,
    code: int | None = None,
) -> Times:
    """Return the predicted time of a pass. The arguments are those of `loops_of`."""
    chosen = loops_of(card, rows, spec, shape, forward=forward, code=code)
    preset = None if spec == FLASH else PRESETS[spec]
    return Times(
        loops_ms(card, chosen, shape, fit),
        other_ms(card, other_bytes(preset, forward=forward), shape),
    )


def limit(card: Card, rows: Rows, spec: str, shape: Shape, fit: Fit, *, forward: bool) -> str:
    """Return the unit that takes the most time of a pass, in the loops without a mask."""
    total: dict[str, float] = {}
    for row in loops_of(card, rows, spec, shape, forward=forward):
        if row["loop"] != "masked":
            by_unit = loop_clocks(card, row)
            name = bound(by_unit, fit)
            total[name] = total.get(name, 0) + tile_clocks(by_unit, fit)
    return max(total, key=lambda name: total[name])
