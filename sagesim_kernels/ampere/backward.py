"""Launch the backward for GPUs that multiply with mma.sync."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor
from triton.runtime import driver

from sagesim.spec import Granularity
from sagesim_kernels.ampere.backward_kernel import Config, ampere_backward
from sagesim_kernels.ampere.p_rows import launch_p_rows
from sagesim_kernels.ampere.query_buffers import STATS
from sagesim_kernels.ampere.row_stats import row_stats_kernel
from sagesim_kernels.ampere.support import BLOCK
from sagesim_kernels.launch_plans import launch
from sagesim_kernels.operands import (
    LAUNCH,
    LOG2_E,
    DqSums,
    Gradients,
    Grid,
    KernelProblem,
    KernelSizes,
    Operand,
    OperandCache,
    Rows,
    RowStatistics,
    Strided,
    finish_dq,
    padded,
    stored_tokens,
)
from sagesim_kernels.portable import Tile, map_product, prepare_backward, try_tiles

_FOR_TWO: Final = 2 * 64 * 1024
"""Bytes of shared memory that are enough for two programs."""

_FOR_THREE: Final = 168
"""The most registers of a thread of which three programs of four warps fit on a multiprocessor."""


@cache
def _shared_memory(device: int) -> int:
    """Return the bytes of shared memory that a block may use. Asking the driver takes long."""
    active: Any = driver.active
    return active.utils.get_device_properties(device)["max_shared_mem"]


def _tiles(channels: int, in_registers: bool, has_one_scale: bool) -> Iterator[Tile]:
    """Yield the tiles to try, the best first. A program owns keys, and `step` counts queries.

    If several warps share keys, each loads less from shared memory, which limits products of 16-bit
    numbers. Products of codes are limited by latency: small programs are faster, or copies of the
    next queries that start early.

    Args:
        channels: of a tile.
        in_registers: whether P and dS stay in the registers of their warp.
        has_one_scale: whether one scale of a tile of dS serves dQ and dK.
    """
    active: Any = driver.active
    has_room = _shared_memory(active.get_current_device()) > _FOR_TWO
    if not in_registers:
        if channels == 64 and has_room:
            yield Tile(128, 4, 1, step=32)
        yield Tile(128, 8, 1, step=64)
        yield Tile(128, 8, 1, step=32)
        yield Tile(64, 4, 1, step=32)
        return
    if channels == 64 and has_one_scale:
        yield Tile(64, 4, 1, step=64, registers=_FOR_THREE)
    if channels == 64 and has_room:
        yield Tile(64, 4, 2, step=64)
    for stages in (2, 1):
        yield Tile(128, 8, stages, step=64)
    yield Tile(64, 4, 1, step=64)


def _bits(x: Operand, other: Operand) -> int:
    """Return the bits of the numbers of x, or 0 if x is the other operand."""
    if x is other:
        return 0
    return 16 if x.scale is None else 8


def launch_kernel(
    tile: Tile,
    problem: KernelProblem,
    operands: OperandCache,
    row_stats: Tensor,
    dq_sums: DqSums,
    grads: Gradients,
    in_registers: bool,
) -> None:
    """Launch the kernel with a tile of keys. in_registers: see `_tiles`."""
    q, k = operands.get("qk_recompute", "q"), operands.get("qk_recompute", "k")
    do, v = operands.get("dp", "do"), operands.get("dp", "v")
    q_right, do_right = operands.get("dk", "q"), operands.get("dv", "do")
    k_right = operands.get("dq", "k")
    grid = Grid(-(-problem.longest_k // tile.rows), problem.k.shape[1], problem.sequences)
    config = Config(
        keys=tile.rows,
        queries=tile.step,
        across=tile.num_warps * (16 if in_registers else 32) // tile.rows,
        stages=tile.num_stages,
        channels=padded(problem.q.shape[3]),
        q_right=_bits(q_right, q),
        do_right=_bits(do_right, do),
        k_right=_bits(k_right, k),
    )
    launch(
        ampere_backward,
        grid.programs,
        grid,
        q,
        k,
        do,
        v,
        q_right,
        do_right,
        k_right,
        row_stats,
        dq_sums,
        Strided.of(grads.dk),
        Strided.of(grads.dv),
        problem.lengths,
        map_product(problem, "dv", "p", same_right=False),
        map_product(problem, "dq", "ds", same_right=False),
        map_product(problem, "dk", "ds", same_right=False),
        problem.scale,
        KernelSizes.of(problem, tile.rows),
        config,
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
) -> None:
    """Fill grads, any strides, and statistics.delta; see `portable.launch_backward`."""
    d, heads = problem.q.shape[3], problem.q.shape[1]
    dq_sums = DqSums.empty(problem, BLOCK, padded(d), 4)
    sum_rows = partial(launch_p_rows, problem, operands, statistics, d_lse)
    prepare_backward(problem, operands, o, do, statistics, d_lse, dq_sums, sum_rows)
    tokens = stored_tokens(problem.cu_q, problem.q)
    row_stats = torch.empty(heads * tokens * STATS.value, dtype=torch.float32, device=do.device)
    grid = Grid(-(-problem.longest_q // BLOCK), heads, problem.sequences)
    launch(
        row_stats_kernel,
        grid.programs,
        grid,
        operands.get("qk_recompute", "q"),
        *statistics,
        dq_sums,
        row_stats,
        problem.lengths,
        problem.scale * LOG2_E,
        KernelSizes.of(problem, BLOCK),
        **LAUNCH,
    )
    products = (problem.spec.dv, problem.spec.dq, problem.spec.dk)
    has_codes = any(matmul.precision.is_scaled for matmul in products)
    # Maps that are exchanged between warps are exchanged in one format for dQ and dK.
    in_registers = (
        has_codes or operands.get("dk", "q").ptr.dtype != operands.get("dq", "k").ptr.dtype
    )
    has_one_scale = all(
        matmul.precision.is_scaled and matmul.lhs is Granularity.PerTile
        for matmul in (problem.spec.dq, problem.spec.dk)
    )
    try_tiles(
        _tiles(padded(d), in_registers, has_one_scale),
        lambda tile: launch_kernel(
            tile, problem, operands, row_stats, dq_sums, grads, in_registers
        ),
        f"the backward at head size {d}",
    )
    finish_dq(problem, dq_sums, statistics.lse2, d_lse, operands.subtracted, grads.dq)
