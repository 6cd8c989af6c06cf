"""The backward for Hopper: its preparation, one pass over the queries, and dQ from its sums."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sagesim_kernels.hopper.backward_blocks import PARTS
from sagesim_kernels.hopper.backward_kernel import Config, hopper_backward
from sagesim_kernels.hopper.backward_loads import ROW_STATS, STATS_LAYOUT
from sagesim_kernels.hopper.backward_stores import BLOCK_WARPS, WARPS
from sagesim_kernels.hopper.capped_rows import (
    prepare_capped_backward,
    sums_of_ds,
)
from sagesim_kernels.hopper.descriptors import (
    sums_descriptor,
    tma_descriptor,
    token_descriptor,
)
from sagesim_kernels.hopper.dq_parts import BLOCK_Q, TILE_K
from sagesim_kernels.hopper.support import have_key_ends
from sagesim_kernels.hopper.tile_scheduler import (
    MOST_QUERY_HEADS,
    BackwardOrder,
    choose_backward_order,
    has_few_steps,
    order_of_keys,
)
from sagesim_kernels.launching import launch
from sagesim_kernels.operands import (
    LAUNCH,
    DqSums,
    Gradients,
    KernelProblem,
    OperandCache,
    Rows,
    RowStatistics,
    Softcap,
    Splits,
    Strided,
    ds_row_sums,
    finish_dq,
    order_tiles,
    padded,
)
from sagesim_kernels.preparation.one_pass import prepare_backward_in_one_pass
from sagesim_kernels.target import multiprocessor_count

_BLOCK_Q: Final = BLOCK_Q.value
_TILE_K: Final = TILE_K.value


def launch_backward(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor,
    do: Tensor,
    statistics: RowStatistics,
    d_lse: Rows | None,
    grads: Gradients,
    *,
    shift: Tensor | None = None,
    p_sink: Tensor | None = None,
) -> None:
    """Fill grads and statistics.delta.

    Args:
        problem: the call.
        operands: its operands, of which none was rounded yet.
        o, do: [sequences, heads, n_q, d], any strides.
        statistics: lse2 of the forward; delta is written.
        d_lse: the gradient of the logsumexp, or None.
        grads: [sequences, heads, tokens, d] each, any strides.
        shift: what smoothing K subtracted from the logits, [sequences, heads, n_q]; only a softcap
            needs it.
        p_sink: the share of the sink in each row's sum, [sequences, heads, n_q]; None without
            sinks.
    """
    dq, dk, dv = grads
    channels = padded(dk.shape[3])
    # Before the preparation: `hopper_backward` reads the order before it waits for that.
    packed_tiles = order_tiles(problem, problem.key_grid(_TILE_K), _TILE_K, queries=False)
    softcap = Softcap.of(problem, shift)
    ds_is_added = softcap.base2 is not None or d_lse is not None or p_sink is not None
    is_one_part = not ds_is_added and has_one_part(problem, operands, dq)
    dq_sums = DqSums.of_one_part(problem) if is_one_part else DqSums.by_tma(problem, channels)
    tokens_q = dq_sums.tokens
    row_stats = dq.new_empty(dq.shape[1] * tokens_q * 4, dtype=torch.float32)
    has_dq_warps = channels == 64
    deltas = None
    if has_dq_warps:
        deltas = dq.new_empty((dq.shape[1] * tokens_q, 4), dtype=torch.int32)
    prepared = (problem, operands, o, do, statistics, d_lse, dq_sums, row_stats)
    shifts = ds_sums = None
    if softcap.base2 is None:
        prepare_backward_in_one_pass(*prepared, tile=_TILE_K, deltas=deltas)
    else:
        shifts, ds_sums = prepare_capped_backward(*prepared, softcap, tile=_TILE_K, deltas=deltas)
    q8, k8 = operands.get("qk_recompute", "q"), operands.get("qk_recompute", "k")
    q16, v16 = operands.get("dk", "q"), operands.get("dp", "v")
    do16 = operands.get("dp", "do")
    k16, mean = operands.get_unsmoothed("dq", "k")
    kv_heads, d, d_v = dk.shape[1], dk.shape[3], dv.shape[3]
    splits = Splits.of(problem, MOST_QUERY_HEADS)
    lengths, scale = problem.lengths, problem.scale
    tokens_k = k8.scale.shape[1] * _BLOCK_Q
    dk_parts, dv_parts = splits.parts(dk), splits.parts(dv)
    tiles = problem.key_grid(_TILE_K, dk_parts.shape[1])
    count = tiles.programs[0]
    if lengths.cu_k is None and lengths.seqused_k is None and lengths.key_mask is None:
        order = choose_backward_order(
            problem.longest_q,
            problem.longest_k,
            problem.longest_offset,
            _TILE_K,
            tiles.all_heads,
            splits.query_heads,
            multiprocessor_count(),
            channels,
            lowest=problem.longest_lowest,
        )
    else:
        # Sequences of other lengths, which the host does not know, would change the balance.
        heads = order_of_keys(problem, tiles, _TILE_K, splits.query_heads, channels)
        order = BackwardOrder(heads, is_dealt=False)
    is_joint = not has_dq_warps and (
        softcap.base2 is not None
        or has_few_steps(
            problem.longest_q,
            problem.longest_k,
            problem.longest_offset,
            _TILE_K,
            splits.query_heads,
            problem.longest_lowest,
        )
    )
    config = Config(
        groups=splits.query_heads,
        splits=splits.programs,
        d=d,
        d_v=d_v,
        has_dq_warps=has_dq_warps,
        is_joint=is_joint,
        copied=operands.copied,
        is_dealt=order.is_dealt,
    )
    programs = multiprocessor_count() if order.is_dealt else count
    of_queries = operands.are_packed(keys=False)
    of_keys = have_key_ends(problem, operands)
    launch(
        hopper_backward,
        (programs,),
        tma_descriptor(q8.ptr.view(-1, q8.stride_n), _BLOCK_Q, channels),
        tma_descriptor(k8.ptr.view(-1, k8.stride_n), _TILE_K, channels),
        token_descriptor(q16.ptr, _BLOCK_Q, channels, has_ends=of_queries),
        token_descriptor(k16.ptr, _TILE_K, channels, has_ends=of_keys),
        token_descriptor(v16.ptr, _TILE_K, channels, has_ends=of_keys),
        token_descriptor(do16.ptr, _BLOCK_Q, channels, has_ends=of_queries),
        TensorDescriptor.from_tensor(row_stats, [ROW_STATS.value], STATS_LAYOUT.value),
        None
        if shifts is None
        else TensorDescriptor.from_tensor(shifts, [_BLOCK_Q], STATS_LAYOUT.value),
        None
        if deltas is None
        else tma_descriptor(deltas.view(torch.bfloat16), _BLOCK_Q, PARTS.value),
        k8.scale,
        None if mean is None else mean.ptr,
        softcap.base2,
        ds_sums,
        Strided.of(dk_parts),
        Strided.of(dv_parts),
        token_descriptor(dq, _BLOCK_Q, channels, has_ends=of_queries)
        if is_one_part
        else sums_descriptor(dq_sums, d, channels),
        dq_sums.unit,
        lengths._replace(n_q=None, n_k=None, left=None, right=None, key_counts=None, key_runs=None),
        # Not n_q and n_k of `lengths`: the kernel would be compiled for whether 16 divides them.
        problem.q.shape[2],
        problem.k.shape[2],
        lengths.left,
        lengths.right,
        tiles.tiles,
        kv_heads,
        packed_tiles,
        tiles.all_heads,
        order.heads_per_group,
        programs,
        -(-count // programs),
        tokens_q,
        tokens_k,
        scale,
        config,
        num_warps=(WARPS if is_joint else BLOCK_WARPS).value,
        **LAUNCH,
    )
    splits.add(problem, dk_parts, dk, scale)
    splits.add(problem, dv_parts, dv, 1.0)
    if is_one_part:
        return
    if ds_sums is None:
        row_sums = ds_row_sums(problem, p_sink, statistics, d_lse)
    else:
        row_sums = sums_of_ds(problem, ds_sums)
    finish_dq(problem, dq_sums, statistics.lse2, row_sums, operands.subtracted, dq)


def has_one_part(problem: KernelProblem, operands: OperandCache, dq: Tensor) -> bool:
    """Return whether one program computes all of dQ of each query, and TMA can store it.

    Each query has to attend to a key: otherwise no program stores its dQ. If queries are not
    copied, each does, except in a sequence without keys. Packed sequences with unequal numbers of
    queries and keys may have none, and so may padded ones.
    """
    vector = 16 // dq.element_size()
    return (
        problem.longest_k <= _TILE_K
        and not operands.copied.queries
        and (problem.cu_q is None or problem.has_equal_lengths)
        and problem.extras.seqused_k is None
        and problem.extras.key_mask is None
        and dq.element_size() == 2
        and dq.data_ptr() % 16 == 0
        and dq.stride(3) == 1
        and all(stride % vector == 0 for stride in dq.stride()[:3])
    )
