"""Rounding to the code grids of INT8 and FP8, and the random numbers of stochastic rounding.

Every function here is elementwise: what an element becomes depends on its value, its place in
its head (row, column), the tensor's name and the seed; never on tiles, batch or device.
"""

from __future__ import annotations

from typing import Final, TypeVar

import torch
from torch import Tensor

from sagesim.spec import Precision, Rounding, RoundingMode

CODE_MAX: Final = {Precision.INT8: 127.0, Precision.FP8_E4M3: 448.0, Precision.FP8_E5M2: 57344.0}
"""The largest code of each scaled format; a region's amax is mapped to it. INT8 has no -128."""

FLOAT8_DTYPE: Final = {
    Precision.FP8_E4M3: torch.float8_e4m3fn,
    Precision.FP8_E5M2: torch.float8_e5m2,
}

_FP8: Final = {Precision.FP8_E4M3: (3, -6), Precision.FP8_E5M2: (2, -14)}
"""Mantissa bits and the exponent of the smallest normal number."""

STREAMS: Final = {"q": 0, "k": 1, "v": 2, "do": 3, "p": 4, "ds": 5}
"""Each tensor draws from a stream of its own; the same tensor draws alike at all its sites."""


def round_codes_(
    y: Tensor, precision: Precision, rounding: Rounding, tensor: str, row0: int = 0
) -> Tensor:
    """Round y, in units of codes, to the format's grid, in place.

    Args:
        y: [..., rows, columns], finite, |y| at most CODE_MAX up to float32 rounding.
        tensor: which of `STREAMS` stochastic rounding draws from.
        row0: the index in its head of y's first row.

    Half-even rounding cannot leave the grid: |y| <= CODE_MAX * (1 + 2**-22) rounds back to
    CODE_MAX. Stochastic rounding could, and is clamped.
    """
    if precision is Precision.INT8:
        return _round_integers_(y, rounding, tensor, row0)
    if rounding.mode is RoundingMode.HALF_EVEN:
        return y.copy_(y.to(FLOAT8_DTYPE[precision]))
    # A float grid is an integer grid within each binade: divide by the spacing, round, multiply.
    mantissa_bits, min_exponent = _FP8[precision]
    exponent = torch.frexp(y.float()).exponent - 1
    step = torch.exp2((exponent.clamp_(min=min_exponent) - mantissa_bits).to(y.dtype))
    _round_integers_(y.div_(step), rounding, tensor, row0).mul_(step)
    return y.clamp_(-CODE_MAX[precision], CODE_MAX[precision])


def _round_integers_(y: Tensor, rounding: Rounding, tensor: str, row0: int) -> Tensor:
    match rounding.mode:
        case RoundingMode.HALF_EVEN:
            return y.round_()
        case RoundingMode.HALF_AWAY:
            whole = y.trunc()
            # y - whole is exact, so ties are seen as ties (adding 0.5 first would not do).
            away = y.sub_(whole).abs().ge_(0.5).copysign_(y)
            return y.copy_(whole.add_(away))
        case RoundingMode.STOCHASTIC:
            assert rounding.seed is not None
            u = uniform(rounding.seed, tensor, y.shape[-2], y.shape[-1], row0, y.device)
            below = y.floor()
            up = y.sub_(below) > u
            return y.copy_(below.add_(up)).clamp_(-127, 127)


def uniform(
    seed: int, tensor: str, rows: int, columns: int, row0: int, device: torch.device
) -> Tensor:
    """Random numbers in [0, 1), float32 [rows, columns], multiples of 2**-24.

    The number of element (row, column) is a hash of seed, stream, row and column, and of nothing
    else: heads and batches share them, tiles and devices cannot change them. The hash is PCG's
    RXS-M-XS output function on 32-bit words, nested once for each coordinate.

    Source: M. Jarzynski and M. Olano, "Hash Functions for GPU Rendering", JCGT 9(3), 2020.
    """
    row = torch.arange(row0, row0 + rows, device=device)
    column = torch.arange(columns, device=device)
    key = pcg_hash(row + pcg_hash(STREAMS[tensor] + pcg_hash(seed)))
    word = pcg_hash(key[:, None] + column)
    return (word >> 8).float() * 2.0**-24


Word = TypeVar("Word", int, Tensor)


def pcg_hash(x: Word) -> Word:
    """The PCG hash of 32-bit words, as Python integers or held in int64; int64 products wrap
    modulo 2**64, which leaves their low 32 bits right."""
    low = 0xFFFFFFFF
    state = ((x & low) * 747796405 + 2891336453) & low
    word = (((state >> ((state >> 28) + 4)) ^ state) * 277803737) & low
    return (word >> 22) ^ word
