"""The forward kernel for mma.sync: O and the logsumexp of a tile of queries."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sagesim_kernels.ampere.device import (
    BLOCK,
    CHUNK,
    VECTOR,
    apply_k_scale,
    block_scale,
    channel_scales,
    chunk_size,
    code_product,
    copy_channels,
    copy_scales,
    copy_token_scales,
    copy_tokens,
    left_tokens,
    query_factors,
    registers_product,
    right_chunk,
    rows_layout,
    scaled_difference,
    shared_product,
    store_chunk,
    token_scale_buffer,
)
from sagesim_kernels.ampere.map_codes import as_left_codes
from sagesim_kernels.ampere.parts import PARTS, key_parts, visible_keys
from sagesim_kernels.gluon_compat import barrier
from sagesim_kernels.launching import wait_for_earlier_kernels
from sagesim_kernels.operands import (
    CODE_UNIT,
    FAILED,
    LOG2_ONE,
    add_sink_of_rows,
    causal_offset,
    exponential_codes,
    first_live_key,
    fits_reference,
    head_pointers,
    length_of,
    live_keys,
    live_queries,
    next_level,
    part_of,
    program_coordinates,
    rescaled,
    row_base,
)
from sagesim_kernels.partial_sums import partial_sums

_BYTES = gl.constexpr(32)
"""Bytes of a row that a product loads at a time, if Q is in shared memory; see `shared_product`."""


class RowConfig(NamedTuple):
    """The constants of a kernel."""

    queries: int  #: that a program owns
    stages: int  #: buffers for a block of keys
    channels: int  #: of a tile in shared memory, 64 or 128


@gluon.jit
def _finite(x):
    """Return x with 0 for -inf, the maximum of a row without keys: its exponentials become 0."""
    return gl.where(x == -float("inf"), 0.0, x)


@gluon.jit
def _upper_max(largest, factor):
    """Return a little more than largest * factor, at most 2**-22 of it; -inf for -inf.

    So no product of the row exceeds it, also if the product is not rounded.
    """
    scaled = largest * factor
    step = gl.full(scaled.shape, 2.0**-23, gl.float32, scaled.type.layout)
    scaled = gl.fma(gl.abs(scaled), step, scaled)
    return gl.where(largest == -float("inf"), largest, scaled)


@gluon.jit
def _add_partial_sums(part, p, weight, shrink):
    """Return part * shrink + the partial sums of p * weight, for numbers of rows."""
    ROWS: gl.constexpr = gl.SliceLayout(1, part.type.layout)
    part = part * gl.convert_layout(shrink, ROWS, assert_trivial=True)[:, None]
    weight = gl.convert_layout(weight, ROWS, assert_trivial=True)[:, None]
    return gl.fma(partial_sums(p), weight.broadcast_to(part.shape), part)


@gluon.jit
def _zero_sums(ROWS: gl.constexpr, HEAD: gl.constexpr, LAYOUT: gl.constexpr):
    """Return an accumulator for each chunk of the channels of a head. HEAD: its channels."""
    first = gl.zeros([ROWS, CHUNK], gl.float32, LAYOUT)
    if HEAD <= CHUNK:
        return (first,)
    else:
        REST: gl.constexpr = chunk_size(HEAD, 1)
        return first, gl.zeros([ROWS, REST], gl.float32, LAYOUT)


@gluon.jit
def _scaled(totals, factor):
    """Return the sums of each chunk of channels times a factor of each row."""
    scaled = ()
    for c in gl.static_range(len(totals)):
        scaled += (totals[c] * factor[:, None],)
    return scaled


@gluon.jit
def _add_values(p, v_s, totals):
    """Return the sums of each chunk of channels plus P V of a block of keys."""
    ACC: gl.constexpr = totals[0].type.layout
    p16 = gl.convert_layout(p.to(v_s.dtype), gl.DotOperandLayout(0, ACC, 2))
    added = ()
    for c in gl.static_range(len(totals)):
        added += (mma_v2(p16, right_chunk(v_s, c, totals[c].shape[1], ACC), totals[c]),)
    return added


@gluon.jit
def _add_coded_chunk(
    total, codes, weight, shrink, v, v_s, scales, key, scales_s, stage, C: gl.constexpr
):
    """Return chunk C of total * shrink + P V of a block of keys, of which P is codes * weight."""
    SIZE: gl.constexpr = total.shape[1]
    ACC: gl.constexpr = total.type.layout
    column = channel_scales(v, scales, key, scales_s, stage, C, SIZE, gl.SliceLayout(0, ACC))
    sums = code_product(codes, right_chunk(v_s.index(stage), C, SIZE, ACC), ACC)
    total = rescaled(total, shrink[:, None].broadcast_to(total.shape))
    return gl.fma(sums, weight[:, None] * column[None, :], total)


@gluon.jit
def _logits(q_left, q_s, factor, k, k_tile, k_scale, k_scales, sizes, IS_NEGATIVE: gl.constexpr):
    """Return s [queries, keys] and a factor of each query that is not negative.

    Their product is the logits. So a row's maximum of s is that of its logits.

    q_left: Q in registers, or None: it is loaded from q_s. factor: `query_factors`. k_tile,
    k_scales: the keys and their scales in shared memory. k_scale: of their block.
    """
    LAYOUT: gl.constexpr = factor.type.layout.parent
    if q_left is None:
        s = shared_product(q_s, k_tile, sizes.D, LAYOUT, _BYTES)
    else:
        s = registers_product(q_left, k_tile, sizes.D, LAYOUT)
    s, factor = apply_k_scale(s, factor, k, k_scale, k_scales)
    if IS_NEGATIVE:
        s = -s
    return s, gl.abs(factor)


@gluon.jit
def _copy_keys(
    k, v, k_base, v_base, k_scales, v_scales, key, lowest, n_k, k_s, v_s, k_scales_s, scales_s,
    stage, sizes,
):  # fmt: skip
    """Start to copy a block of keys and values to a stage; see `copy_tokens`."""
    copy_tokens(k, k_base, key, lowest, n_k, k_s.index(stage))
    copy_token_scales(k, k_scales, key, n_k, k_scales_s, stage)
    if v.scale is None:
        copy_tokens(v, v_base, key, lowest, n_k, v_s.index(stage))
    else:
        copy_channels(v, v_base, key, v_s.index(stage))
        copy_scales(v, v_scales, key, scales_s, stage, sizes.DV)
    async_copy.commit_group()


@gluon.jit
def ampere_forward(
    grid, q, k, v, o, lse2, sink2, lengths, scale_log2, IS_NEGATIVE: gl.constexpr, sizes,
    CONFIG: gl.constexpr, STEP: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Compute O and the logsumexp, in base 2, of a tile of queries.

    The arguments are those of `portable.forward.forward_kernel`, but sink2 is a pointer to sinks
    with the strides of lse2, or None. CONFIG: `RowConfig`. FIXED: whether the reference of P is
    fixed, see `operands.fixed_reference`: it is the largest logit of the first block of keys, which
    does not depend on the tile. STEP: keys of which P is computed at a time: `BLOCK`, or 16 or 32
    if FIXED.
    """
    wait_for_earlier_kernels()
    ROWS_OF_TILE: gl.constexpr = CONFIG.queries
    STAGES: gl.constexpr = CONFIG.stages
    CHANNELS: gl.constexpr = CONFIG.channels
    BITS: gl.constexpr = q.ptr.dtype.element_ty.primitive_bitwidth
    QT: gl.constexpr = q.ptr.dtype.element_ty
    VT: gl.constexpr = v.ptr.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, ACC)

    tile, h, b = program_coordinates(grid, lengths.IS_CAUSAL)
    n_q = length_of(lengths.cu_q, lengths.n_q, b)
    first = tile * ROWS_OF_TILE
    if first >= n_q:
        return
    k_head = h // sizes.GROUPS
    first_live, _unused = live_queries(lengths, b)
    n_k, first_key = live_keys(lengths, b), first_live_key(lengths, b)
    offset = causal_offset(lengths, b)
    queries = first + gl.arange(0, ROWS_OF_TILE, ROWS)
    end_of_keys = gl.minimum(queries + offset + 1, n_k)  # that a query attends to

    q_base, q_scales = head_pointers(q, lengths.cu_q, lengths.n_q, b, h)
    k_base, k_scales = head_pointers(k, lengths.cu_k, lengths.n_k, b, k_head)
    v_base, v_scales = head_pointers(v, lengths.cu_k, lengths.n_k, b, k_head)
    q_s = gl.allocate_shared_memory(QT, [ROWS_OF_TILE, CHANNELS], rows_layout(CHANNELS, BITS))
    k_s = gl.allocate_shared_memory(QT, [STAGES, BLOCK, CHANNELS], rows_layout(CHANNELS, BITS))
    k_scales_s = token_scale_buffer(k, k_s)
    scales_s = q_s
    if v.scale is None:
        v_s = gl.allocate_shared_memory(VT, [STAGES, BLOCK, CHANNELS], rows_layout(CHANNELS, 16))
    else:
        v_s = gl.allocate_shared_memory(VT, [STAGES, CHANNELS, BLOCK], rows_layout(BLOCK, 8))
        if v.BY_CHANNEL:
            scales_s = gl.allocate_shared_memory(gl.float32, [STAGES, CHANNELS], VECTOR)

    parts = key_parts(lengths, b, first, ROWS_OF_TILE, n_k, offset)
    begin = parts.begin + parts.whole_end * 0  # opaque to the compiler, see `key_loop_bounds`
    end = parts.end
    copy_tokens(q, q_base, first, first_live, n_q, q_s)
    async_copy.commit_group()
    if begin < end:
        _copy_keys(
            k, v, k_base, v_base, k_scales, v_scales, begin, first_key, n_k, k_s, v_s, k_scales_s,
            scales_s, 0, sizes,
        )  # fmt: skip
    factor = query_factors(q, q_scales, queries, n_q, scale_log2)

    row_max = gl.full([ROWS_OF_TILE], -float("inf"), gl.float32, ROWS)
    level = -row_max
    row_sum = gl.zeros([ROWS_OF_TILE], gl.float32, ROWS)
    part = partial_sums(
        gl.zeros([ROWS_OF_TILE, STEP], gl.float32, ACC)
    )  # of the row sums, if P is in codes or has a fixed reference
    totals = _zero_sums(ROWS_OF_TILE, sizes.DV, ACC)
    k_scale = block_scale(k, k_scales, begin, begin < end)
    async_copy.wait_group(0)
    barrier()  # All warps see the queries that were copied.
    # If P is computed for fewer keys at a time, no registers are free for Q.
    q_left = None
    if STEP == BLOCK:
        q_left = left_tokens(q_s, sizes.D, ACC)
    # Without a limit on the left and a key mask, there are no masked keys before the second part.
    FIRST_PART: gl.constexpr = 1 if lengths.left is None and lengths.key_mask is None else 0
    if FIXED:
        for key in range(begin, gl.minimum(begin + BLOCK, end), BLOCK):
            s, tile_factor = _logits(
                q_left, q_s, factor, k, k_s.index(0), k_scale, k_scales_s.index(0), sizes,
                IS_NEGATIVE,
            )  # fmt: skip
            keys = key + gl.arange(0, BLOCK, COLUMNS)
            visible = visible_keys(lengths, b, queries, end_of_keys, keys, n_k)
            s = gl.where(visible, s, -float("inf"))
            row_max = _upper_max(gl.max(s, 1), tile_factor)
    n = 0
    for PART in gl.static_range(FIRST_PART, PARTS):
        part_begin, part_end = part_of(parts, PART)
        for key in range(part_begin, part_end, BLOCK):
            stage = n % STAGES
            n += 1
            # The last step copies keys that no step uses.
            next_key = gl.where(key + BLOCK < end, key + BLOCK, key)
            async_copy.wait_group(0)
            barrier()  # All warps have finished the step before, and see what was copied.
            _copy_keys(
                k, v, k_base, v_base, k_scales, v_scales, next_key, first_key, n_k, k_s, v_s,
                k_scales_s, scales_s, n % STAGES, sizes,
            )  # fmt: skip
            this_scale = k_scale
            k_scale = block_scale(k, k_scales, next_key, True)
            if FIXED:
                for START in gl.static_range(0, BLOCK, STEP):
                    s, step_factor = _logits(
                        q_left, q_s, factor, k, k_s.index(stage).slice(START, STEP, 0), this_scale,
                        k_scales_s.index(stage).slice(START, STEP, 0), sizes, IS_NEGATIVE,
                    )  # fmt: skip
                    x = scaled_difference(s, step_factor[:, None], _finite(row_max)[:, None])
                    if PART != 1:
                        keys = key + START + gl.arange(0, STEP, COLUMNS)
                        visible = visible_keys(lengths, b, queries, end_of_keys, keys, n_k)
                        x = gl.where(visible, x, -float("inf"))
                    p = gl.exp2(x)
                    part += partial_sums(p)
                    v_step = v_s.index(stage).slice(START, STEP, 0)
                    totals = _add_values(p, v_step, totals)
            else:
                s, tile_factor = _logits(
                    q_left, q_s, factor, k, k_s.index(stage), this_scale, k_scales_s.index(stage),
                    sizes, IS_NEGATIVE,
                )  # fmt: skip
                if PART != 1:
                    keys = key + gl.arange(0, BLOCK, COLUMNS)
                    visible = visible_keys(lengths, b, queries, end_of_keys, keys, n_k)
                    s = gl.where(visible, s, -float("inf"))
                tile_max = _upper_max(gl.max(s, 1), tile_factor)
                # -inf times a factor of 0 or NaN would be NaN. If the factor is NaN, so is the
                # maximum, except in rows of which every entry is masked.
                tile_factor = gl.where(tile_factor > 0.0, tile_factor, 2.0**-126)[:, None]
                if v.scale is not None:
                    # Codes are relative to the maximum of the tile: they depend on the tile alone.
                    minus_level = _finite(tile_max) - LOG2_ONE
                    p = gl.exp2(scaled_difference(s, tile_factor, minus_level[:, None]))
                    # QK in 16 bit may overflow: all logits of a row may be -inf without a mask.
                    weight, level, shrink = next_level(LOG2_ONE - tile_max, level, True)
                    part = _add_partial_sums(part, p, weight, shrink)
                    codes = exponential_codes(as_left_codes(p))
                    added = ()
                    for c in gl.static_range(len(totals)):
                        added += (
                            _add_coded_chunk(
                                totals[c], codes, weight, shrink, v, v_s, v_scales, key, scales_s,
                                stage, c,
                            ),
                        )  # fmt: skip
                    totals = added
                else:
                    # A maximum that is NaN stays so. In `gl.maximum` the other number would win.
                    new_max = gl.where(
                        tile_max == tile_max, gl.maximum(row_max, tile_max), tile_max
                    )
                    shrink = gl.exp2(row_max - _finite(new_max))
                    row_max = new_max
                    p = gl.exp2(scaled_difference(s, tile_factor, _finite(new_max)[:, None]))
                    row_sum = row_sum * shrink + gl.sum(p, 1)
                    totals = _add_values(p, v_s.index(stage), _scaled(totals, shrink))

    if FIXED or v.scale is not None:
        row_sum = gl.convert_layout(gl.sum(part, 1), ROWS)
    if v.scale is not None:
        row_max = -level
    if FIXED:
        size = gl.sum(gl.abs(totals[0]), 1)
        if len(totals) == 2:
            size += gl.sum(gl.abs(totals[1]), 1)
        fails = ~fits_reference(row_sum, size)
    if sink2 is not None:
        row_sum, row_max, sqrt_rescale = add_sink_of_rows(
            sink2, lse2, lengths.cu_q, b, h, queries, n_q, row_sum, row_max
        )
        totals = _scaled(_scaled(totals, sqrt_rescale), sqrt_rescale)
    # A sum of NaN is not 0. If the magnitude of the logits is above 2^28, all P of a row may be 0.
    has_keys = (row_sum != 0.0) | (row_max > -float("inf"))
    row_sum = gl.where(row_sum != 0.0, row_sum, 1.0)
    row_lse2 = row_max + gl.log2(row_sum)
    row_lse2 = gl.where(has_keys, row_lse2, float("inf"))
    if FIXED:
        row_lse2 = gl.where(fails, FAILED, row_lse2)
    gl.store(row_base(lse2, lengths.cu_q, b, h) + queries, row_lse2, mask=queries < n_q)
    for c in gl.static_range(len(totals)):
        value = totals[c] / row_sum[:, None]
        if v.scale is not None:
            value *= CODE_UNIT
        store_chunk(o, lengths.cu_q, b, h, queries, n_q, value, c, sizes.DV)
