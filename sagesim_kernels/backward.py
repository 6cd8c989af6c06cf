"""The backward: dK and dV in a program for each tile of keys, dQ in one for each tile of queries.

S and dP are computed in both, and S once more where dK and dV are apart, and both where delta comes
from P: then nothing is added by atomics, sums are in a fixed order, and a scale along the rows of P
or dS stays within a warp.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sagesim.spec import Delta, Granularity
from sagesim_kernels import hopper
from sagesim_kernels.delta import delta_from_o
from sagesim_kernels.forward import ForwardResult
from sagesim_kernels.key_tiles import key_tiles
from sagesim_kernels.layout import Grid, Rows, Strided
from sagesim_kernels.maps import UNTRACED, MapTraces
from sagesim_kernels.primitives import LAUNCH, LOG2_E, Rounding
from sagesim_kernels.problem import Problem, padded
from sagesim_kernels.quantize import Operands
from sagesim_kernels.query_tiles import query_tiles
from sagesim_kernels.tiles import launch, most_rows, tiles


class Gradients(NamedTuple):
    """dq, dk, dv, shaped as q, k and v, to be filled."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def backward(
    problem: Problem,
    do: Tensor,
    d_lse: Tensor | None,
    o: Tensor | None,
    result: ForwardResult,
    grads: Gradients,
    traces: MapTraces = UNTRACED,
) -> Tensor:
    """Fill the gradients of every head, and return delta, float32 [sequences, heads, n_q].

    Args:
        do: as o, any strides.
        d_lse: the gradient of the logsumexp, shaped as result.lse2.
        o: the forward's; None where delta does not need it.
        result: the forward's.
    """
    lse2 = result.lse2
    delta = torch.empty_like(lse2)
    if problem.is_empty:
        nothing = 0.0 * problem.scale  # with its sign, as where one of several sequences is empty
        grads.dq.fill_(nothing)
        grads.dk.fill_(nothing)
        grads.dv.zero_()
        return delta.zero_()
    spec, lengths = problem.spec, problem.lengths
    on_hopper = hopper.serves(problem)
    stored = on_hopper and hopper.has_to_copy(problem, queries=True)
    operands = Operands(problem, do, k_mean=result.k_mean, stored=stored)
    d_lse_rows = None if d_lse is None else Rows.of(d_lse.contiguous())
    if on_hopper:
        from sagesim_kernels.hopper import backward as gluon  # experimental: not if not needed

        assert o is not None
        gluon.backward(problem, operands, o, do, lse2, d_lse_rows, delta, *grads)
        return delta
    if spec.delta is Delta.FROM_O:
        assert o is not None
        delta_from_o(problem, o, do, lse2, d_lse_rows, delta)
    d, d_v = problem.q.shape[3], problem.v.shape[3]
    d_pad, d_v_pad = padded(d), padded(d_v)
    heads = problem.q.shape[1]
    scales = (problem.scale, problem.scale * LOG2_E)
    shape = (problem.groups, d, d_v, d_pad, d_v_pad, spec.block_q, spec.block_k)
    s_operands = (operands.at("qk_recompute", "q"), operands.at("qk_recompute", "k"))
    dp_operands = (operands.at("dp", "do"), operands.at("dp", "v"))
    q_right, do_right = operands.at("dk", "q"), operands.at("dv", "do")
    statistics = (*operands.smoothing, Rows.of(lse2), Rows.of(delta))
    is_int8 = {site: spec.site(site).precision.is_scaled for site in ("dv", "dq", "dk")}
    one_block = {
        site: is_int8[site] and spec.site(site).lhs is Granularity.PerTile for site in is_int8
    }

    def run_query_tiles(tile, dq):
        grid = Grid(-(-problem.longest_q // tile.rows), heads, problem.sequences)
        query_tiles[grid.programs](
            grid,
            *s_operands,
            *dp_operands,
            None if dq is None else operands.at("dq", "k"),
            *statistics,
            d_lse_rows,
            None if dq is None else Strided.of(dq),
            None if dq is None else traces.dq_ds,
            lengths,
            Rounding.of(spec, "ds"),
            *scales,
            one_block["dq"],
            *shape,
            tile.rows,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **LAUNCH,
        )

    def run_key_tiles(tile, dk, dv):
        grid = Grid(-(-problem.longest_k // tile.rows), problem.k.shape[1], problem.sequences)
        key_tiles[grid.programs](
            grid,
            *s_operands,
            *dp_operands,
            q_right,
            do_right,
            *statistics,
            None if dk is None else Strided.of(dk),
            None if dv is None else Strided.of(dv),
            traces.dv_p,
            traces.dk_ds,
            lengths,
            Rounding.of(spec, "p"),
            Rounding.of(spec, "ds"),
            *scales,
            q_right is s_operands[0],
            do_right is dp_operands[0],
            one_block["dv"],
            one_block["dk"],
            *shape,
            tile.rows,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **LAUNCH,
        )

    at = f"at head size {max(d, d_v)}, block_q={spec.block_q} and block_k={spec.block_k}"
    within = spec.block_q if spec.smoothing.q else None
    if spec.delta is Delta.FROM_P:
        of_delta = tiles(most_rows(d_pad), d_pad, within=within)
        launch(of_delta, lambda tile: run_query_tiles(tile, None), f"delta {at}")
    rows = most_rows(d_pad, if_small=64 if is_int8["dq"] else 128)
    of_dq = tiles(rows, d_pad, within=within, exactly=spec.block_q if one_block["dq"] else None)
    launch(of_dq, lambda tile: run_query_tiles(tile, grads.dq), f"dQ {at}")

    rows = most_rows(max(d_pad, d_v_pad))
    exactly = spec.block_k if one_block["dv"] or one_block["dk"] else None
    if d_pad + d_v_pad <= (128 if is_int8["dv"] or is_int8["dk"] else 256):
        of_both = tiles(rows, d_pad + d_v_pad, exactly=exactly)
        launch(of_both, lambda tile: run_key_tiles(tile, grads.dk, grads.dv), f"dK and dV {at}")
    else:  # A thread has no registers for the sums of both, and for the products added to them.
        of_dv = tiles(rows, d_v_pad, exactly=exactly)
        launch(of_dv, lambda tile: run_key_tiles(tile, None, grads.dv), f"dV {at}")
        of_dk = tiles(rows, d_pad, exactly=exactly)
        launch(of_dk, lambda tile: run_key_tiles(tile, grads.dk, None), f"dK {at}")
    return delta
