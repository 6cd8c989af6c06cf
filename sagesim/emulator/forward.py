"""The forward: S = Q K^T and O = P V, computed for one panel of query blocks at a time.

Memory is linear in the number of tokens.
"""

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
    encode_p_per_tile_row_,
    may_hold,
    to_tiles,
)
from sagesim.emulator.smoothing import logit_shift, subtract_block_means, subtract_head_mean
from sagesim.emulator.tiling import Panel, select_heads
from sagesim.spec import AttentionSpec, Granularity


@dataclass(frozen=True, slots=True)
class SmoothedQK:
    """Q and K of some heads after smoothing, and what smoothing subtracted."""

    q: Tensor  #: [Z, n_q, d]
    k: Tensor  #: [Z, n_k, d]
    q_mean: Tensor | None  #: [Z, query blocks, d], None if Q is not smoothed
    k_mean: Tensor | None  #: [Z, 1, d], None if K is not smoothed
    shift: Tensor | None  #: [Z, n_q], what smoothing K subtracts from each row of logits

    @classmethod
    def of(cls, x: FlatProblem, heads: slice) -> SmoothedQK:
        """Smooth Q and K of the heads as the spec says."""
        q, k = x.q[heads], x.k[heads]
        q_mean = k_mean = shift = None
        valid_q, valid_k = (select_heads(valid, heads) for valid in x.valid)
        if x.spec.smoothing.k:
            k, k_mean = subtract_head_mean(k, valid_k)
            shift = logit_shift(q, k_mean, x.scale)
        if x.spec.smoothing.q:
            q, q_mean = subtract_block_means(q, valid_q, x.spec.block_q)
        return cls(q, k, q_mean, k_mean, shift)


class Logits:
    """Computes S of any panel for the site "qk" or "qk_recompute", without the mask.

    With a softcap these are the logits before smoothing, capped; else those after smoothing.
    """

    def __init__(
        self, x: FlatProblem, site: str, smoothed: SmoothedQK, tokens: RoundedOperands
    ) -> None:
        self._scale, self._softcap = x.scale, x.softcap
        self._shift = smoothed.shift
        self._q, self._k = tokens.at(site, "q"), tokens.at(site, "k")
        self._bias: Tensor | None = None
        if smoothed.q_mean is not None:
            k = to_tiles(smoothed.k, x.spec.block_k, smoothed.k.shape[-1]).flatten(3)
            bias = product(smoothed.q_mean, k.flatten(1, 2).mT)
            self._bias = bias.unflatten(2, k.shape[1:3])[:, :, None]  # [Z, i, 1, j, block_k]

    def panel(self, panel: Panel) -> Tensor:
        """S of a panel, [Z, i, block_q, j, block_k]."""
        s = tokens_by_tokens(
            self._q.row_blocks(panel.first_block, panel.last_block),
            self._k.row_blocks(0, panel.key_blocks),
        )
        if self._bias is not None:
            s += self._bias[:, panel.first_block : panel.last_block, :, : panel.key_blocks]
        s *= self._scale
        return s if self._softcap is None else self._capped(s, panel, self._softcap)

    def _capped(self, s: Tensor, panel: Panel, softcap: float) -> Tensor:
        """c tanh(S / c) of the logits before smoothing."""
        if self._shift is not None:
            rows = self._shift[:, panel.rows]
            missing = panel.rows.stop - panel.rows.start - rows.shape[1]
            s += as_column(torch.nn.functional.pad(rows, (0, missing)), s)
        return s.div_(softcap).tanh_().mul_(softcap)


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """o [Z, n_q, d_v] and lse [Z, n_q] in the computing dtype."""

    o: Tensor
    lse: Tensor  #: of the logits before smoothing; -inf if the query attends to no key
    lse_smoothed: Tensor  #: of the logits of `Logits`; the backward recomputes P with it


def forward(x: FlatProblem, hooks: Hooks = NO_HOOKS) -> ForwardResult:
    """Compute o and the logsumexp of every head under the spec."""
    o = x.q.new_zeros(*x.q.shape[:2], x.v.shape[-1])
    lse = x.q.new_full(x.q.shape[:2], -torch.inf)
    lse_smoothed = lse.clone()
    if x.grid.n_q == 0 or x.grid.n_k == 0:
        return ForwardResult(o, lse, lse_smoothed)
    for heads in x.grid.head_groups(x.q.shape[0], x.q.device):
        smoothed = SmoothedQK.of(x, heads)
        place = Place(heads)
        tokens = round_tokens(x.spec, place, hooks, q=smoothed.q, k=smoothed.k, v=x.v[heads])
        logits = Logits(x, "qk", smoothed, tokens)
        v = tokens.at("pv", "v")
        v_may_be_nonfinite = v.may_be_nonfinite()
        sinks = sink_logits(x, heads, smoothed)
        for panel in x.grid.panels(heads, x.q.device):
            place = Place(heads, panel)
            s = hooks.map("s", place, panel.mask_(logits.panel(panel), -torch.inf))
            live = panel.live_tiles() if v_may_be_nonfinite else None
            rows = slice(panel.rows.start, min(panel.rows.stop, x.grid.n_q))
            count = rows.stop - rows.start
            sink = None if sinks is None else sinks[:, panel.rows]
            o_panel, lse_panel = _attend(s, v, live, sink, x.spec, place, hooks)
            o[heads, rows] = o_panel[:, :count]
            lse_smoothed[heads, rows] = lse_panel[:, :count]
        lse[heads] = lse_smoothed[heads]
        if smoothed.shift is not None and x.softcap is None:
            lse[heads] += smoothed.shift
    return ForwardResult(o, lse, lse_smoothed)


def sink_logits(x: FlatProblem, heads: slice, smoothed: SmoothedQK) -> Tensor | None:
    """The sink of each row relative to the logits of `Logits`; None without sinks.

    Returns: [Z, n], with n a multiple of block_q.
    """
    if x.sinks is None:
        return None
    grid = x.grid
    sink = x.sinks[heads, None].expand(-1, grid.q_blocks * grid.block_q)
    if smoothed.shift is None or x.softcap is not None:
        return sink
    return sink - torch.nn.functional.pad(smoothed.shift, (0, sink.shape[1] - grid.n_q))


def as_column(rows: Tensor, tiles: Tensor) -> Tensor:
    """Reshape [Z, i * block_q] to [Z, i, block_q, 1, 1], which broadcasts over a map's tiles."""
    return rows.unflatten(1, tiles.shape[1:3])[..., None, None]


def _attend(
    s: Tensor,
    v: Operand,
    live: Tensor | None,
    sink: Tensor | None,
    spec: AttentionSpec,
    place: Place,
    hooks: Hooks,
) -> tuple[Tensor, Tensor]:
    """Softmax and PV of a panel. Return o [Z, rows, d_v] and lse [Z, rows]; overwrite s.

    live: as for `map_by_tokens`. sink: [Z, rows], see `sink_logits`.
    """
    panel = place.panel
    assert panel is not None
    tile_max = s.amax(COLUMN, keepdim=True)
    row_max = tile_max.amax(COLUMN_BLOCK, keepdim=True)
    # A fully masked row has maximum -inf. Subtracting 0 instead gives exp(-inf - 0) = 0, not NaN.
    all_masked = tile_max == -torch.inf
    tile_exp = s.sub_(tile_max.masked_fill(all_masked, 0.0)).exp_()
    if may_hold(row_max.isnan()):
        panel.mask_(tile_exp, 0.0)  # -inf - NaN is NaN, also where the mask has set S to -inf
    weight = (tile_max - row_max.masked_fill(row_max == -torch.inf, 0.0)).exp_()
    row_sum = (tile_exp.sum(COLUMN, keepdim=True) * weight).sum(COLUMN_BLOCK).flatten(1)
    precision, granularity = spec.pv.precision, spec.pv.lhs
    first_row = panel.rows.start
    if precision.is_scaled and granularity is Granularity.PerTileRow:
        p = encode_p_per_tile_row_(
            tile_exp, weight, all_masked, precision, spec.rounding, first_row
        )
    else:
        p = encode(tile_exp.mul_(weight), precision, granularity, spec.rounding, "p", first_row)
    p = hooks.operand("pv", "p", place, p)
    o = map_by_tokens(p, v.row_blocks(0, panel.key_blocks), live)
    row_max = row_max.flatten(1)
    if sink is not None:
        # Relative to the larger of the sink and the row maximum, nothing overflows. A row without
        # keys has no sink either.
        largest = torch.maximum(row_max, sink)
        largest = largest.where(row_sum != 0, 0.0)
        of_keys = (row_max - largest).exp_()
        o *= of_keys[..., None]
        row_sum = row_sum * of_keys + (sink - largest).exp_().where(row_sum != 0, 0.0)
        row_max = largest
    o /= row_sum.masked_fill(row_sum == 0, 1.0)[..., None]
    return o, row_max + row_sum.log()
