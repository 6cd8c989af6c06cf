"""The backward: one pass over the blocks of keys, between kernels that are linear in the tokens.

A program owns a block of keys. It computes S, dP, P and dS of all queries that attend to them once,
keeps dK and dV, and adds its part of dQ to the sums of the queries, as integers: see
`sagesim_kernels.operands.dq_sums`. No result depends on the order in which programs run.

If delta comes from P, or S is recomputed from other operands than those of the forward, another
kernel recomputes P before, for its row sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sagesim.spec import Delta, Granularity
from sagesim_kernels.operands import (
    LOG2_E,
    DqSums,
    Gradients,
    Grid,
    KernelProblem,
    KernelSizes,
    OperandCache,
    Rounding,
    Rows,
    RowStatistics,
    Strided,
    compute_delta_from_o,
    compute_units,
    finish_dq,
    padded,
)
from sagesim_kernels.portable.gradients import gradients_kernel
from sagesim_kernels.portable.p_and_ds import UNTRACED, MapProduct, MapTraces
from sagesim_kernels.portable.p_rows import p_rows_kernel
from sagesim_kernels.portable.tiles import (
    SHORT_STEP,
    Tile,
    block_tiles,
    block_warps,
    launch,
    most_rows,
    tiles,
)


class LogitScale(NamedTuple):
    """The factor of the logits."""

    natural: float
    base2: float  #: times log2(e), for logits whose exponential is exp2


class _Launches:
    """The launches of one backward."""

    def __init__(
        self,
        problem: KernelProblem,
        operands: OperandCache,
        statistics: RowStatistics,
        d_lse: Rows | None,
        traces: MapTraces,
    ) -> None:
        self.problem, self.operands, self.traces = problem, operands, traces
        self.statistics, self.d_lse = statistics, d_lse
        self.q, self.k = operands.get("qk_recompute", "q"), operands.get("qk_recompute", "k")
        self.do, self.v = operands.get("dp", "do"), operands.get("dp", "v")
        self.q_right, self.do_right = operands.get("dk", "q"), operands.get("dv", "do")
        self.k_right = operands.get("dq", "k")
        self.subtracted = operands.subtracted
        self.scale = LogitScale(problem.scale, problem.scale * LOG2_E)
        block_q, block_k = problem.spec.block_q, problem.spec.block_k
        d_pad = padded(problem.q.shape[3])
        rows = block_q if d_pad <= 128 else min(block_q, SHORT_STEP)
        self.dq_sums = DqSums.empty(problem, rows, d_pad, block_warps(block_k, d_pad))

    def product(self, site: str, tensor: str, *, same_right: bool) -> MapProduct:
        matmul = self.problem.spec.site(site)
        per_tile = matmul.precision.is_scaled and matmul.lhs is Granularity.PerTile
        rounding = Rounding.of(self.problem.spec, tensor)
        return MapProduct.of(rounding, per_tile=per_tile, same_right=same_right)

    def run_p_rows(self, tile: Tile, p_sums: Rows) -> None:
        """Launch the kernel of the row sums of P, and of delta if it comes from P."""
        problem = self.problem
        lse2, delta = self.statistics
        grid = Grid(-(-problem.longest_q // tile.rows), problem.q.shape[1], problem.sequences)
        p_rows_kernel[grid.programs](
            grid,
            self.q,
            self.k,
            self.do,
            self.v,
            self.subtracted,
            lse2,
            delta if problem.spec.delta is Delta.FROM_P else None,
            p_sums,
            self.d_lse,
            problem.lengths,
            self.scale.base2,
            KernelSizes.of(problem, tile.rows),
            **tile.options,
        )

    def run_units(self, p_sums: Rows | None) -> None:
        """Launch the kernels of the units of dQ."""
        names = ("q", "k", "do", "v", "k_right")
        operands = {name: getattr(self, name) for name in names}
        compute_units(self.problem, operands, self.statistics, p_sums, self.dq_sums)

    def run_gradients(
        self, tile: Tile, dk: Tensor | None, dv: Tensor | None, *, with_dq: bool
    ) -> None:
        """Launch the kernel of the gradients that are not None, and of dQ if with_dq."""
        problem = self.problem
        grid = Grid(-(-problem.longest_k // tile.rows), problem.k.shape[1], problem.sequences)
        gradients_kernel[grid.programs](
            grid,
            self.q,
            self.k,
            self.do,
            self.v,
            self.q_right,
            self.do_right,
            self.k_right,
            self.subtracted,
            *self.statistics,
            self.dq_sums if with_dq else None,
            None if dk is None else Strided.of(dk),
            None if dv is None else Strided.of(dv),
            self.traces.dv_p,
            self.traces.dq_ds,
            self.traces.dk_ds,
            problem.lengths,
            self.product("dv", "p", same_right=self.do_right is self.do),
            self.product("dq", "ds", same_right=self.k_right is self.k),
            self.product("dk", "ds", same_right=self.q_right is self.q),
            self.scale,
            KernelSizes.of(problem, tile.rows),
            tile.step or problem.spec.block_q,
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
) -> None:
    """Fill grads, any strides, and statistics.delta.

    Args:
        o: the output of the forward; None if delta comes from P.
        do: the gradient of o, any strides.
        statistics: lse2 of the forward, and memory for delta.
        d_lse: the gradient of the logsumexp, or None.
        traces: where to write the codes of P and dS.

    Raises:
        ValueError: if the device has too little shared memory for the spec's blocks.
    """
    spec = problem.spec
    if spec.delta is Delta.FROM_O:
        assert o is not None
        compute_delta_from_o(problem, o, do, statistics, d_lse)
    d, d_v = problem.q.shape[3], problem.v.shape[3]
    d_pad, d_v_pad = padded(d), padded(d_v)
    launches = _Launches(problem, operands, statistics, d_lse, traces)

    at = f"at head size {max(d, d_v)}, block_q={spec.block_q} and block_k={spec.block_k}"
    p_sums = None
    if spec.delta is Delta.FROM_P or spec.qk != spec.qk_recompute:
        shape, device = problem.q.shape[:3], problem.q.device
        p_sums = Rows.of(torch.empty(shape, dtype=torch.float32, device=device))
        of_rows = tiles(most_rows(d_pad), d_pad, within=spec.block_q if spec.smoothing.q else None)
        launch(of_rows, lambda tile: launches.run_p_rows(tile, p_sums), f"row sums of P {at}")
    launches.run_units(p_sums)
    any_step = not (spec.dv.precision.is_scaled or spec.dk.precision.is_scaled)

    def run(dk: Tensor | None, dv: Tensor | None, *, with_dq: bool, what: str) -> None:
        channels = max(d_pad, d_v_pad) if dk is not None and dv is not None else d_pad
        if dk is None and not with_dq:
            channels = d_v_pad
        launch(
            block_tiles(spec.block_k, channels, any_step=any_step),
            lambda tile: launches.run_gradients(tile, dk, dv, with_dq=with_dq),
            f"{what} {at}",
        )

    if d_pad + d_v_pad <= 256:
        run(grads.dk, grads.dv, with_dq=True, what="the backward")
    else:  # The sums of both dK and dV do not fit into registers.
        run(None, grads.dv, with_dq=False, what="dV")
        try:
            run(grads.dk, None, with_dq=True, what="dK and dQ")
        except ValueError:  # Their operands do not fit into the shared memory of a small GPU.
            run(grads.dk, None, with_dq=False, what="dK")
            run(None, None, with_dq=True, what="dQ")
    finish_dq(problem, launches.dq_sums, statistics.lse2, d_lse, launches.subtracted, grads.dq)
