"""Hooks: methods that are called with every intermediate and may return another in its place."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sagesim.emulator.quantization import Operand
from sagesim.emulator.tiling import Panel


class Place(NamedTuple):
    """The part of a problem that an intermediate belongs to."""

    heads: slice  #: of the flat axis Z
    panel: Panel | None = None  #: the query blocks of a map; None for operands with tokens


class Hooks:
    """Returns every intermediate unchanged. Subclasses record or replace some of them.

    The computation uses what a method returns, and may overwrite it later. A hook that stores a
    tensor must therefore store a copy.
    """

    def map(self, name: str, place: Place, tiles: Tensor) -> Tensor:
        """A panel [Z, i, block_q, j, block_k] of "s", "s_recompute", "p_recompute" or "dp"."""
        return tiles

    def ds(self, place: Place, ds: Tensor, p: Tensor) -> Tensor:
        """A panel of dS. p is the panel of P that dS is computed from."""
        return ds

    def delta(self, heads: slice, delta: Tensor) -> None:
        """delta of all queries of the heads, [Z, n_q]. It is not used afterwards."""

    def operand(self, site: str, tensor: str, place: Place, operand: Operand) -> Operand:
        """A rounded operand of a product: all tokens of the heads, or a panel of a map."""
        return operand

    def output(self, o: Tensor) -> Tensor:
        """o [Z, n_q, d_v] before it is rounded to the caller's dtype."""
        return o


NO_HOOKS = Hooks()
