"""The backward: one kernel for dQ, and one for dK and dV.

The kernel of dQ has a program for each tile of queries, the other one a program for each tile of
keys. Both recompute S and dP. If dK and dV are in separate launches, S is recomputed once more. If
delta comes from P, S and dP are recomputed once more. In return no kernel uses atomics, every sum
has a fixed order, and each scale of P or dS is used only in the program that computes it.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sagesim.spec import Delta, Granularity
from sagesim_kernels.operands import (
    LOG2_E,
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
    padded,
)
from sagesim_kernels.portable.dkdv import dkdv_kernel
from sagesim_kernels.portable.dq import dq_kernel
from sagesim_kernels.portable.p_and_ds import UNTRACED, MapProduct, MapTraces
from sagesim_kernels.portable.tiles import Tile, launch, most_rows, tiles


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
        self.subtracted = operands.subtracted
        self.scale = LogitScale(problem.scale, problem.scale * LOG2_E)

    def has_codes(self, site: str) -> bool:
        return self.problem.spec.site(site).precision.is_scaled

    def has_one_scale(self, site: str) -> bool:
        """Whether the codes of a tile of the site's map share one scale."""
        matmul = self.problem.spec.site(site)
        return matmul.precision.is_scaled and matmul.lhs is Granularity.PerTile

    def product(self, site: str, tensor: str, *, same_right: bool = False) -> MapProduct:
        rounding = Rounding.of(self.problem.spec, tensor)
        per_tile = self.has_one_scale(site)
        return MapProduct.of(rounding, per_tile=per_tile, same_right=same_right)

    def run_dq(self, tile: Tile, dq: Tensor | None) -> None:
        """Launch the kernel of dQ; if dq is None, it computes delta from P."""
        problem = self.problem
        grid = Grid(-(-problem.longest_q // tile.rows), problem.q.shape[1], problem.sequences)
        dq_kernel[grid.programs](
            grid,
            self.q,
            self.k,
            self.do,
            self.v,
            None if dq is None else self.operands.get("dq", "k"),
            self.subtracted,
            *self.statistics,
            self.d_lse,
            None if dq is None else Strided.of(dq),
            None if dq is None else self.traces.dq_ds,
            problem.lengths,
            self.product("dq", "ds"),
            self.scale,
            KernelSizes.of(problem, tile.rows),
            **tile.options,
        )

    def run_dkdv(self, tile: Tile, dk: Tensor | None, dv: Tensor | None) -> None:
        """Launch the kernel of dK and dV, for both or for one of them."""
        problem = self.problem
        grid = Grid(-(-problem.longest_k // tile.rows), problem.k.shape[1], problem.sequences)
        dkdv_kernel[grid.programs](
            grid,
            self.q,
            self.k,
            self.do,
            self.v,
            self.q_right,
            self.do_right,
            self.subtracted,
            *self.statistics,
            None if dk is None else Strided.of(dk),
            None if dv is None else Strided.of(dv),
            self.traces.dv_p,
            self.traces.dk_ds,
            problem.lengths,
            self.product("dv", "p", same_right=self.do_right is self.do),
            self.product("dk", "ds", same_right=self.q_right is self.q),
            self.scale,
            KernelSizes.of(problem, tile.rows),
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
    run_dq, run_dkdv = launches.run_dq, launches.run_dkdv

    at = f"at head size {max(d, d_v)}, block_q={spec.block_q} and block_k={spec.block_k}"
    within = spec.block_q if spec.smoothing.q else None
    if spec.delta is Delta.FROM_P:
        of_delta = tiles(most_rows(d_pad), d_pad, within=within)
        launch(of_delta, lambda tile: run_dq(tile, None), f"delta {at}")
    rows = most_rows(d_pad, if_small=64 if launches.has_codes("dq") else 128)
    exactly = spec.block_q if launches.has_one_scale("dq") else None
    of_dq = tiles(rows, d_pad, within=within, exactly=exactly)
    launch(of_dq, lambda tile: run_dq(tile, grads.dq), f"dQ {at}")

    rows = most_rows(max(d_pad, d_v_pad))
    one_scale = launches.has_one_scale("dv") or launches.has_one_scale("dk")
    exactly = spec.block_k if one_scale else None
    has_codes = launches.has_codes("dv") or launches.has_codes("dk")
    if d_pad + d_v_pad <= (128 if has_codes else 256):
        of_both = tiles(rows, d_pad + d_v_pad, exactly=exactly)
        launch(of_both, lambda tile: run_dkdv(tile, grads.dk, grads.dv), f"dK and dV {at}")
    else:  # The sums of both, and the products added to them, do not fit into registers.
        of_dv = tiles(rows, d_v_pad, exactly=exactly)
        launch(of_dv, lambda tile: run_dkdv(tile, None, grads.dv), f"dV {at}")
        of_dk = tiles(rows, d_pad, exactly=exactly)
        launch(of_dk, lambda tile: run_dkdv(tile, grads.dk, None), f"dK {at}")
