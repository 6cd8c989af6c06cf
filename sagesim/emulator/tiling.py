"""Where the tiles of one attention lie: panels of query blocks, and which entries count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_PANEL = 2**17
"""Map entries of one head in a panel, where a single query block does not have more already."""

_GROUP = {"cpu": 2**20, "cuda": 2**27}
"""Map entries computed at once, over heads; heads do not affect each other's numbers."""


def of_heads(x: Tensor, heads: slice) -> Tensor:
    """The heads' part of x [Z or 1, ...]; all of it where they share it."""
    return x[heads] if x.shape[0] > 1 else x


@dataclass(frozen=True, slots=True)
class Panel:
    """A run of query blocks and the key blocks they can attend to."""

    first_block: int
    last_block: int  #: exclusive
    rows: slice  #: in the padded sequence
    key_blocks: int  #: the key blocks 0..key_blocks hold all that the rows attend to
    ignored: Tensor | None  #: bool, True where an entry takes no part; [Z or 1, i, bq, j, bk]


@dataclass(frozen=True, slots=True)
class Grid:
    """The tiling of an n_q x n_k map. Depends on lengths, blocks and mask alone."""

    n_q: int
    n_k: int
    block_q: int
    block_k: int
    is_causal: bool
    attn_mask: Tensor | None  #: bool [heads or 1, n_q, n_k], True where a key is attended to

    @property
    def q_blocks(self) -> int:
        return -(-self.n_q // self.block_q)

    @property
    def k_blocks(self) -> int:
        return -(-self.n_k // self.block_k)

    def head_groups(self, heads: int, device: torch.device) -> Iterator[slice]:
        """Slices of heads whose maps are held in memory together."""
        entries = self._blocks_per_panel() * self.block_q * self.k_blocks * self.block_k
        size = max(1, _GROUP.get(device.type, _GROUP["cuda"]) // entries)
        for start in range(0, heads, size):
            yield slice(start, min(start + size, heads))

    def live(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Bool [Z or 1, n_q] and [Z or 1, n_k]: queries that attend to a key, keys that a query
        attends to. The others are no part of the problem, whatever they hold."""
        if self.attn_mask is not None:
            return self.attn_mask.any(2), self.attn_mask.any(1)
        queries = torch.ones(1, self.n_q, dtype=torch.bool, device=device)
        keys = torch.ones(1, self.n_k, dtype=torch.bool, device=device)
        if self.is_causal:
            keys[:, self.n_q :] = False
        return queries, keys

    def panels(self, heads: slice, device: torch.device) -> Iterator[Panel]:
        """The panels from the first query to the last."""
        step = self._blocks_per_panel()
        for first in range(0, self.q_blocks, step):
            last = min(first + step, self.q_blocks)
            rows = slice(first * self.block_q, last * self.block_q)
            key_blocks = self.k_blocks
            if self.is_causal:
                key_blocks = min(key_blocks, -(-min(rows.stop, self.n_q) // self.block_k))
            ignored = self._ignored(heads, rows, key_blocks, device)
            yield Panel(first, last, rows, key_blocks, ignored)

    def _blocks_per_panel(self) -> int:
        wanted = _PANEL // (self.block_q * self.k_blocks * self.block_k)
        return min(max(1, wanted), self.q_blocks)

    def _ignored(
        self, heads: slice, rows: slice, key_blocks: int, device: torch.device
    ) -> Tensor | None:
        columns = key_blocks * self.block_k
        row = torch.arange(rows.start, rows.stop, device=device)[:, None]
        column = torch.arange(columns, device=device)
        ignored: Tensor | None = None
        if rows.stop > self.n_q or columns > self.n_k:
            ignored = (row >= self.n_q) | (column >= self.n_k)
        if self.is_causal:
            future = column > row
            ignored = future if ignored is None else ignored | future
        if ignored is not None:
            ignored = ignored[None]
        if self.attn_mask is not None:
            mask = of_heads(self.attn_mask, heads)[:, rows.start : rows.stop, :columns]
            bottom, right = rows.stop - rows.start - mask.shape[1], columns - mask.shape[2]
            hidden = torch.nn.functional.pad(~mask, (0, right, 0, bottom), value=True)
            ignored = hidden if ignored is None else ignored | hidden
        if ignored is None:
            return None
        return ignored.unflatten(2, (-1, self.block_k)).unflatten(1, (-1, self.block_q))
