"""Device functions of the kernels for mma.sync: layouts, copies, products and stores."""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from sagesim_kernels.channel_ranges import parts_of
from sagesim_kernels.gluon_compat import async_load
from sagesim_kernels.operands import head_ptr, row_stride

BLOCK = gl.constexpr(64)
"""Queries and keys of a block of the spec, and keys of a step of the loops over keys."""

CHUNK = gl.constexpr(64)
"""Channels of an accumulator at most. The int32 sums of more would need too many registers."""

VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""Layout of float32 numbers in shared memory."""

VECTORS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
"""Layout of vectors of float32 numbers in shared memory."""


@constexpr_function
def chunk_size(channels, c, least=16):
    """Return the channels of accumulator c of a head; it begins at channel c * `CHUNK`.

    The last one of two is as small as a power of two can be. Its channels behind those of the head
    are zeros. channels: of the head. least: of the last one of two, a power of two.
    """
    size = least if c else CHUNK.value
    while c and CHUNK.value + size < channels:
        size *= 2
    return size


@constexpr_function
def rows_layout(columns, bits):
    """Layout of rows in shared memory, of which ldmatrix loads without bank conflicts."""
    per_phase = max(1, 1024 // (columns * bits))
    return gl.SwizzledSharedLayout(128 // bits, per_phase, 8 // per_phase, [1, 0])


@constexpr_function
def _copy_layout(columns, bits, warps):
    """Layout in which each thread copies 16 bytes of a row."""
    vec = 128 // bits
    threads = columns // vec
    return gl.BlockedLayout([1, vec], [32 // threads, threads], [warps, 1], [1, 0])


@constexpr_function
def split_by_block(layout):
    """Return a layout [rows, columns] as [blocks, 64, columns]: threads hold the same numbers."""

    def split(bases):
        return [[row // 64, row % 64, column] for row, column in bases]

    rows, columns = layout.shape
    return gl.DistributedLinearLayout(
        split(layout.reg_bases),
        split(layout.lane_bases),
        split(layout.warp_bases),
        split(layout.block_bases),
        [rows // 64, 64, columns],
    )


@gluon.jit
def rows_of_blocks(x, LAYOUT: gl.constexpr):
    """Repeat numbers [blocks, queries] for each of the 64 keys of a block."""
    BLOCKS: gl.constexpr = x.shape[0]
    QUERIES: gl.constexpr = x.shape[1]
    rows = x[:, None, :].broadcast_to([BLOCKS, BLOCK, QUERIES]).reshape([BLOCKS * BLOCK, QUERIES])
    return gl.convert_layout(rows, LAYOUT, assert_trivial=True)


@gluon.jit
def in_pair_order(row):
    """Return the token of each row of a tile in pair order.

    Rows r and r + 8 of 16 rows, which one thread holds in a product, are tokens 2r and 2r + 1.
    """
    return row // 16 * 16 + row % 8 * 2 + row % 16 // 8


@gluon.jit
def copy_tokens(x, base, first, lowest, last, buffer, IN_PAIR_ORDER: gl.constexpr = False):
    """Start to copy tokens from `first` of an `Operand` to buffer [tokens, channels].

    In 16 bit, tokens before `lowest` and from `last` on become 0. Channels that are not in memory
    become 0.
    """
    COUNT: gl.constexpr = buffer.shape[0]
    CHANNELS: gl.constexpr = buffer.shape[1]
    BITS: gl.constexpr = x.ptr.dtype.element_ty.primitive_bitwidth
    LAYOUT: gl.constexpr = _copy_layout(CHANNELS, BITS, gl.num_warps())
    row = gl.arange(0, COUNT, gl.SliceLayout(1, LAYOUT))
    if IN_PAIR_ORDER:
        row = in_pair_order(row)
    column = gl.arange(0, CHANNELS, gl.SliceLayout(0, LAYOUT))
    if x.scale is None:
        # Rows are whole vectors, and a power of two shows this to the compiler.
        PER_VECTOR: gl.constexpr = 128 // BITS
        stride = (x.stride_n // PER_VECTOR * PER_VECTOR).to(gl.int64)
        ptrs = base + first.to(gl.int64) * stride + (row.to(gl.int64) * stride)[:, None]
    else:
        ptrs = base + first.to(gl.int64) * x.CHANNELS + (row * x.CHANNELS)[:, None]
    ptrs += column[None, :]
    if x.CHANNELS < CHANNELS:
        in_memory = (column < x.CHANNELS)[None, :]
        if x.scale is None:
            in_memory = in_memory & ((row + first < last) & (row + first >= lowest))[:, None]
        async_load(buffer, ptrs, in_memory)
    elif x.scale is None:
        async_load(buffer, ptrs, ((row + first < last) & (row + first >= lowest))[:, None])
    else:
        async_load(buffer, ptrs)


@gluon.jit
def copy_channels(x, base, first, buffer):
    """Start to copy codes of tokens from `first` to buffer [channels, tokens]."""
    CHANNELS: gl.constexpr = buffer.shape[0]
    COUNT: gl.constexpr = buffer.shape[1]
    LAYOUT: gl.constexpr = _copy_layout(COUNT, 8, gl.num_warps())
    row = gl.arange(0, CHANNELS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, COUNT, gl.SliceLayout(0, LAYOUT))
    stride = (x.stride_d // 16 * 16).to(gl.int64)
    ptrs = base + first.to(gl.int64) + (row.to(gl.int64) * stride)[:, None] + column[None, :]
    if x.CHANNELS < CHANNELS:
        async_load(buffer, ptrs, (row < x.CHANNELS)[:, None])
    else:
        async_load(buffer, ptrs)


@gluon.jit
def copy_scales(x, scales, first, buffer, at, D: gl.constexpr):
    """Start to copy the scales of a block's channels to buffer.index(at), if each has its own.

    D: channels that have a scale.
    """
    if x.BY_CHANNEL:
        index = gl.arange(0, buffer.shape[1], gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        ptr = scales + (first // x.TOKENS).to(gl.int64) * x.scale_stride_n
        async_load(buffer.index(at), ptr + index, index < D)


@gluon.jit
def copy_vectors(ptr, STRIDE: gl.constexpr, buffer):
    """Start to copy float32 numbers to buffer [vectors, numbers].

    Vectors are STRIDE apart in memory, and aligned to 16 bytes.
    """
    LAYOUT: gl.constexpr = _copy_layout(buffer.shape[1], 32, gl.num_warps())
    row = gl.arange(0, buffer.shape[0], gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, buffer.shape[1], gl.SliceLayout(0, LAYOUT))
    async_load(buffer, ptr + (row * STRIDE)[:, None] + column[None, :])


@gluon.jit
def channel_scales(
    x, scales, first, buffer, at, C: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr
):
    """Return the scales of chunk C of a block's channels, [SIZE]; see `copy_scales`."""
    if x.BY_CHANNEL:
        return buffer.index(at).slice(C * CHUNK, SIZE).load(LAYOUT)
    else:
        scale = gl.load(scales + (first // x.TOKENS).to(gl.int64) * x.scale_stride_n)
        return gl.full([SIZE], scale, gl.float32, LAYOUT)


@gluon.jit
def query_factors(q, scales, queries, last, scale_log2):
    """Return the factor of the logits of each query: Q's scale, 1 in 16 bit, times scale_log2."""
    factor = gl.full([queries.shape[0]], 1.0, gl.float32, queries.type.layout)
    if q.scale is not None:
        ptrs = scales + (queries // q.TOKENS).to(gl.int64) * q.scale_stride_n
        factor = gl.load(ptrs, mask=queries < last, other=1.0)
    return factor * scale_log2


@gluon.jit
def block_scale(x, scales, first, some):
    """Return the scale of the block of the spec from token `first`; 1 if it has several, or none.

    1 unless some.
    """
    if x.scale is None:
        return 1.0
    elif x.TOKENS == BLOCK:
        at = gl.to_tensor(first // x.TOKENS).to(gl.int64) * x.scale_stride_n
        return gl.load(scales + at, mask=some, other=1.0)
    else:
        return 1.0


@gluon.jit
def token_scale_buffer(x, other):
    """Allocate shared memory for the scales of tokens, if each has its own; or return other.

    other: the buffer [stages, tokens, channels] of the tokens.
    """
    if x.TOKENS == 1:
        return gl.allocate_shared_memory(gl.float32, [other.shape[0], other.shape[1]], VECTOR)
    else:
        return other


@gluon.jit
def copy_token_scales(x, scales, first, last, buffer, at):
    """Start to copy the scales of tokens from `first`, if each has its own; 0 from `last` on."""
    if x.TOKENS == 1:
        index = gl.arange(0, buffer.shape[1], gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        ptrs = scales + (first + index).to(gl.int64) * x.scale_stride_n
        async_load(buffer.index(at), ptrs, first + index < last)


@gluon.jit
def apply_k_scale(s, factor, k, k_scale, k_scales):
    """Multiply K's scale into the logits s [queries, keys] or into their factor [queries].

    The operations are those of `operands.apply_k_scale`.
    """
    if k.scale is None:
        return s, factor
    elif k.TOKENS == BLOCK:
        return s, factor * k_scale
    else:
        column = k_scales.load(gl.SliceLayout(0, s.type.layout))
        return s * (column * 0.0009765625)[None, :], factor * 1024.0


@gluon.jit
def scaled_difference(s, factor, subtracted):
    """Return s * factor - subtracted, rounded once. The last two are broadcast to s."""
    return scaled_sum(s, factor, -subtracted)


@gluon.jit
def scaled_sum(s, factor, added):
    """Return s * factor + added, rounded once. The last two are broadcast to s."""
    return gl.fma(s, factor.broadcast_to(s.shape), added.broadcast_to(s.shape))


@gluon.jit
def code_product(left, right, LAYOUT: gl.constexpr):
    """Return the product of codes, float32; see `operands.code_product`."""
    start = gl.full([left.shape[0], right.shape[1]], 0x4B400000, gl.int32, LAYOUT)
    return mma_v2(left, right, start).to(gl.float32, bitcast=True) - 12582912.0


@gluon.jit
def _start_of_sums(left, right, LAYOUT: gl.constexpr):
    """Return what the products of tokens of two buffers [tokens, channels] are added to."""
    ROWS: gl.constexpr = left.shape[0]
    COLUMNS: gl.constexpr = right.shape[0]
    if left.dtype == gl.int8:
        return gl.full([ROWS, COLUMNS], 0x4B400000, gl.int32, LAYOUT)
    else:
        return gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)


@gluon.jit
def _as_floats(sums):
    """Return sums that began with `_start_of_sums`, float32."""
    if sums.dtype == gl.int32:
        return sums.to(gl.float32, bitcast=True) - 12582912.0
    else:
        return sums


@gluon.jit
def _left_part(buffer, FIRST: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Load channels of a buffer [tokens, channels] as a left operand."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 32 // buffer.dtype.primitive_bitwidth)
    return buffer.slice(FIRST, SIZE, 1).load(OPERAND)


@gluon.jit
def _right_part(buffer, FIRST: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Load channels of a buffer [tokens, channels] as a right operand [channels, tokens]."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 32 // buffer.dtype.primitive_bitwidth)
    return buffer.slice(FIRST, SIZE, 1).permute((1, 0)).load(OPERAND)


@gluon.jit
def left_tokens(buffer, HEAD: gl.constexpr, LAYOUT: gl.constexpr):
    """Load a buffer [tokens, channels] as the left operand of `registers_product`.

    HEAD: channels of the head.
    """
    PARTS: gl.constexpr = parts_of(HEAD, buffer.shape[1], buffer.dtype.primitive_bitwidth)
    left = ()
    for i in gl.static_range(len(PARTS)):
        left += (_left_part(buffer, PARTS[i][0], PARTS[i][1], LAYOUT),)
    return left


@gluon.jit
def registers_product(left, right, HEAD: gl.constexpr, LAYOUT: gl.constexpr):
    """Return left @ right.T, float32, of `left_tokens` and a buffer [tokens, channels]."""
    PARTS: gl.constexpr = parts_of(HEAD, right.shape[1], right.dtype.primitive_bitwidth)
    sums = _start_of_sums(left[0], right, LAYOUT)
    for i in gl.static_range(len(PARTS)):
        sums = mma_v2(left[i], _right_part(right, PARTS[i][0], PARTS[i][1], LAYOUT), sums)
    return _as_floats(sums)


@gluon.jit
def shared_product(left, right, HEAD: gl.constexpr, LAYOUT: gl.constexpr, BYTES: gl.constexpr):
    """Return left @ right.T, float32, of two buffers [tokens, channels].

    HEAD: channels of the head. BYTES: of a row, of which both operands are loaded to registers at a
    time.
    """
    BITS: gl.constexpr = left.dtype.primitive_bitwidth
    PARTS: gl.constexpr = parts_of(HEAD, min(left.shape[1], BYTES * 8 // BITS), BITS)
    sums = _start_of_sums(left, right, LAYOUT)
    for i in gl.static_range(len(PARTS)):
        x = _left_part(left, PARTS[i][0], PARTS[i][1], LAYOUT)
        sums = mma_v2(x, _right_part(right, PARTS[i][0], PARTS[i][1], LAYOUT), sums)
    return _as_floats(sums)


@gluon.jit
def right_chunk(buffer, C: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Load chunk C of the channels, [tokens, SIZE], of a right operand [tokens, channels]."""
    if buffer.dtype == gl.int8:  # [channels, tokens] in memory
        chunk = buffer.slice(C * CHUNK, SIZE, 0).permute((1, 0))
        return chunk.load(gl.DotOperandLayout(1, LAYOUT, 4))
    else:
        return buffer.slice(C * CHUNK, SIZE, 1).load(gl.DotOperandLayout(1, LAYOUT, 2))


@gluon.jit
def store_chunk(x, cu, b, h, rows, last, value, C: gl.constexpr, D: gl.constexpr):
    """Store chunk C of the channels of tokens of sequence b and head h of a `Strided`.

    rows: the token of each row of value. Writes tokens before `last` and channels before D.
    """
    LAYOUT: gl.constexpr = value.type.layout
    column = C * CHUNK + gl.arange(0, value.shape[1], gl.SliceLayout(0, LAYOUT))
    ptrs = head_ptr(x, cu, b, h) + rows.to(gl.int64) * row_stride(x)
    ptrs = ptrs[:, None] + (column.to(gl.int64) * x.stride_d)[None, :]
    mask = (rows < last)[:, None] & (column < D)[None, :]
    gl.store(ptrs, value.to(x.ptr.dtype.element_ty), mask=mask)
