"""TMA descriptors of tensors, and the size of the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sagesim_kernels.hopper.dq_parts import BLOCK_Q
from sagesim_kernels.hopper.token_loads import SEQUENCE_END
from sagesim_kernels.operands import DqSums, Operand, channels_at_once

_DTYPES: Final[dict[torch.dtype, Any]] = {
    torch.int8: gl.int8,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
}

SCALES = gl.constexpr(gl.NVMMASharedLayout(0, 32, 1))
"""Layout of scales in shared memory."""


def tma_descriptor(x: Tensor, rows: int, channels: int) -> TensorDescriptor:
    """Return a descriptor that loads tiles [rows, channels] of x [..., rows, channels].

    x may have fewer channels than a tile. Rows and channels behind the last one are loaded as
    zeros. The channels of x have to be contiguous, and its other strides multiples of 16 bytes. An
    expanded tensor is copied; the descriptor holds the copy.
    """
    x = _with_strides(x)
    return _descriptor(x, x.shape, _strides(x), rows, channels)


def token_descriptor(
    x: Tensor, rows: int, channels: int, *, has_ends: bool = False
) -> TensorDescriptor:
    """Return a descriptor that loads or stores tiles of the tokens of one sequence.

    x: [sequences, heads, tokens, channels], see `tma_descriptor`; or [1, heads, tokens, channels]
    with packed sequences. has_ends: whether TMA loads zeros behind the last token of a sequence,
    and stores nothing there, although other tokens follow. The starts of sequences are then a
    multiple of the stride of tokens apart, see `support.have_known_ends`.

    With ends, the descriptor has one more dimension. TMA compares each coordinate with the size of
    its dimension, and adds up their strides in 64 bits. So token i of a sequence of n tokens, which
    ends before token `end` of x, gets the coordinates (E, end, head, E - n + i, channel), with
    E = `SEQUENCE_END`. The size of the fourth dimension is E, so that TMA sees the end of the
    sequence there. The second and the fourth dimension have the stride s of tokens, and the first
    one has 2**34 - s. The strides add up to E * 2**34 elements, which is 0 modulo 2**64 bytes, and
    to (end - n + i) * s. `triton.tools.ragged_tma` has the same idea.

    Sequence b begins at token b * `apart` of x. The size of the first dimension, which only has to
    be more than E, tells a kernel this factor: it is E + 1 + `apart`. It is 1 for packed sequences,
    of which b is the first token.
    """
    if not has_ends:
        return tma_descriptor(x, rows, channels)
    x = _with_strides(x)
    sequence, heads, token, _ = _strides(x)
    assert x.shape[0] == 1 or sequence % token == 0, "sequences begin between tokens"
    apart = sequence // token if x.shape[0] > 1 else 1
    end, last = SEQUENCE_END.value, (x.shape[0] - 1) * apart + x.shape[2]
    shape = (end + 1 + apart, last + 1, x.shape[1], end, x.shape[3])
    return _descriptor(x, shape, [2**34 - token, token, heads, token, 1], rows, channels)


def right_descriptor(x: Operand, tokens: int, channels: int) -> TensorDescriptor:
    """Return a descriptor that loads tiles [channels, tokens] of codes that are summed over."""
    return tma_descriptor(x.ptr.view(-1, x.stride_d), channels, tokens)


def key_scales_of(k: Operand, keys: int) -> TensorDescriptor | None:
    """Return a descriptor that loads the scales of `keys` keys; None if keys share a scale."""
    if k.TOKENS.value != 1:
        return None
    return TensorDescriptor.from_tensor(k.scale.view(-1), [keys], SCALES.value)


def sums_descriptor(sums: DqSums, d: int, channels: int) -> TensorDescriptor:
    """Return the descriptor by which TMA adds to sums of dQ.

    d: channels of Q. channels: of a tile.
    """
    rows = BLOCK_Q.value * channels_at_once(d, channels) // 32
    layout = gl.NVMMASharedLayout(128, 32, 2)
    return TensorDescriptor.from_tensor(sums.sums.view(-1, 32), [rows, 32], layout)


def _with_strides(x: Tensor) -> Tensor:
    """Return x, or a copy if it is expanded, because TMA has no stride of 0."""
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
        return x.contiguous()
    return x


def _strides(x: Tensor) -> list[int]:
    """Return the strides of x [..., channels], of which torch may give any to a size of 1."""
    return [x.stride(i) if x.shape[i] > 1 else x.shape[-1] for i in range(x.ndim - 1)] + [1]


def _descriptor(
    x: Tensor, shape: Sequence[int], strides: list[int], rows: int, channels: int
) -> TensorDescriptor:
    block = (*[1] * (len(shape) - 2), rows, channels)
    return TensorDescriptor(x, list(shape), strides, list(block), _layout(block, x.dtype))


@lru_cache(maxsize=64)
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[dtype])
