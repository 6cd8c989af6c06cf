"""The forward on Hopper, where Q K^T is INT8 and P V in 16 bit: one launch for all tiles.

One program stays on each multiprocessor and goes from tile to tile: its producer, a single warp,
loads by TMA, and each of its consumers, warpgroups, computes 64 query rows of the tile.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sagesim_kernels.hopper.device import loads, processors
from sagesim_kernels.hopper.forward_warps import BLOCK, Codes, Work, consume, produce
from sagesim_kernels.hopper.schedule import group_of
from sagesim_kernels.layout import Lengths, Rows, Strided
from sagesim_kernels.primitives import LAUNCH, LOG2_E
from sagesim_kernels.problem import Problem
from sagesim_kernels.quantize import Operands

# Of Gluon, whose functions pyright takes at their word:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


class Tile(NamedTuple):
    """How a program works."""

    consumers: int
    """Warpgroups, of 64 query rows each."""
    stages: int
    """Loads of K and V in flight."""
    registers: int
    """Of a consumer's thread."""


TILES = {64: Tile(4, 6, 112), 128: Tile(3, 6, 160)}
"""By head size."""

PRODUCER_REGISTERS = gl.constexpr(24)

_UNSPECIALIZED = (
    "q_tokens",
    "k_tokens",
    "lse2_stride_b",
    "lse2_stride_h",
    "n_q",
    "n_k",
    "heads",
    "groups",
    "longest_q",
    "group",
    "total",
    "programs",
)


@gluon.jit(do_not_specialize=_UNSPECIALIZED)
def _forward(
    q8, k8, v, q_scale, k_scale, q_tokens, k_tokens, o, lse2, lse2_stride_b, lse2_stride_h,
    scale_log2, cu_q, cu_k, n_q, n_k, heads, groups, longest_q, group, total, programs,
    IS_CAUSAL: gl.constexpr, LOWER_RIGHT: gl.constexpr, STAGED: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = q8.block_shape[1]
    # Q is read until a tile's last step: there are two, so that the next tile's is loaded meanwhile
    q_s = gl.allocate_shared_memory(gl.int8, [CONSUMERS * 2, BLOCK, D], q8.layout)
    k_s = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK, D], k8.layout)
    v_s = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK, D], v.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS * 2, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS * 2, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), CONSUMERS)
    for i in gl.static_range(CONSUMERS * 2):
        mbarrier.init(q_full.index(i), 1)
        mbarrier.init(q_empty.index(i), 1)
    fence_async_shared()
    inputs = (q8, k8, v)
    codes = (Codes(q_scale, q_tokens), Codes(k_scale, k_tokens))
    shared = (q_s, k_s, v_s, full, empty, q_full, q_empty)
    lengths = Lengths(cu_q, cu_k, n_q, n_k, IS_CAUSAL, LOWER_RIGHT)
    work = Work(heads, groups, longest_q, group, total, programs)
    lse = Rows(lse2, lse2_stride_b, lse2_stride_h)
    gl.warp_specialize(
        [  # Gluon's comprehensions go over tuples, not over ranges
            # `o` is not assigned before: Triton 3.6 would forget that its stride is 1
            (consume, (i, CONSUMERS, STAGES, D, codes, shared, (o, lse, scale_log2), lengths, work))
            if i < CONSUMERS
            else (produce, (CONSUMERS, STAGES, STAGED, inputs, codes, shared, lengths, work))
            for i in (0, 1, 2, 3, 4)[: CONSUMERS + 1]
        ],
        [4] * (CONSUMERS - 1) + [1],
        [REGISTERS] * (CONSUMERS - 1) + [PRODUCER_REGISTERS],
    )


def forward(problem: Problem, operands: Operands, o: Tensor, lse2: Tensor) -> None:
    """Fill o [sequences, heads, n_q, d], any strides, and lse2, float32 [sequences, heads, n_q]."""
    q, k, v = operands.at("qk", "q"), operands.at("qk", "k"), operands.at("pv", "v")
    heads, d = o.shape[1], o.shape[3]
    tile = TILES[d]
    rows = tile.consumers * BLOCK.value
    n_q, n_k = problem.longest_q, problem.longest_k
    total = problem.sequences * heads * -(-n_q // rows)
    programs = min(total, processors())
    lengths = problem.lengths
    offset = None
    if problem.is_causal:
        offset = n_k - n_q if problem.lower_right else 0
    head_bytes = n_k * d * (k.ptr.element_size() + v.ptr.element_size()) // problem.groups
    group = group_of(n_q, n_k, offset, rows, problem.sequences * heads, programs, head_bytes)
    _forward[(programs,)](
        loads(q.ptr.view(-1, d), BLOCK.value),
        loads(k.ptr.view(-1, d), BLOCK.value),
        loads(v.ptr, BLOCK.value),
        q.scale,
        k.scale,
        q.scale.shape[1],
        k.scale.shape[1] * BLOCK.value,
        Strided.of(o),
        *Rows.of(lse2),
        problem.scale * LOG2_E,
        lengths.cu_q,
        lengths.cu_k,
        lengths.n_q,
        lengths.n_k,
        heads,
        problem.groups,
        problem.longest_q,
        group,
        total,
        programs,
        lengths.IS_CAUSAL,
        lengths.LOWER_RIGHT,
        operands.stored,
        tile.consumers,
        tile.stages,
        tile.registers,
        num_warps=4,
        **LAUNCH,
    )
