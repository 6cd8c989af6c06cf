"""The backward's five products, panel by panel, in memory linear in N."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sagesim._quantize import Operand, encode
from sagesim.forward import Logits, Smoothed, Tape, Tokens
from sagesim.grid import Panel
from sagesim.inputs import Inputs
from sagesim.matmul import (
    map_by_tokens,
    map_transposed_by_tokens,
    product,
    tokens_by_tokens,
)
from sagesim.spec import Delta, Granularity, Precision


@dataclass(frozen=True, slots=True)
class Gradients:
    """dq [Z, n_q, d], dk [Z, n_k, d], dv [Z, n_k, d_v] in the computing dtype."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def backward(
    x: Inputs, do: Tensor, o: Tensor, lse_smoothed: Tensor, tape: Tape | None = None
) -> Gradients:
    """Gradients of every head under the spec.

    Args:
        do, o: [Z, n_q, d_v]; o as the forward returned it, rounded to the caller's dtype.
        lse_smoothed: [Z, n_q], the forward's.
    """
    grads = Gradients(torch.zeros_like(x.q), torch.zeros_like(x.k), torch.zeros_like(x.v))
    if x.grid.n_q == 0 or x.grid.n_k == 0:
        return grads
    for heads in x.grid.head_groups(x.q.shape[0], x.q.device):
        _backward_heads(x, heads, do[heads], o[heads], lse_smoothed[heads], grads, tape)
    return grads


def _backward_heads(
    x: Inputs,
    heads: slice,
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    grads: Gradients,
    tape: Tape | None,
) -> None:
    spec, grid = x.spec, x.grid
    smoothed = Smoothed.of(x, heads)
    tokens = Tokens(spec, heads, tape, q=smoothed.q, k=smoothed.k, v=x.v[heads], do=do)
    logits = Logits(x, "qk_recompute", smoothed, tokens)
    do_dv = tokens.operand("dv", "do")
    do_dp, v = tokens.operand("dp", "do"), tokens.operand("dp", "v")
    k, q = tokens.operand("dq", "k"), tokens.operand("dk", "q")
    padding = (0, grid.q_blocks * grid.block_q - grid.n_q)
    # Padding has lse +inf, as rows that attend to nothing: P = exp(S - inf) = 0.
    lse = torch.nn.functional.pad(
        lse.masked_fill(lse == -torch.inf, torch.inf), padding, value=torch.inf
    )
    delta = torch.nn.functional.pad((do * o).sum(-1), padding)
    dk = x.k.new_zeros(lse.shape[0], grid.k_blocks * grid.block_k, x.k.shape[-1])
    dv = x.v.new_zeros(lse.shape[0], grid.k_blocks * grid.block_k, x.v.shape[-1])

    for panel in grid.panels(heads, lse.device):
        blocks = slice(panel.first_block, panel.last_block)
        keys = slice(0, panel.key_blocks * grid.block_k)

        s = logits.panel(panel)
        if tape is not None:
            tape.map("s_recompute", heads, panel, s)
        p = s.sub_(_as_column(lse[:, panel.rows], s)).exp_()
        if tape is not None:
            tape.map("p_recompute", heads, panel, p)
        p_rounded = _Rounded(x, "p", p, heads, panel, tape)
        dv[:, keys] += map_transposed_by_tokens(
            p_rounded.at("dv"), do_dv.row_blocks(blocks.start, blocks.stop)
        )

        dp = tokens_by_tokens(
            do_dp.row_blocks(blocks.start, blocks.stop), v.row_blocks(0, panel.key_blocks)
        )
        if tape is not None:
            tape.map("dp", heads, panel, dp)
        if spec.delta is Delta.FROM_P:
            delta[:, panel.rows] = (p * dp).sum((-2, -1)).flatten(1)
        ds = dp.sub_(_as_column(delta[:, panel.rows], dp)).mul_(p)
        if tape is not None:
            tape.map("ds", heads, panel, ds)

        ds_rounded = _Rounded(x, "ds", ds, heads, panel, tape)
        dq = map_by_tokens(ds_rounded.at("dq"), k.row_blocks(0, panel.key_blocks))
        rows = slice(panel.rows.start, min(panel.rows.stop, grid.n_q))
        grads.dq[heads, rows] = dq[:, : rows.stop - rows.start] * x.scale
        dk[:, keys] += map_transposed_by_tokens(
            ds_rounded.at("dk"), q.row_blocks(blocks.start, blocks.stop)
        )
        if smoothed.q_mean is not None:  # the bias branch: what subtracting the mean left out
            dk[:, keys] += product(ds.sum(2).flatten(2).mT, smoothed.q_mean[:, blocks])

    if tape is not None:
        tape.rows("delta", heads, delta[:, : grid.n_q])
    grads.dk[heads] = dk[:, : grid.n_k] * x.scale
    grads.dv[heads] = dv[:, : grid.n_k]


class _Rounded:
    """A map's panel, rounded once for every format it is used in."""

    def __init__(
        self, x: Inputs, name: str, tiles: Tensor, heads: slice, panel: Panel, tape: Tape | None
    ) -> None:
        self._x, self._name, self._tiles = x, name, tiles
        self._heads, self._panel, self._tape = heads, panel, tape
        self._operands: dict[tuple[Precision, Granularity], Operand] = {}

    def at(self, site: str) -> Operand:
        """The panel as the left operand of `site`."""
        spec = self._x.spec
        matmul = spec.site(site)
        key = (matmul.precision, matmul.lhs)
        if key not in self._operands:
            self._operands[key] = encode(
                self._tiles, *key, spec.rounding, self._name, self._panel.rows.start
            )
        operand = self._operands[key]
        if self._tape is not None:
            self._tape.operand(site, self._name, self._heads, self._panel, operand)
        return operand


def _as_column(rows: Tensor, tiles: Tensor) -> Tensor:
    """[Z, i * block_q] as [Z, i, block_q, 1, 1], to broadcast over a map's tiles."""
    return rows.unflatten(1, tiles.shape[1:3])[..., None, None]
