"""The backward: one pass over the blocks of keys, between kernels that are linear in the tokens.

A program owns a block of keys. It computes S, dP, P and dS of all queries that attend to them once,
keeps dK and dV, and adds its part of dQ to the sums of the queries, as integers: see
`sagesim_kernels.operands.dq_sums`. No result depends on the order in which programs run.

If delta comes from P, or S is recomputed from other operands than those of the forward, another
kernel recomputes P before, for its row sums.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sagesim.spec import Granularity, Precision
from sagesim_kernels.launching import CompilerFault, launch
from sagesim_kernels.operands import (
    LOG2_E,
    DqSums,
    Gradients,
    KernelProblem,
    KernelSizes,
    OperandCache,
    Rounding,
    Rows,
    RowScales,
    RowStatistics,
    Softcap,
    Strided,
    ds_row_sums,
    finish_dq,
    has_row_bound,
    has_row_bounds,
    padded,
)
from sagesim_kernels.portable.gradients import gradients_kernel
from sagesim_kernels.portable.p_and_ds import UNTRACED, MapProduct, MapTraces
from sagesim_kernels.portable.p_rows import launch_p_rows
from sagesim_kernels.portable.tiles import (
    SHORT_STEP,
    Tile,
    block_tiles,
    block_warps,
    longest_step,
    try_tiles,
)
from sagesim_kernels.preparation import has_same_codes, prepare_backward


class LogitScale(NamedTuple):
    """The factor of the logits."""

    natural: float
    base2: float  #: times log2(e), for logits whose exponential is exp2; or divided by a softcap


def map_product(problem: KernelProblem, site: str, tensor: str, *, same_right: bool) -> MapProduct:
    """Return how a kernel computes the product of `site`, whose left operand is P or dS."""
    matmul = problem.spec.site(site)
    per_tile = matmul.precision.is_scaled and matmul.lhs is Granularity.PerTile
    return MapProduct.of(
        Rounding.of(problem.spec, tensor, matmul.precision),
        per_tile=per_tile,
        same_right=same_right,
        by_bound=has_row_bound(problem.spec, site),
        same_codes=site == "dq" and has_same_codes(problem.spec),
    )


class _Launches:
    """The launches of the kernel of the gradients."""

    def __init__(
        self,
        problem: KernelProblem,
        operands: OperandCache,
        statistics: RowStatistics,
        dq_sums: DqSums,
        row_scales: RowScales | None,
        traces: MapTraces,
        softcap: Softcap,
    ) -> None:
        self.problem, self.statistics, self.traces = problem, statistics, traces
        self.row_scales = row_scales
        self.q, self.k = operands.get("qk_recompute", "q"), operands.get("qk_recompute", "k")
        self.do, self.v = operands.get("dp", "do"), operands.get("dp", "v")
        self.q_right, self.do_right = operands.get("dk", "q"), operands.get("dv", "do")
        self.k_right = operands.get("dq", "k")
        self.subtracted = operands.subtracted
        self.softcap = softcap
        factor = LOG2_E if softcap.inverse is None else softcap.inverse
        self.scale = LogitScale(problem.scale, problem.scale * factor)
        self.dq_sums = dq_sums

    def run_gradients(
        self, tile: Tile, dk: Tensor | None, dv: Tensor | None, *, with_dq: bool
    ) -> None:
        """Launch the kernel of the gradients that are not None, and of dQ if with_dq."""
        problem = self.problem
        grid = problem.key_grid(tile.rows)
        launch(
            gradients_kernel,
            grid.programs,
            grid,
            self.q,
            self.k,
            self.do,
            self.v,
            self.q_right,
            self.do_right,
            self.k_right,
            self.subtracted,
            self.softcap,
            *self.statistics,
            self.dq_sums if with_dq else None,
            self.row_scales,
            None if dk is None else Strided.of(dk),
            None if dv is None else Strided.of(dv),
            self.traces.dv_p,
            self.traces.dq_ds,
            self.traces.dk_ds,
            problem.lengths,
            map_product(problem, "dv", "p", same_right=self.do_right is self.do),
            map_product(problem, "dq", "ds", same_right=self.k_right is self.k),
            map_product(problem, "dk", "ds", same_right=self.q_right is self.q),
            self.scale,
            KernelSizes.of(problem, tile.rows),
            tile.step or longest_step(problem.spec.block_q),
            tile.step != 0,
            **tile.options,
        )


def launch_backward(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor | None,
    do: Tensor,
    statistics: RowStatistics,
    d_lse: Rows | None,
    grads: Gradients,
    traces: MapTraces = UNTRACED,
    *,
    shift: Tensor | None = None,
    p_sink: Tensor | None = None,
) -> None:
    """Fill grads, any strides, and statistics.delta.

    Args:
        o: the output of the forward; None if delta comes from P.
        do: the gradient of o, any strides.
        statistics: lse2 of the forward, and memory for delta.
        d_lse: the gradient of the logsumexp, or None.
        traces: where to write the codes of P and dS.
        shift: what smoothing K subtracted from the logits, [sequences, heads, n_q]; only a softcap
            needs it.
        p_sink: the share of the sink in each row's sum, [sequences, heads, n_q]; None without
            sinks.

    Raises:
        ValueError: if the device has too little shared memory for the spec's blocks.
    """
    spec = problem.spec
    d, d_v = problem.q.shape[3], problem.v.shape[3]
    d_pad, d_v_pad = padded(d), padded(d_v)
    rows = longest_step(spec.block_q) if d_pad <= 128 else min(spec.block_q, SHORT_STEP)
    dq_sums = DqSums.by_threads(problem, rows, d_pad, block_warps(spec.block_k, d_pad))
    softcap = Softcap.of(problem, shift)
    p_bound = None
    if has_row_bounds(spec):
        p_bound = Rows.of(torch.empty_like(statistics.lse2.ptr))
    sum_rows = partial(launch_p_rows, problem, operands, statistics, d_lse, softcap, p_bound)
    row_scales = prepare_backward(
        problem, operands, o, do, statistics, d_lse, dq_sums, sum_rows, p_bound
    )
    launches = _Launches(problem, operands, statistics, dq_sums, row_scales, traces, softcap)
    at = f"at head size {max(d, d_v)}, block_q={spec.block_q} and block_k={spec.block_k}"
    has_codes = spec.dv.precision.is_scaled or spec.dk.precision.is_scaled
    # FP8 sums of parts of a block are added in float32.
    any_step = Precision.INT8 not in (spec.dv.precision, spec.dk.precision)

    def run(dk: Tensor | None, dv: Tensor | None, *, with_dq: bool, what: str) -> None:
        channels = max(d_pad, d_v_pad) if dk is not None and dv is not None else d_pad
        if dk is None and not with_dq:
            channels = d_v_pad
        try_tiles(
            block_tiles(spec.block_k, channels, any_step=any_step),
            lambda tile: launches.run_gradients(tile, dk, dv, with_dq=with_dq),
            f"{what} {at}",
        )

    # Products of codes have sums of their own, before they are added.
    if d_pad + d_v_pad <= (128 if has_codes else 256):
        run(grads.dk, grads.dv, with_dq=True, what="the backward")
    else:  # The sums of both dK and dV do not fit into registers.
        run(None, grads.dv, with_dq=False, what="dV")
        try:
            run(grads.dk, None, with_dq=True, what="dK and dQ")
        except (ValueError, CompilerFault):
            # Their operands do not fit into the shared memory of a small GPU, for example.
            run(grads.dk, None, with_dq=False, what="dK")
            run(None, None, with_dq=True, what="dQ")
    ds_sums = ds_row_sums(problem, p_sink, statistics, d_lse)
    finish_dq(problem, dq_sums, statistics.lse2, ds_sums, operands.subtracted, grads.dq)
