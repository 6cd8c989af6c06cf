"""The forward's two products: S = Q K^T and O = P V, panel by panel, in memory linear in N."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sagesim.emulator.hooks import NO_HOOKS, Hooks, Place
from sagesim.emulator.layout import FlatProblem
from sagesim.emulator.matmul import map_by_tokens, product, tokens_by_tokens
from sagesim.emulator.operands import RoundedOperands, round_tokens
from sagesim.emulator.quantization import (
    COLUMN,
    COLUMN_BLOCK,
    Operand,
    encode,
    encode_unit_,
    to_tiles,
)
from sagesim.emulator.smoothing import logit_shift, subtract_block_means, subtract_head_mean
from sagesim.emulator.tiling import Panel, of_heads
from sagesim.spec import AttentionSpec, Granularity


@dataclass(frozen=True, slots=True)
class Smoothed:
    """Q and K of some heads as they enter the products, and what smoothing took out of them."""

    q: Tensor  #: [Z, n_q, d]
    k: Tensor  #: [Z, n_k, d]
    q_mean: Tensor | None  #: [Z, query blocks, d]
    shift: Tensor | None  #: [Z, n_q], the constant missing from each row of logits

    @classmethod
    def of(cls, x: FlatProblem, heads: slice) -> Smoothed:
        """Smooth the heads as the spec says."""
        q, k, q_mean, shift = x.q[heads], x.k[heads], None, None
        live_q, live_k = (of_heads(live, heads) for live in x.live)
        if x.spec.smoothing.k:
            k, k_mean = subtract_head_mean(k, live_k)
            shift = logit_shift(q, k_mean, x.scale)
        if x.spec.smoothing.q:
            q, q_mean = subtract_block_means(q, live_q, x.spec.block_q)
        return cls(q, k, q_mean, shift)


class Logits:
    """S of any panel, as one of the two sites computes it; ignored entries are -inf."""

    def __init__(
        self, x: FlatProblem, site: str, smoothed: Smoothed, tokens: RoundedOperands
    ) -> None:
        self._scale = x.scale
        self._q, self._k = tokens.at(site, "q"), tokens.at(site, "k")
        self._bias: Tensor | None = None
        if smoothed.q_mean is not None:
            k = to_tiles(smoothed.k, x.spec.block_k, smoothed.k.shape[-1]).flatten(3)
            bias = product(smoothed.q_mean, k.flatten(1, 2).mT)
            self._bias = bias.unflatten(2, k.shape[1:3])[:, :, None]  # [Z, i, 1, j, block_k]

    def panel(self, panel: Panel) -> Tensor:
        """[Z, i, block_q, j, block_k]."""
        s = tokens_by_tokens(
            self._q.row_blocks(panel.first_block, panel.last_block),
            self._k.row_blocks(0, panel.key_blocks),
        )
        if self._bias is not None:
            s += self._bias[:, panel.first_block : panel.last_block, :, : panel.key_blocks]
        s *= self._scale
        if panel.ignored is not None:
            s.masked_fill_(panel.ignored, -torch.inf)
        return s


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """o [Z, n_q, d_v] and lse [Z, n_q] in the computing dtype."""

    o: Tensor
    lse: Tensor  #: of the true logits; -inf where a row attends to nothing
    lse_smoothed: Tensor  #: of the logits as computed, from which the backward rebuilds P


def forward(x: FlatProblem, hooks: Hooks = NO_HOOKS) -> ForwardResult:
    """Attention of every head under the spec."""
    o = x.q.new_zeros(*x.q.shape[:2], x.v.shape[-1])
    lse = x.q.new_full(x.q.shape[:2], -torch.inf)
    lse_smoothed = lse.clone()
    if x.grid.n_q == 0 or x.grid.n_k == 0:
        return ForwardResult(o, lse, lse_smoothed)
    for heads in x.grid.head_groups(x.q.shape[0], x.q.device):
        smoothed = Smoothed.of(x, heads)
        place = Place(heads)
        tokens = round_tokens(x.spec, place, hooks, q=smoothed.q, k=smoothed.k, v=x.v[heads])
        logits = Logits(x, "qk", smoothed, tokens)
        v = tokens.at("pv", "v")
        for panel in x.grid.panels(heads, x.q.device):
            place = Place(heads, panel)
            s = hooks.map("s", place, logits.panel(panel))
            rows = slice(panel.rows.start, min(panel.rows.stop, x.grid.n_q))
            count = rows.stop - rows.start
            o_panel, lse_panel = _attend(s, v, x.spec, place, panel, hooks)
            o[heads, rows] = o_panel[:, :count]
            lse_smoothed[heads, rows] = lse_panel[:, :count]
        shift = 0.0 if smoothed.shift is None else smoothed.shift
        lse[heads] = lse_smoothed[heads] + shift
    return ForwardResult(o, lse, lse_smoothed)


def _attend(
    s: Tensor, v: Operand, spec: AttentionSpec, place: Place, panel: Panel, hooks: Hooks
) -> tuple[Tensor, Tensor]:
    """Softmax and PV of a panel; overwrites s. Returns o [Z, rows, d_v] and lse [Z, rows]."""
    tile_max = s.amax(COLUMN, keepdim=True)
    row_max = tile_max.amax(COLUMN_BLOCK, keepdim=True)
    # A tile or row without any entry has maximum -inf; 0 instead makes its exponentials 0.
    empty = tile_max == -torch.inf
    e = s.sub_(tile_max.masked_fill(empty, 0.0)).exp_()
    weight = (tile_max - row_max.masked_fill(row_max == -torch.inf, 0.0)).exp_()
    l = (e.sum(COLUMN, keepdim=True) * weight).sum(COLUMN_BLOCK)
    how = spec.pv.lhs
    if spec.pv.precision.is_scaled and how is Granularity.PerTileRow:
        p = encode_unit_(e, weight, empty, spec.pv.precision, spec.rounding, panel.rows.start)
    else:
        p = encode(e.mul_(weight), spec.pv.precision, how, spec.rounding, "p", panel.rows.start)
    p = hooks.operand("pv", "p", place, p)
    l = l.flatten(1)
    o = map_by_tokens(p, v.row_blocks(0, panel.key_blocks))
    o /= l.masked_fill(l == 0, 1.0)[..., None]
    return o, row_max.flatten(1) + l.log()
