"""Rounding to the code grids of INT8 and FP8, and the random numbers of stochastic rounding.

Every function is elementwise. A result depends on the element's value, its position (row, column)
in its head, the tensor's name and the seed. It does not depend on tiles, batch or device.
"""

from __future__ import annotations

from typing import Final, TypeVar

import torch
from torch import Tensor

from sagesim.spec import Precision, Rounding, RoundingMode

CODE_MAX: Final = {Precision.INT8: 127.0, Precision.FP8_E4M3: 448.0, Precision.FP8_E5M2: 57344.0}
"""The largest code of each scaled format. The amax of a region gets this code."""

FLOAT8_DTYPE: Final = {
    Precision.FP8_E4M3: torch.float8_e4m3fn,
    Precision.FP8_E5M2: torch.float8_e5m2,
}

_FP8: Final = {Precision.FP8_E4M3: (3, -6), Precision.FP8_E5M2: (2, -14)}
"""Mantissa bits and the exponent of the smallest normal number."""

STREAMS: Final = {"q": 0, "k": 1, "v": 2, "do": 3, "p": 4, "ds": 5}
"""The number of each tensor's random stream. A tensor has the same stream at all its sites."""


def round_codes_(
    y: Tensor, precision: Precision, rounding: Rounding, tensor: str, first_row: int = 0
) -> Tensor:
    """Round y to codes of the format, in place.

    Half-even rounding cannot exceed CODE_MAX, because |y| <= CODE_MAX * (1 + 2**-22) rounds to
    CODE_MAX. Stochastic rounding can, so its result is clamped.

    Args:
        y: x / scale, [..., rows, columns], finite, |y| at most CODE_MAX up to float32 rounding.
        tensor: the tensor's name, one of `STREAMS`.
        first_row: the index of y's first row in its head.
    """
    if precision is Precision.INT8:
        return _round_integers_(y, rounding, tensor, first_row)
    if rounding.mode is RoundingMode.HALF_EVEN:
        return y.copy_(y.to(FLOAT8_DTYPE[precision]))
    # Within a binade, the codes are multiples of a step: divide by the step, round, multiply.
    mantissa_bits, min_exponent = _FP8[precision]
    exponent = torch.frexp(y.float()).exponent - 1
    step = torch.exp2((exponent.clamp_(min=min_exponent) - mantissa_bits).to(y.dtype))
    _round_integers_(y.div_(step), rounding, tensor, first_row).mul_(step)
    return y.clamp_(-CODE_MAX[precision], CODE_MAX[precision])


def _round_integers_(y: Tensor, rounding: Rounding, tensor: str, first_row: int) -> Tensor:
    match rounding.mode:
        case RoundingMode.HALF_EVEN:
            return y.round_()
        case RoundingMode.HALF_AWAY:
            whole = y.trunc()
            # y - whole is exact, so ties are found exactly. y + 0.5 would be rounded.
            away = y.sub_(whole).abs().ge_(0.5).copysign_(y)
            return y.copy_(whole.add_(away))
        case RoundingMode.STOCHASTIC:
            assert rounding.seed is not None
            u = uniform(rounding.seed, tensor, y.shape[-2], y.shape[-1], first_row, y.device)
            below = y.floor()
            up = y.sub_(below) > u
            return y.copy_(below.add_(up)).clamp_(-127, 127)


def uniform(
    seed: int, tensor: str, rows: int, columns: int, first_row: int, device: torch.device
) -> Tensor:
    """Random numbers in [0, 1), float32 [rows, columns], multiples of 2**-24.

    The number of an element is a hash of the seed, the tensor's stream, the row and the column. It
    is the same in all heads, batches, tiles and devices. The hash is the RXS-M-XS output function
    of PCG on 32-bit words, applied to the seed, and then again after adding each of the others.

    Source: M. Jarzynski and M. Olano, "Hash Functions for GPU Rendering", JCGT 9(3), 2020.
    """
    row = torch.arange(first_row, first_row + rows, device=device)
    column = torch.arange(columns, device=device)
    key = pcg_hash(row + pcg_hash(STREAMS[tensor] + pcg_hash(seed)))
    word = pcg_hash(key[:, None] + column)
    return (word >> 8).float() * 2.0**-24


Word = TypeVar("Word", int, Tensor)


def pcg_hash(x: Word) -> Word:
    """The PCG hash of 32-bit words, which are Python integers or elements of an int64 tensor.

    int64 products wrap modulo 2**64, so that their low 32 bits are right.
    """
    low_bits = 0xFFFFFFFF
    state = ((x & low_bits) * 747796405 + 2891336453) & low_bits
    word = (((state >> ((state >> 28) + 4)) ^ state) * 277803737) & low_bits
    return (word >> 22) ^ word
