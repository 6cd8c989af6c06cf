"""The forward of heads with more than 128 channels."""

from __future__ import annotations

from torch import Tensor

from sagesim_kernels.hopper.channel_parts import code_parts, token_parts
from sagesim_kernels.hopper.support import have_key_ends, tile_channels
from sagesim_kernels.hopper.wide_launch import Side, launch_wide
from sagesim_kernels.hopper.wide_structures import Config
from sagesim_kernels.operands import (
    LOG2_E,
    KernelProblem,
    OperandCache,
    Rows,
    Softcap,
    allows_fixed_reference,
)
from sagesim_kernels.portable import compute_failed_rows


def launch_forward(
    problem: KernelProblem,
    operands: OperandCache,
    o: Tensor,
    lse2: Tensor,
    *,
    shift: Tensor | None = None,
    sink2: Tensor | None = None,
) -> None:
    """Fill o and lse2. The arguments are those of `forward.launch_forward`."""
    q, k, v = operands.get("qk", "q"), operands.get("qk", "k"), operands.get("pv", "v")
    d, d_v = tile_channels(problem.q.shape[3]), tile_channels(o.shape[3])
    softcap = Softcap.of(problem, shift)
    config = Config(
        is_forward=True,
        owns_queries=True,
        has_dp=False,
        stages=3 if d == 256 else 4,
        right_stages=4,
        groups=problem.groups,
        splits=1,
        tile_d=d,
        tile_dv=d_v,
        channels=o.shape[3],
        copied=operands.copied,
        is_fixed=allows_fixed_reference(problem),
    )
    launch_wide(
        problem,
        o,
        Rows.of(lse2),
        Side(code_parts(q, d)),
        Side(
            code_parts(k, d), right=token_parts(v, d_v, has_ends=have_key_ends(problem, operands))
        ),
        k.scale,
        problem.scale * (LOG2_E if softcap.inverse is None else softcap.inverse),
        config,
        q_scale=q.scale,
        sink2=sink2,
        softcap=softcap,
    )
    if config.is_fixed:
        compute_failed_rows(problem, operands, o, lse2, sink2=sink2)
