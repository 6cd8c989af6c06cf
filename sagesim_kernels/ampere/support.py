"""Which problems the kernels for mma.sync compute."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from sagesim.spec import AttentionSpec, Granularity, MatmulSpec, Precision, RoundingMode
from sagesim_kernels.interpreter import IS_INTERPRETED
from sagesim_kernels.operands import DTYPES, Copied, KernelProblem, padded
from sagesim_kernels.portable import Tile
from sagesim_kernels.target import compute_capability, multiprocessor_count

CHANNELS: Final = (64, 128)
"""Channels of a tile: those of the problem, padded to a power of two."""

BLOCK: Final = 64

FOR_THREE: Final = 168
FOR_FOUR: Final = 128
"""The most registers of a thread of which three or four programs of four warps fit on a
multiprocessor."""

_REGISTERS: Final = 65536
"""Registers of a multiprocessor."""

_MOST_REGISTERS: Final = 256
"""Registers that a multiprocessor allocates for a thread that has as many as there are."""


def serves_forward(problem: KernelProblem) -> bool:
    """Return whether the kernels compute the forward of the problem on the current device."""
    spec = problem.spec
    return (
        _serves(problem)
        and _has_format(spec.qk)
        and _has_format(spec.pv)
        # The portable forward multiplies with wgmma there, and is faster.
        and compute_capability() != 90
    )


def serves_backward(problem: KernelProblem) -> bool:
    """Return whether the kernels compute the backward of the problem on the current device."""
    return _serves(problem) and _serves_backward(problem.spec)


def _serves(problem: KernelProblem) -> bool:
    spec, channels = problem.spec, padded(problem.q.shape[3])
    return (
        not IS_INTERPRETED
        and problem.extras.softcap is None
        and channels == padded(problem.v.shape[3])
        and channels in CHANNELS
        and spec.block_q == spec.block_k == BLOCK
        and not spec.smoothing.q
        and spec.rounding.mode is RoundingMode.HALF_EVEN
        and _has_mma_sync()
    )


def _has_mma_sync() -> bool:
    """Return whether the kernels are meant for the current device.

    Data center Blackwell is excluded, because it multiplies much faster with tcgen05.
    """
    capability = compute_capability()
    return capability >= 80 and capability // 10 not in (10, 11)


def _has_format(matmul: MatmulSpec) -> bool:
    if matmul.precision is Precision.INT8:
        return matmul.lhs is not Granularity.PerRowBound
    return matmul.precision in DTYPES


@lru_cache(maxsize=256)
def _serves_backward(spec: AttentionSpec) -> bool:
    products = (spec.qk_recompute, spec.dv, spec.dq, spec.dk)
    return spec.dp.precision in DTYPES and all(map(_has_format, products))


def copied(problem: KernelProblem) -> Copied:
    """Return which 16-bit operands have to be copied to padded storage; see `OperandCache`.

    The kernels look at no key mask when they copy tokens to shared memory. There, zeros have to be
    in place of keys that the mask excludes, and of queries that attend to none of the others.
    """
    has_mask = problem.extras.key_mask is not None
    return Copied(queries=has_mask, keys=has_mask)


def programs_at_a_time(tile: Tile) -> int:
    """Return how many programs a GPU runs at the same time, if registers limit them."""
    of_program = 32 * tile.num_warps * (tile.registers or _MOST_REGISTERS)
    return multiprocessor_count() * max(_REGISTERS // of_program, 1)
