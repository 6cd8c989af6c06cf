"""What a backward computes before the gradients: delta, row sums of P, and the units of dQ."""

from __future__ import annotations

import torch
from torch import Tensor

from sagesim.spec import Delta
from sagesim_kernels.operands import (
    LOG2_E,
    DqSums,
    Grid,
    KernelProblem,
    KernelSizes,
    OperandCache,
    Rows,
    RowStatistics,
    compute_delta_from_o,
    compute_units,
    padded,
)
from sagesim_kernels.portable.p_rows import p_rows_kernel
from sagesim_kernels.portable.tiles import Tile, launch, most_rows, tiles


def prepare_backward(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor | None,
    do: Tensor,
    statistics: RowStatistics,
    d_lse: Rows | None,
    dq_sums: DqSums,
) -> None:
    """Fill statistics.delta and dq_sums.unit.

    Args:
        o: the output of the forward; None if delta comes from P.
        do: the gradient of o, any strides.
        statistics: lse2 of the forward, and memory for delta.
        d_lse: the gradient of the logsumexp, or None.
    """
    spec = problem.spec
    if spec.delta is Delta.FROM_O:
        assert o is not None
        compute_delta_from_o(problem, o, do, statistics, d_lse)
    p_sums = None
    if spec.delta is Delta.FROM_P or spec.qk != spec.qk_recompute:
        shape, device = problem.q.shape[:3], problem.q.device
        p_sums = Rows.of(torch.empty(shape, dtype=torch.float32, device=device))
        d_pad = padded(problem.q.shape[3])
        within = spec.block_q if spec.smoothing.q else None
        launch(
            tiles(most_rows(d_pad), d_pad, within=within),
            lambda tile: _run_p_rows(tile, problem, operands, statistics, p_sums, d_lse),
            f"row sums of P at head size {problem.q.shape[3]}",
        )
    compute_units(
        problem,
        {
            "q": operands.get("qk_recompute", "q"),
            "k": operands.get("qk_recompute", "k"),
            "do": operands.get("dp", "do"),
            "v": operands.get("dp", "v"),
            "k_right": operands.get("dq", "k"),
        },
        statistics,
        p_sums,
        dq_sums,
    )


def _run_p_rows(
    tile: Tile,
    problem: KernelProblem,
    operands: OperandCache,
    statistics: RowStatistics,
    p_sums: Rows,
    d_lse: Rows | None,
) -> None:
    lse2, delta = statistics
    grid = Grid(-(-problem.longest_q // tile.rows), problem.q.shape[1], problem.sequences)
    p_rows_kernel[grid.programs](
        grid,
        operands.get("qk_recompute", "q"),
        operands.get("qk_recompute", "k"),
        operands.get("dp", "do"),
        operands.get("dp", "v"),
        operands.subtracted,
        lse2,
        delta if problem.spec.delta is Delta.FROM_P else None,
        p_sums,
        d_lse,
        problem.lengths,
        problem.scale * LOG2_E,
        KernelSizes.of(problem, tile.rows),
        **tile.options,
    )
