"""What a backward computes before the gradients: delta, row sums of P, and the units of dQ."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sagesim.spec import Delta
from sagesim_kernels.launch_plans import launch
from sagesim_kernels.operands import (
    LOG2_E,
    DqSums,
    Grid,
    KernelProblem,
    KernelSizes,
    OperandCache,
    Rows,
    RowStatistics,
    Softcap,
    compute_delta_from_o,
    compute_units,
    padded,
)
from sagesim_kernels.portable.p_rows import p_rows_kernel
from sagesim_kernels.portable.tiles import Tile, most_rows, tiles, try_tiles


def prepare_backward(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor | None,
    do: Tensor,
    statistics: RowStatistics,
    d_lse: Rows | None,
    dq_sums: DqSums,
    sum_rows: Callable[[Rows], None],
) -> None:
    """Fill statistics.delta and dq_sums.unit.

    Args:
        o: the output of the forward; None if delta comes from P.
        do: the gradient of o, any strides.
        statistics: lse2 of the forward, and memory for delta.
        d_lse: the gradient of the logsumexp, or None.
        sum_rows: fills its argument with the row sums of P, and statistics.delta if delta comes
            from P.
    """
    spec = problem.spec
    if spec.delta is Delta.FROM_O:
        assert o is not None
        compute_delta_from_o(problem, o, do, statistics, d_lse)
    p_sums = None
    if spec.delta is Delta.FROM_P or spec.qk != spec.qk_recompute:
        shape, device = problem.q.shape[:3], problem.q.device
        p_sums = Rows.of(torch.empty(shape, dtype=torch.float32, device=device))
        sum_rows(p_sums)
    compute_units(
        problem,
        {
            "q": operands.get("qk_recompute", "q"),
            "k": operands.get("qk_recompute", "k"),
            "do": operands.get("dp", "do"),
            "v": operands.get("dp", "v"),
            "k_right": operands.get("dq", "k"),
        },
        operands.k_mean if problem.extras.softcap is not None else None,
        statistics,
        p_sums,
        dq_sums,
    )


def launch_p_rows(
    problem: KernelProblem,
    operands: OperandCache,
    statistics: RowStatistics,
    d_lse: Rows | None,
    softcap: Softcap,
    p_sums: Rows,
) -> None:
    """Fill p_sums with the row sums of P, and statistics.delta if delta comes from P.

    Raises:
        ValueError: if the device has too little shared memory for the spec's blocks.
    """
    lse2, delta = statistics
    spec, d = problem.spec, problem.q.shape[3]

    def run(tile: Tile) -> None:
        grid = Grid(-(-problem.longest_q // tile.rows), problem.q.shape[1], problem.sequences)
        launch(
            p_rows_kernel,
            grid.programs,
            grid,
            operands.get("qk_recompute", "q"),
            operands.get("qk_recompute", "k"),
            operands.get("dp", "do"),
            operands.get("dp", "v"),
            operands.subtracted,
            softcap,
            lse2,
            delta if spec.delta is Delta.FROM_P else None,
            p_sums,
            d_lse,
            problem.lengths,
            problem.scale * (LOG2_E if softcap.inverse is None else softcap.inverse),
            KernelSizes.of(problem, tile.rows),
            **tile.options,
        )

    candidates = tiles(
        most_rows(padded(d)), padded(d), within=spec.block_q if spec.smoothing.q else None
    )
    what = f"row sums of P at head size {d}, block_q={spec.block_q} and block_k={spec.block_k}"
    try_tiles(candidates, run, what)
