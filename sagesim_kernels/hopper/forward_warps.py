"""What the warps of the forward's kernel do: one loads, the others compute.

Barriers: `full` of a stage of loads and `empty` again, and `q_full` and `q_empty` of a consumer's
queries. Loads are counted, and so are tiles, since the program began: at any time the warps may be
at different ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sagesim_kernels.hopper.compat import load
from sagesim_kernels.layout import (
    causal_offset,
    keys_seen,
    length_of,
    live_keys,
    row_base,
    sees,
    start_of,
    stored_start_of,
)

# Of Gluon, whose functions pyright takes at their word:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

BLOCK = gl.constexpr(64)
"""Queries of a consumer, and keys of a step."""

MMA8 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
QUERIES = gl.constexpr(gl.SliceLayout(1, MMA.value))
KEYS = gl.constexpr(gl.SliceLayout(0, MMA.value))
"""Layouts of S in int32, of S and P in float32, and of their rows and columns."""


class Work(NamedTuple):
    """What there is to do, and who does it."""

    heads: Any
    groups: Any  #: heads for each head of k and v
    longest_q: Any
    group: Any  #: of `Tile`, a divisor of sequences * heads
    total: Any  #: tiles
    programs: Any


class Codes(NamedTuple):
    """Where the scales of codes are, and the tokens of storage for a head of them."""

    scale: Any
    tokens: Any


_PIN = gl.constexpr("""{
.reg .pred p;
.reg .b32 t;
or.b32 t, $4, $5;
or.b32 t, t, $6;
or.b32 t, t, $7;
setp.lt.s32 p, t, 0;
@p prefetch.global.L2 [$8];
mov.b32 $0, $4;
mov.b32 $1, $5;
mov.b32 $2, $6;
mov.b32 $3, $7;
}""")


@gluon.jit
def _pin(x, at):
    """x, computed before anything that follows. at: any address in global memory.

    ptxas would move the wait for a product above the exponentials that are to run meanwhile, but
    moves no wait over an access to memory that may happen. This one happens where a number has its
    sign bit set, as a NaN may, but no other sum of exponentials; and it changes nothing.
    """
    at = gl.full(x.shape, at.to(gl.int64), gl.int64, x.type.layout)
    return gl.inline_asm_elementwise(
        _PIN, "=&f,=&f,=&f,=&f,f,f,f,f,l,l,l,l", [x, at], gl.float32, is_pure=False, pack=4
    )


@gluon.jit
def _tile_of(lap, lengths, work, ROWS: gl.constexpr):
    """The tile of a program's lap: its sequence, head and first query, and whether there is one.

    In snake order: there, and back in the next lap. Under a mask later tiles of a group of heads
    are shorter, so that a program with a long tile has a short one next.
    """
    pid = gl.program_id(0)
    index = lap * work.programs + pid
    if lap % 2 == 1:
        index = lap * work.programs + work.programs - 1 - pid
    is_one = index < work.total
    index = gl.minimum(index, work.total - 1)
    tiles = (work.longest_q + ROWS - 1) // ROWS
    together = tiles * work.group
    tile = index % together // work.group
    head = index // together * work.group + index % work.group
    if lengths.IS_CAUSAL:  # longest first
        tile = tiles - 1 - tile
    b = head // work.heads
    first = tile * ROWS
    is_one = is_one & (first < length_of(lengths.cu_q, lengths.n_q, b))
    return b, head % work.heads, first, is_one


@gluon.jit
def _key_blocks(first, ROWS: gl.constexpr, lengths, b):
    """Of queries first..first + ROWS: blocks of keys that all of them attend to, and the number of
    blocks to multiply with. The latter is not zero, lest there be a case of its own."""
    n_k = live_keys(lengths, b)
    seen, end = keys_seen(first, ROWS, BLOCK, n_k, causal_offset(lengths, b))
    return seen // BLOCK, gl.maximum((end + BLOCK - 1) // BLOCK, 1)


@gluon.jit
def _first_row(codes, cu, n, b, h):
    """Of a sequence and head, in storage of codes."""
    return h.to(gl.int64) * codes.tokens + stored_start_of(cu, n, b)


@gluon.jit
def _wait(full, n, STAGES: gl.constexpr):
    """For load n of the program."""
    mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)


@gluon.jit
def produce(
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, STAGED: gl.constexpr, inputs, codes, shared,
    lengths, work,
):  # fmt: skip
    """Load j of a tile is of K of step j and V of step j - 1.

    The consumers multiply with both at once, so one barrier says that both are there, and one that
    both are done with. Keys go from the last down, so that the blocks that a mask cuts come before
    the loop over the others.
    """
    ROWS: gl.constexpr = CONSUMERS * BLOCK
    D: gl.constexpr = inputs[0].block_shape[1]
    q8, k8, v = inputs
    q_codes, k_codes = codes
    q_s, k_s, v_s, full, empty, q_full, q_empty = shared
    n = 0  # loads
    tile = 0  # tiles that had any queries
    for lap in range((work.total + work.programs - 1) // work.programs):
        b, h, first, is_one = _tile_of(lap, lengths, work, ROWS)
        if is_one:
            k_head = h // work.groups
            q_row = _first_row(q_codes, lengths.cu_q, lengths.n_q, b, h).to(gl.int32) + first
            k_start = stored_start_of(lengths.cu_k, lengths.n_k, b).to(gl.int32)
            k_row = k_head * k_codes.tokens + k_start
            v_b = b
            v_row = 0
            if STAGED:
                v_b = 0
                v_row = k_start
            _, blocks = _key_blocks(first, ROWS, lengths, b)
            for i in gl.static_range(CONSUMERS):
                slot = i * 2 + tile % 2
                mbarrier.wait(q_empty.index(slot), ((tile // 2) & 1) ^ 1)
                bar = q_full.index(slot)
                mbarrier.expect(bar, BLOCK * D)
                load(q8, [q_row + i * BLOCK, 0], bar, q_s.index(slot))
            tile += 1
            for j in range(blocks + 1):
                stage = n % STAGES
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
                key = (blocks - 1 - j) * BLOCK
                mbarrier.expect(bar, 3 * BLOCK * D, pred=(j > 0) & (j < blocks))
                mbarrier.expect(bar, BLOCK * D, pred=j == 0)
                mbarrier.expect(bar, 2 * BLOCK * D, pred=j == blocks)
                key_v = v_row + key + BLOCK
                load(k8, [k_row + key, 0], bar, k_s.index(stage), pred=j < blocks)
                load(v, [v_b, k_head, key_v, 0], bar, v_s.index(stage), pred=j > 0)
                n += 1


@gluon.jit
def _start_qk(q, k):
    zeros = gl.zeros((BLOCK, BLOCK), gl.int32, MMA8)
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _qk(q, k_s, full, empty, n, STAGES: gl.constexpr):
    """S of load n, of which nothing is needed any more."""
    stage = n % STAGES
    _wait(full, n, STAGES)
    s = warpgroup_mma_wait(0, deps=[_start_qk(q, k_s.index(stage))])
    mbarrier.arrive(empty.index(stage), count=1)
    return s


@gluon.jit
def _highest(s):
    """Of each row: of the int32 sums, as an instruction compares three of them but two floats. The
    factor that makes them logits is not negative."""
    return gl.max(gl.convert_layout(s, MMA), 1).to(gl.float32)


@gluon.jit
def _exponents(s, factor, row_max):
    return gl.convert_layout(s.to(gl.float32), MMA) * factor[:, None] - row_max[:, None]


@gluon.jit
def _masked(s, factor, row_max, block, seen_by):
    """P, the rows' new maxima, -inf where they have not seen a key, and by how much what was summed
    up before shrinks."""
    queries, n_k, offset = seen_by
    keys = block * BLOCK + gl.arange(0, BLOCK, KEYS)
    x = gl.convert_layout(s.to(gl.float32), MMA) * factor[:, None]
    x = gl.where(sees(queries[:, None], keys[None, :], n_k, offset), x, -float("inf"))
    new_max = gl.maximum(row_max, gl.max(x, 1))
    at = gl.where(new_max == -float("inf"), 0.0, new_max)
    return gl.exp2(x - at[:, None]), new_max, gl.exp2(row_max - at)


@gluon.jit
def _sum(p):
    """Over columns 8 apart, which one thread has; the sums are added up at the end of the tile."""
    return gl.sum(p.reshape([BLOCK, 8, 8]), 1)


@gluon.jit
def _store(o, cu, b, h, first, last, value):
    """As `layout.store_tokens`. A warp's rows change threads first: a thread stores eight columns
    next to each other at once, and no sector of memory is written in parts."""
    WIDE: gl.constexpr = gl.BlockedLayout([2, 8], [8, 4], [4, 1], [1, 0])
    value = gl.convert_layout(value.to(o.ptr.dtype.element_ty), WIDE)
    ROW: gl.constexpr = gl.SliceLayout(1, value.type.layout)
    COLUMN: gl.constexpr = gl.SliceLayout(0, value.type.layout)
    row = first + gl.arange(0, value.shape[0], ROW)
    column = gl.arange(0, value.shape[1], COLUMN).to(gl.int64)
    base = o.ptr + b.to(gl.int64) * o.stride_b + h.to(gl.int64) * o.stride_h
    ptrs = (base + (start_of(cu, b) + row) * o.stride_n)[:, None] + (column * o.stride_d)[None, :]
    gl.store(ptrs, value, mask=(row < last)[:, None])


@gluon.jit
def consume(
    consumer: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
    codes, shared, out, lengths, work,
):  # fmt: skip
    """64 query rows of each tile; those past the end of the sequence take one step, and go nowhere.

    The blocks of keys that a mask may cut, two at most, come first. From the last of these on, the
    product with V of a step runs together with Q K^T of the next.
    """
    q_codes, k_codes = codes
    q_s, k_s, v_s, full, empty, q_full, q_empty = shared
    o_out, lse2, scale_log2 = out
    ROWS: gl.constexpr = CONSUMERS * BLOCK
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    OUT: gl.constexpr = gl.SliceLayout(1, ACC)
    dt: gl.constexpr = v_s.dtype
    n = 0  # loads
    tile = 0  # tiles that had any queries
    for lap in range((work.total + work.programs - 1) // work.programs):
        b, h, tile_first, is_one = _tile_of(lap, lengths, work, ROWS)
        if is_one:
            _, tile_blocks = _key_blocks(tile_first, ROWS, lengths, b)
            first = tile_first + consumer * BLOCK
            n_q = length_of(lengths.cu_q, lengths.n_q, b)
            seen, blocks = _key_blocks(first, BLOCK, lengths, b)
            if first >= n_q:  # nothing of it is stored
                blocks = 1
            seen = gl.minimum(seen, blocks - 1)
            queries = first + gl.arange(0, BLOCK, QUERIES)
            seen_by = (queries, live_keys(lengths, b), causal_offset(lengths, b))
            q_row = _first_row(q_codes, lengths.cu_q, lengths.n_q, b, h)
            q_factor = gl.load(q_codes.scale + q_row + queries, mask=queries < n_q, other=0.0)
            q_factor = q_factor * scale_log2
            for _ in range(tile_blocks - blocks):  # keys that only later rows of the tile see
                _wait(full, n, STAGES)
                mbarrier.arrive(empty.index(n % STAGES), count=1)
                n += 1
            k_row = _first_row(k_codes, lengths.cu_k, lengths.n_k, b, h // work.groups)
            k_ptr = k_codes.scale + k_row // BLOCK
            k_next = gl.load(k_ptr + seen)
            slot = consumer * 2 + tile % 2
            mbarrier.wait(q_full.index(slot), (tile // 2) & 1)
            tile += 1
            q = q_s.index(slot)
            row_max = gl.full((BLOCK,), -float("inf"), gl.float32, QUERIES)
            part = _sum(gl.zeros((BLOCK, BLOCK), gl.float32, MMA))
            PART: gl.constexpr = gl.SliceLayout(1, part.type.layout)
            o = gl.zeros((BLOCK, D), gl.float32, ACC)
            for i in range(blocks - 1 - seen):
                at = blocks - 1 - i
                factor = q_factor * gl.load(k_ptr + at)
                s = _qk(q, k_s, full, empty, n, STAGES)
                n += 1
                p, row_max, shrink = _masked(s, factor, row_max, at, seen_by)
                part = part * gl.convert_layout(shrink, PART)[:, None] + _sum(p)
                o = o * gl.convert_layout(shrink, OUT)[:, None]
                _wait(full, n, STAGES)
                v = v_s.index(n % STAGES).reshape([BLOCK, D])
                o_t = warpgroup_mma(gl.convert_layout(p.to(dt), A), v, o, is_async=True)
                o = warpgroup_mma_wait(0, deps=[o_t])
            factor = q_factor * k_next
            s = _qk(q, k_s, full, empty, n, STAGES)
            n += 1
            p, row_max, shrink = _masked(s, factor, row_max, seen, seen_by)
            part = part * gl.convert_layout(shrink, PART)[:, None] + _sum(p)
            o = o * gl.convert_layout(shrink, OUT)[:, None]
            p16 = gl.convert_layout(p.to(dt), A)
            _wait(full, n, STAGES)
            k_next = gl.load(k_ptr + gl.maximum(seen - 1, 0))
            for i in range(seen):
                stage = n % STAGES
                k_scale = k_next
                k_next = gl.load(k_ptr + gl.maximum(seen - 2 - i, 0))
                s = _start_qk(q, k_s.index(stage))
                v = v_s.index(stage).reshape([BLOCK, D])
                o_t = warpgroup_mma(p16, v, o, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s])
                factor = q_factor * k_scale
                new_max = gl.maximum(row_max, _highest(s) * factor)
                shrink = gl.exp2(row_max - new_max)
                row_max = new_max
                p = gl.exp2(_exponents(s, factor, row_max))
                part = part * gl.convert_layout(shrink, PART)[:, None] + _sum(p)
                part = _pin(part, q_codes.scale)
                # For the next step, but here: ptxas moves the wait for the product, below, up to
                # the last branch, and this is one.
                n += 1
                _wait(full, n, STAGES)
                o = warpgroup_mma_wait(0, deps=[o_t])
                # All warps meet in it first: they are done with this K, and V of the step before.
                mbarrier.arrive(empty.index(stage), count=1)
                o = o * gl.convert_layout(shrink, OUT)[:, None]
                p16 = gl.convert_layout(p.to(dt), A)
            mbarrier.arrive(q_empty.index(slot), count=1)
            stage = n % STAGES
            o_t = warpgroup_mma(p16, v_s.index(stage).reshape([BLOCK, D]), o, is_async=True)
            row_sum = gl.convert_layout(gl.sum(part, 1), QUERIES)
            o = warpgroup_mma_wait(0, deps=[o_t])
            mbarrier.arrive(empty.index(stage), count=1)
            n += 1
            row_lse2 = gl.where(row_sum == 0.0, float("inf"), row_max + gl.log2(row_sum))
            rows = first + gl.arange(0, BLOCK, QUERIES)
            gl.store(row_base(lse2, lengths.cu_q, b, h) + rows, row_lse2, mask=rows < n_q)
            row_sum = gl.convert_layout(row_sum, OUT)[:, None]
            # The bits of o / row_sum, which too is a product with an inverse, but scales both for
            # sums that there are none of: the greatest exponential is 1. Of rows without a key V
            # may have contributed 0 * NaN.
            o = gl.where(row_sum == 0.0, 0.0, o * (1.0 / row_sum))
            _store(o_out, lengths.cu_q, b, h, first, n_q, o)
