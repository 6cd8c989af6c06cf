"""The forward for Hopper in which P is rounded to codes: its kernel and its launch.

Q K^T and P V are in INT8. Otherwise it is built like the forward with P V in 16 bit.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sagesim_kernels.hopper.codes_operands import quantize
from sagesim_kernels.hopper.dealt_tiles import allocate_tiles
from sagesim_kernels.hopper.descriptors import (
    SCALES,
    key_scales_of,
    right_descriptor,
    tma_descriptor,
)
from sagesim_kernels.hopper.forward import PRODUCER_REGISTERS, Config
from sagesim_kernels.hopper.forward_codes_warps import consume
from sagesim_kernels.hopper.forward_loads import allocate_barriers, produce
from sagesim_kernels.hopper.forward_structures import (
    Buffers,
    Inputs,
    Scales,
    StoredScales,
    TileScheduler,
)
from sagesim_kernels.hopper.forward_tiles import BLOCK
from sagesim_kernels.hopper.tile_scheduler import order_of_queries
from sagesim_kernels.launching import launch, wait_for_earlier_kernels
from sagesim_kernels.operands import (
    LAUNCH,
    LOG2_E,
    KernelProblem,
    Lengths,
    Operand,
    OperandCache,
    Rows,
    Strided,
    order_tiles,
    padded,
)
from sagesim_kernels.target import multiprocessor_count

CONFIGS = {64: Config(3, 8, 160), 128: Config(2, 6, 240)}
"""By the channels of a tile. A consumer holds sums of all channels twice, and S."""


@gluon.jit
def hopper_forward_codes(
    q8, k8, v8, q_scale, k_scale, v_scale, key_scales, channel_scales, q_tokens, k_tokens,
    v_tokens, o, lse2, lse2_stride_b, lse2_stride_h, scale, mask, n_q, n_k, heads, groups,
    packed_tiles, head_tiles, heads_per_group, tiles, programs, QD: gl.constexpr, DV: gl.constexpr,
    V_CHANNELS: gl.constexpr, Q_TOKENS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """mask: `Lengths` without n_q and n_k, and without a window or padding.

    v8: TMA descriptor of the codes of V, a right operand. key_scales, channel_scales: TMA
    descriptors of k_scale and v_scale, or None if keys or channels of a block share a scale. scale:
    the scale of the logits times log2(e). QD: channels of Q and K. DV: of V and O. V_CHANNELS: rows
    of a head of v8. Q_TOKENS: queries that share a scale.
    """
    D: gl.constexpr = q8.block_shape[1]
    CONSUMERS: gl.constexpr = CONFIG.consumers
    STAGES: gl.constexpr = CONFIG.stages
    q_s = gl.allocate_shared_memory(gl.int8, [CONSUMERS * 2, BLOCK, D], q8.layout)
    k_s = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK, D], k8.layout)
    v_s = gl.allocate_shared_memory(gl.int8, [STAGES, D, BLOCK], v8.layout)
    k_scale_s = None
    if key_scales is not None:
        k_scale_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], key_scales.layout)
    v_scale_s = None
    if channel_scales is not None:
        v_scale_s = gl.allocate_shared_memory(gl.float32, [STAGES, D], channel_scales.layout)
    barriers = allocate_barriers(CONSUMERS, STAGES)
    inputs = Inputs(q8, k8, v8, key_scales, channel_scales)
    scales = Scales(
        StoredScales(q_scale, q_tokens),
        StoredScales(k_scale, k_tokens),
        StoredScales(v_scale, v_tokens),
    )
    buffers = Buffers(q_s, k_s, v_s, k_scale_s, v_scale_s, allocate_tiles(4))
    rows = Rows(lse2, lse2_stride_b, lse2_stride_h)
    lengths = Lengths(
        mask.cu_q,
        mask.cu_k,
        n_q,
        n_k,
        mask.IS_CAUSAL,
        mask.LOWER_RIGHT,
        None,
        None,
        None,
        None,
        None,
        None,
    )
    scheduler = TileScheduler(
        heads, groups, packed_tiles, head_tiles, heads_per_group, tiles, programs
    )  # fmt: skip
    wait_for_earlier_kernels()
    gl.warp_specialize(
        [
            (
                consume,
                (
                    i, CONSUMERS, D, QD, DV, scales, buffers, barriers, o, rows, scale, lengths,
                    scheduler, Q_TOKENS,
                ),
            )
            if i < CONSUMERS
            else (
                produce,
                (
                    inputs, scales, buffers, barriers, lengths, scheduler, CONSUMERS, True, DV,
                    V_CHANNELS,
                ),
            )
            for i in (0, 1, 2, 3, 4)[: CONSUMERS + 1]
        ],
        [4] * (CONSUMERS - 1) + [1],
        [CONFIG.registers] * (CONSUMERS - 1) + [PRODUCER_REGISTERS],
    )  # fmt: skip


def launch_forward(problem: KernelProblem, operands: OperandCache, o: Tensor, lse2: Tensor) -> None:
    """Fill o and lse2 with the output and the logsumexp in base 2.

    Args:
        problem: the call.
        operands: those of qk and pv.
        o: [sequences, heads, n_q, d], any strides.
        lse2: float32 [sequences, heads, n_q], contiguous.
    """
    operands.quantize("qk", "pv", by=quantize)
    q, k, v = operands.get("qk", "q"), operands.get("qk", "k"), operands.get("pv", "v")
    heads, d_v = o.shape[1], o.shape[3]
    channels = padded(d_v)
    lengths = problem.lengths
    config = CONFIGS[channels]
    rows = config.consumers * BLOCK.value
    grid = problem.query_grid(rows)
    tiles = grid.programs[0]
    programs = min(tiles, multiprocessor_count())
    head_bytes = problem.longest_k * channels * 2 // problem.groups
    heads_per_group = order_of_queries(problem, grid, rows, programs, head_bytes)
    packed_tiles = order_tiles(problem, grid, rows, queries=True)
    launch(
        hopper_forward_codes,
        (programs,),
        tma_descriptor(q.ptr.view(-1, q.stride_n), BLOCK.value, channels),
        tma_descriptor(k.ptr.view(-1, k.stride_n), BLOCK.value, channels),
        right_descriptor(v, BLOCK.value, channels),
        q.scale,
        k.scale,
        v.scale,
        key_scales_of(k, BLOCK.value),
        _channel_scales_of(v, channels),
        q.scale.shape[1] * q.TOKENS.value,
        k.scale.shape[1] * k.TOKENS.value,
        v.scale.shape[1] * v.TOKENS.value,
        Strided.of(o),
        *Rows.of(lse2),
        problem.scale * LOG2_E,
        lengths._replace(n_q=None, n_k=None),
        problem.q.shape[2],
        problem.k.shape[2],
        heads,
        problem.groups,
        packed_tiles,
        grid.tiles,
        heads_per_group,
        tiles,
        programs,
        problem.q.shape[3],
        d_v,
        v.CHANNELS,
        q.TOKENS,
        config,
        num_warps=4,
        **LAUNCH,
    )


def _channel_scales_of(v: Operand, channels: int) -> TensorDescriptor | None:
    """Return a descriptor of the scales of V if each channel has its own, else None.

    A tile of fewer channels gets scales of the next block as well, for sums that are not stored.
    """
    if not v.BY_CHANNEL.value:
        return None
    return TensorDescriptor.from_tensor(v.scale.view(-1), [channels], SCALES.value)
