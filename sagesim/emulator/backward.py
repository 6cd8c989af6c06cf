"""The backward: its five products, computed for one panel of query blocks at a time.

Memory is linear in the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sagesim.emulator import row_bounds
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
from sagesim.emulator.quantization import Operand
from sagesim.emulator.row_bounds import RowBound, fold, has_row_bound, has_row_bounds
from sagesim.emulator.tiling import Panel
from sagesim.spec import AttentionSpec, Delta


@dataclass(frozen=True, slots=True)
class Gradients:
    """dq [Z, n_q, d], dk [Z, n_k, d], dv [Z, n_k, d_v] in the computing dtype."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None  #: [Z] in float64; None without sinks


def backward(
    x: FlatProblem, do: Tensor, o: Tensor, lse_smoothed: Tensor, hooks: Hooks = NO_HOOKS
) -> Gradients:
    """Compute the gradients of every head under the spec.

    Args:
        do, o: [Z, n_q, d_v]; o as the forward returned it, rounded to the caller's dtype.
        lse_smoothed: [Z, n_q], see `ForwardResult`.
    """
    dsinks = None if x.sinks is None else torch.zeros_like(x.sinks, dtype=torch.float64)
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
    do_dp, v, k = tokens.at("dp", "do"), tokens.at("dp", "v"), tokens.at("dq", "k")
    padding = (0, grid.q_blocks * grid.block_q - grid.n_q)
    sink = sink_logits(x, heads, smoothed)
    # lse = +inf makes P = exp(S - inf) = 0 in padding rows and in rows that attend to no key.
    lse = torch.nn.functional.pad(
        lse.masked_fill(lse == -torch.inf, torch.inf), padding, value=torch.inf
    )
    p_sink = None if sink is None else (sink - lse).exp()
    delta = torch.nn.functional.pad((do * o).sum(-1), padding)
    p_bound = ds_bound = None
    if has_row_bounds(spec):
        p_bound, ds_bound = _row_bounds(x, heads, logits, do_dp, v, lse, delta)
    do_dv, p_bound = _right_operand("dv", "do", do, p_bound, tokens, x, hooks, heads)
    q, ds_bound = _right_operand("dk", "q", smoothed.q, ds_bound, tokens, x, hooks, heads)
    may_be_nonfinite = any(operand.may_be_nonfinite() for operand in (do_dv, k, q))
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
        p = hooks.map("p_recompute", place, _p(s, lse, panel))
        p_rounded = RoundedOperands(spec, place, hooks, {"p": p}, p_bound)
        dv[:, keys] += map_transposed_by_tokens(
            _left_operand("dv", "p", p_rounded, spec),
            do_dv.row_blocks(blocks.start, blocks.stop),
            live,
        )

        dp = hooks.map("dp", place, _dp(do_dp, v, panel))
        if spec.delta is Delta.FROM_P:
            delta[:, panel.rows] = _delta_from_p(p, dp, panel)
        # dP or delta may be NaN at entries where P is 0.
        ds = dp.sub_(as_column(delta[:, panel.rows], dp)).mul_(p)
        ds = panel.mask_(ds if slope is None else ds.mul_(slope), 0.0)
        ds = hooks.ds(place, ds, p)

        ds_rounded = RoundedOperands(spec, place, hooks, {"ds": ds}, ds_bound)
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
            _left_operand("dk", "ds", ds_rounded, spec),
            q.row_blocks(blocks.start, blocks.stop),
            live,
        )
        if smoothed.q_mean is not None:  # add the term of the mean that was subtracted from q
            dk[:, keys] += product(ds.sum(2).flatten(2).mT, smoothed.q_mean[:, blocks])

    hooks.delta(heads, delta[:, : grid.n_q])
    if p_sink is not None and grads.dsinks is not None:
        grads.dsinks[heads] = -(p_sink * delta).double().sum(1)
    grads.dk[heads] = dk[:, : grid.n_k] * x.scale
    grads.dv[heads] = dv[:, : grid.n_k]


def _p(s: Tensor, lse: Tensor, panel: Panel) -> Tensor:
    """P of a panel; overwrites s."""
    # Mask after exp: in a row whose lse is NaN, exp(-inf - lse) would be NaN.
    return panel.mask_(s.sub_(as_column(lse[:, panel.rows], s)).exp_(), 0.0)


def _dp(do: Operand, v: Operand, panel: Panel) -> Tensor:
    """dP of a panel, without the mask."""
    return tokens_by_tokens(
        do.row_blocks(panel.first_block, panel.last_block), v.row_blocks(0, panel.key_blocks)
    )


def _delta_from_p(p: Tensor, dp: Tensor, panel: Panel) -> Tensor:
    """delta of a panel's rows, [Z, rows]; masks dp."""
    return (p * panel.mask_(dp, 0.0)).sum((-2, -1)).flatten(1)


def _row_bounds(
    x: FlatProblem,
    heads: slice,
    logits: Logits,
    do: Operand,
    v: Operand,
    lse: Tensor,
    delta: Tensor,
) -> tuple[RowBound, RowBound]:
    """The bounds on the rows of P and dS. do and v: those of dp; lse and delta: [Z, n], padded."""
    row_max, delta = torch.full_like(lse, -torch.inf), delta.clone()
    for panel in x.grid.panels(heads, lse.device):
        s = panel.mask_(logits.panel(panel), -torch.inf)
        row_max[:, panel.rows] = s.amax((-2, -1)).flatten(1)
        if x.spec.delta is Delta.FROM_P:
            delta[:, panel.rows] = _delta_from_p(_p(s, lse, panel), _dp(do, v, panel), panel)
    of_p = row_bounds.p_bound(row_max, lse)
    # V may hold NaN, which does not reach a row without keys.
    of_ds = row_bounds.ds_bound(of_p, do, v, delta).masked_fill(row_max == -torch.inf, 0.0)
    return RowBound(of_p), RowBound(of_ds)


def _left_operand(site: str, tensor: str, rounded: RoundedOperands, spec: AttentionSpec) -> Operand:
    """The map that dV or dK multiplies. Its scales per row bound are in the other operand."""
    operand = rounded.at(site, tensor)
    return operand.without_scale() if has_row_bound(spec, site) else operand


def _right_operand(
    site: str,
    tensor: str,
    y: Tensor,
    bound: RowBound | None,
    tokens: RoundedOperands,
    x: FlatProblem,
    hooks: Hooks,
    heads: slice,
) -> tuple[Operand, RowBound | None]:
    """dO of dV or Q of dK, and the bound on the rows of the map with the codes that it gets.

    y: the operand before it is rounded, [Z, n_q, channels].
    """
    spec, block = x.spec, x.spec.block_q
    if bound is None or not has_row_bound(spec, site):
        return tokens.at(site, tensor), bound
    missing = bound.bound.shape[1] - y.shape[1]
    y = torch.nn.functional.pad(y, (0, 0, 0, missing))
    right, bound = fold(y, bound.bound, spec.site(site), block, spec.rounding, tensor)
    return hooks.operand(site, tensor, Place(heads), right), bound
