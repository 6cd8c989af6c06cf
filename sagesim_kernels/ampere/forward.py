"""Launch the forward for GPUs that multiply with mma.sync."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from sagesim_kernels.ampere.forward_kernel import RowConfig, ampere_forward
from sagesim_kernels.launch_plans import launch
from sagesim_kernels.operands import (
    LAUNCH,
    LOG2_E,
    Grid,
    KernelProblem,
    KernelSizes,
    OperandCache,
    Rows,
    Strided,
    padded,
)
from sagesim_kernels.portable import Tile, try_tiles


def row_tiles(channels: int) -> Iterator[Tile]:
    """Yield the tiles of queries to try, the best first."""
    if channels == 64:
        yield Tile(128, 4, 2)
    yield Tile(64, 4, 2)


def launch_forward(problem: KernelProblem, operands: OperandCache, o: Tensor, lse2: Tensor) -> None:
    """Fill o and lse2; see `portable.launch_forward`."""
    q, k, v = operands.get("qk", "q"), operands.get("qk", "k"), operands.get("pv", "v")
    channels = padded(problem.q.shape[3])

    def run(tile: Tile) -> None:
        grid = Grid(-(-problem.longest_q // tile.rows), problem.q.shape[1], problem.sequences)
        launch(
            ampere_forward,
            grid.programs,
            grid,
            q,
            k,
            v,
            Strided.of(o),
            Rows.of(lse2),
            problem.lengths,
            problem.scale * LOG2_E,
            problem.scale < 0,
            KernelSizes.of(problem, tile.rows),
            RowConfig(tile.rows, tile.num_stages, channels),
            **tile.options,
        )

    try_tiles(row_tiles(channels), run, f"the forward at head size {problem.q.shape[3]}")
