"""Products that sum over channels, S and dP, of those channels that a head has.

A tile of 128 channels has zeros where a head of 80 or 96 channels has none. The products leave out
most of them: they multiply parts of the tile, of 64, 32 and 16 channels, as tensors of Triton have
a power of two of channels. The results have the same bits.

The products dV, dQ and dK have channels in their results. Divided in the same way they were slower:
see docs/speed.md, "Channels of a head".
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma


@constexpr_function
def parts_of(channels, tile, bits):
    """Return the first channel and the size of each part of a tile that is multiplied.

    channels: of a head. bits: of a number. An operation of wgmma sums over 32 bytes.
    """
    step = 256 // bits
    end = -(-channels // step) * step
    parts = []
    first = 0
    while first < end:
        size = tile
        while size > end - first:
            size //= 2
        parts.append((first, size))
        first += size
    return tuple(parts)


@constexpr_function
def products_of(channels, tile, bits):
    """Return how many products of `warpgroup_mma_wait` `start_product` starts."""
    return len(parts_of(channels, tile, bits))


@gluon.jit
def start_product(left, right, DTYPE: gl.constexpr, LAYOUT: gl.constexpr, CHANNELS: gl.constexpr):
    """Start the product left right^T of two tiles of tokens; it sums over their channels.

    left, right: [tokens, D], right in shared memory, and left too if it has channels that the head
    has not. CHANNELS: of a head. The result may be read only after a wait.
    """
    ROWS: gl.constexpr = left.shape[0]
    COLUMNS: gl.constexpr = right.shape[0]
    TILE: gl.constexpr = right.shape[1]
    PARTS: gl.constexpr = parts_of(CHANNELS, TILE, right.dtype.primitive_bitwidth)
    out = gl.zeros((ROWS, COLUMNS), DTYPE, LAYOUT)
    if len(PARTS) == 1:
        return warpgroup_mma(left, right.permute((1, 0)), out, use_acc=False, is_async=True)
    else:
        for i in gl.static_range(len(PARTS)):
            lhs = left.slice(PARTS[i][0], PARTS[i][1], 1)
            rhs = right.slice(PARTS[i][0], PARTS[i][1], 1).permute((1, 0))
            out = warpgroup_mma(lhs, rhs, out, use_acc=i > 0, is_async=True)
        return out
