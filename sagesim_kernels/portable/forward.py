"""The forward: S = Q K^T and O = P V by online softmax, one program for each tile of queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.launching import launch, wait_for_earlier_kernels
from sagesim_kernels.operands import (
    FAILED,
    LOG2_127,
    LOG2_E,
    HeadIndex,
    KernelProblem,
    KernelSizes,
    OperandCache,
    Rounding,
    Rows,
    Softcap,
    Strided,
    add_sink,
    apply_k_scale,
    attends_in,
    causal_offset,
    code_product,
    first_live_key,
    head_pointers,
    in_register_order,
    is_unmasked,
    key_bias,
    key_loops,
    length_of,
    live_keys,
    live_queries,
    load_block,
    load_block_scales,
    load_channel_scales,
    load_rows,
    load_shift,
    load_token_scales,
    load_tokens,
    padded,
    program_coordinates,
    store_rows,
    store_tokens,
    tanh,
    to_codes,
    tokens_by_tokens,
)
from sagesim_kernels.portable.p_and_ds import MapTile, MapTrace, store_codes
from sagesim_kernels.portable.tiles import Tile, tiles, try_tiles

_CODES_PER_P = tl.constexpr(2.0**-7)
"""Codes are 127 P. This factor, which changes no bit, keeps their sums from overflowing."""

_ROWS = tl.constexpr(1024)
"""Queries whose rows a program looks through for those that have failed."""

_LOG2_LEFT = tl.constexpr(LOG2_127 - 7)
"""log2 of the factor that remains in the row sums: 127 / 128."""


@triton.jit
def _finite(x):
    """Return x with 0 for -inf, the maximum of a row without keys: its exponentials become 0."""
    return tl.where(x == -float("inf"), 0.0, x)


@triton.jit
def _compute_tile(
    tile,
    h,
    b,
    heads,
    q,
    k,
    v,
    subtracted,
    o,
    lse2,
    sink2,
    softcap,
    trace,
    lengths,
    rounding,
    scale,
    IS_NEGATIVE: tl.constexpr,
    sizes,
    ONLY_FAILED: tl.constexpr,
):
    """Compute O and the logsumexp, in base 2, of a tile of queries of sequence b and head h.

    ONLY_FAILED: whether to store no rows but those that have failed, see `fixed_reference`. The
    others: see `forward_kernel`.
    """
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = tile * sizes.TILE
    k_head = h // sizes.GROUPS
    z = b * heads + h
    first_live, _ = live_queries(lengths, b)
    n_k, first_key = live_keys(lengths, b), first_live_key(lengths, b)
    offset = causal_offset(lengths, b)
    queries = first + tl.arange(0, sizes.TILE)

    q_base, q_scales = head_pointers(q, lengths.cu_q, lengths.n_q, b, h)
    k_base, k_scales = head_pointers(k, lengths.cu_k, lengths.n_k, b, k_head)
    v_base, v_scales = head_pointers(v, lengths.cu_k, lengths.n_k, b, k_head)
    q_tile = load_tokens(q, q_base, first, sizes.TILE, n_q, sizes.D_PAD, first_live)
    q_factor = load_token_scales(q, q_scales, first, sizes.TILE, n_q) * scale
    if softcap.base2 is not None:
        row_shift = load_shift(softcap, lengths.cu_q, b, h, queries, n_q)
    row_max = tl.full((sizes.TILE,), -float("inf"), tl.float32)
    row_sum = tl.zeros((sizes.TILE,), tl.float32)
    total = tl.zeros((sizes.TILE, sizes.DV_PAD), tl.float32)
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
            live = None
            if lengths.key_mask is not None:
                live = is_unmasked(lengths, b, keys, n_k)
            k_tile = load_block(k, k_base, key, sizes.BLOCK_K, n_k, sizes.D_PAD, PART == 0)
            k_scale = load_block_scales(k, k_scales, key, sizes.BLOCK_K)
            s, factor = apply_k_scale(
                tokens_by_tokens(q_tile, k_tile), q_factor, k, k_scale, sizes.BLOCK_K
            )
            if subtracted.q_mean is not None:
                block = first // sizes.BLOCK_Q
                head = HeadIndex(b, h, k_head)
                bias = key_bias(subtracted, lengths, head, block, key, sizes.BLOCK_K, n_k, sizes)
                s = s * factor[:, None] + bias[None, :] * scale
                factor = tl.full((sizes.TILE,), 1.0, tl.float32)
            elif softcap.base2 is None:
                # The logits are s * factor. The factor must not be negative, so that a row's
                # maximum of s is the maximum of its logits.
                if IS_NEGATIVE:
                    s = -s
                factor = tl.abs(factor)
            if softcap.base2 is not None:
                s = tanh(tl.fma(s, factor[:, None], row_shift[:, None])) * softcap.base2
                factor = tl.full((sizes.TILE,), 1.0, tl.float32)
            if PART > 0:
                # Multiply before masking: -inf times a factor of 0 or NaN is NaN.
                visible = attends_in(lengths, b, queries[:, None], keys[None, :], n_k, offset)
                s = tl.where(visible, s * factor[:, None], -float("inf"))
                factor = tl.full((sizes.TILE,), 1.0, tl.float32)

            tile_max = tl.max(s, 1) * factor
            new_max = tl.maximum(row_max, tile_max)
            shrink = tl.exp2(row_max - _finite(new_max))
            v_tile = load_block(
                v, v_base, key, sizes.BLOCK_K, n_k, sizes.DV_PAD, PART == 0, first_key, live
            )
            if v.scale is not None:
                # 127 P relative to the maximum of the tile: codes depend on the tile alone.
                p = 127.0 * tl.exp2(s * factor[:, None] - _finite(tile_max)[:, None])
                codes = to_codes(p, queries[:, None], keys[None, :], rounding)
                at = MapTile(z, queries[:, None], keys[None, :], lengths.n_q, lengths.n_k)
                store_codes(trace, codes, 1.0, at)
                weight = tl.exp2(tile_max - _finite(new_max)) * _CODES_PER_P
                v_scale = load_channel_scales(v, v_scales, key, sizes.DV, sizes.DV_PAD)[None, :]
                sums = code_product(in_register_order(codes), v_tile)
                total = tl.fma(sums, weight[:, None] * v_scale, total * shrink[:, None])
                row_sum = row_sum * shrink + tl.sum(p, 1) * weight
            else:
                p = tl.exp2(s * factor[:, None] - _finite(new_max)[:, None])
                total = tl.dot(p.to(v_tile.dtype), v_tile, total * shrink[:, None])
                row_sum = row_sum * shrink + tl.sum(p, 1)
            row_max = new_max

    has_keys = row_sum != 0.0  # also if it is NaN
    if sink2 is not None:
        row_sink2 = load_rows(sink2, lengths.cu_q, b, h, queries, n_q, 0.0)
        row_sum, row_max, sqrt_rescale = add_sink(
            row_sum, row_max, row_sink2, 0.0 if v.scale is None else _LOG2_LEFT
        )
        total = total * sqrt_rescale[:, None] * sqrt_rescale[:, None]
    row_sum = tl.where(has_keys, row_sum, 1.0)
    row_lse2 = row_max + tl.log2(row_sum)
    if v.scale is not None:
        row_lse2 -= _LOG2_LEFT
    row_lse2 = tl.where(has_keys, row_lse2, float("inf"))
    is_stored = None
    if ONLY_FAILED:
        is_stored = load_rows(lse2, lengths.cu_q, b, h, queries, n_q, 0.0) == FAILED
        queries = tl.where(is_stored, queries, n_q)
    store_rows(lse2, lengths.cu_q, b, h, queries, n_q, row_lse2)
    value = total / row_sum[:, None]
    store_tokens(o, lengths.cu_q, b, h, first, n_q, value, sizes.DV, is_stored)


@triton.jit
def forward_kernel(
    grid,
    q,
    k,
    v,
    subtracted,
    o,
    lse2,
    sink2,
    softcap,
    trace,
    lengths,
    rounding,
    scale,
    IS_NEGATIVE: tl.constexpr,
    sizes,
):
    """Compute O and the logsumexp, in base 2, of a tile of queries.

    q, k, v: `Operand`. subtracted: `SubtractedMeans`. sink2: `Rows` of the sinks in base 2, or
    None. softcap: `Softcap`. trace: the `MapTrace` of P, or None. scale: the logit scale
    times log2(e), or divided by the softcap. IS_NEGATIVE: whether it is negative.
    """
    wait_for_earlier_kernels()
    tile, h, b = program_coordinates(grid, lengths.IS_CAUSAL)
    if tile * sizes.TILE >= length_of(lengths.cu_q, lengths.n_q, b):
        return
    _compute_tile(
        tile, h, b, grid.heads, q, k, v, subtracted, o, lse2, sink2, softcap, trace, lengths,
        rounding, scale, IS_NEGATIVE, sizes, False,
    )  # fmt: skip


@triton.jit
def _has_failed_row(lse2, cu, b, h, queries, n_q):
    """Return whether the row of one of these queries of sequence b and head h has failed."""
    has_failed = load_rows(lse2, cu, b, h, queries, n_q, 0.0) == FAILED
    return tl.max(has_failed.to(tl.int32), 0) > 0


@triton.jit
def failed_rows_kernel(
    grid, q, k, v, subtracted, o, lse2, sink2, softcap, lengths, rounding, scale,
    IS_NEGATIVE: tl.constexpr, sizes,
):  # fmt: skip
    """Compute the rows that have failed, of some tiles of queries of a head.

    The arguments are those of `forward_kernel`. grid: of `_ROWS` queries a program.
    """
    wait_for_earlier_kernels()
    part, h, b = program_coordinates(grid, False)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = part * _ROWS
    if first >= n_q:
        return
    queries = first + tl.arange(0, _ROWS)
    if _has_failed_row(lse2, lengths.cu_q, b, h, queries, n_q):
        for at in range(first, tl.minimum(first + _ROWS, n_q), sizes.TILE):
            of_tile = at + tl.arange(0, sizes.TILE)
            if _has_failed_row(lse2, lengths.cu_q, b, h, of_tile, n_q):
                _compute_tile(
                    at // sizes.TILE, h, b, grid.heads, q, k, v, subtracted, o, lse2, sink2,
                    softcap, None, lengths, rounding, scale, IS_NEGATIVE, sizes, True,
                )  # fmt: skip


def launch_forward(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor,
    lse2: Tensor,
    trace: MapTrace | None = None,
    *,
    shift: Tensor | None = None,
    sink2: Tensor | None = None,
) -> None:
    """Fill o [sequences, heads, n_q, d_v], any strides, and lse2, float32 [sequences, heads, n_q].

    Args:
        trace: where to write the codes of P, if pv is INT8. The scales that are written are all 1.
        shift: what smoothing K subtracted from the logits, [sequences, heads, n_q]; only a softcap
            needs it.
        sink2: the sinks in base 2, [sequences, heads, n_q], or None.

    Raises:
        ValueError: if the device has too little shared memory for the spec's blocks.
    """
    options = _Options.of(problem, operands, o, lse2, shift, sink2)

    def run(tile: Tile) -> None:
        grid = problem.query_grid(tile.rows)
        launch(
            forward_kernel,
            grid.programs,
            grid,
            *options.tensors,
            trace,
            *options.others,
            KernelSizes.of(problem, tile.rows),
            **tile.options,
        )

    _try_tiles(problem, run)


def compute_failed_rows(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor,
    lse2: Tensor,
    *,
    sink2: Tensor | None = None,
) -> None:
    """Fill the rows of o and lse2 that have failed in a forward with a fixed reference.

    The arguments are those of `launch_forward`.
    """
    options = _Options.of(problem, operands, o, lse2, None, sink2)

    def run(tile: Tile) -> None:
        grid = problem.query_grid(_ROWS.value)
        launch(
            failed_rows_kernel,
            grid.programs,
            grid,
            *options.tensors,
            *options.others,
            KernelSizes.of(problem, tile.rows),
            **tile.options,
        )

    _try_tiles(problem, run)


class _Options(NamedTuple):
    """The arguments that both kernels have."""

    tensors: tuple[Any, ...]  #: those before the trace
    others: tuple[Any, ...]  #: those after it, but for the sizes

    @classmethod
    def of(
        cls,
        problem: KernelProblem,
        operands: OperandCache,
        o: Tensor,
        lse2: Tensor,
        shift: Tensor | None,
        sink2: Tensor | None,
    ) -> _Options:
        softcap = Softcap.of(problem, shift)
        return cls(
            (
                operands.get("qk", "q"),
                operands.get("qk", "k"),
                operands.get("pv", "v"),
                operands.subtracted,
                Strided.of(o),
                Rows.of(lse2),
                None if sink2 is None else Rows.of(sink2),
                softcap,
            ),
            (
                problem.lengths,
                Rounding.of(problem.spec, "p"),
                problem.scale * (LOG2_E if softcap.inverse is None else softcap.inverse),
                problem.scale < 0,
            ),
        )


def _try_tiles(problem: KernelProblem, run: Callable[[Tile], None]) -> None:
    spec, d = problem.spec, problem.q.shape[3]
    within = spec.block_q if spec.smoothing.q else None
    try_tiles(
        tiles(64, padded(problem.v.shape[3]), within=within),
        run,
        f"the forward at head size {d} and block_k={spec.block_k}",
    )
