"""Launch the backward for GPUs that multiply with mma.sync."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import partial
from typing import Final

import torch
from torch import Tensor

from sagesim.spec import Granularity
from sagesim_kernels.ampere.backward_kernel import Config, ampere_backward
from sagesim_kernels.ampere.p_rows import launch_p_rows
from sagesim_kernels.ampere.query_buffers import STATS
from sagesim_kernels.ampere.support import BLOCK, FOR_THREE, programs_at_a_time
from sagesim_kernels.launching import launch
from sagesim_kernels.operands import (
    BYTES_OF_A_QUERY,
    DqSums,
    Gradients,
    KernelProblem,
    KernelSizes,
    Operand,
    OperandCache,
    Rows,
    RowStatistics,
    Splits,
    Strided,
    choose_backward_heads,
    ds_row_sums,
    finish_dq,
    heads_of_packed_tiles,
    order_tiles,
    padded,
)
from sagesim_kernels.portable import Tile, map_product, try_tiles
from sagesim_kernels.preparation import (
    compute_query_rows,
    has_one_pass,
    prepare_backward,
)
from sagesim_kernels.preparation.one_pass import prepare_backward_in_one_pass
from sagesim_kernels.target import block_shared_memory

_FOR_TWO: Final = 2 * 64 * 1024
"""Bytes of shared memory that are enough for two programs."""


class _Maps(Enum):
    """How P and dS are rounded, on which the best tile depends."""

    IN_16_BIT = "to one 16-bit format"
    ONE_SCALE = "to codes with one scale for each tile"
    IN_CODES = "to codes, some of them with scales of rows"
    OTHERWISE = "to several formats"

    @property
    def keys_of_a_warp(self) -> int:
        return 32 if self is _Maps.IN_16_BIT else 16

    @classmethod
    def of(cls, problem: KernelProblem, operands: OperandCache) -> _Maps:
        products = (problem.spec.dv, problem.spec.dq, problem.spec.dk)
        if all(x.precision.is_scaled for x in products):
            one_scale = all(x.lhs is Granularity.PerTile for x in products)
            return cls.ONE_SCALE if one_scale else cls.IN_CODES
        has_codes = any(x.precision.is_scaled for x in products)
        of_dq, of_dk = (operands.get("dq", "k").ptr, operands.get("dk", "q").ptr)
        return cls.OTHERWISE if has_codes or of_dq.dtype != of_dk.dtype else cls.IN_16_BIT


def _tiles(channels: int, maps: _Maps) -> Iterator[Tile]:
    """Yield the tiles to try, the best first. A program owns keys, and `step` counts queries.

    In 16 bit, shared memory limits the products, so a warp owns 32 keys: it loads right operands
    half as often as with 16. Products of codes are limited by the number of instructions. At head
    size 128 a program owns 64 keys: with 128, or with two stages for maps that have scales of rows,
    registers are spilled.

    Args:
        channels: of a tile.
        maps: how P and dS are rounded.
    """
    has_room = channels == 64 and block_shared_memory() > _FOR_TWO
    if maps is _Maps.IN_16_BIT:
        if has_room:
            yield Tile(128, 4, 1, step=32)
        yield Tile(128, 8, 1, step=64)
        yield Tile(128, 8, 1, step=32)
        yield Tile(64, 4, 1, step=32)
    elif maps is _Maps.ONE_SCALE and channels == 64:
        yield Tile(64, 4, 1, step=64, registers=FOR_THREE)
    elif maps in (_Maps.ONE_SCALE, _Maps.IN_CODES) and channels == 128:
        if maps is _Maps.ONE_SCALE:
            yield Tile(64, 8, 2, step=64)
        yield Tile(64, 8, 1, step=64)
    else:
        if has_room:
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
    maps: _Maps,
) -> None:
    """Launch the kernel with a tile of keys."""
    q, k = operands.get("qk_recompute", "q"), operands.get("qk_recompute", "k")
    do, v = operands.get("dp", "do"), operands.get("dp", "v")
    q_right, do_right = operands.get("dk", "q"), operands.get("dv", "do")
    k_right = operands.get("dq", "k")
    offset = problem.longest_offset
    splits = Splits.of(problem, problem.groups)
    dk, dv = splits.parts(grads.dk), splits.parts(grads.dv)
    heads = dk.shape[1]
    grid = problem.key_grid(tile.rows, heads)
    heads_per_group = 1  # without a mask all tiles take the same time
    if grid.cu is not None:
        channels = splits.query_heads * padded(problem.q.shape[3])
        head_bytes = problem.longest_q * channels * BYTES_OF_A_QUERY
        heads_per_group = heads_of_packed_tiles(
            problem,
            grid,
            tile.rows,
            programs_at_a_time(tile),
            head_bytes,
            queries=False,
            query_heads=splits.query_heads,
        )
        grid = grid._replace(packed_tiles=order_tiles(problem, grid, tile.rows, queries=False))
    elif offset is not None or problem.longest_lowest is not None:
        heads_per_group = choose_backward_heads(
            problem.longest_q,
            problem.longest_k,
            offset,
            tile.rows,
            grid.all_heads,
            splits.query_heads,
            programs_at_a_time(tile),
            problem.longest_lowest,
        )
    config = Config(
        keys=tile.rows,
        queries=tile.step,
        across=tile.num_warps * maps.keys_of_a_warp // tile.rows,
        stages=tile.num_stages,
        channels=padded(problem.q.shape[3]),
        q_right=_bits(q_right, q),
        do_right=_bits(do_right, do),
        k_right=_bits(k_right, k),
        splits=splits.programs,
    )
    launch(
        ampere_backward,
        grid.programs,
        grid._replace(heads_per_group=heads_per_group),
        q,
        k,
        do,
        v,
        q_right,
        do_right,
        k_right,
        row_stats,
        dq_sums,
        Strided.of(dk),
        Strided.of(dv),
        problem.lengths,
        map_product(problem, "dv", "p", same_right=False),
        map_product(problem, "dq", "ds", same_right=False),
        map_product(problem, "dk", "ds", same_right=False),
        splits.factor(problem.scale),
        KernelSizes.of(problem, tile.rows),
        config,
        **tile.options,
    )
    splits.add(problem, dk, grads.dk, problem.scale)
    splits.add(problem, dv, grads.dv, 1.0)


def launch_backward(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor | None,
    do: Tensor,
    statistics: RowStatistics,
    d_lse: Rows | None,
    grads: Gradients,
    *,
    p_sink: Tensor | None = None,
) -> None:
    """Fill grads, any strides, and statistics.delta; see `portable.launch_backward`."""
    d, heads = problem.q.shape[3], problem.q.shape[1]
    dq_sums = DqSums.by_threads(problem, BLOCK, padded(d), 4)
    row_stats = do.new_empty(heads * dq_sums.tokens * STATS.value, dtype=torch.float32)
    prepared = (problem, operands, o, do, statistics, d_lse, dq_sums)
    if has_one_pass(problem.spec):
        prepare_backward_in_one_pass(*prepared, row_stats, tile=BLOCK)
    else:
        operands.quantize("qk_recompute", "dv", "dq", "dk")
        sum_rows = partial(launch_p_rows, problem, operands, statistics, d_lse)
        fill_units = partial(compute_query_rows, tile=BLOCK, row_stats=row_stats)
        prepare_backward(*prepared, sum_rows, fill_units=fill_units)
    maps = _Maps.of(problem, operands)
    try_tiles(
        _tiles(padded(d), maps),
        lambda tile: launch_kernel(tile, problem, operands, row_stats, dq_sums, grads, maps),
        f"the backward at head size {d}",
    )
    ds_sums = ds_row_sums(problem, p_sink, statistics, d_lse)
    finish_dq(problem, dq_sums, statistics.lse2, ds_sums, operands.subtracted, grads.dq)
