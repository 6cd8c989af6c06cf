"""Launch the forward for GPUs that multiply with mma.sync."""

from __future__ import annotations

from torch import Tensor

from sagesim_kernels.ampere.device import BLOCK
from sagesim_kernels.ampere.forward_kernel import RowConfig, ampere_forward
from sagesim_kernels.ampere.support import FOR_FOUR, programs_at_a_time
from sagesim_kernels.launching import launch
from sagesim_kernels.operands import (
    BYTES_OF_A_KEY,
    LOG2_E,
    Grid,
    KernelProblem,
    KernelSizes,
    OperandCache,
    Rows,
    Strided,
    allows_fixed_reference,
    choose_forward_heads,
    heads_of_packed_tiles,
    order_tiles,
    padded,
)
from sagesim_kernels.portable import Tile, compute_failed_rows, try_tiles


def _tile(channels: int, *, p_in_codes: bool, is_fixed: bool) -> Tile:
    """Return the fastest tile of queries. It fits into the shared memory of every GPU.

    With 32 rows, a warp loads each key and value for twice as many rows as with 16. At 128
    channels, there are enough registers for that only if P is computed of 16 keys at a time.

    p_in_codes: whether P is rounded to codes. Their products take more instructions and fewer loads
    of operands, so that more warps with 16 rows each are faster than fewer with 32.
    is_fixed: whether P has a fixed reference, so that it can be computed of few keys at a time.
    """
    if channels == 128:
        return Tile(128, 4, 2, step=16) if is_fixed else Tile(64, 4, 2)
    return Tile(64, 4, 2, registers=FOR_FOUR) if p_in_codes else Tile(128, 4, 2)


def grid_of_queries(problem: KernelProblem, tile: Tile) -> Grid:
    """Return the programs of a kernel that owns tiles of queries."""
    grid = problem.query_grid(tile.rows)
    if grid.cu is not None:
        channels = padded(problem.v.shape[3])
        head_bytes = problem.longest_k * channels * BYTES_OF_A_KEY // problem.groups
        programs = programs_at_a_time(tile)
        heads_per_group = heads_of_packed_tiles(
            problem, grid, tile.rows, programs, head_bytes, queries=True
        )
        order = order_tiles(problem, grid, tile.rows, queries=True)
        return grid._replace(heads_per_group=heads_per_group, order=order)
    heads_per_group = choose_forward_heads(
        problem.longest_q,
        problem.longest_k,
        problem.longest_offset,
        problem.longest_lowest,
        tile.rows,
        grid.all_heads,
        programs_at_a_time(tile),
    )
    return grid._replace(heads_per_group=heads_per_group)


def launch_forward(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor,
    lse2: Tensor,
    *,
    sink2: Tensor | None = None,
) -> None:
    """Fill o and lse2, which is contiguous; see `portable.launch_forward`."""
    q, k, v = operands.get("qk", "q"), operands.get("qk", "k"), operands.get("pv", "v")
    channels = padded(problem.q.shape[3])
    # With a limit on the left, the first block depends on the tile.
    is_fixed = allows_fixed_reference(problem) and problem.lengths.left is None

    def run(tile: Tile) -> None:
        grid = grid_of_queries(problem, tile)
        launch(
            ampere_forward,
            grid.programs,
            grid,
            q,
            k,
            v,
            Strided.of(o),
            Rows.of(lse2),
            sink2,
            problem.lengths,
            problem.scale * LOG2_E,
            problem.scale < 0,
            KernelSizes.of(problem, tile.rows),
            RowConfig(tile.rows, tile.num_stages, channels),
            tile.step or BLOCK.value,
            is_fixed,
            **tile.options,
        )

    tile = _tile(channels, p_in_codes=v.scale is not None, is_fixed=is_fixed)
    try_tiles([tile], run, f"the forward at head size {problem.q.shape[3]}")
    if is_fixed:
        compute_failed_rows(problem, operands, o, lse2, sink2=sink2)
