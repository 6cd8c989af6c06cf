"""The products S and dP, which sum over the channels of a head.

A tile has more channels than some heads: TMA fills the other channels of a tile with zeros. These
products do not multiply most of the zeros. Tensors of Triton have a power of two of channels, so
that the first 80 channels of a tile of 128 are two parts, of 64 and of 16 channels. The results
have the same bits as those of whole tiles.

The channels of dV, dQ and dK are columns of their results. Divided in the same way, these products
took longer: see docs/kernel_variants.md, "Channels of a head".
"""

# Pyright takes the annotations of Gluon's functions literally:
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from sagesim_kernels.channel_ranges import parts_of


@constexpr_function
def products_of(channels, tile, bits):
    """Return how many products `start_product` starts, as `warpgroup_mma_wait` counts them."""
    return len(parts_of(channels, tile, bits))


@gluon.jit
def start_sum(left, right, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Start the sum of the products left[i] right[i]^T. It may be read only after a wait.

    left, right: tuples of parts of two blocks of tokens, [tokens, channels] each.
    `warpgroup_mma_wait` counts each pair as a product.
    """
    ROWS: gl.constexpr = left[0].shape[0]
    COLUMNS: gl.constexpr = right[0].shape[0]
    out = gl.zeros((ROWS, COLUMNS), DTYPE, LAYOUT)
    for i in gl.static_range(len(left)):
        columns = right[i].permute((1, 0))
        out = warpgroup_mma(left[i], columns, out, use_acc=i > 0, is_async=True)
    return out


@gluon.jit
def start_product(left, right, DTYPE: gl.constexpr, LAYOUT: gl.constexpr, CHANNELS: gl.constexpr):
    """Start the product left right^T of two blocks of tokens, which sums over their channels.

    left, right: [tokens, channels of the tile], in shared memory. left may be in registers if
    CHANNELS are all channels of the tile. CHANNELS: of the head. The result may be read only after
    a wait.
    """
    TILE: gl.constexpr = right.shape[1]
    PARTS: gl.constexpr = parts_of(CHANNELS, TILE, right.dtype.primitive_bitwidth)
    if len(PARTS) == 1:
        return start_sum((left,), (right,), DTYPE, LAYOUT)
    else:
        lefts, rights = (), ()
        for i in gl.static_range(len(PARTS)):
            lefts += (left.slice(PARTS[i][0], PARTS[i][1], 1),)
            rights += (right.slice(PARTS[i][0], PARTS[i][1], 1),)
        return start_sum(lefts, rights, DTYPE, LAYOUT)
