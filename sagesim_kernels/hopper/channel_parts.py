"""Tiles of 128, 192 or 256 channels, in two parts.

Tensors of Triton have a power of two of channels. A tile of 192 channels therefore is two tensors,
of 128 and of 64 channels, and costs no more than that. The other tiles are two equal halves. In a
kernel, *parts* are pairs of TMA descriptors, or of buffers in shared memory.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sagesim_kernels.gluon_compat import tma_load
from sagesim_kernels.hopper.descriptors import tma_descriptor, token_descriptor
from sagesim_kernels.hopper.token_loads import load_tokens
from sagesim_kernels.operands import Operand

BLOCK = gl.constexpr(64)
"""Tokens of a block."""


_Parts = tuple[TensorDescriptor, TensorDescriptor]


def code_parts(x: Operand, channels: int) -> _Parts:
    """Return TMA descriptors of the parts of a block of codes. channels: of a tile."""
    rows = x.ptr.view(-1, x.stride_n)
    first, rest = (tma_descriptor(rows, BLOCK.value, n) for n in _channels_of_parts(channels))
    return first, rest


def token_parts(x: Operand, channels: int, *, has_ends: bool) -> _Parts:
    """Return TMA descriptors of the parts of a block of tokens in 16 bit.

    channels: of a tile. has_ends: see `token_descriptor`.
    """
    first, rest = (
        token_descriptor(x.ptr, BLOCK.value, n, has_ends=has_ends)
        for n in _channels_of_parts(channels)
    )
    return first, rest


def _channels_of_parts(channels: int) -> tuple[int, int]:
    rest = 64 if channels == 192 else channels // 2
    return channels - rest, rest


@gluon.jit
def _allocate_part(x, COUNT: gl.constexpr):
    D: gl.constexpr = x.block_shape[len(x.block_shape) - 1]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, D], x.dtype)
    return gl.allocate_shared_memory(x.dtype, [COUNT, BLOCK, D], LAYOUT)


@gluon.jit
def allocate(x, COUNT: gl.constexpr):
    """Return buffers for COUNT blocks of what the TMA descriptors x load; both are parts."""
    first, rest = x
    return _allocate_part(first, COUNT), _allocate_part(rest, COUNT)


@gluon.jit
def buffer_at(buffers, i):
    """Return buffer i of `allocate`."""
    first, rest = buffers
    return first.index(i), rest.index(i)


@gluon.jit
def load_codes(x, row, bar, buffer):
    """Load a block of codes from `row` of a tensor of two dimensions by TMA."""
    tma_load(x[0], [row, 0], bar, buffer[0])
    tma_load(x[1], [row, x[0].block_shape[1]], bar, buffer[1])


@gluon.jit
def load_numbers(x, origin, first, bar, buffer):
    """Load a block of tokens in 16 bit. x, buffer: parts. The others: see `load_tokens`."""
    load_tokens(x[0], origin, first, bar, buffer[0])
    load_tokens(x[1], origin, first, bar, buffer[1], buffer[0].shape[1])
