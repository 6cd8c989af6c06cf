"""Sums over rows of P, in one program for each tile of queries: delta from P, and the sums of P."""

from __future__ import annotations

import triton
import triton.language as tl

from sagesim.spec import Delta
from sagesim_kernels.launching import launch, wait_for_earlier_kernels
from sagesim_kernels.operands import (
    LOG2_E,
    HeadIndex,
    KernelProblem,
    KernelSizes,
    OperandCache,
    Rows,
    RowStatistics,
    Softcap,
    apply_k_scale,
    attends_in,
    causal_offset,
    head_pointers,
    key_bias,
    key_loops,
    length_of,
    live_keys,
    live_queries,
    load_block,
    load_block_scales,
    load_rows,
    load_shift,
    load_token_scales,
    load_tokens,
    padded,
    program_coordinates,
    store_rows,
    subtract_lse_gradient,
    tanh,
    tokens_by_tokens,
)
from sagesim_kernels.portable.tiles import Tile, most_rows, tiles, try_tiles


@triton.jit
def p_rows_kernel(
    grid, q, k, do, v, subtracted, softcap, lse2, delta, p_sums, p_bound, d_lse, lengths, scale,
    sizes,
):  # fmt: skip
    """Compute rowsum(P), delta = rowsum(P o dP) and the largest P of each row of a tile of queries.

    What has no memory is not computed.

    q, k, do, v: `Operand` of qk_recompute and dp; do and v are not used if delta is None.
    subtracted: `SubtractedMeans`. softcap: `Softcap`. scale: the logit scale times
    log2(e), or divided by the softcap.
    """
    wait_for_earlier_kernels()
    tile, h, b = program_coordinates(grid, lengths.IS_CAUSAL)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = tile * sizes.TILE
    if first >= n_q:
        return
    k_head = h // sizes.GROUPS
    first_live, _ = live_queries(lengths, b)
    n_k = live_keys(lengths, b)
    offset = causal_offset(lengths, b)
    queries = first + tl.arange(0, sizes.TILE)

    q_base, q_scales = head_pointers(q, lengths.cu_q, lengths.n_q, b, h)
    k_base, k_scales = head_pointers(k, lengths.cu_k, lengths.n_k, b, k_head)
    q_tile = load_tokens(q, q_base, first, sizes.TILE, n_q, sizes.D_PAD, first_live)
    q_factor = load_token_scales(q, q_scales, first, sizes.TILE, n_q)[:, None] * scale
    if softcap.base2 is not None:
        row_shift = load_shift(softcap, lengths.cu_q, b, h, queries, n_q)[:, None]
    row_lse2 = load_rows(lse2, lengths.cu_q, b, h, queries, n_q, float("inf"))
    p_sum = tl.zeros((sizes.TILE,), tl.float32)
    delta_sum = tl.zeros((sizes.TILE,), tl.float32)
    top = tl.full((sizes.TILE,), -float("inf"), tl.float32)
    if delta is not None:
        do_base, do_scales = head_pointers(do, lengths.cu_q, lengths.n_q, b, h)
        v_base, v_scales = head_pointers(v, lengths.cu_k, lengths.n_k, b, k_head)
        do_tile = load_tokens(do, do_base, first, sizes.TILE, n_q, sizes.DV_PAD, first_live)
        do_scale = load_token_scales(do, do_scales, first, sizes.TILE, n_q)[:, None]
    begin, whole, whole_end, end = key_loops(
        lengths, b, first, sizes.TILE, sizes.BLOCK_K, n_k, offset
    )
    if lengths.key_mask is not None:
        whole = begin
        whole_end = begin
    # Parts: 0, keys to which all queries attend, without a mask; 1, the right edge; 2, the left.
    for PART in tl.static_range(  # pyright: ignore[reportGeneralTypeIssues]
        0 if lengths.key_mask is None else 1, 2 if lengths.left is None else 3
    ):
        for key in range(
            whole if PART == 0 else whole_end if PART == 1 else begin,
            whole_end if PART == 0 else end if PART == 1 else whole,
            sizes.BLOCK_K,
        ):
            keys = key + tl.arange(0, sizes.BLOCK_K)
            k_tile = load_block(k, k_base, key, sizes.BLOCK_K, n_k, sizes.D_PAD, PART == 0)
            k_scale = load_block_scales(k, k_scales, key, sizes.BLOCK_K)[None, :]
            s, factor = apply_k_scale(
                tokens_by_tokens(q_tile, k_tile), q_factor, k, k_scale, sizes.BLOCK_K
            )
            if subtracted.q_mean is not None:
                block = first // sizes.BLOCK_Q
                head = HeadIndex(b, h, k_head)
                bias = key_bias(subtracted, lengths, head, block, key, sizes.BLOCK_K, n_k, sizes)
                s = s * factor + bias[None, :] * scale
                factor = tl.full((1, 1), 1.0, tl.float32)
            if softcap.base2 is not None:
                s = tanh(tl.fma(s, factor, row_shift)) * softcap.base2
            elif subtracted.q_mean is None:
                s = s * factor
            s -= row_lse2[:, None]
            if PART > 0:
                visible = attends_in(lengths, b, queries[:, None], keys[None, :], n_k, offset)
                s = tl.where(visible, s, -float("inf"))
            p = tl.exp2(s)
            if p_sums is not None or p_bound is not None:
                p_sum += tl.sum(p, 1)
            if p_bound is not None:
                top = tl.maximum(top, tl.max(s, 1))
            if delta is not None:
                v_tile = load_block(v, v_base, key, sizes.BLOCK_K, n_k, sizes.DV_PAD, PART == 0)
                v_scale = load_block_scales(v, v_scales, key, sizes.BLOCK_K)[None, :]
                p_dp = p * (tokens_by_tokens(do_tile, v_tile) * (do_scale * v_scale))
                if PART > 0:
                    p_dp = tl.where(visible, p_dp, 0.0)  # dP may be NaN where P is 0
                delta_sum += tl.sum(p_dp, 1)
    if p_sums is not None:
        store_rows(p_sums, lengths.cu_q, b, h, queries, n_q, p_sum)
    if p_bound is not None:
        # A maximum may drop a NaN, which a sum keeps.
        bound = tl.where(p_sum == p_sum, tl.exp2(top), p_sum)
        store_rows(p_bound, lengths.cu_q, b, h, queries, n_q, bound)
    if delta is not None:
        result = subtract_lse_gradient(delta_sum, d_lse, lengths, b, h, queries, n_q, row_lse2)
        store_rows(delta, lengths.cu_q, b, h, queries, n_q, result)


def launch_p_rows(
    problem: KernelProblem,
    operands: OperandCache,
    statistics: RowStatistics,
    d_lse: Rows | None,
    softcap: Softcap,
    p_bound: Rows | None,
    p_sums: Rows | None,
) -> None:
    """Fill statistics.delta if delta comes from P, and p_bound and p_sums unless they are None.

    p_bound: gets the largest P of each row. p_sums: gets the row sums of P.

    Raises:
        ValueError: if the device has too little shared memory for the spec's blocks.
    """
    lse2, delta = statistics
    spec, d = problem.spec, problem.q.shape[3]

    def run(tile: Tile) -> None:
        grid = problem.query_grid(tile.rows)
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
            p_bound,
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
