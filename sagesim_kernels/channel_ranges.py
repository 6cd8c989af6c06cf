"""How kernels divide the channels of a head.

A tile has more channels than some heads; the others are zeros. Tensors of Triton have a power of
two of channels, so that kernels leave out zeros by dividing a tile.
"""

from __future__ import annotations

from triton import constexpr_function


@constexpr_function
def parts_of(channels, most, bits):
    """Return the first channel and the size of each part of a head whose products are summed.

    channels: of the head. most: channels of a part at most, a power of two. bits: of an element. An
    instruction sums over 32 bytes.

    >>> parts_of(80, 128, 16)
    ((0, 64), (64, 16))
    """
    step = 256 // bits
    end = -(-channels // step) * step
    parts = []
    first = 0
    while first < end:
        size = most
        while size > end - first:
            size //= 2
        parts.append((first, size))
        first += size
    return tuple(parts)
