"""The tiling of an attention map: panels of query blocks, and which entries are masked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sagesim.problem import Band

_PANEL_ENTRIES = 2**17
"""The most map entries of one head in a panel, unless a single query block has more."""

_GROUP_ENTRIES = {"cpu": 2**20, "cuda": 2**27}
"""The most map entries of all heads that are computed together, by device.

Only memory and speed depend on it: heads do not affect each other's results.
"""


def select_heads(x: Tensor, heads: slice) -> Tensor:
    """Select heads of x [Z or 1, ...]. If the axis has size 1, all heads share x: return it."""
    return x[heads] if x.shape[0] > 1 else x


@dataclass(frozen=True, slots=True)
class Panel:
    """A run of query blocks and the key blocks they can attend to."""

    first_block: int
    last_block: int  #: exclusive
    rows: slice  #: in the padded sequence
    key_blocks: int  #: the rows attend to keys of the first `key_blocks` blocks only
    masked: Tensor | None  #: bool, True at masked and padding entries; [Z or 1, i, bq, j, bk]

    def mask_(self, x: Tensor, value: float) -> Tensor:
        """Write a value to the masked and padding entries of x, in place, and return x."""
        return x if self.masked is None else x.masked_fill_(self.masked, value)

    def live_tiles(self) -> Tensor | None:
        """Which tiles are not entirely masked, bool [Z or 1, i, j]; None if nothing is masked."""
        return None if self.masked is None else ~self.masked.all(4).all(2)


@dataclass(frozen=True, slots=True)
class Grid:
    """The tiling of an n_q x n_k map. It depends only on lengths, block sizes and masks."""

    n_q: int
    n_k: int
    block_q: int
    block_k: int
    band: Band
    key_mask: Tensor | None  #: bool [Z or 1, n_k]; True attends
    attn_mask: Tensor | None  #: bool [Z or 1, n_q, n_k]; True attends

    @property
    def q_blocks(self) -> int:
        return -(-self.n_q // self.block_q)

    @property
    def k_blocks(self) -> int:
        return -(-self.n_k // self.block_k)

    def head_groups(self, heads: int, device: torch.device) -> Iterator[slice]:
        """Slices of heads that are computed together."""
        entries = self._blocks_per_panel() * self.block_q * self.k_blocks * self.block_k
        size = max(1, _GROUP_ENTRIES.get(device.type, _GROUP_ENTRIES["cuda"]) // entries)
        for start in range(0, heads, size):
            yield slice(start, min(start + size, heads))

    def valid_tokens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Which queries and keys are not padding, bool [Z or 1, n_q] and [Z or 1, n_k].

        A query that attends to no key is padding, and so is a key that no query attends to.
        """
        if self.attn_mask is not None:
            return self.attn_mask.any(2), self.attn_mask.any(1)
        key_mask = self.key_mask
        if key_mask is None:
            key_mask = torch.ones(1, self.n_k, dtype=torch.bool, device=device)
        query = torch.arange(self.n_q, device=device)
        first, end = self._band_ends(query, self.n_k, self.band)
        queries = _any_between(key_mask, first, end)
        # Key j is attended to by the queries j - highest to j - lowest.
        lowest, highest = self.band
        mirrored = Band(None if highest is None else -highest, None if lowest is None else -lowest)
        key = torch.arange(self.n_k, device=device)
        first, end = self._band_ends(key, self.n_q, mirrored)
        return queries, key_mask & (end > first)

    def _band_ends(self, token: Tensor, n: int, band: Band) -> tuple[Tensor, Tensor]:
        """The first of the tokens 0..n that a band leaves to each token, and their end."""
        lowest, highest = band
        first = (token + (-self.n_q - self.n_k if lowest is None else lowest)).clamp(0, n)
        end = (token + (self.n_q + self.n_k if highest is None else highest) + 1).clamp(0, n)
        return first, end

    def panels(self, heads: slice, device: torch.device) -> Iterator[Panel]:
        """The panels of the given heads, from the first query to the last."""
        step, ends = self._blocks_per_panel(), self._key_ends()
        for first in range(0, self.q_blocks, step):
            last = min(first + step, self.q_blocks)
            rows = slice(first * self.block_q, last * self.block_q)
            key_blocks = max(1, -(-max(ends[rows], default=0) // self.block_k))
            masked = self._masked(heads, rows, key_blocks, device)
            yield Panel(first, last, rows, key_blocks, masked)

    def _key_ends(self) -> list[int]:
        """For each query, a number n so that it attends to no key from n on.

        A mask of single heads gives n_k: the keys of other heads must not change a head's result.
        """
        if self.attn_mask is None:
            return [self.band.keys_of(query, self.n_k).stop for query in range(self.n_q)]
        if self.attn_mask.shape[0] > 1:
            return [self.n_k] * self.n_q
        # The distance of the last True from the end; argmax gives the first of equal elements.
        mask = self.attn_mask[0].flip(1)
        distance = mask.to(torch.uint8).argmax(1)
        return (self.n_k - distance).masked_fill(~mask.any(1), 0).tolist()

    def _blocks_per_panel(self) -> int:
        fitting = _PANEL_ENTRIES // (self.block_q * self.k_blocks * self.block_k)
        return min(max(1, fitting), self.q_blocks)

    def _masked(
        self, heads: slice, rows: slice, key_blocks: int, device: torch.device
    ) -> Tensor | None:
        columns = key_blocks * self.block_k
        row = torch.arange(rows.start, rows.stop, device=device)[:, None]
        column = torch.arange(columns, device=device)
        masked: Tensor | None = None
        if rows.stop > self.n_q or columns > self.n_k:
            masked = (row >= self.n_q) | (column >= self.n_k)
        by_band = self.band.attends(row, column)
        if by_band is not None:
            masked = ~by_band if masked is None else masked | ~by_band
        if masked is not None:
            masked = masked[None]
        by_mask = self._masked_by_tensors(heads, rows, columns)
        if by_mask is not None:
            masked = by_mask if masked is None else masked | by_mask
        if masked is None:
            return None
        return masked.unflatten(2, (-1, self.block_k)).unflatten(1, (-1, self.block_q))

    def _masked_by_tensors(self, heads: slice, rows: slice, columns: int) -> Tensor | None:
        """What key_mask or attn_mask masks, and all padding; None if there is no such mask."""
        if self.key_mask is not None:
            keys = select_heads(self.key_mask, heads)[:, None, :columns]
            masked = torch.nn.functional.pad(~keys, (0, columns - keys.shape[2]), value=True)
            return masked.expand(-1, rows.stop - rows.start, -1)
        if self.attn_mask is None:
            return None
        mask = select_heads(self.attn_mask, heads)[:, rows.start : rows.stop, :columns]
        bottom, right = rows.stop - rows.start - mask.shape[1], columns - mask.shape[2]
        return torch.nn.functional.pad(~mask, (0, right, 0, bottom), value=True)


def _any_between(mask: Tensor, first: Tensor, end: Tensor) -> Tensor:
    """Whether mask [Z, n] is True anywhere in first..end, each [m]; bool [Z, m]."""
    count = torch.nn.functional.pad(mask.to(torch.int32).cumsum(1), (1, 0))
    return count[:, torch.maximum(first, end)] > count[:, first]
