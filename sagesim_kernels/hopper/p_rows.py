"""Launch the kernel of the sums and maxima of rows of P for Hopper."""

from __future__ import annotations

from sagesim.spec import Delta
from sagesim_kernels.hopper.descriptors import key_scales_of, tma_descriptor, token_descriptor
from sagesim_kernels.hopper.p_rows_kernel import hopper_p_rows
from sagesim_kernels.hopper.p_rows_warps import BLOCK, TILE
from sagesim_kernels.hopper.support import have_key_ends
from sagesim_kernels.launching import launch
from sagesim_kernels.operands import (
    LAUNCH,
    LOG2_E,
    KernelProblem,
    OperandCache,
    Rows,
    RowStatistics,
    padded,
    stored_tokens,
)


def launch_p_rows(
    problem: KernelProblem,
    operands: OperandCache,
    statistics: RowStatistics,
    d_lse: Rows | None,
    p_sums: Rows | None,
    p_bound: Rows | None = None,
) -> None:
    """Fill p_sums, p_bound and statistics.delta; see `portable.launch_p_rows`.

    p_sums: None if the sums are not needed.
    """
    lse2, delta = statistics
    has_delta = problem.spec.delta is Delta.FROM_P
    channels, block = padded(problem.q.shape[3]), BLOCK.value
    q8, k8 = operands.get("qk_recompute", "q"), operands.get("qk_recompute", "k")
    do16, v16 = operands.get("dp", "do"), operands.get("dp", "v")
    grid = problem.query_grid(TILE.value)
    of_queries = operands.are_packed(keys=False)
    of_keys = have_key_ends(problem, operands)
    launch(
        hopper_p_rows,
        grid.programs,
        grid,
        tma_descriptor(q8.ptr.view(-1, q8.stride_n), block, channels),
        token_descriptor(do16.ptr, block, channels, has_ends=of_queries) if has_delta else None,
        tma_descriptor(k8.ptr.view(-1, k8.stride_n), block, channels),
        token_descriptor(v16.ptr, block, channels, has_ends=of_keys) if has_delta else None,
        key_scales_of(k8, block),
        q8,
        k8,
        lse2,
        delta if has_delta else None,
        p_sums,
        p_bound,
        d_lse,
        problem.lengths,
        stored_tokens(problem.cu_q, problem.q),
        stored_tokens(problem.cu_k, problem.k),
        problem.scale * LOG2_E,
        problem.k.shape[3],
        problem.v.shape[3],
        problem.groups,
        operands.copied,
        num_warps=4,
        **LAUNCH,
    )
