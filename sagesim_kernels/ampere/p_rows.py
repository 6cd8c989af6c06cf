"""Launch the kernel of the row sums of P for GPUs that multiply with mma.sync."""

from __future__ import annotations

from sagesim.spec import Delta
from sagesim_kernels.ampere.forward import grid_of_queries
from sagesim_kernels.ampere.forward_kernel import RowConfig
from sagesim_kernels.ampere.p_rows_kernel import ampere_p_rows
from sagesim_kernels.ampere.support import FOR_THREE
from sagesim_kernels.launching import launch
from sagesim_kernels.operands import (
    LOG2_E,
    KernelProblem,
    KernelSizes,
    OperandCache,
    Rows,
    RowStatistics,
    padded,
)
from sagesim_kernels.portable import Tile, try_tiles


def _tile(channels: int) -> Tile:
    """Return the fastest tile of queries. It fits into the shared memory of every GPU."""
    return Tile(128, 4, 2) if channels == 64 else Tile(64, 4, 2, registers=FOR_THREE)


def launch_p_rows(
    problem: KernelProblem,
    operands: OperandCache,
    statistics: RowStatistics,
    d_lse: Rows | None,
    p_sums: Rows | None,
) -> None:
    """Fill p_sums and statistics.delta; see `portable.launch_p_rows`."""
    lse2, delta = statistics
    channels = padded(problem.q.shape[3])

    def run(tile: Tile) -> None:
        grid = grid_of_queries(problem, tile)
        launch(
            ampere_p_rows,
            grid.programs,
            grid,
            operands.get("qk_recompute", "q"),
            operands.get("qk_recompute", "k"),
            operands.get("dp", "do"),
            operands.get("dp", "v"),
            lse2,
            delta if problem.spec.delta is Delta.FROM_P else None,
            p_sums,
            d_lse,
            problem.lengths,
            problem.scale * LOG2_E,
            KernelSizes.of(problem, tile.rows),
            RowConfig(tile.rows, tile.num_stages, channels),
            **tile.options,
        )

    try_tiles([_tile(channels)], run, f"row sums of P at head size {problem.q.shape[3]}")
