"""Tiles of 128, 192 or 256 channels, in two parts.

Tensors of Triton have a power of two of channels. A tile of 192 channels therefore is two tensors,
of 128 and of 64 channels, and costs no more than that. The other tiles are two equal halves. In a
kernel, *parts* are pairs of TMA descriptors, or of buffers in shared memory.
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sagesim_kernels.gluon_compat import reinterpret, tma_load
from sagesim_kernels.hopper.descriptors import tma_descriptor

BLOCK = gl.constexpr(64)
"""Tokens of a block."""


def part_descriptors(x: Tensor, channels: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return TMA descriptors that load the parts of a block of tokens of x.

    x: [..., tokens, channels]. channels: of a tile.
    """
    rest = 64 if channels == 192 else channels // 2
    return tma_descriptor(x, BLOCK.value, channels - rest), tma_descriptor(x, BLOCK.value, rest)


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
def _load_part(x, b, h, row, channel, bar, buffer):
    D: gl.constexpr = buffer.shape[1]
    shared = reinterpret(buffer, x.dtype, [1, 1, BLOCK, D], x.layout)
    tma_load(x, [b, h, row, channel], bar, shared)


@gluon.jit
def load_numbers(x, b, h, row, bar, buffer):
    """Load a block of tokens from `row` of head h, of a tensor of four dimensions, by TMA."""
    _load_part(x[0], b, h, row, 0, bar, buffer[0])
    _load_part(x[1], b, h, row, buffer[0].shape[1], bar, buffer[1])
