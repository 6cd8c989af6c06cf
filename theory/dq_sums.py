"""Sums of dQ as integers: a bound on every row, the unit that follows, and the error.

A row of dQ is a sum of parts, one for each block of keys. A part is rounded to a multiple of the
row's unit u_i, and the multiples are added in int32, in any order. The unit follows from a bound
B_i on the sum of the magnitudes of the parts. All results are before the logit scale.

Computed in float64. Rows are [..., n_q]. Source: ours; docs/numerics.md, "Sums of dQ".
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from sagesim.spec import Granularity, MatmulSpec, Precision, RoundingMode

SLACK: Final = 1 + 2.0**-6
"""The factor of B_i that covers float32 errors of the bound, of dS and of the parts."""

SUBNORMAL_EXCESS: Final = 2 / (1 + 2.0**-7)
"""How far the parts of a 16-bit dS may exceed B_i if elements are subnormal in the format.

Rounding to nearest then may double an element, and `growth` is 1 + 2^-7. In FP16 these are elements
below 2^-14. Gradients without loss scaling may be that small.
"""

_BITS: Final = 30
_SMALLEST_UNIT: Final = 2.0**-126
_INVERSE_BITS: Final = 126
_LARGEST_DS: Final = 2.0**120
_FLOAT32: Final = 2.0**-14
"""More than the relative error of a part in float32, of up to 256 keys.

A 16-bit part has 255 sums, of which each may be truncated: 255 * 2^-23. An INT8 part is an exact
integer times a factor of three numbers. One of them is the inverse unit, a power of two. So there
are two roundings.
"""

_16_BIT: Final = (Precision.FP16, Precision.BF16, Precision.INPUT16)


class Growth(NamedTuple):
    """What rounding dS may make of the sum of a row's magnitudes.

    It is at most own times the sum of the row plus shared times the sums of all rows of the block
    of queries.
    """

    own: float
    shared: float


def growth(matmul: MatmulSpec, mode: RoundingMode, block_k: int) -> Growth:
    """The growth g of a row of dS: sum_j |rounded dS_ij| <= g sum_j |dS_ij|.

    - 16 bit: 1 + 2^-7. BF16 rounds a normal number by less than 2^-8 of it, FP16 by 2^-11. A
      subnormal number may double, see `SUBNORMAL_EXCESS`.
    - Codes, to nearest: 2. A number below half a code becomes 0. One between half a code and a
      code becomes a code, which is at most twice the number. A larger one grows by less.
    - Codes, stochastic: a number grows by less than a code, which is amax / 127. A row of a tile
      has block_k elements. With one scale for each row of a tile, its amax is at most the sum of
      that row of the tile, so the row's sum grows by at most block_k / 127 of itself. The tiles of
      a row add up. With one scale for each tile, the amax is an element of any row of the tile. It
      is at most the sum of all rows of the tile.

    Args:
        matmul: the spec of the site dq.
        mode: how codes are rounded; a 16-bit format ignores it.
        block_k: keys of a tile.

    Raises:
        ValueError: if the format is neither INT8 nor 16 bit, or scales are stochastic and neither
            per tile nor per tile row.
    """
    if matmul.precision in _16_BIT:
        return Growth(1 + 2.0**-7, 0.0)
    if matmul.precision is not Precision.INT8:
        raise ValueError(f"sums of dQ are of INT8 or 16-bit products, not {matmul.precision.value}")
    if mode is not RoundingMode.STOCHASTIC:
        return Growth(2.0, 0.0)
    match matmul.lhs:
        case Granularity.PerTile:
            return Growth(1.0, block_k / 127)
        case Granularity.PerTileRow:
            return Growth(1 + block_k / 127, 0.0)
        case _:
            raise ValueError(f"stochastic rounding with one scale per {matmul.lhs.value}")


def ds_bound(
    *,
    v: Tensor,
    do: Tensor,
    delta: Tensor,
    p_bound: Tensor,
    growth: Growth,
    block_q: int,
) -> Tensor:
    """B_i / max |K|, an upper bound on sum_j |rounded dS_ij|, [..., n_q].

    It is g R_i (|dO_i| max_j |V_j| + |delta_i|). |dP_ij| <= |dO_i| |V_j| (Cauchy-Schwarz), and
    dS_ij = P_ij (dP_ij - delta_i). So sum_j |dS_ij| is at most R_i times the parentheses. Rounding
    dS makes it at most g times as large.

    j runs over all keys here. The kernels leave out blocks of keys that no query of the block
    attends to. Their bound is therefore at most this one.

    Args:
        v: V as dP multiplies it, [..., n_k, d_v]. A row that is not finite does not count.
        do: dO as dP multiplies it, [..., n_q, d_v].
        delta: [..., n_q].
        p_bound: R_i, see `p_bound`.
        growth: see `growth`.
        block_q: queries of a tile.
    """
    v_norm = v.double().norm(dim=-1)
    largest_v = v_norm.where(v_norm.isfinite(), 0.0).amax(-1, keepdim=True)
    dp = do.double().norm(dim=-1) * largest_v
    sums = p_bound.double() * (dp + delta.double().abs())
    total = growth.own * sums
    if growth.shared:
        n = sums.shape[-1]
        blocks = torch.nn.functional.pad(sums, (0, -n % block_q)).unflatten(-1, (-1, block_q))
        shared = blocks.sum(-1).repeat_interleave(block_q, -1)[..., :n]
        total = total + growth.shared * shared
    return total


def row_bound(ds_bound: Tensor, k: Tensor) -> Tensor:
    """B_i, an upper bound on the sum over blocks J of |part_iJ| in every channel, [..., n_q].

    A part is a sum of products of dS with elements of K. So B_i is `ds_bound` times max |K|.

    Args:
        ds_bound: see `ds_bound`.
        k: K as dQ multiplies it, [..., n_k, d].
    """
    return ds_bound * k.double().abs().amax((-2, -1))[..., None]


def p_bound(
    lse: Tensor,
    keys: int,
    *,
    p_sums: Tensor | None = None,
    q: Tensor | None = None,
    k: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """R_i, an upper bound on the sum of row i of P as the backward computes it, [..., n_q].

    P is exp(S - L). The exact sum of a row is 1 if S is that of the forward. S and L are rounded: 8
    roundings of |L| in float32 change P by at most the factor 2^x with x = 2^-21 |L| log2 e. A key
    whose S is far below L has a larger error relative to L. Its P is small by as much, and `SLACK`
    covers it. In INT8, S is the same number in both passes. No S is above L then, so no P is above
    1, and the sum is at most the number of keys.

    A 16-bit S is a float32 sum of d products. The backward may add them in another order than the
    forward, or than the kernel that computes the sums of P. Each of the two sums is off by at most
    d truncations of 2^-23 of |Q_i| |K_j|.

    Args:
        lse: L of the logits as they are recomputed (with smoothed K).
        keys: the number of keys.
        p_sums: the row sums of P; None if qk_recompute and qk have the same operands, and delta
            does not come from P.
        q: Q as qk_recompute multiplies it if it is in 16 bit, [..., n_q, d]; None in INT8.
        k: the same of K, [..., n_k, d].
        scale: the logit scale.
    """
    is_exact = q is None or k is None
    if is_exact and p_sums is not None:
        return p_sums.double()
    size = lse.double().abs().masked_fill(lse.isinf(), 0.0)
    if q is not None and k is not None:
        channels = max(32, 1 << (q.shape[-1] - 1).bit_length())
        largest = k.double().norm(dim=-1).amax(-1, keepdim=True)
        size = size + channels * q.double().norm(dim=-1) * largest * abs(scale)
    rounding = torch.exp2(2.0**-21 * math.log2(math.e) * size)
    if is_exact:
        return rounding.clamp(max=float(keys))
    return rounding if p_sums is None else rounding * p_sums.double()


def unit(bound: Tensor, ds_bound: Tensor, *, in_16_bit: bool) -> Tensor:
    """u_i, the unit of a row: a power of two, float64.

    It is the least power of two that is not below (1 + 2^-6) B_i, times 2^-30. It is at least
    2^-126. It is also at least the least power of two that is not below (1 + 2^-6) B_i / max |K|,
    times 2^-126. So a scale of dS divided by the unit is at most 2^126.

    It is NaN if B_i / max |K| is not below 2^120, or if B_i is not below 2^127 in 16 bit and 2^157
    for codes.

    Args:
        bound: B_i, see `row_bound`.
        ds_bound: B_i / max |K|, see `ds_bound`.
        in_16_bit: whether dQ is a product of 16-bit numbers.
    """
    units = torch.maximum(
        torch.ldexp(_power_above(bound * SLACK), torch.tensor(-_BITS)),
        torch.ldexp(_power_above(ds_bound * SLACK), torch.tensor(-_INVERSE_BITS)),
    )
    is_finite = (ds_bound < _LARGEST_DS) & (bound < (2.0**127 if in_16_bit else 2.0**157))
    return units.clamp(min=_SMALLEST_UNIT).where(is_finite, math.nan)


def largest_sum(key_blocks: Tensor, excess: float = 1.0) -> Tensor:
    """An upper bound on the magnitude of a sum of multiples, and of every partial sum, in units.

    The magnitudes of the parts add up to at most excess * B_i, which is at most excess * 2^30
    units. Float32 changes a part by at most 2^-14 of its terms. Rounding to a multiple adds at
    most half a unit for each block of keys. The factor 1 + 2^-6 of the unit is left to float32
    errors of the bound and of dS, and does not count here.

    For 2^20 keys in blocks of 32, and `SUBNORMAL_EXCESS`, it is below 2^31: int32 does not
    overflow. Each query head has rows of its own, so the number of query heads does not matter.

    Args:
        key_blocks: the number of key blocks that the row's block attends to.
        excess: the most that the sum of magnitudes exceeds B_i by; `SUBNORMAL_EXCESS` if dS is
            rounded to 16 bit.
    """
    return excess * (1 + _FLOAT32) * 2.0**_BITS + key_blocks.double() / 2


def error_bound(unit: Tensor, key_blocks: Tensor) -> Tensor:
    """An upper bound on |sum of multiples * unit - sum of parts|: half a unit for each key block.

    The sum of integers is exact. The logit scale multiplies both.

    Args:
        key_blocks: the number of key blocks that the row's block attends to.
    """
    return unit * (key_blocks.double() / 2)


def expected_error(unit: Tensor, key_blocks: Tensor) -> Tensor:
    """The root mean square of the same error: u_i sqrt(key_blocks / 12).

    The errors of the parts are taken as independent, and as uniform over a unit. It holds if parts
    span many units and are no multiples of the unit. A part that is 0 has no error.

    Args:
        key_blocks: the number of parts that are not 0.
    """
    return unit * (key_blocks.double() / 12).sqrt()


def last_place(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The gap between neighbours in `dtype` (bf16 or fp16) around x, elementwise and float64."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x.double().abs().clamp(min=info.tiny)).exponent - 1
    return torch.ldexp(torch.full_like(x, info.eps, dtype=torch.float64), exponent)


def _power_above(x: Tensor) -> Tensor:
    """The least power of two that is not below x >= 0; 0 for 0."""
    mantissa, exponent = torch.frexp(x)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(mantissa), exponent).where(x > 0, 0.0)
