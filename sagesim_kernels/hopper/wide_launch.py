"""The launch of the kernel for heads with more than 128 channels."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sagesim_kernels.hopper.channel_parts import BLOCK
from sagesim_kernels.hopper.wide_kernel import hopper_wide
from sagesim_kernels.hopper.wide_structures import Config
from sagesim_kernels.hopper.wide_warps import TILE
from sagesim_kernels.launching import launch
from sagesim_kernels.operands import (
    BYTES_OF_A_QUERY,
    LAUNCH,
    KernelProblem,
    Rows,
    Softcap,
    Strided,
    choose_backward_heads,
    heads_of_packed_tiles,
    order_tiles,
    stored_tokens,
)
from sagesim_kernels.target import multiprocessor_count

_Pair = tuple[TensorDescriptor, TensorDescriptor] | tuple[None, None]


class Side(NamedTuple):
    """TMA descriptors of queries or of keys; the fields of `Tokens`, a pair of parts each."""

    codes: _Pair
    numbers: _Pair = (None, None)
    right: _Pair = (None, None)


def launch_wide(
    problem: KernelProblem,
    out: Tensor,
    lse2: Rows,
    own: Side,
    streamed: Side,
    k_scale: Tensor,
    scale: float,
    config: Config,
    *,
    q_scale: Tensor | None = None,
    stats: TensorDescriptor | None = None,
    row_stats: Tensor | None = None,
    sink2: Tensor | None = None,
    softcap: Softcap,
    ds_sums: Rows | None = None,
    k_mean: Tensor | None = None,
) -> None:
    """Fill out, any strides, and in the forward lse2.

    The arguments are those of `hopper_wide`; the shift of the softcap has the strides of lse2.
    """
    n_q, n_k = problem.longest_q, problem.longest_k
    offset, lowest = problem.longest_offset, problem.longest_lowest
    lengths: Any = problem.lengths
    heads = problem.q.shape[1] if config.owns_queries else problem.k.shape[1]
    owned, others = (n_q, n_k) if config.owns_queries else (n_k, n_q)
    if config.owns_queries:  # as seen from the last token
        offset = None if offset is None else offset + n_q - n_k
        lowest = None if lowest is None else lowest + n_q - n_k
    tiles = problem.token_grid(not config.owns_queries, TILE.value, out.shape[1])
    packed_tiles = order_tiles(problem, tiles, TILE.value, queries=config.owns_queries)
    query_heads = 1 if config.owns_queries else config.groups
    if tiles.cu is not None:
        channels = query_heads * (config.tile_d + config.tile_dv) // 2
        heads_per_group = heads_of_packed_tiles(
            problem,
            tiles,
            TILE.value,
            multiprocessor_count(),
            others * channels * BYTES_OF_A_QUERY,
            queries=config.owns_queries,
            query_heads=query_heads,
        )
    else:
        heads_per_group = choose_backward_heads(
            others,
            owned,
            offset,
            TILE.value,
            tiles.all_heads,
            query_heads,
            multiprocessor_count(),
            lowest=lowest,
        )
    launch(
        hopper_wide,
        tiles.programs,
        *own.codes,
        *own.numbers,
        *streamed.codes,
        *streamed.numbers,
        *streamed.right,
        stats,
        row_stats,
        q_scale,
        k_scale,
        sink2,
        softcap.inverse,
        softcap.base2,
        softcap.shift,
        ds_sums,
        k_mean,
        Strided.of(out),
        lse2,
        lengths._replace(n_q=0, n_k=0, left=None, right=None, key_counts=None),
        # Not n_q and n_k of `lengths`: the kernel would be compiled for whether 16 divides them.
        problem.q.shape[2],
        problem.k.shape[2],
        lengths.left,
        lengths.right,
        tiles.tiles,
        heads,
        packed_tiles,
        heads_per_group,
        stored_tokens(problem.cu_q, problem.q),
        k_scale.shape[1] * BLOCK.value,
        scale,
        config,
        num_warps=4,
        **LAUNCH,
    )
