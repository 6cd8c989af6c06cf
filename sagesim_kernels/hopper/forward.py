"""The forward for Hopper, with Q K^T in INT8 and P V in 16 bit: its kernel and its launch.

The kernel is persistent: one program runs on each multiprocessor and computes one tile after the
other. It is warp-specialised: a producer, which is a single warp, loads by TMA, and each consumer,
which is a warpgroup, computes 64 query rows of the tile.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagesim_kernels.hopper.dealt_tiles import allocate_tiles
from sagesim_kernels.hopper.descriptors import key_scales_of, tma_descriptor, token_descriptor
from sagesim_kernels.hopper.forward_loads import allocate_barriers, produce
from sagesim_kernels.hopper.forward_structures import (
    Buffers,
    Inputs,
    Scales,
    StoredScales,
    TileScheduler,
)
from sagesim_kernels.hopper.forward_tiles import BLOCK
from sagesim_kernels.hopper.forward_warps import consume
from sagesim_kernels.hopper.support import have_key_ends
from sagesim_kernels.hopper.tile_scheduler import order_of_queries, prefers_two_programs
from sagesim_kernels.launching import launch, wait_for_earlier_kernels
from sagesim_kernels.operands import (
    LAUNCH,
    LOG2_E,
    KernelProblem,
    Lengths,
    OperandCache,
    Rows,
    Softcap,
    Strided,
    allows_fixed_reference,
    order_tiles,
    padded,
)
from sagesim_kernels.portable import compute_failed_rows
from sagesim_kernels.target import multiprocessor_count

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false


class Config(NamedTuple):
    """The shape of a program, for one head size."""

    consumers: int
    """Consumer warpgroups, with 64 query rows each."""
    stages: int
    """Loads of K and V that may be in flight."""
    registers: int
    """Registers of a consumer's thread."""
    programs: int = 1
    """Programs that a multiprocessor runs at a time."""


CONFIGS = {64: Config(4, 6, 112), 128: Config(3, 6, 160)}
"""By the channels of a tile."""

TWO_PROGRAMS = Config(2, 6, 104, programs=2)
"""Another shape for 64 channels, see `prefers_two_programs`."""

MASKED_CONFIGS = {64: Config(3, 12, 160), 128: Config(3, 6, 160)}
"""The same for windows with a limit on the left, key masks and softcaps.

The first two mask more blocks, which takes registers, and have short loops, which end before new
loads do. The tanh of a softcap takes registers.
"""

PRODUCER_REGISTERS = gl.constexpr(24)

_REGISTERS: Final = 2**16
"""Of a multiprocessor."""


# TMA descriptors are parameters of their own: the launcher of Triton 3.6 finds them only outside
# tuples.
@gluon.jit
def hopper_forward(
    q8, k8, v, q_scale, k_scale, key_scales, q_tokens, k_tokens, o, lse2, lse2_stride_b,
    lse2_stride_h, sink2, inverse_cap, cap2, shift, scale, mask, n_q, n_k, left, right,
    heads, groups, packed_tiles, head_tiles, heads_per_group, tiles, programs,
    QD: gl.constexpr, DV: gl.constexpr, CONFIG: gl.constexpr, IS_COPIED: gl.constexpr,
    FIXED: gl.constexpr,
):  # fmt: skip
    """mask: `Lengths` without n_q, n_k, left and right. QD: channels of Q and K. DV: of V and O.

    key_scales: TMA descriptor of k_scale if each key has its own scale, or None. sink2: the sinks
    in base 2, with the strides of lse2; or None. inverse_cap, cap2, shift: of a `Softcap`; the
    shift has the strides of lse2. scale: the scale of the logits, times log2(e) or divided by the
    softcap. IS_COPIED: whether V lies in padded storage. FIXED: see `consume`.
    """
    D: gl.constexpr = q8.block_shape[1]
    V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, D], v.dtype)
    CONSUMERS: gl.constexpr = CONFIG.consumers
    STAGES: gl.constexpr = CONFIG.stages
    # Q is read until the last step of a tile. With two buffers for each consumer, Q of the next
    # tile is loaded in the meantime.
    q_s = gl.allocate_shared_memory(gl.int8, [CONSUMERS * 2, BLOCK, D], q8.layout)
    k_s = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK, D], k8.layout)
    v_s = gl.allocate_shared_memory(v.dtype, [STAGES, BLOCK, D], V)
    k_scale_s = None
    if key_scales is not None:
        k_scale_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], key_scales.layout)
    barriers = allocate_barriers(CONSUMERS, STAGES)
    inputs = Inputs(q8, k8, v, key_scales, None)
    scales = Scales(StoredScales(q_scale, q_tokens), StoredScales(k_scale, k_tokens), None)
    buffers = Buffers(q_s, k_s, v_s, k_scale_s, None, allocate_tiles(4))
    rows = Rows(lse2, lse2_stride_b, lse2_stride_h)
    softcap = Softcap(inverse_cap, cap2, shift, lse2_stride_b, lse2_stride_h)
    lengths = Lengths(
        mask.cu_q,
        mask.cu_k,
        n_q,
        n_k,
        mask.IS_CAUSAL,
        mask.LOWER_RIGHT,
        left,
        right,
        mask.seqused_k,
        mask.key_mask,
        None,
        mask.key_runs,
    )
    scheduler = TileScheduler(
        heads, groups, packed_tiles, head_tiles, heads_per_group, tiles, programs
    )  # fmt: skip
    wait_for_earlier_kernels()
    gl.warp_specialize(
        [  # Gluon's comprehensions iterate over tuples, not over ranges
            # `o` is not part of a structure that is made here: there Triton 3.6 forgets that the
            # stride of its channels is the constant 1.
            (
                consume,
                (
                    i, CONSUMERS, D, QD, DV, scales, buffers, barriers, o, rows, sink2, softcap,
                    scale, lengths, scheduler, FIXED, CONFIG.programs > 1,
                ),
            )
            if i < CONSUMERS
            else (
                produce,
                (
                    inputs, scales, buffers, barriers, lengths, scheduler, CONSUMERS, IS_COPIED, DV,
                    0,
                ),
            )
            for i in (0, 1, 2, 3, 4)[: CONSUMERS + 1]
        ],
        [4] * (CONSUMERS - 1) + [1],
        [CONFIG.registers] * (CONSUMERS - 1) + [PRODUCER_REGISTERS],
    )  # fmt: skip


def launch_forward(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor,
    lse2: Tensor,
    *,
    shift: Tensor | None = None,
    sink2: Tensor | None = None,
) -> None:
    """Fill o and lse2 with the output and the logsumexp in base 2.

    Args:
        problem: the call.
        operands: those of `prepare_forward`.
        o: [sequences, heads, n_q, d], any strides.
        lse2: float32 [sequences, heads, n_q], contiguous.
        shift: what smoothing K subtracted from the logits, with the shape and strides of lse2; only
            a softcap needs it.
        sink2: the sinks in base 2, as `sink_logits` returns them; or None.
    """
    q, k, v = operands.get("qk", "q"), operands.get("qk", "k"), operands.get("pv", "v")
    heads, d_v = o.shape[1], o.shape[3]
    channels = padded(d_v)
    lengths = problem.lengths
    softcap = Softcap.of(problem, shift)
    bytes_of_channel = k.ptr.element_size() + v.ptr.element_size()
    head_bytes = problem.longest_k * channels * bytes_of_channel // problem.groups
    extras = (lengths.left, lengths.key_mask, softcap.base2)
    if any(x is not None for x in extras):
        config = MASKED_CONFIGS[channels]
    else:
        config = _config(problem, channels, head_bytes)
    rows = config.consumers * BLOCK.value
    grid = problem.query_grid(rows)
    tiles = grid.programs[0]
    programs = min(tiles, config.programs * multiprocessor_count())
    heads_per_group = order_of_queries(problem, grid, rows, programs, head_bytes)
    packed_tiles = order_tiles(problem, grid, rows, queries=True)
    is_fixed = allows_fixed_reference(problem)
    launch(
        hopper_forward,
        (programs,),
        tma_descriptor(q.ptr.view(-1, q.stride_n), BLOCK.value, channels),
        tma_descriptor(k.ptr.view(-1, k.stride_n), BLOCK.value, channels),
        token_descriptor(v.ptr, BLOCK.value, channels, has_ends=have_key_ends(problem, operands)),
        q.scale,
        k.scale,
        key_scales_of(k, BLOCK.value),
        q.scale.shape[1],
        k.scale.shape[1] * k.TOKENS.value,
        Strided.of(o),
        *Rows.of(lse2),
        sink2,
        softcap.inverse,
        softcap.base2,
        softcap.shift,
        problem.scale * (LOG2_E if softcap.inverse is None else softcap.inverse),
        lengths._replace(n_q=None, n_k=None, left=None, right=None, key_counts=None),
        problem.q.shape[2],
        problem.k.shape[2],
        lengths.left,
        lengths.right,
        heads,
        problem.groups,
        packed_tiles,
        grid.tiles,
        heads_per_group,
        tiles,
        programs,
        problem.q.shape[3],
        d_v,
        config,
        operands.copied.keys,
        is_fixed,
        num_warps=4,
        **_register_limit(config),
        **LAUNCH,
    )
    if is_fixed:
        compute_failed_rows(problem, operands, o, lse2, sink2=sink2)


def _config(problem: KernelProblem, channels: int, head_bytes: int) -> Config:
    """Return the shape of a program, for a call without a window, key mask or softcap."""
    config = CONFIGS[channels]
    if channels > 64:
        return config
    # The host does not know the lengths of packed sequences, and assumes that of the longest.
    sequences = problem.sequences
    if problem.cu_q is not None:
        sequences = -(-problem.q.shape[2] // problem.longest_q)
    is_better = prefers_two_programs(
        problem.longest_q,
        problem.longest_k,
        problem.longest_offset,
        config.consumers * BLOCK.value,
        problem.q.shape[1] * sequences,
        multiprocessor_count(),
        head_bytes,
    )
    return TWO_PROGRAMS if is_better else config


def _register_limit(config: Config) -> dict[str, int]:
    """Return the option that lets several programs start on a multiprocessor.

    A program starts with as many registers for each thread of its producer, which counts as a
    warpgroup, as for each thread of its consumers. They then share them out.
    """
    if config.programs == 1:
        return {}
    threads = config.programs * 128 * (config.consumers + 1)
    return {"maxnreg": _REGISTERS // threads // 8 * 8}
