"""Which problems the Hopper kernels compute, and which of their operands have to be copied.

The Hopper kernels are written in Gluon: a forward for specs in which QK is INT8 and PV is in 16
bit, one for P in codes, a backward for specs in which QK alone is INT8, and another one for P and
dS in codes. Other kernels compute every other problem. All use the same operands, codes and scales.
Hopper's forwards visit keys in another order, so float32 sums are added up in another order, and P
in 16 bit is rounded relative to another row maximum.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from torch import Tensor

from sagesim.spec import (
    AttentionSpec,
    Delta,
    Granularity,
    MatmulSpec,
    Precision,
    RoundingMode,
)
from sagesim_kernels.interpreter import IS_INTERPRETED
from sagesim_kernels.operands import (
    DTYPES,
    FP8,
    Copied,
    KernelProblem,
    OperandCache,
    padded,
    stored_tokens,
)
from sagesim_kernels.preparation import has_one_pass
from sagesim_kernels.target import compute_capability

CHANNELS: Final = (64, 128, 192, 256)
"""Channels of a tile. TMA pads those of the problem with zeros."""

_NARROW: Final = 128
"""Heads with more channels have kernels of their own, see `wide_kernel`. They compute tiles of this
many channels, too, if Q and V have unequal head sizes."""

BLOCK: Final = 64
_QK: Final = MatmulSpec(Precision.INT8, Granularity.PerToken, Granularity.PerBlock)
_QK_BY_TOKEN: Final = MatmulSpec(Precision.INT8, Granularity.PerToken, Granularity.PerToken)
_MOST_ROWS: Final = 2**29
"""Tokens of all heads in padded storage. The sums of dQ have up to four rows of 32 numbers for each
token, and TMA counts rows in 31 bits."""


_MOST_TOKENS: Final = 2**30
"""A tensor with known ends is shorter than this many strides of a token; see `token_descriptor`."""


def serves_forward(problem: KernelProblem) -> bool:
    """Return whether the Hopper kernels compute the forward of the problem on the current device.

    The answer does not depend on the numbers in the tensors, or on how sequences are packed. Up to
    `_MOST_ROWS`, the same kernels therefore compute a sequence alone and in a batch.
    """
    spec = problem.spec
    return _serves(problem) and (
        _serves_qk_and_pv(spec, _QK)
        or (_serves_qk_and_pv(spec, _QK_BY_TOKEN) and not is_wide(problem))
    )


def serves_forward_in_codes(problem: KernelProblem) -> bool:
    """Return whether a Hopper kernel computes the forward of a problem with P in codes.

    As for `serves_forward`, the answer does not depend on how sequences are packed.
    """
    return (
        _serves(problem)
        and not is_wide(problem)
        and problem.extras.is_none
        and _serves_p_in_codes(problem.spec)
    )


@lru_cache(maxsize=256)
def _serves_p_in_codes(spec: AttentionSpec) -> bool:
    return (
        spec.qk.precision is spec.pv.precision is Precision.INT8
        and not spec.smoothing.q
        and spec.rounding.mode is RoundingMode.HALF_EVEN
        and spec.block_q == spec.block_k == BLOCK
    )


def serves_backward(problem: KernelProblem) -> bool:
    """Return whether the Hopper kernels compute the backward; see `serves_forward`."""
    spec = problem.spec
    return _serves(problem) and _serves_gradients(spec) and (is_wide(problem) or has_one_pass(spec))


def _serves(problem: KernelProblem) -> bool:
    d, d_v = problem.q.shape[3], problem.v.shape[3]
    return _is_for_hopper(problem) and _serves_head_sizes(d, d_v) and problem.scale >= 0


def _is_for_hopper(problem: KernelProblem) -> bool:
    return (
        not IS_INTERPRETED
        and is_hopper()
        and max(_rows(problem.cu_q, problem.q), _rows(problem.cu_k, problem.k)) < _MOST_ROWS
    )


def serves_codes(problem: KernelProblem) -> bool:
    """Return whether a Hopper kernel computes the backward of a problem with P and dS in codes.

    Q and V have tiles of equal size. As for `serves_forward`, the answer does not depend on how
    sequences are packed.
    """
    d, d_v = (tile_channels(x.shape[3]) for x in (problem.q, problem.v))
    return (
        _is_for_hopper(problem)
        and problem.extras.softcap is None
        and d == d_v
        and d in (CHANNELS[0], _NARROW)
        and (_serves_codes(problem.spec) or serves_fp8(problem.spec))
    )


@lru_cache(maxsize=256)
def _serves_codes(spec: AttentionSpec) -> bool:
    maps = (spec.dv, spec.dq, spec.dk)
    products = (spec.qk_recompute, *maps)
    granularities = {x.lhs for x in products}
    return (
        all(x.precision is Precision.INT8 for x in products)
        and Granularity.PerRowBound not in granularities
        and len({x.lhs is Granularity.PerTile for x in maps}) == 1
        and spec.dp.precision in DTYPES
        and not spec.smoothing.q
        and spec.rounding.mode is RoundingMode.HALF_EVEN
        and spec.block_q == spec.block_k == BLOCK
    )


@lru_cache(maxsize=256)
def serves_fp8(spec: AttentionSpec) -> bool:
    """Return whether the backward of a spec is one in FP8, with scales from bounds."""
    maps = (spec.dv, spec.dq, spec.dk)
    return (
        spec.qk_recompute.precision is Precision.INT8
        and spec.dv.precision in FP8
        and len({x.precision for x in maps}) == 1
        and all(x.lhs is Granularity.PerRowBound for x in maps)
        and spec.dp.precision in DTYPES
        and not spec.smoothing.q
        and spec.rounding.mode is RoundingMode.HALF_EVEN
        and spec.block_q % BLOCK == 0
        and spec.block_k == BLOCK
    )


def tile_channels(channels: int) -> int:
    """Return the channels of a tile for a head size: a power of two, or 192."""
    return 192 if 128 < channels <= 192 else padded(channels)


def is_hopper() -> bool:
    """Return whether Triton compiles for a Hopper GPU."""
    return compute_capability() == 90


def _rows(cu: Tensor | None, x: Tensor) -> int:
    return x.shape[1] * stored_tokens(cu, x)


@lru_cache(maxsize=256)
def _serves_qk_and_pv(spec: AttentionSpec, qk: MatmulSpec) -> bool:
    return (
        spec.qk == qk
        and spec.pv.precision in DTYPES
        and not spec.smoothing.q
        and spec.block_k == BLOCK
    )


@lru_cache(maxsize=256)
def _serves_gradients(spec: AttentionSpec) -> bool:
    (sixteen, *others) = {spec.site(site).precision for site in ("dv", "dp", "dq", "dk")}
    return (
        spec.qk_recompute == _QK
        and sixteen in DTYPES
        and not others
        and not spec.smoothing.q
        and spec.delta is Delta.FROM_O
        and spec.block_q == spec.block_k == BLOCK
    )


def is_wide(problem: KernelProblem) -> bool:
    """Return whether Q or V has so many channels that heads need kernels of their own."""
    return max(problem.q.shape[3], problem.v.shape[3]) > _NARROW


def _serves_head_sizes(d: int, d_v: int) -> bool:
    d, d_v = tile_channels(d), tile_channels(d_v)
    return d in CHANNELS and d_v in CHANNELS and (d == d_v or min(d, d_v) >= _NARROW)


def copied(problem: KernelProblem) -> Copied:
    """Return which 16-bit operands have to be copied to padded storage; see `OperandCache`.

    TMA loads the values of keys that no query attends to and of queries that attend to no key,
    where the kernels need zeros. Which keys are padding, and how long packed sequences are, is in
    the memory of the device, so that the host copies whenever there may be such keys or queries.

    TMA loads zeros for the keys that seqused_k excludes, if it can see where a sequence ends. If
    padding leaves a sequence without keys, nothing of its queries is loaded.
    """
    _, key_mask, seqused_k, *_ = problem.extras
    is_padded = key_mask is not None or seqused_k is not None
    # Padding may take all keys of the first queries, which attend to few under a limit on the
    # right, and all keys of the last ones, which attend to few under a limit on the left.
    has_first = key_mask is not None and problem.longest_offset is not None
    has_last = is_padded and problem.longest_lowest is not None
    has_known_ends = seqused_k is None or all(map(have_known_ends, (problem.k, problem.v)))
    return Copied(
        queries=has_first or has_last or has_dead_queries(problem),
        keys=key_mask is not None or has_dead_keys(problem) or not has_known_ends,
    )


def have_known_ends(x: Tensor) -> bool:
    """Return whether TMA can see where each sequence of x ends; see `token_descriptor`.

    x: [sequences, heads, tokens, channels]. If x has to be copied, the answer holds for the copy.
    """
    if x.shape[0] == 1 or 0 in x.stride()[:3]:  # expanded tensors are copied
        return True
    sequence, token = x.stride(0), x.stride(2) if x.shape[2] > 1 else x.shape[3]
    return sequence % token == 0 and x.shape[0] * sequence // token < _MOST_TOKENS


def have_key_ends(problem: KernelProblem, operands: OperandCache) -> bool:
    """Return whether TMA has to see where the keys of each sequence end."""
    has_end = problem.extras.seqused_k is not None and not operands.copied.keys
    return has_end or operands.are_packed(keys=True)


def has_dead_keys(problem: KernelProblem) -> bool:
    """Return whether there are keys that no query attends to, in a call without padding.

    Of packed sequences, whether there may be.
    """
    n_q, n_k = problem.q.shape[2], problem.k.shape[2]
    lowest, offset = problem.longest_lowest, problem.longest_offset
    if problem.cu_q is not None:
        limit = lowest if problem.lower_right else offset
        return limit is not None and not problem.has_equal_lengths
    return (lowest is not None and lowest > 0) or (offset is not None and n_q + offset < n_k)


def has_dead_queries(problem: KernelProblem) -> bool:
    """Return whether there are queries that attend to no key, in a call without padding.

    Of packed sequences, whether there may be.
    """
    n_q, n_k = problem.q.shape[2], problem.k.shape[2]
    lowest, offset = problem.longest_lowest, problem.longest_offset
    if problem.cu_q is not None:
        limit = offset if problem.lower_right else lowest
        return limit is not None and not problem.has_equal_lengths
    return (lowest is not None and n_q + lowest > n_k) or (offset is not None and offset < 0)
