"""The backward: its five products, computed for one panel of query blocks at a time.

Memory is linear in the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sagesim.emulator.forward import Logits, SmoothedQK, as_column, sink_logits
from sagesim.emulator.hooks import NO_HOOKS, Hooks, Place
from sagesim.emulator.layout import FlatProblem
from sagesim.emulator.matmul import (
    map_by_tokens,
    map_transposed_by_tokens,
    product,
    tokens_by_tokens,
)
from sagesim.emulator.operands import RoundedOperands, round_tokens
from sagesim.spec import Delta


@dataclass(frozen=True, slots=True)
class Gradients:
    """dq [Z, n_q, d], dk [Z, n_k, d], dv [Z, n_k, d_v] in the computing dtype."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None  #: [Z]; None without sinks


def backward(
    x: FlatProblem, do: Tensor, o: Tensor, lse_smoothed: Tensor, hooks: Hooks = NO_HOOKS
) -> Gradients:
    """Compute the gradients of every head under the spec.

    Args:
        do, o: [Z, n_q, d_v]; o as the forward returned it, rounded to the caller's dtype.
        lse_smoothed: [Z, n_q], see `ForwardResult`.
    """
    dsinks = None if x.sinks is None else torch.zeros_like(x.sinks)
    grads = Gradients(torch.zeros_like(x.q), torch.zeros_like(x.k), torch.zeros_like(x.v), dsinks)
    if x.grid.n_q == 0 or x.grid.n_k == 0:
        return grads
    for heads in x.grid.head_groups(x.q.shape[0], x.q.device):
        _backward_heads(x, heads, do[heads], o[heads], lse_smoothed[heads], grads, hooks)
    return grads


def _backward_heads(
    x: FlatProblem,
    heads: slice,
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    grads: Gradients,
    hooks: Hooks,
) -> None:
    spec, grid = x.spec, x.grid
    smoothed = SmoothedQK.of(x, heads)
    tokens = round_tokens(
        spec, Place(heads), hooks, q=smoothed.q, k=smoothed.k, v=x.v[heads], do=do
    )
    logits = Logits(x, "qk_recompute", smoothed, tokens)
    do_dv = tokens.at("dv", "do")
    do_dp, v = tokens.at("dp", "do"), tokens.at("dp", "v")
    k, q = tokens.at("dq", "k"), tokens.at("dk", "q")
    may_be_nonfinite = any(operand.may_be_nonfinite() for operand in (do_dv, k, q))
    padding = (0, grid.q_blocks * grid.block_q - grid.n_q)
    sink = sink_logits(x, heads, smoothed)
    # lse = +inf makes P = exp(S - inf) = 0 in padding rows and in rows that attend to no key.
    lse = torch.nn.functional.pad(
        lse.masked_fill(lse == -torch.inf, torch.inf), padding, value=torch.inf
    )
    p_sink = None if sink is None else (sink - lse).exp()
    delta = torch.nn.functional.pad((do * o).sum(-1), padding)
    dk = x.k.new_zeros(lse.shape[0], grid.k_blocks * grid.block_k, x.k.shape[-1])
    dv = x.v.new_zeros(lse.shape[0], grid.k_blocks * grid.block_k, x.v.shape[-1])

    for panel in grid.panels(heads, lse.device):
        blocks = slice(panel.first_block, panel.last_block)
        keys = slice(0, panel.key_blocks * grid.block_k)
        place = Place(heads, panel)
        live = panel.live_tiles() if may_be_nonfinite else None

        s = hooks.map("s_recompute", place, logits.panel(panel))
        # The derivative of c tanh(S / c).
        slope = None if x.softcap is None else 1 - (s / x.softcap).square()
        # Mask after exp: in a row whose lse is NaN, exp(-inf - lse) would be NaN.
        p = panel.mask_(s.sub_(as_column(lse[:, panel.rows], s)).exp_(), 0.0)
        p = hooks.map("p_recompute", place, p)
        p_rounded = RoundedOperands(spec, place, hooks, {"p": p})
        dv[:, keys] += map_transposed_by_tokens(
            p_rounded.at("dv", "p"), do_dv.row_blocks(blocks.start, blocks.stop), live
        )

        dp = tokens_by_tokens(
            do_dp.row_blocks(blocks.start, blocks.stop), v.row_blocks(0, panel.key_blocks)
        )
        dp = hooks.map("dp", place, dp)
        if spec.delta is Delta.FROM_P:
            delta[:, panel.rows] = (p * panel.mask_(dp, 0.0)).sum((-2, -1)).flatten(1)
        # dP or delta may be NaN at entries where P is 0.
        ds = dp.sub_(as_column(delta[:, panel.rows], dp)).mul_(p)
        ds = panel.mask_(ds if slope is None else ds.mul_(slope), 0.0)
        ds = hooks.ds(place, ds, p)

        ds_rounded = RoundedOperands(spec, place, hooks, {"ds": ds})
        dq = map_by_tokens(ds_rounded.at("dq", "ds"), k.row_blocks(0, panel.key_blocks), live)
        rows = slice(panel.rows.start, min(panel.rows.stop, grid.n_q))
        dq = dq[:, : rows.stop - rows.start]
        if smoothed.k_mean is not None:  # add the term of the mean that was subtracted from k
            ds_sum = None
            if x.softcap is not None:
                ds_sum = ds.sum((-2, -1)).flatten(1)[:, : dq.shape[1]]
            elif p_sink is not None:
                ds_sum = delta[:, rows] * p_sink[:, rows]
            if ds_sum is not None:
                dq += ds_sum[..., None] * smoothed.k_mean
        grads.dq[heads, rows] = dq * x.scale
        dk[:, keys] += map_transposed_by_tokens(
            ds_rounded.at("dk", "ds"), q.row_blocks(blocks.start, blocks.stop), live
        )
        if smoothed.q_mean is not None:  # add the term of the mean that was subtracted from q
            dk[:, keys] += product(ds.sum(2).flatten(2).mT, smoothed.q_mean[:, blocks])

    hooks.delta(heads, delta[:, : grid.n_q])
    if p_sink is not None and grads.dsinks is not None:
        of_rows = p_sink * delta
        grads.dsinks[heads] = -of_rows.double().sum(1).to(of_rows.dtype)
    grads.dk[heads] = dk[:, : grid.n_k] * x.scale
    grads.dv[heads] = dv[:, : grid.n_k]
