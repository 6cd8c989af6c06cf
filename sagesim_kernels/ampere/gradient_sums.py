"""Products of P and dS in the backward for mma.sync: additions to dK, dV and the sums of dQ."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from sagesim_kernels.ampere.device import (
    BLOCK,
    CHUNK,
    channel_scales,
    chunk_size,
    code_product,
    right_chunk,
)
from sagesim_kernels.ampere.dq_units import add_units, mark_nonfinite, to_int32
from sagesim_kernels.ampere.map_codes import exchanged
from sagesim_kernels.gluon_compat import reinterpret


@gluon.jit
def _add_product(
    total, left, row_scale, x, scales, first, buffer, scale_buffer, stage, C: gl.constexpr
):
    """Return total plus chunk C of left @ x, for a map and an operand of queries.

    left: of `left_operand`. row_scale: of `rounded`.
    """
    SIZE: gl.constexpr = total.shape[1]
    LAYOUT: gl.constexpr = total.type.layout
    if left.dtype != gl.int8:
        return mma_v2(left, right_chunk(buffer.index(stage), C, SIZE, LAYOUT), total)
    else:
        COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
        column = channel_scales(x, scales, first, scale_buffer, stage, C, SIZE, COLUMNS)
        sums = code_product(left, right_chunk(buffer.index(stage), C, SIZE, LAYOUT), LAYOUT)
        return gl.fma(sums, row_scale[:, None] * column[None, :], total)


@gluon.jit
def add_to_sums(
    sum0, sum1, left, row_scale, x, scales, first, buffer, scale_buffer, stage,
    CHUNKS: gl.constexpr,
):  # fmt: skip
    """Return the sums of all chunks, the second unused if there is one, plus left @ x."""
    sum0 = _add_product(sum0, left, row_scale, x, scales, first, buffer, scale_buffer, stage, 0)
    if CHUNKS == 2:
        sum1 = _add_product(sum1, left, row_scale, x, scales, first, buffer, scale_buffer, stage, 1)
    return sum0, sum1


@constexpr_function
def dq_chunk_size(channels, c, queries, warps):
    """Return the channels of chunk c of a part of dQ; see `chunk_size`.

    No two warps hold the same number: of 16 queries or more, each has 8 channels or more.
    """
    return chunk_size(channels, c, max(16, 8 * (16 * warps // queries)))


@gluon.jit
def _units(
    left, factor, k_right, scales, first, buffer, scale_buffer, i, dq_sums, at, C: gl.constexpr,
    SIZE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return chunk C of the part of dQ of block i of the keys, [queries, SIZE], int32.

    It is in units of its rows.

    left, factor: what `exchanged` returned.
    """
    tokens = right_chunk(buffer.index(i), C, SIZE, LAYOUT)
    if left.dtype == gl.int8:
        COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
        column = channel_scales(k_right, scales, first, scale_buffer, i, C, SIZE, COLUMNS)
        return to_int32(code_product(left, tokens, LAYOUT) * (factor * column[None, :]))
    else:
        start = gl.zeros([left.shape[0], SIZE], gl.float32, LAYOUT)
        part = mma_v2(left, tokens, start) * factor
        if left.dtype == gl.float16:  # dS may overflow
            mark_nonfinite(dq_sums, at, part)
        return to_int32(part)


@gluon.jit
def add_to_dq(
    ds_s, maxima, inverse, k_right, scales, first, second, kr_s, kr_scales_s, dq_product, dq_sums,
    at, HEAD: gl.constexpr, DS: gl.constexpr, CONFIG: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add the parts of dQ of a step to the sums of its queries.

    ds_s: dS of the tile of keys. HEAD: channels of dQ. CONFIG: `backward_kernel.Config`.
    """
    BLOCKS: gl.constexpr = CONFIG.keys // BLOCK
    ROWS: gl.constexpr = ds_s.shape[0] // BLOCKS
    blocks = reinterpret(ds_s, ds_s.dtype, [BLOCKS, ROWS, CONFIG.queries], DS)
    # The part of each block of keys is rounded to integers, which are added up here.
    left0, factor0 = exchanged(blocks.index(0), dq_product, inverse, maxima, 0, LAYOUT)
    if BLOCKS == 2:
        left1, factor1 = exchanged(blocks.index(1), dq_product, inverse, maxima, 1, LAYOUT)
    for c in gl.static_range(CONFIG.channels // CHUNK):
        units = _units(
            left0, factor0, k_right, scales, first, kr_s, kr_scales_s, 0, dq_sums, at, c,
            dq_chunk_size(HEAD, c, CONFIG.queries, gl.num_warps()), LAYOUT,
        )  # fmt: skip
        if BLOCKS == 2:
            units += _units(
                left1, factor1, k_right, scales, second, kr_s, kr_scales_s, 1, dq_sums, at, c,
                dq_chunk_size(HEAD, c, CONFIG.queries, gl.num_warps()), LAYOUT,
            )  # fmt: skip
        add_units(dq_sums, at, units, c, CONFIG.channels)
